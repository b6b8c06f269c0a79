//! One VMM process: spawn, boot, freeze, fork, stop.
//!
//! A [`Vmm`] owns its process: dropping it closes the control socket and kills the process through its pidfd; the
//! supervisor reaps it. Nothing here knows images, templates or agents.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use command_fds::{CommandFdExt, FdMapping};
use offshoot_protocol::control::{
    BootConfig, ChildSpec, ControlError, ErrorKind, ForkTimes, FrozenInfo, Reply, Request, Status,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::clock::{Deadline, monotonic_ns};
use crate::control::{ChannelError, Conn, End, EventSink, ForkState, Ignore, Started, Supervisor, pair};
use crate::fault::{Fault, of_io};

/// Number under which a VMM finds its control socket.
const CONTROL_FD: i32 = 3;

/// Why an operation on a VMM failed.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    /// The program could not be started.
    #[error("start the VMM {}", program.display())]
    Spawn {
        /// The program.
        program: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The host refused a descriptor or similar.
    #[error("prepare to {doing} sandbox {id}")]
    Prepare {
        /// The operation.
        doing: &'static str,
        /// Sandbox id.
        id: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The control socket failed or the deadline passed.
    #[error("{doing} sandbox {id}")]
    Channel {
        /// The operation.
        doing: &'static str,
        /// Sandbox id.
        id: String,
        /// What happened.
        source: ChannelError,
    },
    /// The VMM ended meanwhile.
    #[error("{doing} sandbox {id}: its VMM ended: {end}")]
    Ended {
        /// The operation.
        doing: &'static str,
        /// Sandbox id.
        id: String,
        /// How.
        end: End,
    },
    /// The VMM refused.
    #[error("{doing} sandbox {id}")]
    Refused {
        /// The operation.
        doing: &'static str,
        /// Sandbox id.
        id: String,
        /// Its answer.
        source: ControlError,
    },
    /// The VMM answered something else than what was asked.
    #[error("{doing} sandbox {id}: the VMM's answer lacks {lacks}")]
    Answer {
        /// The operation.
        doing: &'static str,
        /// Sandbox id.
        id: String,
        /// What is missing.
        lacks: &'static str,
    },
}

impl Fault for VmmError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Spawn { .. } | Self::Ended { .. } => ErrorKind::Host,
            Self::Prepare { source, .. } => of_io(source).0,
            Self::Channel {
                source: ChannelError::TimedOut | ChannelError::Closed,
                ..
            } => ErrorKind::Host,
            Self::Channel { .. } | Self::Answer { .. } => ErrorKind::Bug,
            Self::Refused { source, .. } => source.kind,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            Self::Spawn { .. } => "vmm_not_started",
            Self::Prepare { source, .. } => of_io(source).1,
            Self::Channel {
                source: ChannelError::TimedOut,
                ..
            } => "vmm_timeout",
            Self::Channel {
                source: ChannelError::Closed,
                ..
            }
            | Self::Ended { .. } => "vmm_ended",
            Self::Channel { .. } | Self::Answer { .. } => "vmm_protocol",
            Self::Refused { .. } => "vmm_refused",
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Spawn { .. } => {
                Some("name the program with --vmm, or put offshoot-vmm beside offshootd".into())
            }
            Self::Channel {
                source: ChannelError::TimedOut,
                ..
            } => Some("the host may be overloaded; the daemon's log has the VMM's state".into()),
            Self::Refused { source, .. } if source.kind == ErrorKind::Unsupported => {
                Some("`offshoot doctor` says what this host lacks".into())
            }
            _ => None,
        }
    }
}

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

/// A fork's children, in order, and its times.
#[derive(Debug)]
pub struct ForkOutcome {
    /// One result for each child asked for, in that order.
    pub children: Vec<Result<Vmm, ControlError>>,
    /// What the VMM measured.
    pub times: ForkTimes,
    /// When the VMM's reply had arrived, nanoseconds of `CLOCK_MONOTONIC`.
    pub returned_ns: u64,
}

/// How [`Vmm::fork`] waits and reports.
pub struct ForkOptions {
    /// When children that have not started are given up.
    pub deadline: Deadline,
    /// Takes the children's events.
    pub sink: Arc<dyn EventSink>,
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
        let spawn = |source| VmmError::Spawn {
            program: options.program.to_owned(),
            source,
        };
        let mut command = Command::new(options.program);
        command.args(["--control-fd", &CONTROL_FD.to_string()]);
        command
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(options.stderr);
        command
            .fd_mappings(vec![FdMapping {
                parent_fd: theirs,
                child_fd: CONTROL_FD,
            }])
            .map_err(|_| spawn(std::io::Error::other("descriptor 3 was mapped twice")))?;
        let child = command.spawn().map_err(spawn)?;
        // Holds the host's copy of the other end: without it the end of the VMM closes the socket.
        drop(command);
        // Not yet waited for, so the number still names this child.
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).map_err(prepare)?;
        let conn = supervisor
            .register(options.id.to_owned(), ours, options.sink)
            .map_err(prepare)?;
        let vmm = Self::new(conn, supervisor, Kind::Guest);
        supervisor.adopt(&vmm.conn, child.id(), pidfd).map_err(prepare)?;
        Ok(vmm)
    }

    fn new(conn: Arc<Conn>, supervisor: &Arc<Supervisor>, kind: Kind) -> Self {
        Self {
            conn,
            supervisor: Arc::clone(supervisor),
            kind,
            forking: Mutex::default(),
        }
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
        self.call("boot", Request::Boot(Box::new(config)), &fds, deadline)
            .map(drop)
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
        let zygote = Self::new(
            conn.map_err(|errno| self.prepare("freeze", errno))?,
            &self.supervisor,
            Kind::Zygote,
        );
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

    /// Forks `children.len()` children at once: from a zygote, or from a running guest through one frozen twin.
    ///
    /// Returns when each child has started or failed, or the deadline has passed; a child that then has not started is
    /// killed. A failed child does not touch its siblings, nor a failed fork this VMM.
    ///
    /// Cost: for each child one `socketpair`, one `sendmsg` and two `epoll_ctl`; its birth is two `recvmsg` on the
    /// supervisor's thread.
    ///
    /// # Errors
    /// Fails as a whole only where the VMM refuses the fork, ends, or does not answer in time.
    pub fn fork(
        &self,
        children: Vec<(ChildSpec, ChildResources)>,
        options: &ForkOptions,
    ) -> Result<ForkOutcome, VmmError> {
        let _one_at_a_time = self
            .forking
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let count =
            u32::try_from(children.len()).map_err(|_| self.answer("fork", "room for so many children"))?;
        let mut born = Vec::with_capacity(children.len());
        let mut announced = Vec::with_capacity(children.len());
        for (spec, resources) in children {
            let (ours, theirs) = pair().map_err(|errno| self.prepare("fork", errno))?;
            let conn = self
                .supervisor
                .register(spec.id.clone(), ours, Arc::clone(&options.sink));
            let conn = conn.map_err(|errno| self.prepare("fork", errno))?;
            born.push(Self::new(conn, &self.supervisor, Kind::Guest));
            announced.push((Request::Child(spec), vec![theirs, resources.vsock, resources.log]));
        }
        let twin = match self.kind {
            Kind::Guest => Some(self.prepare_twin()?),
            Kind::Zygote => None,
        };
        let source = twin.as_ref().map_or(&self.conn, |(twin, _)| &twin.conn);
        source.set_forking(born.iter().map(|vmm| Arc::clone(&vmm.conn)).collect());
        let forked = self.fork_and_wait(count, announced, twin.as_ref(), born, options.deadline);
        source.set_forking(Vec::new());
        forked
    }

    /// A control socket for the twin: its owner, and the end to send.
    fn prepare_twin(&self) -> Result<(Vmm, OwnedFd), VmmError> {
        let (ours, theirs) = pair().map_err(|errno| self.prepare("fork", errno))?;
        let conn = self
            .supervisor
            .register(self.conn.id.clone(), ours, Arc::new(Ignore));
        let conn = conn.map_err(|errno| self.prepare("fork", errno))?;
        Ok((Self::new(conn, &self.supervisor, Kind::Zygote), theirs))
    }

    fn fork_and_wait(
        &self,
        count: u32,
        announced: Vec<(Request, Vec<OwnedFd>)>,
        twin: Option<&(Vmm, OwnedFd)>,
        born: Vec<Vmm>,
        deadline: Deadline,
    ) -> Result<ForkOutcome, VmmError> {
        let twin_end: Vec<_> = twin.iter().map(|(_, theirs)| theirs.as_fd()).collect();
        let answer = self.conn.request_with(
            Request::Fork { count },
            &twin_end,
            announced.into_iter(),
            deadline,
        );
        let returned_ns = monotonic_ns();
        let (reply, fds) = self.outcome("fork", answer)?;
        let Reply::Forked(times) = reply else {
            return Err(self.answer("fork", "its times"));
        };
        if let Some((twin, _)) = twin {
            let pidfd = fds
                .into_iter()
                .next()
                .ok_or_else(|| self.answer("fork", "the twin's pidfd"))?;
            // The twin is known by its pidfd alone; it ends when its children are forked.
            self.supervisor
                .adopt(&twin.conn, 0, pidfd)
                .map_err(|errno| self.prepare("fork", errno))?;
        }
        let children = born
            .into_iter()
            .map(|child| child.await_birth(deadline))
            .collect();
        Ok(ForkOutcome {
            children,
            times,
            returned_ns,
        })
    }

    fn await_birth(self, deadline: Deadline) -> Result<Self, ControlError> {
        match self.conn.wait_born(deadline) {
            ForkState::Ready => Ok(self),
            ForkState::Failed(error) => Err(error),
            ForkState::Pending => {
                let message = format!("sandbox {} did not start within the deadline", self.conn.id);
                Err(ControlError {
                    kind: ErrorKind::Host,
                    message,
                })
            }
        }
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
        self.conn
            .wait_ended(Deadline::after(std::time::Duration::from_secs(5)))
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
                match self
                    .conn
                    .wait_ended(Deadline::after(std::time::Duration::from_secs(1)))
                {
                    Some(end) => Err(VmmError::Ended { doing, id, end }),
                    None => Err(VmmError::Channel {
                        doing,
                        id,
                        source: ChannelError::Closed,
                    }),
                }
            }
            Err(source) => Err(VmmError::Channel { doing, id, source }),
        }
    }

    fn prepare(&self, doing: &'static str, errno: rustix::io::Errno) -> VmmError {
        VmmError::Prepare {
            doing,
            id: self.conn.id.clone(),
            source: errno.into(),
        }
    }

    fn answer(&self, doing: &'static str, lacks: &'static str) -> VmmError {
        VmmError::Answer {
            doing,
            id: self.conn.id.clone(),
            lacks,
        }
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
        f.debug_struct("Vmm")
            .field("id", id)
            .field("kind", &kind)
            .field("pid", &pid)
            .finish()
    }
}
