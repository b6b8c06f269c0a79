//! Sending a file.

use std::fs::{File, Metadata};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use bytes::Bytes;
use futures_util::stream;
use http::header::{ACCEPT_RANGES, CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, RANGE};
use http::request::Parts;
use http::{HeaderValue, Method, Response, StatusCode};

use crate::agent::Agent;
use crate::http::{Answer, Body, empty, query, streamed};

use super::{CHUNK_BYTES, Refusal, refuse, resolve, status_of, user};

/// Answers `GET /files`.
pub async fn download(agent: &Agent, parts: &Parts) -> Answer {
    send(agent, parts).await.unwrap_or_else(|refusal| *refusal)
}

async fn send(agent: &Agent, parts: &Parts) -> Result<Answer, Refusal> {
    let user = user(agent, parts)?;
    let path = query(&parts.uri, "path").unwrap_or_default();
    let resolved = resolve(&path, &user)?;
    let open = tokio::task::spawn_blocking({
        let resolved = resolved.clone();
        move || open_regular(&resolved)
    });
    let opened =
        open.await.map_err(|_| refuse(StatusCode::INTERNAL_SERVER_ERROR, "the file reader stopped"))?;
    let (file, metadata) = opened.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => refuse(StatusCode::NOT_FOUND, format!("path '{path}' does not exist")),
        io::ErrorKind::IsADirectory => {
            refuse(StatusCode::BAD_REQUEST, format!("path '{path}' is a directory, not a file"))
        }
        io::ErrorKind::InvalidInput => {
            refuse(StatusCode::BAD_REQUEST, format!("path '{path}' is not a regular file"))
        }
        _ => refuse(status_of(&error), format!("could not open '{path}': {error}")),
    })?;
    let mut answer = respond(parts, file, metadata.len(), &path)?;
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    let name = resolved.file_name().unwrap_or_default().to_string_lossy();
    if let Ok(value) = HeaderValue::from_str(&disposition(&name)) {
        headers.insert(CONTENT_DISPOSITION, value);
    }
    Ok(answer)
}

fn respond(parts: &Parts, file: File, size: u64, path: &str) -> Result<Answer, Refusal> {
    let asked = parts.headers.get(RANGE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let mut answer = Response::new(empty());
    let (first, length) = match byte_range(asked, size) {
        Range::Whole => (0, size),
        Range::Part { first, length } => {
            *answer.status_mut() = StatusCode::PARTIAL_CONTENT;
            let value = format!("bytes {first}-{}/{size}", first + length - 1);
            answer.headers_mut().insert(CONTENT_RANGE, header(&value));
            (first, length)
        }
        Range::Outside => {
            let message = format!("range '{asked}' lies outside the {size} bytes of '{path}'");
            let mut refusal = refuse(StatusCode::RANGE_NOT_SATISFIABLE, message);
            refusal.headers_mut().insert(CONTENT_RANGE, header(&format!("bytes */{size}")));
            return Err(refusal);
        }
    };
    let failed = |error: io::Error| refuse(status_of(&error), format!("could not read '{path}': {error}"));
    // Files of /proc and /sys say they are empty; they are sent without a length.
    let unsized_start = if size == 0 { read_start(&file).map_err(failed)? } else { Bytes::new() };
    if unsized_start.is_empty() {
        answer.headers_mut().insert(CONTENT_LENGTH, header(&length.to_string()));
        answer.headers_mut().insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    }
    if parts.method != Method::HEAD {
        *answer.body_mut() = match (size, unsized_start.is_empty()) {
            (0, true) => empty(),
            (0, false) => contents(file, unsized_start, u64::MAX),
            _ => {
                (&file).seek(SeekFrom::Start(first)).map_err(failed)?;
                contents(file, Bytes::new(), length)
            }
        };
    }
    Ok(answer)
}

fn header(text: &str) -> HeaderValue {
    HeaderValue::from_str(text).expect("digits and punctuation are a header value")
}

/// Opens without waiting for the other end of a pipe, and refuses what is no regular file.
fn open_regular(path: &Path) -> io::Result<(File, Metadata)> {
    let file = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !metadata.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok((file, metadata))
}

fn read_start(mut file: &File) -> io::Result<Bytes> {
    let mut start = vec![0; CHUNK_BYTES];
    let length = file.read(&mut start)?;
    start.truncate(length);
    Ok(start.into())
}

/// `start`, then the file from where it stands, at most `left` bytes. A file that became shorter breaks the answer
/// off, since its length was promised.
fn contents(file: File, start: Bytes, left: u64) -> Body {
    let file = tokio::fs::File::from_std(file);
    let chunks = stream::try_unfold((file, start, left), |(mut file, start, left)| async move {
        use tokio::io::AsyncReadExt;
        if !start.is_empty() {
            return Ok(Some((start, (file, Bytes::new(), left))));
        }
        let most = left.min(CHUNK_BYTES as u64) as usize;
        if most == 0 {
            return Ok(None);
        }
        let mut chunk = vec![0; most];
        let length = file.read(&mut chunk).await?;
        chunk.truncate(length);
        match length {
            0 if left == u64::MAX => Ok(None),
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => {
                let left = if left == u64::MAX { left } else { left - length as u64 };
                Ok(Some((chunk.into(), (file, Bytes::new(), left))))
            }
        }
    });
    streamed(chunks)
}

fn disposition(name: &str) -> String {
    let plain: String = name
        .chars()
        .map(|c| if c.is_ascii_graphic() && c != '"' && c != '\\' || c == ' ' { c } else { '_' })
        .collect();
    let encoded: String = name
        .bytes()
        .map(|byte| {
            if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
                char::from(byte).to_string()
            } else {
                format!("%{byte:02X}")
            }
        })
        .collect();
    if plain == name {
        format!("inline; filename=\"{plain}\"")
    } else {
        format!("inline; filename=\"{plain}\"; filename*=UTF-8''{encoded}")
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Range {
    /// No range, or one this server does not serve (several parts, other units): the whole file.
    Whole,
    /// A part that lies inside.
    Part { first: u64, length: u64 },
    /// Nothing of it lies inside.
    Outside,
}

/// Reads a `Range` header (RFC 9110, section 14.2) of one part.
fn byte_range(header: &str, size: u64) -> Range {
    let Some((first, last)) = header.strip_prefix("bytes=").and_then(|range| range.trim().split_once('-'))
    else {
        return Range::Whole;
    };
    let (first, last) = match (first.parse::<u64>(), last.parse::<u64>()) {
        (Ok(first), Ok(last)) if first <= last => (first, last.min(size.saturating_sub(1))),
        (Ok(first), Err(_)) if last.is_empty() => (first, size.saturating_sub(1)),
        (Err(_), Ok(0)) if first.is_empty() => return Range::Outside,
        (Err(_), Ok(suffix)) if first.is_empty() => (size.saturating_sub(suffix), size.saturating_sub(1)),
        _ => return Range::Whole,
    };
    if first >= size {
        return Range::Outside;
    }
    Range::Part { first, length: last - first + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_one_part_are_served() {
        assert_eq!(byte_range("bytes=0-9", 100), Range::Part { first: 0, length: 10 });
        assert_eq!(byte_range("bytes=90-", 100), Range::Part { first: 90, length: 10 });
        assert_eq!(byte_range("bytes=-7", 100), Range::Part { first: 93, length: 7 });
        assert_eq!(byte_range("bytes=-700", 100), Range::Part { first: 0, length: 100 });
        assert_eq!(byte_range("bytes=95-400", 100), Range::Part { first: 95, length: 5 });
        assert_eq!(byte_range("bytes=100-", 100), Range::Outside);
        assert_eq!(byte_range("bytes=-0", 100), Range::Outside);
        assert_eq!(byte_range("bytes=0-", 0), Range::Outside);
        for whole in ["", "bytes=5-2", "bytes=0-1,3-4", "lines=1-2", "bytes=x-y"] {
            assert_eq!(byte_range(whole, 100), Range::Whole, "{whole}");
        }
    }

    #[test]
    fn file_names_cannot_break_the_header() {
        assert_eq!(disposition("a b.txt"), "inline; filename=\"a b.txt\"");
        assert_eq!(
            disposition("a\"\r\nX: ü"),
            "inline; filename=\"a___X: _\"; filename*=UTF-8''a%22%0D%0AX%3A%20%C3%BC"
        );
    }
}
