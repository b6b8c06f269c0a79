//! Ending a command with all that it started.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::cgroup::Cgroup;
use crate::sys;

/// A started command as something to be signalled: its session leader, session and cgroup.
pub struct Target {
    /// The session leader.
    pub pid: i32,
    /// Set when the leader was reaped.
    pub reaped: Arc<AtomicBool>,
    /// Its cgroup, where there are cgroups.
    pub cgroup: Option<Cgroup>,
}

/// A session whose processes fork while they are being killed is read again this many times.
const PASSES: usize = 8;

impl Target {
    /// Whether the leader was reaped.
    pub fn is_reaped(&self) -> bool {
        self.reaped.load(Ordering::Acquire)
    }

    /// Sends `signal` to the leader's process group.
    ///
    /// # Errors
    /// As `kill(2)`; `ESRCH` once the leader was reaped.
    pub fn signal_group(&self, signal: i32) -> io::Result<()> {
        if self.is_reaped() {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        sys::send_signal(-self.pid, signal)
    }

    /// Sends `signal` to the leader only.
    ///
    /// # Errors
    /// As `kill(2)`; `ESRCH` once the leader was reaped.
    pub fn signal_leader(&self, signal: i32) -> io::Result<()> {
        if self.is_reaped() {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        sys::send_signal(self.pid, signal)
    }

    /// Kills the leader, its group, its session and its cgroup.
    pub fn kill_tree(&self) {
        if let Some(cgroup) = &self.cgroup {
            // A cgroup that is gone has no process left.
            let _ = cgroup.kill();
        }
        // While a process of the session lives, its number is not given out again; if the leader was reaped and a
        // process has the number, the session is empty and the number is someone else's.
        if self.is_reaped() && Path::new("/proc").join(self.pid.to_string()).exists() {
            return;
        }
        let _ = sys::send_signal(-self.pid, libc::SIGKILL);
        for _ in 0..PASSES {
            if !kill_session(self.pid) {
                return;
            }
        }
    }
}

/// Kills the living members of session `session`; false if there was none.
fn kill_session(session: i32) -> bool {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return false;
    };
    let mut found = false;
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let Ok(stat) = std::fs::read(entry.path().join("stat")) else {
            continue;
        };
        if session_if_alive(&stat) == Some(session) {
            found |= sys::send_signal(pid, libc::SIGKILL).is_ok();
        }
    }
    found
}

/// The session in a `/proc/PID/stat` line, unless the process is dead. The command name may hold spaces and brackets.
fn session_if_alive(stat: &[u8]) -> Option<i32> {
    let after_name = stat.iter().rposition(|&byte| byte == b')')? + 1;
    let text = std::str::from_utf8(stat.get(after_name..)?).ok()?;
    let mut fields = text.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(2)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn session_is_found_behind_any_name() {
        assert_eq!(session_if_alive(b"7 (a) b) (c) S 1 7 42 0 -1"), Some(42));
        assert_eq!(session_if_alive(b"7 (sh) Z 1 7 42 0 -1"), None);
        assert_eq!(session_if_alive(b"garbage"), None);
    }
}
