//! How vCPU threads tell the control thread that the guest has ended.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use offshoot_protocol::control::ExitReason;
use rustix::event::EventfdFlags;

/// Remembers the first reason and makes a descriptor readable.
#[derive(Debug)]
pub struct Notice {
    reason: Mutex<Option<ExitReason>>,
    event: OwnedFd,
}

impl Notice {
    /// A notice without reason.
    ///
    /// # Errors
    /// The system has no descriptor left.
    pub fn new() -> rustix::io::Result<Self> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { reason: Mutex::new(None), event })
    }

    /// Records why the guest ended; later reasons are ignored.
    pub fn end(&self, reason: ExitReason) {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(reason);
        // The counter cannot overflow: each vCPU writes once.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// The reason, once there is one.
    pub fn reason(&self) -> Option<ExitReason> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl AsFd for Notice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
