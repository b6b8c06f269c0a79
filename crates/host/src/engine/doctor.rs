//! Runs the VMM's probe of this machine.

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::{DoctorError, Host};
use crate::clock::Deadline;

/// Time for the probe.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Output that is read, bytes.
const MAX_OUTPUT_BYTES: u64 = 1 << 20;

impl Host {
    /// What `offshoot-vmm --probe` found out about this machine, as the JSON it printed.
    ///
    /// # Errors
    /// Fails where the program cannot be run, does not end in time, or prints no JSON.
    pub fn probe(&self) -> Result<serde_json::Value, DoctorError> {
        let program = self.config.vmm.clone();
        let run = |source| DoctorError::Run { program: program.clone(), source };
        let mut command = Command::new(&program);
        command.arg("--probe").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(run)?;
        let readers = [
            child.stdout.take().map(|pipe| read_in_background(OwnedFd::from(pipe))),
            child.stderr.take().map(|pipe| read_in_background(OwnedFd::from(pipe))),
        ];
        // Not waited for yet, so the number still names this child.
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
        let ended =
            pidfd.and_then(|pidfd| wait(&pidfd, Deadline::after(TIMEOUT))).map_err(|e| run(e.into()))?;
        if !ended {
            child.kill().map_err(run)?;
        }
        let status = child.wait().map_err(run)?;
        let [stdout, stderr] = readers.map(|reader| reader.and_then(|r| r.join().ok()).unwrap_or_default());
        if !ended {
            return Err(DoctorError::TimedOut { program, seconds: TIMEOUT.as_secs() });
        }
        // A probe that finds fault may end with a failure and still report.
        serde_json::from_slice(&stdout).map_err(|_| DoctorError::Failed {
            program,
            status: status.to_string(),
            output: String::from_utf8_lossy(&[stdout, stderr].concat()).trim().to_owned(),
        })
    }
}

fn read_in_background(pipe: OwnedFd) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // What could be read counts; a broken pipe shows in the exit status.
        let _ =
            io::Read::by_ref(&mut std::fs::File::from(pipe)).take(MAX_OUTPUT_BYTES).read_to_end(&mut bytes);
        bytes
    })
}

/// Whether the process ended before the deadline.
fn wait(pidfd: &OwnedFd, deadline: Deadline) -> rustix::io::Result<bool> {
    loop {
        let timeout = Timespec::try_from(deadline.left()).ok();
        match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], timeout.as_ref()) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}
