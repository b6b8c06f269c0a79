//! Errors of one VMM process.

use std::path::PathBuf;

use offshoot_protocol::control::{ControlError, ErrorKind};

use crate::control::{ChannelError, End};
use crate::fault::{Fault, of_io};

/// Why an operation on a VMM failed.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    /// The program could not be started.
    #[error("start the VMM {}", program.display())]
    Spawn {
        /// The program.
        program: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The host refused a descriptor or similar.
    #[error("prepare to {doing} sandbox {id}")]
    Prepare {
        /// The operation.
        doing: &'static str,
        /// Sandbox id.
        id: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The control socket failed or the deadline passed.
    #[error("{doing} sandbox {id}")]
    Channel {
        /// The operation.
        doing: &'static str,
        /// Sandbox id.
        id: String,
        /// What happened.
        source: ChannelError,
    },
    /// The VMM ended meanwhile.
    #[error("{doing} sandbox {id}: its VMM ended: {end}")]
    Ended {
        /// The operation.
        doing: &'static str,
        /// Sandbox id.
        id: String,
        /// How.
        end: End,
    },
    /// The VMM refused.
    #[error("{doing} sandbox {id}")]
    Refused {
        /// The operation.
        doing: &'static str,
        /// Sandbox id.
        id: String,
        /// Its answer.
        source: ControlError,
    },
    /// The VMM answered something else than what was asked.
    #[error("{doing} sandbox {id}: the VMM's answer lacks {lacks}")]
    Answer {
        /// The operation.
        doing: &'static str,
        /// Sandbox id.
        id: String,
        /// What is missing.
        lacks: &'static str,
    },
}

impl Fault for VmmError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Spawn { .. } | Self::Ended { .. } => ErrorKind::Host,
            Self::Prepare { source, .. } => of_io(source).0,
            Self::Channel { source: ChannelError::TimedOut | ChannelError::Closed, .. } => ErrorKind::Host,
            Self::Channel { .. } | Self::Answer { .. } => ErrorKind::Bug,
            Self::Refused { source, .. } => source.kind,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            Self::Spawn { .. } => "vmm_not_started",
            Self::Prepare { source, .. } => of_io(source).1,
            Self::Channel { source: ChannelError::TimedOut, .. } => "vmm_timeout",
            Self::Channel { source: ChannelError::Closed, .. } | Self::Ended { .. } => "vmm_ended",
            Self::Channel { .. } | Self::Answer { .. } => "vmm_protocol",
            Self::Refused { .. } => "vmm_refused",
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Spawn { .. } => {
                Some("name the program with --vmm, or put offshoot-vmm beside offshootd".into())
            }
            Self::Channel { source: ChannelError::TimedOut, .. } => {
                Some("the host may be overloaded; the daemon's log has the VMM's state".into())
            }
            Self::Refused { source, .. } if source.kind == ErrorKind::Unsupported => {
                Some("`offshoot doctor` says what this host lacks".into())
            }
            _ => None,
        }
    }
}
