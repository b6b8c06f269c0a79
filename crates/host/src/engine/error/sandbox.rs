//! Errors of sandboxes: clones, forks, removal.

use std::io;

use offshoot_protocol::control::{ControlError, ErrorKind};

use super::TemplateError;
use crate::agent::AgentError;
use crate::fault::{Fault, of_io};
use crate::resources::ResourceError;

/// Why an operation on sandboxes failed.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// No such sandbox.
    #[error("there is no sandbox {id:?}")]
    NotFound {
        /// The id or name asked for.
        id: String,
    },
    /// No such template, or it cannot be used.
    #[error(transparent)]
    Template(Box<TemplateError>),
    /// The template's zygote has ended.
    #[error("template {name:?} is lost: {end}")]
    TemplateLost {
        /// The template.
        name: String,
        /// How its zygote ended.
        end: String,
    },
    /// A sandbox has the name.
    #[error("a sandbox named {name:?} exists already")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// A field of the request is wrong.
    #[error("{field} {problem}")]
    Field {
        /// Which.
        field: &'static str,
        /// What is wrong and what is allowed.
        problem: String,
    },
    /// The sandbox is not running.
    #[error("sandbox {id} is {state}, not running{}", cause.as_ref().map(|c| format!(": {c}")).unwrap_or_default())]
    NotRunning {
        /// Its id.
        id: String,
        /// `starting` or `dead`.
        state: &'static str,
        /// Why it is dead.
        cause: Option<String>,
    },
    /// Too many forks in flight.
    #[error("{most} forks are in flight and none ended within {seconds} s")]
    Busy {
        /// The limit.
        most: usize,
        /// How long was waited, seconds.
        seconds: u64,
    },
    /// The daemon is ending.
    #[error("the daemon is shutting down")]
    ShuttingDown,
    /// Files of the sandbox could not be made.
    #[error("prepare sandbox {id}")]
    Resources {
        /// Its id.
        id: String,
        /// Why.
        source: ResourceError,
    },
    /// The fork failed as a whole.
    #[error("sandbox {id} was not forked: {message}")]
    Fork {
        /// The child's id.
        id: String,
        /// Kind of the fork's error.
        kind: ErrorKind,
        /// Code of the fork's error.
        code: &'static str,
        /// The fork's error; one text for all its children.
        message: String,
    },
    /// This child of a fork failed.
    #[error("sandbox {id} did not start")]
    Child {
        /// Its id.
        id: String,
        /// Why.
        source: ControlError,
    },
    /// Its identity was not acknowledged; it was ended.
    #[error("sandbox {id} was ended: its identity was not acknowledged within {seconds} s")]
    Identity {
        /// Its id.
        id: String,
        /// The limit, seconds.
        seconds: u64,
        /// What went wrong.
        source: AgentError,
    },
    /// Its console cannot be read.
    #[error("read the console of sandbox {id}")]
    Console {
        /// Its id.
        id: String,
        /// The system's answer.
        source: io::Error,
    },
}

impl From<TemplateError> for SandboxError {
    fn from(error: TemplateError) -> Self {
        Self::Template(Box::new(error))
    }
}

impl Fault for SandboxError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::NotFound { .. } | Self::NameTaken { .. } | Self::Field { .. } => ErrorKind::Caller,
            Self::Template(source) => source.kind(),
            Self::TemplateLost { .. } | Self::NotRunning { .. } | Self::ShuttingDown => ErrorKind::State,
            Self::Busy { .. } | Self::Identity { .. } => ErrorKind::Host,
            Self::Resources { source, .. } => source.kind(),
            Self::Fork { kind, .. } => *kind,
            Self::Child { source, .. } => source.kind,
            Self::Console { source, .. } => of_io(source).0,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "sandbox_not_found",
            Self::Template(source) => source.code(),
            Self::TemplateLost { .. } => "template_lost",
            Self::NameTaken { .. } => "sandbox_exists",
            Self::Field { .. } => "bad_request",
            Self::NotRunning { .. } => "sandbox_not_running",
            Self::Busy { .. } => "forks_busy",
            Self::ShuttingDown => "shutting_down",
            Self::Resources { source, .. } => source.code(),
            Self::Fork { code, .. } => code,
            Self::Child { .. } => "child_failed",
            Self::Identity { .. } => "identity_not_applied",
            Self::Console { source, .. } => of_io(source).1,
        }
    }

    fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::NotFound { .. } => "`offshoot ls` shows what there is",
            Self::Template(source) => return source.hint(),
            Self::TemplateLost { .. } => "remove the template and build it again; its sandboxes live on",
            Self::NotRunning { state: "starting", .. } => "try again in a moment",
            Self::NotRunning { .. } => "`offshoot logs` has its console; remove it when done",
            Self::Busy { .. } => "try again, or start offshootd with a higher --max-forks-in-flight",
            Self::Resources { source, .. } => return source.hint(),
            Self::Identity { .. } => {
                "the host may be overloaded: fork fewer at once or raise --identity-timeout-ms"
            }
            _ => return None,
        };
        Some(hint.to_owned())
    }
}
