//! `shell`: this terminal becomes one in the guest.

use std::io::IsTerminal;
use std::sync::Mutex;

use rustix::stdio::stdin;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::Context;
use super::exec::HANG_UP;
use crate::failure::{Failure, Result};
use crate::process::{self, Event, Handle, Input, Process, Spec, WindowSize};
use crate::ui::{GuestOutput, Stream};

const TYPED_BYTES: usize = 16 * 1024;
/// What is typed ahead of a slow guest, in reads; then the terminal itself waits.
const TYPED_AHEAD: usize = 64;

/// Opens the terminal and stays until its command ends.
pub async fn shell(context: &Context, mut spec: Spec) -> Result<u8> {
    if context.ui.is_json() {
        return Err(Failure::usage("shell has no JSON form; use exec"));
    }
    if !std::io::stdin().is_terminal() {
        return Err(Failure::usage("shell needs a terminal as its standard input; without one use exec -i"));
    }
    let term = std::env::var("TERM").unwrap_or_else(|_| "xterm-256color".into());
    spec.envs.insert("TERM".into(), term);
    spec.input = Input::Terminal(window_size());
    let mut ends = Ends::catch()?;
    let mut resized = signal(SignalKind::window_change())
        .map_err(|error| Failure::local("cannot catch signals", &error))?;

    let mut process = Process::start(&context.client, &spec).await?;
    let handle = process.handle();
    let raw = RawMode::enter()?;
    let (trouble_sender, mut trouble) = mpsc::channel(1);
    tokio::spawn(type_in(handle.clone(), trouble_sender));
    let mut output = GuestOutput::new();
    // The size may have changed between the start and the catching of its signal.
    let _ = handle.resize(window_size()).await;
    let result = loop {
        tokio::select! {
            event = process.next() => match event {
                Ok(Event::Stdout(bytes) | Event::Stderr(bytes)) => {
                    if let Err(failure) = output.write(Stream::Stdout, &bytes).await {
                        break Err(failure);
                    }
                }
                Ok(Event::End(end)) => break Ok(end.exit_code()),
                Err(failure) => break Err(failure),
            },
            // A size that does not arrive is put right by the next one.
            _ = resized.recv() => { let _ = handle.resize(window_size()).await; }
            code = ends.next() => {
                let _ = handle.signal(&HANG_UP).await;
                break Ok(code);
            }
            Some(failure) = trouble.recv() => {
                let _ = handle.signal(&HANG_UP).await;
                break Err(failure);
            }
        }
    };
    drop(raw);
    result
}

/// Signals that end this program, which must leave its terminal as it found it.
struct Ends {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    hang_up: tokio::signal::unix::Signal,
    quit: tokio::signal::unix::Signal,
}

impl Ends {
    fn catch() -> Result<Self> {
        let catch = |kind| signal(kind).map_err(|error| Failure::local("cannot catch signals", &error));
        Ok(Self {
            interrupt: catch(SignalKind::interrupt())?,
            terminate: catch(SignalKind::terminate())?,
            hang_up: catch(SignalKind::hangup())?,
            quit: catch(SignalKind::quit())?,
        })
    }

    /// The exit code of the next one.
    async fn next(&mut self) -> u8 {
        tokio::select! {
            _ = self.interrupt.recv() => 130,
            _ = self.terminate.recv() => 143,
            _ = self.hang_up.recv() => 129,
            _ = self.quit.recv() => 131,
        }
    }
}

async fn type_in(handle: Handle, trouble: mpsc::Sender<Failure>) {
    let (sender, mut typed) = mpsc::channel::<Vec<u8>>(TYPED_AHEAD);
    tokio::spawn(async move {
        let mut stdin = tokio::io::stdin();
        let mut buffer = vec![0; TYPED_BYTES];
        while let Ok(count @ 1..) = stdin.read(&mut buffer).await {
            if sender.send(buffer[..count].to_vec()).await.is_err() {
                return;
            }
        }
    });
    while let Some(mut bytes) = typed.recv().await {
        // One call for all that was typed while the last one was on its way.
        while let Ok(more) = typed.try_recv() {
            bytes.extend_from_slice(&more);
        }
        match handle.type_in(&bytes).await {
            Ok(()) => {}
            Err(failure) if process::is_over(&failure) => return,
            Err(failure) => {
                let _ = trouble.send(failure).await;
                return;
            }
        }
    }
    // The terminal is gone.
    let _ = handle.signal(&HANG_UP).await;
}

fn window_size() -> WindowSize {
    match tcgetwinsize(stdin()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => WindowSize { cols: size.ws_col, rows: size.ws_row },
        _ => WindowSize { cols: 80, rows: 24 },
    }
}

/// What the terminal was like before raw mode, for whoever restores it first: the guard, or a panic's hook.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// Keeps the terminal raw; restores it when dropped, and when the program panics (which may not unwind).
struct RawMode(());

impl RawMode {
    fn enter() -> Result<Self> {
        let failed = |error: rustix::io::Errno| Failure::local("cannot make the terminal raw", &error.into());
        let before = tcgetattr(stdin()).map_err(failed)?;
        let mut raw = before.clone();
        raw.make_raw();
        remember(Some(before));
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            restore();
            hook(info);
        }));
        let guard = Self(());
        tcsetattr(stdin(), OptionalActions::Now, &raw).map_err(failed)?;
        Ok(guard)
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore();
    }
}

fn remember(before: Option<Termios>) -> Option<Termios> {
    let mut slot = BEFORE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    std::mem::replace(&mut slot, before)
}

fn restore() {
    if let Some(before) = remember(None) {
        let _ = tcsetattr(stdin(), OptionalActions::Now, &before);
    }
}
