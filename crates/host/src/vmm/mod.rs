//! One VMM process: spawn, boot, freeze, fork, stop.
//!
//! A [`Vmm`] owns its process: dropping it closes the control socket and kills the process through its pidfd; the
//! supervisor reaps it. Nothing here knows images, templates or agents.

mod error;
mod fork;

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use command_fds::{CommandFdExt, FdMapping};
use offshoot_protocol::control::{BootConfig, FrozenInfo, Reply, Request, Status};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::clock::Deadline;
use crate::control::{ChannelError, Conn, End, EventSink, Started, Supervisor, pair};

pub use error::VmmError;
pub use fork::{ForkOptions, ForkOutcome};

/// Number under which a VMM finds its control socket.
const CONTROL_FD: i32 = 3;

/// How to start a VMM program.
pub struct SpawnOptions<'a> {
    /// The program, `offshoot-vmm`.
    pub program: &'a Path,
    /// Sandbox id.
    pub id: &'a str,
    /// Where its standard error goes.
    pub stderr: OwnedFd,
    /// Takes its events.
    pub sink: Arc<dyn EventSink>,
}

/// What a child is given by the host, made before the fork. Closed by the host as soon as it is sent.
#[derive(Debug)]
pub struct ChildResources {
    /// Listening Unix stream socket of the hybrid vsock.
    pub vsock: OwnedFd,
    /// Console log, open for reading and writing.
    pub log: OwnedFd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Guest,
    Zygote,
}

/// A VMM process and its control socket.
pub struct Vmm {
    conn: Arc<Conn>,
    supervisor: Arc<Supervisor>,
    kind: Kind,
    /// One fork at a time: the events of its children are told apart by index alone.
    forking: Mutex<()>,
}

impl Vmm {
    /// Starts a VMM program with its control socket as descriptor 3 and no other descriptor but the standard three.
    ///
    /// # Errors
    /// Fails where the program cannot be run or the host refuses descriptors.
    pub fn spawn(supervisor: &Arc<Supervisor>, options: SpawnOptions<'_>) -> Result<Self, VmmError> {
        let prepare = |source: rustix::io::Errno| VmmError::Prepare {
            doing: "start",
            id: options.id.to_owned(),
            source: source.into(),
        };
        let (ours, theirs) = pair().map_err(prepare)?;
        let spawn = |source| VmmError::Spawn { program: options.program.to_owned(), source };
        let mut command = Command::new(options.program);
        command.args(["--control-fd", &CONTROL_FD.to_string()]);
        command.env_clear().stdin(Stdio::null()).stdout(Stdio::null()).stderr(options.stderr);
        command
            .fd_mappings(vec![FdMapping { parent_fd: theirs, child_fd: CONTROL_FD }])
            .map_err(|_| spawn(std::io::Error::other("descriptor 3 was mapped twice")))?;
        let child = command.spawn().map_err(spawn)?;
        // Holds the host's copy of the other end: without it the end of the VMM closes the socket.
        drop(command);
        // Not yet waited for, so the number still names this child.
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).map_err(prepare)?;
        let conn = supervisor.register(options.id.to_owned(), ours, options.sink).map_err(prepare)?;
        let vmm = Self::new(conn, supervisor, Kind::Guest);
        supervisor.adopt(&vmm.conn, child.id(), pidfd).map_err(prepare)?;
        Ok(vmm)
    }

    fn new(conn: Arc<Conn>, supervisor: &Arc<Supervisor>, kind: Kind) -> Self {
        Self { conn, supervisor: Arc::clone(supervisor), kind, forking: Mutex::default() }
    }

    /// Boots a guest; `resources` become its vsock listener and console log.
    ///
    /// # Errors
    /// What the VMM refused, or that it ended or did not answer in time.
    pub fn boot(
        &self,
        config: BootConfig,
        resources: ChildResources,
        deadline: Deadline,
    ) -> Result<(), VmmError> {
        let fds = [resources.vsock.as_fd(), resources.log.as_fd()];
        self.call("boot", Request::Boot(Box::new(config)), &fds, deadline).map(drop)
    }

    /// Freezes the guest into a template; the zygote that serves it is returned and this process ends.
    ///
    /// # Errors
    /// What the VMM refused (the guest then goes on running), or that it ended or did not answer in time.
    pub fn freeze(
        &self,
        sink: Arc<dyn EventSink>,
        deadline: Deadline,
    ) -> Result<(Vmm, FrozenInfo), VmmError> {
        let (ours, theirs) = pair().map_err(|errno| self.prepare("freeze", errno))?;
        let conn = self.supervisor.register(self.conn.id.clone(), ours, sink);
        let zygote =
            Self::new(conn.map_err(|errno| self.prepare("freeze", errno))?, &self.supervisor, Kind::Zygote);
        let (reply, fds) = self.call("freeze", Request::Freeze, &[theirs.as_fd()], deadline)?;
        drop(theirs);
        let (Reply::Frozen(info), Some(pidfd)) = (reply, fds.into_iter().next()) else {
            return Err(self.answer("freeze", "the zygote's pidfd"));
        };
        self.supervisor
            .adopt(&zygote.conn, info.pid, pidfd)
            .map_err(|errno| self.prepare("freeze", errno))?;
        Ok((zygote, info))
    }

    /// Counters and role.
    ///
    /// # Errors
    /// That the VMM ended or did not answer in time.
    pub fn status(&self, deadline: Deadline) -> Result<Status, VmmError> {
        match self.call("read the status of", Request::Status, &[], deadline)?.0 {
            Reply::Status(status) => Ok(*status),
            _ => Err(self.answer("read the status of", "a status")),
        }
    }

    /// Stops the vCPUs until [`Vmm::resume`].
    ///
    /// # Errors
    /// What the VMM refused, or that it ended or did not answer in time.
    pub fn pause(&self, deadline: Deadline) -> Result<(), VmmError> {
        self.call("pause", Request::Pause, &[], deadline).map(drop)
    }

    /// Lets paused vCPUs go on.
    ///
    /// # Errors
    /// What the VMM refused, or that it ended or did not answer in time.
    pub fn resume(&self, deadline: Deadline) -> Result<(), VmmError> {
        self.call("resume", Request::Resume, &[], deadline).map(drop)
    }

    /// Asks the VMM to end; whatever it answers, it is killed at the deadline. Returns how it ended, if it did.
    pub fn stop(&self, deadline: Deadline) -> Option<End> {
        // An answer changes nothing: only the end of the process counts.
        let _ = self.conn.request(Request::Stop, &[], deadline);
        if let Some(end) = self.conn.wait_ended(deadline) {
            return Some(end);
        }
        self.conn.kill();
        self.conn.wait_ended(Deadline::after(std::time::Duration::from_secs(5)))
    }

    /// Sends `SIGKILL` through the pidfd.
    pub fn kill(&self) {
        self.conn.kill();
    }

    /// Waits for the end of the process; `None` if it still lives at the deadline.
    pub fn wait_ended(&self, deadline: Deadline) -> Option<End> {
        self.conn.wait_ended(deadline)
    }

    /// How the process ended, once it has.
    pub fn ended(&self) -> Option<End> {
        self.conn.ended()
    }

    /// Key of this VMM's events.
    pub fn key(&self) -> u64 {
        self.conn.key
    }

    /// Sandbox id.
    pub fn id(&self) -> &str {
        &self.conn.id
    }

    /// Process id, for display and `/proc` only.
    pub fn pid(&self) -> Option<u32> {
        self.conn.pid()
    }

    /// The process' pidfd.
    pub fn pidfd(&self) -> Option<Arc<OwnedFd>> {
        self.conn.pidfd()
    }

    /// When a forked child began and started.
    pub fn started(&self) -> Option<Started> {
        self.conn.started()
    }

    fn call(
        &self,
        doing: &'static str,
        request: Request,
        fds: &[std::os::fd::BorrowedFd<'_>],
        deadline: Deadline,
    ) -> Result<(Reply, Vec<OwnedFd>), VmmError> {
        self.outcome(doing, self.conn.request(request, fds, deadline))
    }

    fn outcome(
        &self,
        doing: &'static str,
        answer: Result<crate::control::Answer, ChannelError>,
    ) -> Result<(Reply, Vec<OwnedFd>), VmmError> {
        let id = self.conn.id.clone();
        match answer {
            Ok((Ok(reply), fds)) => Ok((reply, fds)),
            Ok((Err(source), _)) => Err(VmmError::Refused { doing, id, source }),
            Err(ChannelError::Closed) => {
                match self.conn.wait_ended(Deadline::after(std::time::Duration::from_secs(1))) {
                    Some(end) => Err(VmmError::Ended { doing, id, end }),
                    None => Err(VmmError::Channel { doing, id, source: ChannelError::Closed }),
                }
            }
            Err(source) => Err(VmmError::Channel { doing, id, source }),
        }
    }

    fn prepare(&self, doing: &'static str, errno: rustix::io::Errno) -> VmmError {
        VmmError::Prepare { doing, id: self.conn.id.clone(), source: errno.into() }
    }

    fn answer(&self, doing: &'static str, lacks: &'static str) -> VmmError {
        VmmError::Answer { doing, id: self.conn.id.clone(), lacks }
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        self.conn.abandon();
    }
}

impl std::fmt::Debug for Vmm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (id, kind, pid) = (&self.conn.id, self.kind, self.conn.pid());
        f.debug_struct("Vmm").field("id", id).field("kind", &kind).field("pid", &pid).finish()
    }
}
