//! The host's side of the agent's host-only port, over the hybrid vsock. Blocking, with a deadline on every step.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine;
use offshoot_protocol::control::ErrorKind;
use offshoot_protocol::identity::{HostReply, HostRequest, Identity};
use offshoot_protocol::ports;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::clock::{Deadline, wall_clock_ns};
use crate::fault::Fault;
use crate::ids::{hex_id, random_bytes};

/// Longest reply line, bytes: a warm-up's output is bounded by the agent well below it.
const MAX_REPLY_BYTES: usize = 4 << 20;
/// Longest answer to `CONNECT`, bytes.
const MAX_CONNECT_BYTES: usize = 64;
/// Pause before a refused connection is tried again.
const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// Fresh entropy for each identity, bytes.
const ENTROPY_BYTES: usize = 64;
/// First limit of one attempt; it doubles with each.
const FIRST_ATTEMPT: Duration = Duration::from_secs(2);

/// Why the agent did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// Nobody accepted a connection to the sandbox's socket.
    #[error("connect to the agent through {}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The guest does not accept connections on the port.
    #[error("the guest accepts no connection on vsock port {port}")]
    Refused {
        /// The port.
        port: u32,
    },
    /// The deadline passed.
    #[error("the agent did not {doing} within the deadline")]
    TimedOut {
        /// What was asked.
        doing: &'static str,
    },
    /// The connection broke.
    #[error("the agent's connection broke while it was to {doing}")]
    Broken {
        /// What was asked.
        doing: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// The agent sent something that is no reply.
    #[error("the agent's reply, when it was to {doing}, cannot be read")]
    Malformed {
        /// What was asked.
        doing: &'static str,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// The agent failed and said why.
    #[error("the agent could not {doing}: {message}")]
    Failed {
        /// What was asked.
        doing: &'static str,
        /// Its words.
        message: String,
    },
    /// The agent answered another question.
    #[error("the agent answered something else than {doing}")]
    Unexpected {
        /// What was asked.
        doing: &'static str,
    },
}

impl Fault for AgentError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Malformed { .. } | Self::Unexpected { .. } => ErrorKind::Corrupt,
            Self::Failed { .. } => ErrorKind::Caller,
            _ => ErrorKind::Host,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            Self::Connect { .. } | Self::Refused { .. } => "agent_unreachable",
            Self::TimedOut { .. } => "agent_timeout",
            Self::Broken { .. } => "agent_gone",
            Self::Malformed { .. } | Self::Unexpected { .. } => "agent_protocol",
            Self::Failed { .. } => "agent_failed",
        }
    }
}

/// One connection to the agent's host-only port.
#[derive(Debug)]
pub struct AgentClient {
    stream: UnixStream,
}

impl AgentClient {
    /// Connects once.
    ///
    /// # Errors
    /// Fails where the VMM or the guest refuses, or the deadline passes.
    pub fn connect(vsock: &Path, deadline: Deadline) -> Result<Self, AgentError> {
        let stream = connect_stream(vsock, deadline)
            .map_err(|source| AgentError::Connect { path: vsock.to_owned(), source })?;
        let mut client = Self { stream };
        let port = ports::HOST_ONLY;
        client.write(format!("CONNECT {port}\n").as_bytes(), "accept a connection", deadline)?;
        match client.read_line(MAX_CONNECT_BYTES, "accept a connection", deadline) {
            Ok(line) if line.starts_with(b"OK ") => Ok(client),
            Ok(_) | Err(AgentError::Broken { .. }) => Err(AgentError::Refused { port }),
            Err(error) => Err(error),
        }
    }

    /// Whether the agent is up; its version.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub fn ping(&mut self, deadline: Deadline) -> Result<String, AgentError> {
        match self.call(&HostRequest::Ping, "answer", deadline)? {
            HostReply::Pong { version } => Ok(version),
            _ => Err(AgentError::Unexpected { doing: "a ping" }),
        }
    }

    /// Applies an identity; names and reasons of the hooks that failed.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub fn apply(&mut self, identity: Identity, deadline: Deadline) -> Result<Vec<String>, AgentError> {
        let wanted = identity.generation;
        match self.call(&HostRequest::Identity(identity), "apply its identity", deadline)? {
            HostReply::IdentityApplied { generation, failed_hooks, .. } if generation == wanted => {
                Ok(failed_hooks)
            }
            _ => Err(AgentError::Unexpected { doing: "its identity" }),
        }
    }

    /// Runs a warm-up in the interpreter; what it wrote to standard output and error.
    ///
    /// # Errors
    /// See [`AgentError`]; [`AgentError::Failed`] has the traceback.
    pub fn warm(
        &mut self,
        source: &str,
        file_name: &str,
        timeout: Duration,
        deadline: Deadline,
    ) -> Result<(String, String), AgentError> {
        let request = HostRequest::Warm {
            source: source.to_owned(),
            file_name: file_name.to_owned(),
            timeout_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
        };
        match self.call(&request, "run the warm-up", deadline)? {
            HostReply::Warmed { stdout, stderr } => Ok((stdout, stderr)),
            _ => Err(AgentError::Unexpected { doing: "the warm-up" }),
        }
    }

    /// Asks the guest to sync its file systems and power off.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub fn shutdown(&mut self, deadline: Deadline) -> Result<(), AgentError> {
        match self.call(&HostRequest::Shutdown, "shut down", deadline)? {
            HostReply::ShuttingDown => Ok(()),
            _ => Err(AgentError::Unexpected { doing: "a shutdown" }),
        }
    }

    fn call(
        &mut self,
        request: &HostRequest,
        doing: &'static str,
        deadline: Deadline,
    ) -> Result<HostReply, AgentError> {
        let mut line =
            serde_json::to_vec(request).map_err(|source| AgentError::Malformed { doing, source })?;
        line.push(b'\n');
        self.write(&line, doing, deadline)?;
        let line = self.read_line(MAX_REPLY_BYTES, doing, deadline)?;
        match serde_json::from_slice(&line).map_err(|source| AgentError::Malformed { doing, source })? {
            HostReply::Failed { message } => Err(AgentError::Failed { doing, message }),
            reply => Ok(reply),
        }
    }

    fn write(&mut self, mut bytes: &[u8], doing: &'static str, deadline: Deadline) -> Result<(), AgentError> {
        while !bytes.is_empty() {
            self.stream.set_write_timeout(Some(left(deadline, doing)?)).map_err(|e| broken(doing, e))?;
            let written = self.stream.write(bytes).map_err(|e| broken(doing, e))?;
            bytes = &bytes[written..];
        }
        Ok(())
    }

    /// One line without its end. Nothing follows a reply before the next request, so reading in blocks loses nothing.
    fn read_line(
        &mut self,
        limit: usize,
        doing: &'static str,
        deadline: Deadline,
    ) -> Result<Vec<u8>, AgentError> {
        let mut line = Vec::new();
        let mut block = [0u8; 4096];
        loop {
            self.stream.set_read_timeout(Some(left(deadline, doing)?)).map_err(|e| broken(doing, e))?;
            let read = match self.stream.read(&mut block) {
                Ok(0) => return Err(broken(doing, io::ErrorKind::UnexpectedEof.into())),
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(broken(doing, error)),
            };
            line.extend_from_slice(&block[..read]);
            if line.last() == Some(&b'\n') {
                line.pop();
                return Ok(line);
            }
            if line.len() > limit {
                return Err(broken(doing, io::Error::other("its reply has no end")));
            }
        }
    }
}

fn left(deadline: Deadline, doing: &'static str) -> Result<Duration, AgentError> {
    let left = deadline.left();
    if left.is_zero() { Err(AgentError::TimedOut { doing }) } else { Ok(left) }
}

fn broken(doing: &'static str, source: io::Error) -> AgentError {
    match source.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => AgentError::TimedOut { doing },
        _ => AgentError::Broken { doing, source },
    }
}

/// Connects without ever waiting in the kernel: a VMM that does not accept fills its backlog, and a blocking `connect`
/// would then hang.
fn connect_stream(path: &Path, deadline: Deadline) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    loop {
        match rustix::net::connect(&socket, &address) {
            Ok(()) => break,
            Err(Errno::AGAIN | Errno::INTR) if !deadline.is_over() => std::thread::sleep(RETRY_PAUSE),
            Err(errno) => return Err(errno.into()),
        }
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Whose identity, and what of it is not random.
#[derive(Debug, Clone)]
pub struct IdentityOf<'a> {
    /// Sandbox id; becomes the hostname, too.
    pub sandbox_id: &'a str,
    /// Generation along the lineage.
    pub generation: u64,
    /// Environment of processes started from now on.
    pub env: &'a std::collections::BTreeMap<String, String>,
}

/// A new identity: entropy, machine id and clock are made at this moment and never used twice.
pub fn fresh_identity(of: &IdentityOf<'_>) -> Identity {
    let entropy = random_bytes::<ENTROPY_BYTES>();
    Identity {
        sandbox_id: of.sandbox_id.to_owned(),
        entropy_base64: base64::engine::general_purpose::STANDARD.encode(entropy),
        wall_clock_ns: wall_clock_ns(),
        hostname: of.sandbox_id.to_owned(),
        machine_id: hex_id(),
        generation: of.generation,
        env: of.env.clone(),
    }
}

/// When the steps of [`give_identity`] were done, nanoseconds of `CLOCK_MONOTONIC`.
#[derive(Debug, Clone)]
pub struct IdentityTimes {
    /// The agent's first reply.
    pub replied_ns: u64,
    /// The identity was acknowledged.
    pub applied_ns: u64,
    /// Hooks that failed: name and reason.
    pub failed_hooks: Vec<String>,
}

/// Tries until `deadline` to give a clone its identity. A connection that breaks or stays silent is made anew, with
/// fresh entropy and the clock of that moment; what the agent refuses is final.
///
/// # Errors
/// The last attempt's error.
pub fn give_identity(
    vsock: &Path,
    of: &IdentityOf<'_>,
    deadline: Deadline,
    keep_on: &dyn Fn() -> bool,
) -> Result<IdentityTimes, AgentError> {
    let mut limit = FIRST_ATTEMPT;
    loop {
        let error = match try_identity(vsock, of, deadline, limit) {
            Ok(times) => return Ok(times),
            Err(error @ AgentError::Failed { .. }) => return Err(error),
            Err(error) => error,
        };
        if deadline.is_over() || !keep_on() {
            return Err(error);
        }
        limit *= 2;
        std::thread::sleep(RETRY_PAUSE);
    }
}

fn try_identity(
    vsock: &Path,
    of: &IdentityOf<'_>,
    deadline: Deadline,
    limit: Duration,
) -> Result<IdentityTimes, AgentError> {
    let attempt = deadline.at_most(limit);
    let mut agent = AgentClient::connect(vsock, attempt)?;
    agent.ping(attempt)?;
    let replied_ns = crate::clock::monotonic_ns();
    let failed_hooks = agent.apply(fresh_identity(of), deadline)?;
    Ok(IdentityTimes { replied_ns, applied_ns: crate::clock::monotonic_ns(), failed_hooks })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn every_identity_is_its_own() {
        let env = Default::default();
        let of = IdentityOf { sandbox_id: "a", generation: 1, env: &env };
        let (one, two) = (fresh_identity(&of), fresh_identity(&of));
        assert_ne!(one.entropy_base64, two.entropy_base64);
        assert_ne!(one.machine_id, two.machine_id);
        assert_eq!(one.machine_id.len(), 32);
        let raw = base64::engine::general_purpose::STANDARD.decode(&one.entropy_base64).unwrap();
        assert_eq!(raw.len(), ENTROPY_BYTES);
    }

    #[test]
    fn a_vmm_that_never_accepts_is_a_timeout_not_a_hang() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let _listener = UnixListener::bind(&path).unwrap();
        let error = AgentClient::connect(&path, Deadline::after(Duration::from_millis(80))).unwrap_err();
        assert!(matches!(error, AgentError::TimedOut { .. }), "{error:?}");
    }

    #[test]
    fn a_socket_that_is_gone_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gone");
        let error = AgentClient::connect(&path, Deadline::after(Duration::from_secs(1))).unwrap_err();
        assert!(matches!(error, AgentError::Connect { .. }), "{error:?}");
        assert!(error.to_string().contains("gone"));
    }
}
