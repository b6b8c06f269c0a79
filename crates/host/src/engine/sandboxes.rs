//! Look-up, logs and removal of sandboxes.

use std::path::PathBuf;
use std::sync::Arc;

use super::births::not_running;
use super::state::{Sandbox, SandboxState};
use super::{Host, SandboxError, SandboxInfo};
use crate::clock::Deadline;

impl Host {
    /// All sandboxes, by id.
    pub fn sandboxes(&self) -> Vec<SandboxInfo> {
        let sandboxes: Vec<Arc<Sandbox>> = self.lock().sandboxes.values().cloned().collect();
        sandboxes.iter().map(|sandbox| sandbox.info()).collect()
    }

    /// One sandbox, by id or name.
    ///
    /// # Errors
    /// Fails where there is none.
    pub fn sandbox(&self, id: &str) -> Result<SandboxInfo, SandboxError> {
        Ok(self.find_sandbox(id)?.info())
    }

    pub(super) fn find_sandbox(&self, id: &str) -> Result<Arc<Sandbox>, SandboxError> {
        let registry = self.lock();
        let by_name = || registry.sandboxes.values().find(|sandbox| sandbox.name.as_deref() == Some(id));
        let found = registry.sandboxes.get(id).or_else(by_name).cloned();
        found.ok_or_else(|| SandboxError::NotFound { id: id.to_owned() })
    }

    /// Where a running sandbox's hybrid vsock listens.
    ///
    /// # Errors
    /// Fails where there is none, or it is not running: before its identity is acknowledged nothing may reach it.
    pub fn vsock_path(&self, id: &str) -> Result<PathBuf, SandboxError> {
        let sandbox = self.find_sandbox(id)?;
        match (sandbox.running(), sandbox.dir()) {
            (Some(_), Some(dir)) => Ok(dir.vsock_path()),
            _ => Err(not_running(&sandbox)),
        }
    }

    /// The last `max_bytes` of a sandbox's console, dead or alive.
    ///
    /// # Errors
    /// Fails where there is none, or its log cannot be read.
    pub fn console(&self, id: &str, max_bytes: u64) -> Result<Vec<u8>, SandboxError> {
        let sandbox = self.find_sandbox(id)?;
        let dir = sandbox.dir().ok_or_else(|| SandboxError::NotFound { id: id.to_owned() })?;
        let read = dir.console_tail(max_bytes);
        read.map_err(|source| SandboxError::Console { id: sandbox.id.clone(), source })
    }

    /// Ends a sandbox and forgets it. Its forks live on.
    ///
    /// # Errors
    /// Fails where there is none, or it is still starting.
    pub fn remove_sandbox(&self, id: &str) -> Result<(), SandboxError> {
        let sandbox = self.find_sandbox(id)?;
        if sandbox.state() == SandboxState::Starting {
            return Err(not_running(&sandbox));
        }
        // Two removals at once: the second finds it gone.
        if self.lock().sandboxes.remove(&sandbox.id).is_none() {
            return Err(SandboxError::NotFound { id: id.to_owned() });
        }
        if let Some(vmm) = sandbox.running()
            && vmm.stop(Deadline::after(self.config.stop_timeout)).is_none()
        {
            tracing::error!(sandbox = sandbox.id, "its VMM outlived SIGKILL; it is reaped when it ends");
        }
        sandbox.release();
        Ok(())
    }
}
