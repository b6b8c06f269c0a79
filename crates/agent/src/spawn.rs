//! Starting a command: its user, streams, session and cgroup.

use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use rustix::fs::Gid;
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;
use tokio::sync::oneshot;

use crate::cgroup::Cgroups;
use crate::kill::Target;
use crate::reaper::{Exit, Reaper};
use crate::sys::{ChildSetup, Credentials};
use crate::users::User;

/// Search path of commands whose environment names none.
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Terminals belong to this group, `tty` on Debian and most others.
const TTY_GROUP: u32 = 5;
/// Descriptors on their way to a child's 3, 4, ... are kept at or above this number.
const EXTRA_FD_FLOOR: i32 = 16;

/// What a command's standard streams are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Streams {
    /// Pipes for output; `/dev/null` as input.
    Output,
    /// Pipes for output and input.
    InputOutput,
    /// One terminal.
    Pty(PtySize),
}

/// Size of a terminal, characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PtySize {
    /// Columns.
    pub cols: u16,
    /// Rows.
    pub rows: u16,
}

impl PtySize {
    /// As the kernel takes it.
    pub fn winsize(self) -> Winsize {
        Winsize { ws_row: self.rows, ws_col: self.cols, ws_xpixel: 0, ws_ypixel: 0 }
    }
}

/// A command to start.
pub struct Launch {
    /// File, or name to be looked up in the `PATH` of `env`.
    pub program: OsString,
    /// Arguments after the program's name.
    pub args: Vec<OsString>,
    /// The whole environment.
    pub env: Vec<(String, String)>,
    /// Existing working directory.
    pub cwd: PathBuf,
    /// User to run as.
    pub user: User,
    /// Standard streams.
    pub streams: Streams,
    /// Descriptors that the command gets as 3, 4, and so on.
    pub extra_fds: Vec<OwnedFd>,
}

/// A started command.
pub struct Spawned {
    /// For signals.
    pub target: Target,
    /// Resolves when the leader was reaped.
    pub exit: oneshot::Receiver<Exit>,
    /// Our ends of its streams.
    pub ends: Ends,
}

/// Our ends of a command's streams.
pub enum Ends {
    /// Three pipes.
    Pipes {
        /// Its standard input, unless that is `/dev/null`.
        stdin: Option<OwnedFd>,
        /// Its standard output.
        stdout: OwnedFd,
        /// Its standard error.
        stderr: OwnedFd,
    },
    /// The master side of its terminal.
    Pty(OwnedFd),
}

/// Starts commands.
pub struct Spawner {
    reaper: Arc<Reaper>,
    cgroups: Option<Arc<Cgroups>>,
}

impl Spawner {
    /// A spawner over the agent's reaper, and cgroups where there are any.
    pub fn new(reaper: Arc<Reaper>, cgroups: Option<Arc<Cgroups>>) -> Self {
        Self { reaper, cgroups }
    }

    /// Starts a command in a session (and, where possible, cgroup) of its own.
    ///
    /// # Errors
    /// What `fork`, the steps before `exec`, or `exec` answered.
    pub fn spawn(&self, launch: Launch) -> io::Result<Spawned> {
        let mut command = Command::new(&launch.program);
        command.args(&launch.args).env_clear();
        for (name, value) in &launch.env {
            if name.is_empty() || name.contains('=') {
                return Err(invalid_input(&format!(
                    "'{name}' cannot be the name of an environment variable"
                )));
            }
            command.env(name, value);
        }
        if !launch.env.iter().any(|(name, _)| name == "PATH") {
            command.env("PATH", DEFAULT_PATH);
        }
        let master = connect_streams(&mut command, launch.streams, &launch.user)?;
        let (cgroup, cgroup_procs) = self.cgroups.as_ref().map(Cgroups::create).transpose()?.unzip();
        ChildSetup {
            cgroup_procs,
            controlling_terminal: master.is_some(),
            extra_fds: launch.extra_fds.into_iter().map(above_targets).collect::<io::Result<_>>()?,
            credentials: credentials_for(&launch.user),
            cwd: to_cstring(launch.cwd.as_os_str())?,
        }
        .install(&mut command);

        let mut started = self.reaper.spawn(&mut command)?;
        let ends = match master {
            Some(master) => Ends::Pty(master),
            None => Ends::Pipes {
                stdin: started.child.stdin.take().map(OwnedFd::from),
                stdout: started.child.stdout.take().expect("standard output is a pipe").into(),
                stderr: started.child.stderr.take().expect("standard error is a pipe").into(),
            },
        };
        let target = Target { pid: started.pid, reaped: started.reaped, cgroup };
        Ok(Spawned { target, exit: started.exit, ends })
    }
}

fn connect_streams(command: &mut Command, streams: Streams, user: &User) -> io::Result<Option<OwnedFd>> {
    let size = match streams {
        Streams::Output | Streams::InputOutput => {
            let stdin = if streams == Streams::InputOutput { Stdio::piped() } else { Stdio::null() };
            command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
            return Ok(None);
        }
        Streams::Pty(size) => size,
    };
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = rustix::pty::openpt(flags)?;
    rustix::pty::unlockpt(&master)?;
    let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
    rustix::termios::tcsetwinsize(&slave, size.winsize())?;
    if rustix::process::geteuid().is_root() {
        rustix::fs::fchown(&slave, Some(user.ids().0), Some(Gid::from_raw(TTY_GROUP)))?;
    }
    command.stdin(slave.try_clone()?).stdout(slave.try_clone()?).stderr(slave);
    Ok(Some(master))
}

fn credentials_for(user: &User) -> Option<Credentials> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let (uid, gid) = user.ids();
    Some(Credentials { uid, gid, groups: user.groups.iter().map(|&gid| Gid::from_raw(gid)).collect() })
}

fn above_targets(fd: OwnedFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(&fd, EXTRA_FD_FLOOR)?)
}

fn to_cstring(text: &OsStr) -> io::Result<CString> {
    CString::new(text.as_bytes()).map_err(|_| invalid_input("a path holds a zero byte"))
}

fn invalid_input(message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message.to_owned())
}

/// Whether `path` is a directory that a command can be started in.
pub fn is_directory(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|metadata| metadata.is_dir())
}
