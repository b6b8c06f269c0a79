//! `GET /files` and `POST /files`.

use std::path::PathBuf;

use http::StatusCode;
use http::request::Parts;

use crate::agent::Agent;
use crate::http::{Answer, error, query};
use crate::users::User;

use super::connect;
use super::paths;

mod download;
mod upload;

pub use download::download;
pub use upload::upload;

/// Bytes of a file in memory at a time.
const CHUNK_BYTES: usize = 64 * 1024;

/// An error answer on its way; boxed, since answers are large and errors rare.
type Refusal = Box<Answer>;

fn refuse(status: StatusCode, message: impl Into<String>) -> Refusal {
    Box::new(error(status, message))
}

/// The status of a failed file operation.
fn status_of(error: &std::io::Error) -> StatusCode {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::NotFound => StatusCode::NOT_FOUND,
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => StatusCode::FORBIDDEN,
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => StatusCode::INSUFFICIENT_STORAGE,
        ErrorKind::IsADirectory | ErrorKind::NotADirectory | ErrorKind::InvalidFilename => {
            StatusCode::BAD_REQUEST
        }
        ErrorKind::FileTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// The user of a request: the query's `username`, or Basic authentication, or the default.
fn user(agent: &Agent, parts: &Parts) -> Result<User, Refusal> {
    let unauthorized = |message: String| refuse(StatusCode::UNAUTHORIZED, message);
    let name = match query(&parts.uri, "username").filter(|name| !name.is_empty()) {
        Some(name) => Some(name),
        None => connect::basic_user(&parts.headers).map_err(|error| unauthorized(error.message))?,
    };
    agent.accounts.find(name.as_deref()).map_err(|error| unauthorized(error.to_string()))
}

fn resolve(path: &str, user: &User) -> Result<PathBuf, Refusal> {
    paths::resolve(path, user).map_err(|error| refuse(StatusCode::BAD_REQUEST, error.to_string()))
}
