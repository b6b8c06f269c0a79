//! One Python process with our driver in it.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tokio::sync::oneshot;

use crate::kill::Target;
use crate::pipe::AsyncPipe;
use crate::reaper::Exit;
use crate::spawn::{DEFAULT_PATH, Ends, Launch, Spawner, Streams};
use crate::users::User;

use super::wire::{self, Garbled, Message, Utf8Decoder};

/// The driver's source.
pub const SOURCE: &str = include_str!("driver.py");
/// Its module name.
const MODULE: &str = "offshoot_driver";
/// Announces a seed; the driver names the same number. Within the real-time signals, of which programs use few.
const RESEED_SIGNAL: i32 = 45;
/// Most bytes of output in one event.
pub const CHUNK_BYTES: usize = 32 * 1024;
/// An idle interpreter must have used a seed by then.
const RESEED_LIMIT: Duration = Duration::from_secs(10);

/// What a driver needs to start.
pub struct Settings {
    /// Python.
    pub python: PathBuf,
    /// Directory with the driver's source.
    pub directory: PathBuf,
    /// Working directory.
    pub cwd: PathBuf,
    /// Environment.
    pub env: Vec<(String, String)>,
    /// User.
    pub user: User,
}

/// A running driver; killed with all that it started when dropped.
pub struct Driver {
    /// Resolves when it was reaped.
    pub exit: oneshot::Receiver<Exit>,
    /// Its standard output.
    pub stdout: Output,
    /// Its standard error.
    pub stderr: Output,
    /// For interrupts and seeds.
    pub link: Arc<Link>,
    /// Messages.
    pub control: Control,
}

/// The channel to the driver.
pub struct Control {
    pipe: AsyncPipe,
    received: BytesMut,
}

/// An output stream as text.
pub struct Output {
    pipe: AsyncPipe,
    decoder: Utf8Decoder,
    ended: bool,
}

/// What others than the context's own task may do to a driver.
pub struct Link {
    target: Target,
    seeds: AsyncPipe,
    /// Code is running.
    pub busy: AtomicBool,
}

/// Why a seed was not used.
#[derive(Debug, thiserror::Error)]
pub enum ReseedError {
    /// The interpreter did not answer.
    #[error("the idle interpreter did not use its new seed within {} s", RESEED_LIMIT.as_secs())]
    Silent,
    /// It could not be told.
    #[error("the interpreter could not be given its new seed: {0}")]
    Send(io::Error),
}

/// Writes the driver's source where interpreters of any user find it.
///
/// # Errors
/// As `write(2)`.
pub fn install(directory: &Path) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    let path = directory.join(format!("{MODULE}.py"));
    std::fs::write(&path, SOURCE)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644))
}

/// The image's Python, if it has one.
pub fn find_python() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into());
    std::env::split_paths(&path).map(|directory| directory.join("python3")).find(|file| {
        std::fs::metadata(file)
            .is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
    })
}

impl Driver {
    /// Starts Python; [`Message::Ready`] follows.
    ///
    /// # Errors
    /// As [`Spawner::spawn`].
    pub fn start(spawner: &Spawner, settings: Settings) -> io::Result<Self> {
        let (control, control_child) = socket_pair(SocketType::STREAM)?;
        let (seeds, seeds_child) = socket_pair(SocketType::SEQPACKET)?;
        let spawned = spawner.spawn(Launch {
            program: settings.python.into(),
            args: vec![OsString::from("-c"), boot_code(&settings.directory).into()],
            env: settings.env,
            cwd: settings.cwd,
            user: settings.user,
            streams: Streams::Output,
            extra_fds: vec![control_child, seeds_child],
        })?;
        let Ends::Pipes { stdout, stderr, .. } = spawned.ends else {
            return Err(io::Error::other("the interpreter was started with a terminal"));
        };
        let link =
            Link { target: spawned.target, seeds: AsyncPipe::new(seeds)?, busy: AtomicBool::new(false) };
        Ok(Self {
            exit: spawned.exit,
            stdout: Output::new(stdout)?,
            stderr: Output::new(stderr)?,
            link: Arc::new(link),
            control: Control { pipe: AsyncPipe::new(control)?, received: BytesMut::new() },
        })
    }
}

impl Control {
    /// Asks it to run code.
    ///
    /// # Errors
    /// Where it is gone.
    pub async fn send(&mut self, run: &wire::Run<'_>) -> io::Result<()> {
        self.pipe.write_all(&wire::encode(run)).await
    }

    /// The next message; pends for ever once the driver closed its side (its exit tells the rest). Safe to cancel.
    ///
    /// # Errors
    /// Where something else came.
    pub async fn message(&mut self) -> Result<Message, Garbled> {
        loop {
            if let Some(message) = wire::take(&mut self.received)? {
                return Ok(message);
            }
            match self.pipe.read_chunk(CHUNK_BYTES).await {
                Ok(bytes) if !bytes.is_empty() => self.received.extend_from_slice(&bytes),
                _ => std::future::pending().await,
            }
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if !self.link.target.is_reaped() {
            self.link.target.kill_tree();
        }
    }
}

impl Output {
    fn new(fd: OwnedFd) -> io::Result<Self> {
        Ok(Self { pipe: AsyncPipe::new(fd)?, decoder: Utf8Decoder::default(), ended: false })
    }

    /// The next text, possibly empty; pends for ever after the end. Safe to cancel.
    pub async fn read(&mut self) -> String {
        if self.ended {
            return std::future::pending().await;
        }
        let bytes = self.pipe.read_chunk(CHUNK_BYTES).await.unwrap_or_else(|_| Bytes::new());
        self.ended = bytes.is_empty();
        self.decoder.decode(&bytes)
    }

    /// Bytes written and not read yet.
    pub fn available_bytes(&self) -> usize {
        self.pipe.available_bytes()
    }

    /// Text that is there now, of at most `bytes` bytes; `None` where there is none.
    pub fn read_now(&mut self, bytes: &mut usize) -> Option<String> {
        let chunk = self.pipe.read_now(CHUNK_BYTES.min(*bytes))?;
        *bytes -= chunk.len();
        Some(self.decoder.decode(&chunk))
    }

    /// A last incomplete character.
    pub fn finish(&mut self) -> String {
        self.decoder.finish()
    }
}

impl Link {
    /// Interrupts the code and what it runs, as Ctrl-C would.
    pub fn interrupt(&self) {
        // A driver that is gone needs no interrupt.
        let _ = self.target.signal_group(libc::SIGINT);
    }

    /// Kills it with all that it started.
    pub fn kill(&self) {
        self.target.kill_tree();
    }

    /// Seeds Python's `random` and numpy's legacy generator anew. An idle interpreter has done so on return; one that
    /// runs code does so before it goes on from its present bytecode or C call.
    ///
    /// # Errors
    /// Where an idle interpreter does not answer.
    pub async fn reseed(&self, seed: &[u8]) -> Result<(), ReseedError> {
        if self.target.is_reaped() {
            return Ok(());
        }
        while self.seeds.read_now(CHUNK_BYTES).is_some() {}
        self.seeds.write_all(seed).await.map_err(ReseedError::Send)?;
        self.target.signal_leader(RESEED_SIGNAL).map_err(ReseedError::Send)?;
        if self.busy.load(Ordering::Relaxed) {
            return Ok(());
        }
        match tokio::time::timeout(RESEED_LIMIT, self.seeds.read_chunk(CHUNK_BYTES)).await {
            // The answer, or the end of an interpreter that is gone.
            Ok(Ok(_)) => Ok(()),
            _ if self.busy.load(Ordering::Relaxed) || self.target.is_reaped() => Ok(()),
            _ => Err(ReseedError::Silent),
        }
    }
}

/// Reads and drops output, for as long as nobody wants it.
pub async fn discard(stdout: &mut Output, stderr: &mut Output) {
    loop {
        tokio::select! {
            _ = stdout.read() => {}
            _ = stderr.read() => {}
        }
    }
}

fn socket_pair(kind: SocketType) -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?)
}

fn boot_code(directory: &Path) -> String {
    let directory = directory.to_string_lossy().replace('\\', "\\\\").replace('\'', "\\'");
    format!(
        "import sys as _offshoot_sys; _offshoot_sys.path.insert(0, '{directory}'); \
         import {MODULE} as _offshoot_driver; _offshoot_sys.path.pop(0); _offshoot_driver.main()"
    )
}
