//! `exec`: a command in a guest, its streams apart, its status ours.

use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{SignalKind, signal};

use super::Context;
use crate::failure::{Failure, Result};
use crate::process::{self, End, Event, Handle, Input, Process, Spec};
use crate::ui::{GuestOutput, Stream, Ui};

/// One input call's bytes; in base64 well below any limit on a request.
const INPUT_BYTES: usize = 48 * 1024;
/// An interrupt, and what to send instead where the guest's service does not know it.
const INTERRUPT: [&str; 2] = ["SIGNAL_SIGINT", "SIGNAL_SIGTERM"];
const TERMINATE: [&str; 1] = ["SIGNAL_SIGTERM"];
/// A hang-up, for what would go on unseen; interactive shells ignore termination.
pub const HANG_UP: [&str; 2] = ["SIGNAL_SIGHUP", "SIGNAL_SIGKILL"];

/// Runs the command to its end.
pub async fn exec(context: &Context, spec: &Spec) -> Result<u8> {
    // Caught from the beginning, so that no signal falls between the start and the answer to it.
    let signals = Signals::catch()?;
    let mut process = Process::start(&context.client, spec).await?;
    let handle = process.handle();
    tokio::spawn(forward_signals(signals, handle.clone(), context.ui));
    if spec.input == Input::Pipe {
        tokio::spawn(forward_stdin(handle.clone(), context.ui));
    }
    let mut printer = Printer::new(context.ui);
    let result = async {
        printer.started(&handle).await?;
        loop {
            match process.next().await? {
                Event::End(end) => {
                    printer.ended(&end).await?;
                    return Ok(end.exit_code());
                }
                event => printer.output(&event).await?,
            }
        }
    };
    let result = result.await;
    if let Err(Failure::BrokenPipe) = &result {
        // As a pipe's writer would be told on this side.
        let _ = handle.signal(&["SIGNAL_SIGPIPE", "SIGNAL_SIGTERM"]).await;
    }
    result
}

struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    hang_up: tokio::signal::unix::Signal,
}

impl Signals {
    fn catch() -> Result<Self> {
        let catch = |kind| signal(kind).map_err(|error| Failure::local("cannot catch signals", &error));
        Ok(Self {
            interrupt: catch(SignalKind::interrupt())?,
            terminate: catch(SignalKind::terminate())?,
            hang_up: catch(SignalKind::hangup())?,
        })
    }
}

/// The second interrupt kills the command, the third leaves without it.
async fn forward_signals(mut signals: Signals, handle: Handle, ui: Ui) {
    let mut interrupts = 0;
    loop {
        let names: &[&str] = tokio::select! {
            _ = signals.interrupt.recv() => {
                interrupts += 1;
                match interrupts {
                    1 => &INTERRUPT,
                    2 => &["SIGNAL_SIGKILL"],
                    _ => std::process::exit(130),
                }
            }
            _ = signals.terminate.recv() => &TERMINATE,
            _ = signals.hang_up.recv() => &HANG_UP,
        };
        let handle = handle.clone();
        tokio::spawn(async move {
            match handle.signal(names).await {
                Err(failure) if process::is_over(&failure) => {}
                Err(Failure::Report(report)) => {
                    ui.note(&format!("the signal did not reach the command: {report}"))
                }
                _ => {}
            }
        });
    }
}

async fn forward_stdin(handle: Handle, ui: Ui) {
    let mut stdin = tokio::io::stdin();
    let mut buffer = vec![0; INPUT_BYTES];
    let trouble = loop {
        match stdin.read(&mut buffer).await {
            Ok(0) => break None,
            Ok(count) => match handle.send(&buffer[..count]).await {
                Ok(()) => {}
                Err(failure) if process::is_over(&failure) => return,
                Err(Failure::Report(report)) => break Some(report.message),
                Err(Failure::BrokenPipe) => break None,
            },
            Err(error) => break Some(error.to_string()),
        }
    };
    if let Some(trouble) = trouble {
        ui.note(&format!("standard input is not passed on any more: {trouble}"));
    }
    match handle.close_stdin().await {
        Err(failure) if process::is_over(&failure) => {}
        Err(Failure::Report(report)) => {
            ui.note(&format!("cannot end the command's standard input: {report}"))
        }
        _ => {}
    }
}

/// Shows a guest process: its bytes as they are, or an object for each event.
struct Printer {
    ui: Ui,
    output: GuestOutput,
    stdout: Utf8,
    stderr: Utf8,
}

impl Printer {
    fn new(ui: Ui) -> Self {
        Self { ui, output: GuestOutput::new(), stdout: Utf8::default(), stderr: Utf8::default() }
    }

    async fn started(&mut self, handle: &Handle) -> Result<()> {
        match self.ui.is_json() {
            true => self.output.json(&json!({"type": "start", "pid": handle.pid})).await,
            false => Ok(()),
        }
    }

    async fn output(&mut self, event: &Event) -> Result<()> {
        let (stream, bytes) = match event {
            Event::Stdout(bytes) => (Stream::Stdout, bytes),
            Event::Stderr(bytes) => (Stream::Stderr, bytes),
            Event::End(_) => return Ok(()),
        };
        if !self.ui.is_json() {
            return self.output.write(stream, bytes).await;
        }
        let event = match stream {
            Stream::Stdout => self.stdout.event("stdout", bytes),
            Stream::Stderr => self.stderr.event("stderr", bytes),
        };
        match event {
            Some(event) => self.output.json(&event).await,
            None => Ok(()),
        }
    }

    async fn ended(&mut self, end: &End) -> Result<()> {
        if !self.ui.is_json() {
            return Ok(());
        }
        for event in [self.stdout.rest("stdout"), self.stderr.rest("stderr")].into_iter().flatten() {
            self.output.json(&event).await?;
        }
        let event = match end {
            End::Exited(code) => json!({"type": "exit", "exit_code": code}),
            End::Signalled { number, status } => json!({"type": "exit", "signal": number, "status": status}),
        };
        self.output.json(&event).await
    }
}

/// Makes text of chunks that may end within a character; what is not text goes as base64.
#[derive(Default)]
struct Utf8 {
    pending: Vec<u8>,
}

impl Utf8 {
    fn event(&mut self, stream: &str, bytes: &[u8]) -> Option<Value> {
        self.pending.extend_from_slice(bytes);
        let whole = match std::str::from_utf8(&self.pending) {
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            _ => self.pending.len(),
        };
        let rest = self.pending.split_off(whole);
        let event = self.rest(stream);
        self.pending = rest;
        event
    }

    fn rest(&mut self, stream: &str) -> Option<Value> {
        use base64::Engine;
        let bytes = std::mem::take(&mut self.pending);
        if bytes.is_empty() {
            return None;
        }
        Some(match String::from_utf8(bytes) {
            Ok(text) => json!({"type": stream, "text": text}),
            Err(error) => {
                let text = base64::engine::general_purpose::STANDARD.encode(error.as_bytes());
                json!({"type": stream, "base64": text})
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_split_between_chunks_stays_whole() {
        let mut utf8 = Utf8::default();
        let bytes = "aé".as_bytes();
        assert_eq!(utf8.event("stdout", &bytes[..2]), Some(json!({"type": "stdout", "text": "a"})));
        assert_eq!(utf8.event("stdout", &bytes[2..]), Some(json!({"type": "stdout", "text": "é"})));
        assert_eq!(utf8.rest("stdout"), None);
    }

    #[test]
    fn what_is_not_text_goes_as_base64() {
        let mut utf8 = Utf8::default();
        assert_eq!(utf8.event("stderr", b"\xff\x00"), Some(json!({"type": "stderr", "base64": "/wA="})));
        assert_eq!(utf8.event("stderr", b"\xc3"), None);
        assert_eq!(utf8.rest("stderr"), Some(json!({"type": "stderr", "base64": "ww=="})));
    }
}
