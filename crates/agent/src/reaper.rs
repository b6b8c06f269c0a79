//! The one owner of `waitpid`.
//!
//! As PID 1 the agent must reap every orphan of the guest, yet the status of its own children must reach whoever
//! started them. Both go through [`Reaper`]: a child is forked and registered under the lock that [`Reaper::reap`]
//! holds while it waits, so that no status can arrive before its receiver exists, and the standard library's own wait
//! (for a child whose `exec` failed) cannot lose its status to the reaper.

use std::collections::HashMap;
use std::io;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::process::{WaitOptions, WaitStatus};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// It called `exit`.
    Code(i32),
    /// A signal ended it.
    Signal {
        /// Signal number.
        number: i32,
        /// It left a core dump.
        core_dumped: bool,
    },
}

impl Exit {
    fn of(status: WaitStatus) -> Option<Self> {
        if let Some(code) = status.exit_status() {
            return Some(Self::Code(code));
        }
        let number = status.terminating_signal()?;
        Some(Self::Signal { number, core_dumped: status.as_raw() & 0x80 != 0 })
    }
}

struct Registered {
    exit: oneshot::Sender<Exit>,
    reaped: Arc<AtomicBool>,
}

/// Reaps children and hands out their statuses.
#[derive(Default)]
pub struct Reaper {
    children: Mutex<HashMap<i32, Registered>>,
}

/// A registered child.
pub struct Reapable {
    /// Process id.
    pub pid: i32,
    /// Resolves when it was reaped.
    pub exit: oneshot::Receiver<Exit>,
    /// Set in the instant it is reaped: from then on its number may belong to someone else.
    pub reaped: Arc<AtomicBool>,
    /// Its pipes.
    pub child: Child,
}

impl Reaper {
    fn lock(&self) -> MutexGuard<'_, HashMap<i32, Registered>> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts `command` as a registered child.
    ///
    /// # Errors
    /// As [`Command::spawn`].
    pub fn spawn(&self, command: &mut Command) -> io::Result<Reapable> {
        let mut children = self.lock();
        let child = command.spawn()?;
        let pid = child.id() as i32;
        let (sender, exit) = oneshot::channel();
        let reaped = Arc::new(AtomicBool::new(false));
        children.insert(pid, Registered { exit: sender, reaped: reaped.clone() });
        Ok(Reapable { pid, exit, reaped, child })
    }

    /// Reaps whatever has ended.
    pub fn reap(&self) {
        let mut children = self.lock();
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            let Some(exit) = Exit::of(status) else { continue };
            if let Some(registered) = children.remove(&pid.as_raw_nonzero().get()) {
                registered.reaped.store(true, Ordering::Release);
                // The receiver may be gone: nobody asks for the status any more.
                let _ = registered.exit.send(exit);
            }
        }
    }

    /// Reaps at every `SIGCHLD`, for ever.
    ///
    /// # Errors
    /// Where the signal handler cannot be installed.
    pub fn run(self: Arc<Self>) -> io::Result<()> {
        let mut signals = signal(SignalKind::child())?;
        tokio::spawn(async move {
            loop {
                self.reap();
                if signals.recv().await.is_none() {
                    return;
                }
            }
        });
        Ok(())
    }
}
