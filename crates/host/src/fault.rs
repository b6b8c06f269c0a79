//! What every error of this crate can say about itself, and the report of it that a client sees.

use offshoot_protocol::control::ErrorKind;
use serde::{Deserialize, Serialize};

/// An error with a kind, a stable code and, where one is known, a way out.
pub trait Fault: std::error::Error {
    /// Who must act.
    fn kind(&self) -> ErrorKind;
    /// Stable name for programs, `snake_case`.
    fn code(&self) -> &'static str;
    /// What to do about it.
    fn hint(&self) -> Option<String> {
        None
    }
}

/// A [`Fault`] as data: the body of every error answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// [`Fault::code`].
    pub code: String,
    /// [`Fault::kind`].
    pub kind: ErrorKind,
    /// The error and its sources, joined by `: `.
    pub message: String,
    /// [`Fault::hint`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

impl Report {
    /// The report of `fault`.
    pub fn of<F: Fault + 'static>(fault: &F) -> Self {
        let mut message = fault.to_string();
        let mut source = fault.source();
        while let Some(inner) = source {
            message.push_str(": ");
            message.push_str(&inner.to_string());
            source = inner.source();
        }
        Self { code: fault.code().to_owned(), kind: fault.kind(), message, hint: fault.hint() }
    }
}

/// Kind and code of a failed system call: out of space and out of memory have codes of their own.
pub(crate) fn of_io(error: &std::io::Error) -> (ErrorKind, &'static str) {
    use std::io::ErrorKind as Io;
    match error.kind() {
        Io::StorageFull | Io::QuotaExceeded => (ErrorKind::Host, "out_of_space"),
        Io::OutOfMemory => (ErrorKind::Host, "out_of_memory"),
        _ => (ErrorKind::Host, "host_io"),
    }
}
