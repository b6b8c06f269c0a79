//! Errors of the host's operations: one family for each kind of thing.

mod image;
mod sandbox;
mod template;

use std::io;
use std::path::PathBuf;

use offshoot_protocol::control::ErrorKind;

use crate::fault::Fault;
use crate::resources::ResourceError;

pub use image::ImageStoreError;
pub use sandbox::SandboxError;
pub use template::TemplateError;

/// Why a host could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The run directory could not be prepared.
    #[error("prepare the run directory")]
    RunDir(#[from] ResourceError),
    /// The state directory could not be made.
    #[error("make the state directory {}", path.display())]
    StateDir {
        /// The directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A thread could not be started.
    #[error("start the supervisor")]
    Thread(#[source] io::Error),
}

/// Why the host's machine could not be examined.
#[derive(Debug, thiserror::Error)]
pub enum DoctorError {
    /// The probe could not be run.
    #[error("run {} --probe", program.display())]
    Run {
        /// The VMM program.
        program: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The probe did not end in time.
    #[error("{} --probe did not end within {seconds} s", program.display())]
    TimedOut {
        /// The VMM program.
        program: PathBuf,
        /// The limit, seconds.
        seconds: u64,
    },
    /// The probe failed.
    #[error("{} --probe failed ({status}): {output}", program.display())]
    Failed {
        /// The VMM program.
        program: PathBuf,
        /// How it ended.
        status: String,
        /// What it printed.
        output: String,
    },
}

impl Fault for DoctorError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Host
    }

    fn code(&self) -> &'static str {
        match self {
            Self::Run { .. } => "vmm_not_started",
            Self::TimedOut { .. } => "probe_timeout",
            Self::Failed { .. } => "probe_failed",
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Run { .. } => {
                Some("name the program with --vmm, or put offshoot-vmm beside offshootd".into())
            }
            _ => None,
        }
    }
}
