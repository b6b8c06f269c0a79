//! Going down in order.

use std::time::Duration;

use rustix::mount::{MountFlags, mount_remount};
use rustix::system::{RebootCommand, reboot};

use crate::agent::{Agent, Machine};
use crate::console;
use crate::sys;

/// How long processes may take to end by themselves.
const TERM_LIMIT: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(20);
/// The reply must reach the host before the machine is off.
const REPLY_GRACE: Duration = Duration::from_millis(100);

/// Ends every process, writes everything back, and powers off. On a borrowed machine, ends the agent.
pub async fn power_off(agent: &Agent) {
    tokio::time::sleep(REPLY_GRACE).await;
    if agent.machine == Machine::Borrowed {
        for process in agent.processes.living() {
            process.kill();
        }
        std::process::exit(0);
    }
    end_everyone().await;
    rustix::fs::sync();
    if let Err(error) = mount_remount("/", MountFlags::RDONLY, c"") {
        console::say(&format!("the root file system could not be made read-only: {error}"));
    }
    rustix::fs::sync();
    if let Err(error) = reboot(RebootCommand::PowerOff) {
        console::say(&format!("the machine could not be powered off: {error}"));
    }
}

async fn end_everyone() {
    // As PID 1, "everyone" leaves out the agent itself. ESRCH: there is nobody.
    if sys::send_signal(-1, libc::SIGTERM).is_err() {
        return;
    }
    let ended = async {
        while sys::send_signal(-1, 0).is_ok() {
            tokio::time::sleep(POLL).await;
        }
    };
    if tokio::time::timeout(TERM_LIMIT, ended).await.is_err() {
        let _ = sys::send_signal(-1, libc::SIGKILL);
        tokio::time::sleep(POLL).await;
    }
}
