//! What a command can end with when it does not succeed, and the one place that turns it into an exit code.

use std::fmt;
use std::io;

use http::StatusCode;
use serde::{Deserialize, Serialize};

/// Exit code of a command whose reader went away, as a shell shows a program killed by `SIGPIPE`.
pub const BROKEN_PIPE_EXIT: u8 = 141;
/// Exit code of a guest command that its `--timeout` ended, as `timeout(1)` has it.
pub const TIMED_OUT_EXIT: u8 = 124;

/// The result of everything in this program that can fail.
pub type Result<T> = std::result::Result<T, Failure>;

/// Why a command did not succeed.
#[derive(Debug)]
pub enum Failure {
    /// To be told to the user.
    Report(Box<Report>),
    /// Nobody reads standard output any more: nothing to tell, nobody to tell it to.
    BrokenPipe,
}

/// Who must act on a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The code that ran in the guest failed or ran out of time.
    Guest,
    /// The command line is wrong.
    Usage,
    /// The request is wrong or names something that does not exist.
    Caller,
    /// Not possible in the present state.
    State,
    /// This host or build cannot do it.
    Unsupported,
    /// The host refused a resource.
    Host,
    /// The daemon does not answer.
    Unreachable,
    /// Data failed a check.
    Corrupt,
    /// A fault of Offshoot.
    #[serde(other)]
    Bug,
}

impl Kind {
    /// The process exit code of this kind.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Guest => 1,
            Self::Usage => 2,
            Self::Caller => 3,
            Self::State => 4,
            Self::Unsupported => 5,
            Self::Host => 6,
            Self::Unreachable => 7,
            Self::Corrupt | Self::Bug => 8,
        }
    }

    /// The kind of an answer that carries no kind of its own.
    pub fn of_status(status: StatusCode) -> Self {
        match status.as_u16() {
            409 | 502 | 504 => Self::State,
            422 => Self::Corrupt,
            501 => Self::Unsupported,
            429 | 503 | 507 => Self::Host,
            400..=499 => Self::Caller,
            _ => Self::Bug,
        }
    }

    /// The kind of an error of the guest's Connect services.
    pub fn of_connect_code(code: &str) -> Self {
        match code {
            "invalid_argument" | "not_found" | "already_exists" | "permission_denied" | "unauthenticated"
            | "out_of_range" => Self::Caller,
            "failed_precondition" | "aborted" | "unavailable" | "canceled" => Self::State,
            "deadline_exceeded" => Self::Guest,
            "resource_exhausted" => Self::Host,
            "unimplemented" => Self::Unsupported,
            "data_loss" => Self::Corrupt,
            _ => Self::Bug,
        }
    }
}

/// A failure as told to people and, with `--json`, to programs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// Stable name, as in `docs/api.md`.
    pub code: String,
    /// Who must act.
    pub kind: Kind,
    /// What was attempted and why it failed.
    pub message: String,
    /// The way out, where one is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Exit code instead of the kind's.
    #[serde(skip)]
    pub exit_code: Option<u8>,
}

impl Report {
    /// A report without a hint.
    pub fn new(kind: Kind, code: &str, message: impl Into<String>) -> Self {
        Self { code: code.into(), kind, message: message.into(), hint: None, exit_code: None }
    }

    /// Adds the way out.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The process exit code.
    pub fn exit_code(&self) -> u8 {
        self.exit_code.unwrap_or(self.kind.exit_code())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.message)
    }
}

impl From<Report> for Failure {
    fn from(report: Report) -> Self {
        Self::Report(Box::new(report))
    }
}

impl Failure {
    /// The process exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Report(report) => report.exit_code(),
            Self::BrokenPipe => BROKEN_PIPE_EXIT,
        }
    }

    /// A wrong command line.
    pub fn usage(message: impl Into<String>) -> Self {
        Report::new(Kind::Usage, "usage", message).into()
    }

    /// A failed operation on a local file or stream; `what` says what was attempted, with the path.
    pub fn local(what: impl fmt::Display, error: &io::Error) -> Self {
        let kind = match error.kind() {
            io::ErrorKind::NotFound
            | io::ErrorKind::PermissionDenied
            | io::ErrorKind::IsADirectory
            | io::ErrorKind::NotADirectory
            | io::ErrorKind::InvalidInput
            | io::ErrorKind::InvalidData => Kind::Caller,
            _ => Kind::Host,
        };
        Report::new(kind, "local_io", format!("{what}: {error}")).into()
    }

    /// A failed write to standard output.
    pub fn stdout(error: &io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Self::BrokenPipe;
        }
        Self::local("cannot write to standard output", error)
    }

    /// An answer of the daemon that does not follow its API.
    pub fn protocol(message: impl Into<String>) -> Self {
        Report::new(Kind::Bug, "bad_answer", message)
            .hint("are offshoot and offshootd of the same version?")
            .into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_the_api_has_its_documented_exit_code() {
        let codes =
            [("caller", 3), ("state", 4), ("unsupported", 5), ("host", 6), ("corrupt", 8), ("bug", 8)];
        for (name, code) in codes {
            let kind: Kind = serde_json::from_value(name.into()).unwrap();
            assert_eq!(kind.exit_code(), code, "{name}");
        }
    }

    #[test]
    fn a_kind_of_a_newer_daemon_counts_as_a_bug() {
        let kind: Kind = serde_json::from_value("novel".into()).unwrap();
        assert_eq!(kind, Kind::Bug);
    }

    #[test]
    fn a_status_without_body_still_has_a_kind() {
        let kinds = [
            (404, Kind::Caller),
            (409, Kind::State),
            (501, Kind::Unsupported),
            (507, Kind::Host),
            (500, Kind::Bug),
        ];
        for (status, kind) in kinds {
            assert_eq!(Kind::of_status(StatusCode::from_u16(status).unwrap()), kind, "{status}");
        }
    }
}
