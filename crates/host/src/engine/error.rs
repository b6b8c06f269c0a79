//! Errors of the host's operations: one family for each kind of thing.

use std::io;
use std::path::PathBuf;

use offshoot_image::ImageError;
use offshoot_protocol::control::{ControlError, ErrorKind};

use crate::agent::AgentError;
use crate::fault::{Fault, of_io};
use crate::resources::ResourceError;
use crate::vmm::VmmError;

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

/// Why an operation on images failed.
#[derive(Debug, thiserror::Error)]
pub enum ImageStoreError {
    /// No such image.
    #[error("there is no image {name:?}")]
    NotFound {
        /// The name asked for.
        name: String,
    },
    /// There is one of this name, or one is being made.
    #[error("image {name:?} exists already or is being made")]
    Exists {
        /// The name.
        name: String,
    },
    /// A template was made of it, and may be made of it again.
    #[error("image {name:?} is needed by the templates {}", templates.join(", "))]
    InUse {
        /// The image.
        name: String,
        /// Names of the templates.
        templates: Vec<String>,
    },
    /// The name is not allowed.
    #[error("image name {name:?} is not of the form [a-z0-9][a-z0-9_.-]{{0,62}}")]
    Name {
        /// The name.
        name: String,
    },
    /// The image could not be made or read.
    #[error("image {name:?}")]
    Image {
        /// Its name.
        name: String,
        /// Why.
        source: ImageError,
    },
    /// The registry could not be read or changed.
    #[error("{doing} {}", path.display())]
    Store {
        /// What was attempted.
        doing: &'static str,
        /// Where.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

impl Fault for ImageStoreError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::NotFound { .. } | Self::Exists { .. } | Self::InUse { .. } | Self::Name { .. } => {
                ErrorKind::Caller
            }
            Self::Image { source, .. } => source.kind(),
            Self::Store { source, .. } => of_io(source).0,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "image_not_found",
            Self::Exists { .. } => "image_exists",
            Self::InUse { .. } => "image_in_use",
            Self::Name { .. } => "bad_name",
            Self::Image { source, .. } => match source.kind() {
                ErrorKind::Corrupt => "image_corrupt",
                ErrorKind::Caller => "image_bad_input",
                ErrorKind::Unsupported => "image_unsupported",
                _ => "image_not_made",
            },
            Self::Store { source, .. } => of_io(source).1,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::NotFound { .. } => Some("`offshoot image ls` shows what there is".into()),
            Self::Exists { name } => Some(format!(
                "choose another name, or `offshoot image rm {name}` first"
            )),
            Self::InUse { .. } => Some("remove these templates first".into()),
            Self::Image { name, source } if source.kind() == ErrorKind::Corrupt => {
                Some(format!("`offshoot image rm {name}` and make it again"))
            }
            _ => None,
        }
    }
}

/// Why an operation on templates failed.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// No such template.
    #[error("there is no template {name:?}")]
    NotFound {
        /// The name asked for.
        name: String,
    },
    /// There is one of this name, or one is being built.
    #[error("template {name:?} exists already or is being built")]
    Exists {
        /// The name.
        name: String,
    },
    /// Sandboxes that descend from it live.
    #[error("template {name:?} has live sandboxes: {}", clones.join(", "))]
    InUse {
        /// The template.
        name: String,
        /// Their ids.
        clones: Vec<String>,
    },
    /// A setting is out of its range.
    #[error("template setting {setting} {problem}")]
    Setting {
        /// Which.
        setting: &'static str,
        /// What is wrong and what is allowed.
        problem: String,
    },
    /// Its image is not usable.
    #[error("build template {name:?}")]
    Image {
        /// The template.
        name: String,
        /// Why.
        source: ImageStoreError,
    },
    /// Files of the build could not be made.
    #[error("build template {name:?}")]
    Resources {
        /// The template.
        name: String,
        /// Why.
        source: ResourceError,
    },
    /// The VMM failed.
    #[error("build template {name:?}: {}", or_nothing(console))]
    Vmm {
        /// The template.
        name: String,
        /// Last lines of the console.
        console: String,
        /// Why.
        source: Box<VmmError>,
    },
    /// The guest ended during boot or warm-up.
    #[error(
        "build template {name:?}: the guest ended during {step}: {end}; {}",
        or_nothing(console)
    )]
    GuestEnded {
        /// The template.
        name: String,
        /// `boot`, `warm` or `freeze`.
        step: &'static str,
        /// How.
        end: String,
        /// Last lines of the console.
        console: String,
    },
    /// The agent did not come up in time.
    #[error(
        "build template {name:?}: the agent did not answer within {seconds} s of boot; {}",
        or_nothing(console)
    )]
    BootTimeout {
        /// The template.
        name: String,
        /// The limit, seconds.
        seconds: u64,
        /// Last lines of the console.
        console: String,
        /// The last attempt's error.
        source: AgentError,
    },
    /// The warm-up raised or was killed.
    #[error("build template {name:?}: the warm-up failed")]
    Warm {
        /// The template.
        name: String,
        /// What the agent said.
        source: AgentError,
    },
    /// The client went away or the daemon is ending.
    #[error("build of template {name:?} was cancelled")]
    Cancelled {
        /// The template.
        name: String,
    },
}

fn or_nothing(console: &str) -> String {
    if console.is_empty() {
        "its console is empty".to_owned()
    } else {
        format!("its console ends with:\n{console}\n")
    }
}

impl Fault for TemplateError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::NotFound { .. } | Self::Exists { .. } | Self::InUse { .. } | Self::Setting { .. } => {
                ErrorKind::Caller
            }
            Self::Image { source, .. } => source.kind(),
            Self::Resources { source, .. } => source.kind(),
            Self::Vmm { source, .. } => source.kind(),
            // The guest is what the caller gave us: its image, command line and warm-up.
            Self::GuestEnded { .. } | Self::BootTimeout { .. } => ErrorKind::State,
            Self::Warm {
                source: AgentError::Failed { .. },
                ..
            } => ErrorKind::Caller,
            Self::Warm { .. } | Self::Cancelled { .. } => ErrorKind::State,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "template_not_found",
            Self::Exists { .. } => "template_exists",
            Self::InUse { .. } => "template_in_use",
            Self::Setting { .. } => "bad_template",
            Self::Image { source, .. } => source.code(),
            Self::Resources { source, .. } => source.code(),
            Self::Vmm { source, .. } => source.code(),
            Self::GuestEnded { .. } => "guest_ended",
            Self::BootTimeout { .. } => "boot_timeout",
            Self::Warm {
                source: AgentError::Failed { .. },
                ..
            } => "warm_failed",
            Self::Warm {
                source: AgentError::TimedOut { .. },
                ..
            } => "warm_timeout",
            Self::Warm { .. } => "warm_broken",
            Self::Cancelled { .. } => "cancelled",
        }
    }

    fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::NotFound { .. } => "`offshoot template ls` shows what there is",
            Self::Exists { .. } => "choose another name, or remove it first",
            Self::InUse { .. } => {
                "remove these sandboxes first, or force it: they then live on without the template"
            }
            Self::Image { source, .. } => return source.hint(),
            Self::Resources { source, .. } => return source.hint(),
            Self::Vmm { source, .. } => return source.hint(),
            Self::GuestEnded { step: "boot", .. } => {
                "check the image's kernel and root disk, and give more memory_mib if the console speaks of memory"
            }
            Self::GuestEnded { .. } => {
                "give more memory_mib if the console speaks of memory; nothing was left behind"
            }
            Self::BootTimeout { .. } => {
                "raise boot_timeout_ms; `offshoot doctor` says whether this host runs Linux guests at full speed"
            }
            Self::Warm {
                source: AgentError::Failed { .. },
                ..
            } => "correct the warm-up; nothing was left behind",
            Self::Warm { .. } => "raise warm_timeout_ms or shorten the warm-up; nothing was left behind",
            Self::Setting { .. } | Self::Cancelled { .. } => return None,
        };
        Some(hint.to_owned())
    }
}

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
            Self::NotRunning {
                state: "starting", ..
            } => "try again in a moment",
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
