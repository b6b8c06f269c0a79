//! Receiving files. A file is written beside its destination and renamed over it: readers see the old or the new one.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use futures_util::stream::{Stream, StreamExt};
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::request::Parts;
use http::{HeaderMap, StatusCode};
use http_body_util::BodyDataStream;
use hyper::body::Incoming;
use rustix::fs::{AtFlags, CWD, XattrFlags, chownat, fchown, fsetxattr};
use serde::Serialize;

use crate::agent::Agent;
use crate::http::{Answer, json, query};
use crate::users::User;

use super::{Refusal, refuse, resolve, status_of, user};

const METADATA_HEADER: &str = "x-metadata-";
const NEW_FILE_MODE: u32 = 0o644;

type Metadata = std::collections::BTreeMap<String, String>;

/// One received file, as the client is told of it.
#[derive(Debug, Serialize)]
struct Received {
    name: String,
    path: PathBuf,
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "Metadata::is_empty")]
    metadata: Metadata,
}

/// Answers `POST /files`.
pub async fn upload(agent: &Agent, parts: &Parts, body: Incoming) -> Answer {
    match receive(agent, parts, body).await {
        Ok(received) => json(StatusCode::OK, &received),
        Err(refusal) => *refusal,
    }
}

async fn receive(agent: &Agent, parts: &Parts, body: Incoming) -> Result<Vec<Received>, Refusal> {
    let user = user(agent, parts)?;
    let metadata = metadata_of(&parts.headers)?;
    let path = query(&parts.uri, "path").filter(|path| !path.is_empty());
    let encoding =
        parts.headers.get(CONTENT_ENCODING).and_then(|value| value.to_str().ok()).unwrap_or("identity");
    if !encoding.eq_ignore_ascii_case("identity") {
        let message = format!("content encoding '{encoding}' is not served: send the file as it is");
        return Err(refuse(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    let content_type =
        parts.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let data = BodyDataStream::new(body);
    if let Ok(boundary) = multer::parse_boundary(content_type) {
        return receive_parts(multer::Multipart::new(data, boundary), path, &user, &metadata).await;
    }
    if !content_type.trim().to_ascii_lowercase().starts_with("application/octet-stream") {
        let message = format!(
            "content type '{content_type}' is not served: use multipart/form-data or application/octet-stream"
        );
        return Err(refuse(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    let path = path.ok_or_else(|| refuse(StatusCode::BAD_REQUEST, "the query names no path"))?;
    Ok(vec![store(&path, &user, &metadata, data).await?])
}

async fn receive_parts(
    mut parts: multer::Multipart<'_>,
    path: Option<String>,
    user: &User,
    metadata: &Metadata,
) -> Result<Vec<Received>, Refusal> {
    let broken =
        |error: multer::Error| refuse(StatusCode::BAD_REQUEST, format!("broken multipart body: {error}"));
    let mut received = Vec::new();
    while let Some(part) = parts.next_field().await.map_err(broken)? {
        if part.name() != Some("file") {
            continue;
        }
        let destination = match &path {
            Some(_) if !received.is_empty() => {
                let message = "several files cannot go to one path: leave out \"path\" and name each part";
                return Err(refuse(StatusCode::BAD_REQUEST, message));
            }
            Some(path) => path.clone(),
            None => part
                .file_name()
                .filter(|name| !name.is_empty())
                .ok_or_else(|| {
                    refuse(StatusCode::BAD_REQUEST, "neither the query nor the part names a path")
                })?
                .to_owned(),
        };
        received.push(store(&destination, user, metadata, part).await?);
    }
    if received.is_empty() {
        return Err(refuse(StatusCode::BAD_REQUEST, "the multipart body has no part named \"file\""));
    }
    Ok(received)
}

async fn store<Failure: std::fmt::Display>(
    path: &str,
    user: &User,
    metadata: &Metadata,
    data: impl Stream<Item = Result<Bytes, Failure>>,
) -> Result<Received, Refusal> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::IsADirectory => {
            refuse(StatusCode::BAD_REQUEST, format!("path '{path}' is a directory"))
        }
        io::ErrorKind::InvalidInput => refuse(StatusCode::BAD_REQUEST, format!("path '{path}': {error}")),
        _ => refuse(status_of(&error), format!("could not write '{path}': {error}")),
    };
    let resolved = resolve(path, user)?;
    let mut data = std::pin::pin!(data);
    let mut upload = blocking({
        let (resolved, user) = (resolved.clone(), user.clone());
        move || Upload::begin(resolved, user)
    })
    .await
    .map_err(failed)?;
    while let Some(chunk) = data.next().await {
        let chunk = chunk.map_err(|error| {
            refuse(
                StatusCode::BAD_REQUEST,
                format!("the upload of '{path}' broke off, nothing was changed: {error}"),
            )
        })?;
        upload = blocking(move || upload.append(&chunk)).await.map_err(failed)?;
    }
    let attributes = metadata.clone();
    blocking(move || upload.finish(&attributes)).await.map_err(failed)?;
    let name = resolved.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Received { name, path: resolved, kind: "file", metadata: metadata.clone() })
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|_| Err(io::Error::other("the file writer stopped")))
}

/// A file being received; removed again if it is not finished.
struct Upload {
    temporary: PathBuf,
    destination: PathBuf,
    file: File,
    user: User,
    finished: bool,
}

impl Upload {
    fn begin(path: PathBuf, user: User) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // What a symbolic link names is written, not the link.
        let destination = fs::canonicalize(&path).unwrap_or(path);
        let mode = match fs::metadata(&destination) {
            Ok(existing) if existing.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
            Ok(existing) if !existing.is_file() => {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
            }
            Ok(existing) => existing.permissions().mode() & 0o7777,
            Err(_) => NEW_FILE_MODE,
        };
        let Some(parent) = destination.parent().filter(|_| destination.file_name().is_some()) else {
            return Err(io::ErrorKind::IsADirectory.into());
        };
        make_directories(parent, &user)?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let pid = std::process::id();
        let temporary = parent.join(format!(".offshoot-upload-{pid}-{number}"));
        let file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        let upload = Self { temporary, destination, file, user, finished: false };
        give_to(&upload.file, &upload.user)?;
        upload.file.set_permissions(fs::Permissions::from_mode(mode))?;
        Ok(upload)
    }

    fn append(mut self, chunk: &[u8]) -> io::Result<Self> {
        self.file.write_all(chunk)?;
        Ok(self)
    }

    fn finish(mut self, metadata: &Metadata) -> io::Result<()> {
        for (key, value) in metadata {
            fsetxattr(&self.file, format!("user.e2b.{key}"), value.as_bytes(), XattrFlags::empty())?;
        }
        fs::rename(&self.temporary, &self.destination)?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if !self.finished {
            // Nothing more can be done about a file that cannot be removed.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

fn give_to(file: &File, user: &User) -> io::Result<()> {
    if rustix::process::geteuid().is_root() {
        let (uid, gid) = user.ids();
        fchown(file, Some(uid), Some(gid))?;
    }
    Ok(())
}

/// `mkdir -p`; what is made belongs to `user`.
fn make_directories(path: &Path, user: &User) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(existing) if existing.is_dir() => return Ok(()),
        Ok(_) => return Err(io::ErrorKind::NotADirectory.into()),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Err(_) => {}
    }
    if let Some(parent) = path.parent() {
        make_directories(parent, user)?;
    }
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        other => other?,
    }
    if rustix::process::geteuid().is_root() {
        let (uid, gid) = user.ids();
        chownat(CWD, path, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
    }
    Ok(())
}

fn metadata_of(headers: &HeaderMap) -> Result<Metadata, Refusal> {
    let mut metadata = Metadata::new();
    for (name, value) in headers {
        let Some(key) = name.as_str().strip_prefix(METADATA_HEADER).filter(|key| !key.is_empty()) else {
            continue;
        };
        let value = value.to_str().map_err(|_| {
            refuse(StatusCode::BAD_REQUEST, format!("the value of header '{name}' is not printable ASCII"))
        })?;
        metadata.insert(key.to_owned(), value.to_owned());
    }
    Ok(metadata)
}
