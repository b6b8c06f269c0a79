//! One VMM process: what it is at each moment, and how it becomes something else.
//!
//! ```text
//!            boot                 fork: parent
//!  Empty ───────────▶ Running ◀──────────────────┐
//!                      │ │ └─────────────────────┘
//!               freeze │ │ fork: child
//!            (child)   │ ▼
//!                      │ Twin ──fork──▶ Starting ──▶ Running
//!                      ▼                   ▲
//!                    Zygote ──fork─────────┘
//! ```
//!
//! Twin and zygote have one thread, no KVM VM, and never run their guest. A forked child leaves its parent's call stack
//! by returning its new [`Role`] to [`serve`]'s loop, so that no local of the parent's is used or dropped later.

mod attach;
mod breed;
mod error;
mod freeze;
mod machine;
mod running;
mod watchdog;
mod zygote;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use offshoot_protocol::control::{Event, ExitReason, Message};

use crate::control::{ControlSocket, SocketError};

pub use error::VmmError;

/// What this process is.
enum Role {
    Empty(ControlSocket),
    Starting(Box<breed::Newborn>),
    Running(Box<running::Running>),
    Twin(Box<breed::Twin>),
    Zygote(Box<zygote::Zygote>),
    Ended(ExitReason, Arc<ControlSocket>),
    /// Ended without a word to anybody: a twin whose children are on their way.
    Gone,
}

/// Serves the control socket until the VMM ends. Returns in every process that is forked on the way, too.
///
/// # Errors
/// Only what makes the process unable to speak to the host at all.
pub fn serve(control: OwnedFd) -> Result<(), SocketError> {
    let mut role = Role::Empty(ControlSocket::new(control));
    loop {
        role = match role {
            Role::Empty(control) => running::wait_for_boot(control)?,
            Role::Starting(newborn) => newborn.start(),
            Role::Running(running) => running.serve(),
            Role::Twin(twin) => twin.breed(),
            Role::Zygote(zygote) => zygote.serve(),
            Role::Ended(reason, control) => {
                // The host may be gone already; then nobody wants to know.
                let _ = control.send(&Message::Event(Event::Exited { reason }), &[]);
                return Ok(());
            }
            Role::Gone => return Ok(()),
        }
    }
}
