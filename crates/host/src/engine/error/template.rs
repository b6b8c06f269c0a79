//! Errors of templates and their builds.

use offshoot_protocol::control::ErrorKind;

use super::ImageStoreError;
use crate::agent::AgentError;
use crate::fault::Fault;
use crate::resources::ResourceError;
use crate::vmm::VmmError;

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
    /// The host could not hold the guest.
    #[error(
        "build template {name:?}: it needs {needed_mib} MiB of memory, the host has {available_mib} MiB available"
    )]
    NotEnoughMemory {
        /// The template.
        name: String,
        /// Its guest's memory.
        needed_mib: u64,
        /// What the host could give without swapping.
        available_mib: u64,
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
    #[error("build template {name:?}: the guest ended during {step}: {end}; {}", or_nothing(console))]
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
            Self::NotEnoughMemory { .. } => ErrorKind::Host,
            Self::Image { source, .. } => source.kind(),
            Self::Resources { source, .. } => source.kind(),
            Self::Vmm { source, .. } => source.kind(),
            // The guest is what the caller gave us: its image, command line and warm-up.
            Self::GuestEnded { .. } | Self::BootTimeout { .. } => ErrorKind::State,
            Self::Warm { source: AgentError::Failed { .. }, .. } => ErrorKind::Caller,
            Self::Warm { .. } | Self::Cancelled { .. } => ErrorKind::State,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "template_not_found",
            Self::Exists { .. } => "template_exists",
            Self::InUse { .. } => "template_in_use",
            Self::Setting { .. } => "bad_template",
            Self::NotEnoughMemory { .. } => "out_of_memory",
            Self::Image { source, .. } => source.code(),
            Self::Resources { source, .. } => source.code(),
            Self::Vmm { source, .. } => source.code(),
            Self::GuestEnded { .. } => "guest_ended",
            Self::BootTimeout { .. } => "boot_timeout",
            Self::Warm { source: AgentError::Failed { .. }, .. } => "warm_failed",
            Self::Warm { source: AgentError::TimedOut { .. }, .. } => "warm_timeout",
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
            Self::NotEnoughMemory { .. } => "give less memory_mib, or end sandboxes and other programs first",
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
            Self::Warm { source: AgentError::Failed { .. }, .. } => {
                "correct the warm-up; nothing was left behind"
            }
            Self::Warm { .. } => "raise warm_timeout_ms or shorten the warm-up; nothing was left behind",
            Self::Setting { .. } | Self::Cancelled { .. } => return None,
        };
        Some(hint.to_owned())
    }
}
