//! Commands started for clients.
//!
//! ```text
//! running --leader reaped, output at its end--> ended --30 s--> forgotten
//!    `--time limit or kill: the whole session and cgroup--^
//! ```

use std::collections::BTreeMap;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::termios::tcsetwinsize;
use tokio::sync::{mpsc, oneshot, watch};

use crate::kill::Target;
use crate::pipe::AsyncPipe;
use crate::reaper::Exit;
use crate::spawn::{Ends, Launch, PtySize, Spawner};

pub mod hub;
pub mod table;

use hub::{End, Hub, Output, Stream};

/// Most bytes of a pipe in one event.
const PIPE_CHUNK_BYTES: usize = 32 * 1024;
/// Most bytes of a terminal in one event.
const PTY_CHUNK_BYTES: usize = 16 * 1024;
/// After a kill, how long output may stay open (held by a process that escaped) before the end is told.
const DRAIN_LIMIT: Duration = Duration::from_secs(2);

/// What a client asked to start, for `List`.
#[derive(Debug, Clone, Default)]
pub struct Description {
    /// Program.
    pub cmd: String,
    /// Arguments.
    pub args: Vec<String>,
    /// Environment given by the client.
    pub envs: BTreeMap<String, String>,
    /// Working directory given by the client.
    pub cwd: Option<String>,
    /// Name given by the client.
    pub tag: Option<String>,
}

/// Why input cannot reach a process.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// Input of the other kind.
    #[error("process {pid} has {has}, not {asked}")]
    Kind {
        /// Process id.
        pid: i32,
        /// What it has.
        has: &'static str,
        /// What was asked for.
        asked: &'static str,
    },
    /// Closed or never opened.
    #[error("standard input of process {pid} is closed; start it with \"stdin\": true to keep it open")]
    Closed {
        /// Process id.
        pid: i32,
    },
    /// Refused by the kernel.
    #[error("could not write to process {pid}: {source}")]
    Write {
        /// Process id.
        pid: i32,
        /// Why.
        source: io::Error,
    },
}

enum Input {
    Pipe(tokio::sync::Mutex<Option<AsyncPipe>>),
    Pty(Arc<AsyncPipe>, tokio::sync::Mutex<()>),
}

/// A command started for a client.
pub struct Process {
    /// What was asked for.
    pub description: Description,
    hub: Hub,
    target: Mutex<Option<Target>>,
    pid: i32,
    input: Input,
    timed_out: AtomicBool,
    killed: watch::Sender<bool>,
}

impl Process {
    /// Starts a command; it is killed with all that it started after `time_limit`. The first listener misses nothing.
    ///
    /// # Errors
    /// As [`Spawner::spawn`].
    pub fn start(
        spawner: &Spawner,
        launch: Launch,
        description: Description,
        time_limit: Option<Duration>,
    ) -> io::Result<(Arc<Self>, mpsc::Receiver<Output>)> {
        let spawned = spawner.spawn(launch)?;
        let (input, outputs) = match spawned.ends {
            Ends::Pipes { stdin, stdout, stderr } => {
                let stdin = stdin.map(AsyncPipe::new).transpose()?;
                let outputs = vec![
                    (Stream::Stdout, Arc::new(AsyncPipe::new(stdout)?)),
                    (Stream::Stderr, Arc::new(AsyncPipe::new(stderr)?)),
                ];
                (Input::Pipe(tokio::sync::Mutex::new(stdin)), outputs)
            }
            Ends::Pty(master) => {
                let master = Arc::new(AsyncPipe::new(master)?);
                (Input::Pty(master.clone(), tokio::sync::Mutex::new(())), vec![(Stream::Pty, master)])
            }
        };
        let process = Arc::new(Self {
            description,
            hub: Hub::default(),
            pid: spawned.target.pid,
            target: Mutex::new(Some(spawned.target)),
            input,
            timed_out: AtomicBool::new(false),
            killed: watch::Sender::new(false),
        });
        let listener = process.hub.listen();
        tokio::spawn(process.clone().attend(spawned.exit, outputs, time_limit));
        Ok((process, listener))
    }

    /// Process id of the session leader.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// The end, once it has come.
    pub fn end(&self) -> Option<End> {
        self.hub.end()
    }

    /// A new listener; see [`Hub::listen`].
    pub fn listen(&self) -> mpsc::Receiver<Output> {
        self.hub.listen()
    }

    async fn attend(
        self: Arc<Self>,
        exit: oneshot::Receiver<Exit>,
        outputs: Vec<(Stream, Arc<AsyncPipe>)>,
        time_limit: Option<Duration>,
    ) {
        let limit = time_limit.map(|limit| tokio::spawn(self.clone().enforce(limit)));
        let pumps: Vec<_> =
            outputs.into_iter().map(|(stream, pipe)| tokio::spawn(self.clone().pump(stream, pipe))).collect();
        // The reaper lives as long as the agent and answers for every registered child.
        let exit = exit.await.unwrap_or(Exit::Signal { number: libc::SIGKILL, core_dumped: false });
        futures_util::future::join_all(pumps).await;
        if let Some(limit) = limit {
            limit.abort();
        }
        self.hub.finish(End { exit, timed_out: self.timed_out.load(Ordering::Relaxed) });
        self.close_stdin_now();
        // Lets go of the cgroup.
        self.target.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    async fn enforce(self: Arc<Self>, limit: Duration) {
        tokio::time::sleep(limit).await;
        self.timed_out.store(true, Ordering::Relaxed);
        self.kill();
    }

    async fn pump(self: Arc<Self>, stream: Stream, pipe: Arc<AsyncPipe>) {
        let most = if stream == Stream::Pty { PTY_CHUNK_BYTES } else { PIPE_CHUNK_BYTES };
        let mut drained = pin!(self.drained_after_kill());
        loop {
            let chunk = tokio::select! {
                biased;
                () = &mut drained => break,
                chunk = pipe.read_chunk(most) => chunk,
            };
            match chunk {
                Ok(chunk) if !chunk.is_empty() => self.hub.put(stream, chunk).await,
                _ => return,
            }
        }
        let mut left = pipe.available_bytes();
        while left > 0 {
            let Some(chunk) = pipe.read_now(most.min(left)) else {
                return;
            };
            left -= chunk.len();
            self.hub.put(stream, chunk).await;
        }
    }

    async fn drained_after_kill(&self) {
        // The sender is ours: waiting cannot fail.
        let _ = self.killed.subscribe().wait_for(|killed| *killed).await;
        tokio::time::sleep(DRAIN_LIMIT).await;
    }

    /// Resolves at the end.
    pub async fn wait_end(&self) {
        self.hub.wait_end().await;
    }

    /// Kills it with all that it started; false if it has ended already.
    pub fn kill(&self) -> bool {
        let target = self.target.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(target) = &*target {
            target.kill_tree();
            self.killed.send_replace(true);
        }
        target.is_some()
    }

    /// Sends `signal` to its process group; false if it has ended already.
    ///
    /// # Errors
    /// As `kill(2)`.
    pub fn signal(&self, signal: i32) -> io::Result<bool> {
        if signal == libc::SIGKILL {
            return Ok(self.kill());
        }
        let target = self.target.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(target) = &*target else { return Ok(false) };
        match target.signal_group(signal) {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Writes to its standard input, waiting while it does not read.
    ///
    /// # Errors
    /// Where it has a terminal, or its input is closed.
    pub async fn write_stdin(&self, data: &[u8]) -> Result<(), InputError> {
        let pid = self.pid;
        let Input::Pipe(stdin) = &self.input else {
            return Err(InputError::Kind { pid, has: "a terminal", asked: "standard input" });
        };
        let stdin = stdin.lock().await;
        let stdin = stdin.as_ref().ok_or(InputError::Closed { pid })?;
        stdin.write_all(data).await.map_err(|source| InputError::Write { pid, source })
    }

    /// Writes to its terminal, waiting while it does not read.
    ///
    /// # Errors
    /// Where it has none.
    pub async fn write_pty(&self, data: &[u8]) -> Result<(), InputError> {
        let pid = self.pid;
        let Input::Pty(master, turn) = &self.input else {
            return Err(InputError::Kind { pid, has: "standard input", asked: "a terminal" });
        };
        let _turn = turn.lock().await;
        master.write_all(data).await.map_err(|source| InputError::Write { pid, source })
    }

    /// Closes its standard input.
    ///
    /// # Errors
    /// Where it has a terminal: there, the end is a character.
    pub async fn close_stdin(&self) -> Result<(), InputError> {
        let Input::Pipe(stdin) = &self.input else {
            return Err(InputError::Kind { pid: self.pid, has: "a terminal", asked: "standard input" });
        };
        stdin.lock().await.take();
        Ok(())
    }

    fn close_stdin_now(&self) {
        if let Input::Pipe(stdin) = &self.input
            && let Ok(mut stdin) = stdin.try_lock()
        {
            stdin.take();
        }
    }

    /// Changes the size of its terminal.
    ///
    /// # Errors
    /// Where it has none.
    pub fn resize(&self, size: PtySize) -> Result<(), InputError> {
        let pid = self.pid;
        let Input::Pty(master, _) = &self.input else {
            return Err(InputError::Kind { pid, has: "standard input", asked: "a terminal" });
        };
        tcsetwinsize(master.fd(), size.winsize())
            .map_err(|error| InputError::Write { pid, source: error.into() })
    }
}
