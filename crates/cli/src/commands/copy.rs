//! `cp`: one file into or out of a sandbox, never whole in memory.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use bytes::Bytes;
use futures_util::stream;
use http::{HeaderValue, Method, header};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};

use super::Context;
use crate::client::{self, Body, LOOKUP_DEADLINE, Reader};
use crate::failure::{Failure, Kind, Report, Result};
use crate::plan::{CopyPlan, Direction, GuestPath, LocalEnd};
use crate::progress::Progress;
use crate::text;
use crate::ui::{GuestOutput, Stream};

const CHUNK_BYTES: usize = 256 * 1024;
/// Mode of a file that was copied out, before the process's umask.
const NEW_FILE_MODE: u32 = 0o666;

/// Copies one file.
pub async fn copy(context: &Context, plan: &CopyPlan) -> Result<u8> {
    let began = Instant::now();
    let (bytes, local) = match plan.direction {
        Direction::Upload => upload(context, plan).await?,
        Direction::Download => download(context, plan).await?,
    };
    let took_ms = began.elapsed().as_secs_f64() * 1e3;
    let guest = format!("{}:{}", plan.guest.sandbox, plan.guest.path);
    let (from, to) = match plan.direction {
        Direction::Upload => (local, guest),
        Direction::Download => (guest, local),
    };
    if context.ui.is_json() {
        context.ui.json(&json!({"from": from, "to": to, "bytes": bytes, "took_ms": took_ms}))?;
    }
    context.ui.note(&format!("copied {} from {from} to {to} in {}", text::bytes(bytes), text::ms(took_ms)));
    Ok(0)
}

async fn upload(context: &Context, plan: &CopyPlan) -> Result<(u64, String)> {
    let (body, size, shown) = match &plan.local {
        LocalEnd::Standard => (sending(context, tokio::io::stdin(), None), None, "-".to_owned()),
        LocalEnd::File(path) => {
            let shown = path.display().to_string();
            let failed = |error| Failure::local(format!("cannot read {shown}"), &error);
            let metadata = tokio::fs::metadata(path).await.map_err(failed)?;
            if metadata.is_dir() {
                return Err(directory(path, &plan.guest).into());
            }
            let file = tokio::fs::File::open(path).await.map_err(failed)?;
            // Only a regular file knows its size, and one that grows meanwhile is sent as long as it was.
            let size = metadata.is_file().then_some(metadata.len());
            let body = match size {
                Some(size) => sending(context, file.take(size), Some(size)),
                None => sending(context, file, None),
            };
            (body, size, shown)
        }
    };
    let (body, sent) = body;
    let mut request = client::request(Method::POST, &files(plan), body);
    let headers = request.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    if let Some(size) = size {
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(size));
    }
    let alive = || context.client.check_sandbox(&plan.guest.sandbox);
    let answer = client::unless_dead(context.client.send_ok(request, std::time::Duration::MAX), alive).await;
    let response = answer.map_err(|failure| hinted(failure, plan))?;
    context.client.collect(response, LOOKUP_DEADLINE).await?;
    Ok((sent.get(), shown))
}

/// Counts what a body has sent, for whoever made the body.
#[derive(Clone, Default)]
struct Sent(std::sync::Arc<std::sync::atomic::AtomicU64>);

impl Sent {
    fn add(&self, count: usize) {
        self.0.fetch_add(count as u64, std::sync::atomic::Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(std::sync::atomic::Ordering::Relaxed)
    }
}

/// A body that reads `from` piece by piece; short of `size` it fails, so that the guest keeps no torn file.
fn sending(
    context: &Context,
    from: impl AsyncRead + Send + Unpin + 'static,
    size: Option<u64>,
) -> (Body, Sent) {
    let sent = Sent::default();
    let counter = sent.clone();
    let progress = Progress::bytes(context.ui, size);
    let frames = stream::try_unfold((from, progress), move |(mut from, progress)| {
        let counter = counter.clone();
        async move {
            let mut chunk = vec![0; CHUNK_BYTES];
            let count = from.read(&mut chunk).await?;
            if count == 0 {
                return match size {
                    Some(size) if counter.get() < size => {
                        Err(io::Error::other("the file became shorter while it was copied"))
                    }
                    _ => Ok(None),
                };
            }
            chunk.truncate(count);
            counter.add(count);
            progress.advance(count);
            Ok::<_, io::Error>(Some((Frame::data(Bytes::from(chunk)), (from, progress))))
        }
    });
    (StreamBody::new(frames).boxed_unsync(), sent)
}

async fn download(context: &Context, plan: &CopyPlan) -> Result<(u64, String)> {
    let mut sink = Sink::open(plan).await?;
    let request = client::request(Method::GET, &files(plan), client::empty());
    let alive = || context.client.check_sandbox(&plan.guest.sandbox);
    let answer = client::unless_dead(context.client.send_ok(request, std::time::Duration::MAX), alive).await;
    let response = answer.map_err(|failure| hinted(failure, plan))?;
    let length = response.headers().get(header::CONTENT_LENGTH);
    let total = length.and_then(|value| value.to_str().ok()).and_then(|value| value.parse::<u64>().ok());
    let progress = Progress::bytes(context.ui, total);
    let what = format!("{}:{}", plan.guest.sandbox, plan.guest.path);
    let mut reader = Reader::new(&context.client, &what, response);
    let mut bytes = 0;
    while let Some(chunk) = client::unless_dead(reader.chunk(), alive).await? {
        sink.write(&chunk).await?;
        progress.advance(chunk.len());
        bytes += chunk.len() as u64;
    }
    drop(progress);
    let shown = sink.finish().await?;
    Ok((bytes, shown))
}

/// Where a download goes. A file appears under its name only when it is whole.
enum Sink {
    Standard(GuestOutput),
    /// A device, a pipe: written to as it is.
    Special(tokio::fs::File, PathBuf),
    Regular {
        file: tokio::fs::File,
        temporary: tempfile::TempPath,
        path: PathBuf,
    },
}

impl Sink {
    async fn open(plan: &CopyPlan) -> Result<Self> {
        let LocalEnd::File(path) = &plan.local else {
            return Ok(Self::Standard(GuestOutput::new()));
        };
        let failed = |path: &Path, error: io::Error| {
            Failure::local(format!("cannot write {}", path.display()), &error)
        };
        let mut path = path.clone();
        if path.is_dir() || path.as_os_str().as_encoded_bytes().ends_with(b"/") {
            match plan.guest.path.rsplit('/').next() {
                Some(name) if !matches!(name, "" | "." | ".." | "~") => path.push(name),
                _ => {
                    return Err(Failure::usage(format!(
                        "{} names no file to put into {}",
                        plan.guest.path,
                        path.display()
                    )));
                }
            }
        }
        // A link stays one: what it points to is replaced.
        let path = std::fs::canonicalize(&path).unwrap_or(path);
        let existing = std::fs::metadata(&path).ok();
        if existing.as_ref().is_some_and(std::fs::Metadata::is_dir) {
            return Err(failed(&path, io::ErrorKind::IsADirectory.into()));
        }
        if existing.as_ref().is_some_and(|metadata| !metadata.is_file()) {
            let options = tokio::fs::OpenOptions::new().write(true).open(&path).await;
            return options
                .map(|file| Self::Special(file, path.clone()))
                .map_err(|error| failed(&path, error));
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mode = existing.map_or(NEW_FILE_MODE, |metadata| metadata.permissions().mode() & 0o7777);
        let mut builder = tempfile::Builder::new();
        builder.prefix(".offshoot-cp-").permissions(Permissions::from_mode(mode));
        let (file, temporary) =
            builder.tempfile_in(folder).map_err(|error| failed(&path, error))?.into_parts();
        Ok(Self::Regular { file: tokio::fs::File::from_std(file), temporary, path })
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let (file, path) = match self {
            Self::Standard(output) => return output.write(Stream::Stdout, bytes).await,
            Self::Special(file, path) => (file, path),
            Self::Regular { file, path, .. } => (file, path),
        };
        file.write_all(bytes)
            .await
            .map_err(|error| Failure::local(format!("cannot write {}", path.display()), &error))
    }

    async fn finish(self) -> Result<String> {
        match self {
            Self::Standard(_) => Ok("-".into()),
            Self::Special(mut file, path) => {
                let flushed = file.flush().await;
                flushed
                    .map_err(|error| Failure::local(format!("cannot write {}", path.display()), &error))?;
                Ok(path.display().to_string())
            }
            Self::Regular { mut file, temporary, path } => {
                let failed =
                    |error: io::Error| Failure::local(format!("cannot write {}", path.display()), &error);
                file.flush().await.map_err(failed)?;
                temporary.persist(&path).map_err(|error| failed(error.error))?;
                Ok(path.display().to_string())
            }
        }
    }
}

fn files(plan: &CopyPlan) -> String {
    let path = utf8_percent_encode(&plan.guest.path, NON_ALPHANUMERIC);
    let user =
        plan.user.as_deref().map(|user| format!("&username={}", utf8_percent_encode(user, NON_ALPHANUMERIC)));
    format!("/sandboxes/{}/envd/files?path={path}{}", plan.guest.sandbox, user.unwrap_or_default())
}

fn directory(path: &Path, guest: &GuestPath) -> Report {
    let shown = path.display();
    let GuestPath { sandbox, path: target } = guest;
    Report::new(Kind::Caller, "is_a_directory", format!("{shown} is a directory; cp copies single files"))
        .hint(format!("tar -C {shown} -c . | offshoot exec -i {sandbox} -- tar -C {target} -x"))
}

/// Adds what to do about a path that turned out to be a directory in the guest.
fn hinted(failure: Failure, plan: &CopyPlan) -> Failure {
    let GuestPath { sandbox, path } = &plan.guest;
    match failure {
        Failure::Report(report) if report.code == "http_400" && report.message.contains("directory") => {
            let hint = match plan.direction {
                Direction::Upload => format!("end it with / to copy into it: {sandbox}:{path}/"),
                Direction::Download => {
                    format!("offshoot exec {sandbox} -- tar -C {path} -c . | tar -C DIRECTORY -x")
                }
            };
            report.hint(hint).into()
        }
        other => other,
    }
}
