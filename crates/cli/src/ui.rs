//! Standard output for results, standard error for everything else.

use std::io::{self, IsTerminal, Write};

use serde::Serialize;
use tokio::io::AsyncWriteExt;

use crate::failure::{Failure, Report, Result};

/// How this invocation talks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// For people.
    Text,
    /// For programs: JSON, one object a line for streams.
    Json,
}

/// The two output streams and what the user wants on them.
#[derive(Debug, Clone, Copy)]
pub struct Ui {
    format: Format,
    quiet: bool,
}

impl Ui {
    /// Output as the global flags ask.
    pub fn new(format: Format, quiet: bool) -> Self {
        Self { format, quiet }
    }

    /// Whether results are JSON.
    pub fn is_json(&self) -> bool {
        self.format == Format::Json
    }

    /// Whether a progress bar would be seen and is wanted.
    pub fn draws_bars(&self) -> bool {
        self.shows_notes() && io::stderr().is_terminal()
    }

    /// Whether remarks on standard error are wanted.
    pub fn shows_notes(&self) -> bool {
        !self.quiet && self.format == Format::Text
    }

    /// One line, or several, of the result.
    pub fn line(&self, text: &str) -> Result<()> {
        let mut stdout = io::stdout().lock();
        stdout
            .write_all(text.as_bytes())
            .and_then(|()| stdout.write_all(b"\n"))
            .and_then(|()| stdout.flush())
            .map_err(|error| Failure::stdout(&error))
    }

    /// One JSON value on a line of its own.
    pub fn json(&self, value: &impl Serialize) -> Result<()> {
        self.line(&serde_json::to_string(value).expect("values made here have string keys"))
    }

    /// A remark on standard error; lost silently when nobody reads it.
    pub fn note(&self, text: &str) {
        if self.shows_notes() {
            let _ = writeln!(io::stderr(), "{text}");
        }
    }

    /// A failure on standard error; lost silently when nobody reads it.
    pub fn report(&self, report: &Report) {
        let mut stderr = io::stderr().lock();
        let _ = match self.format {
            Format::Json => {
                writeln!(stderr, "{}", serde_json::to_string(report).expect("a report has string keys"))
            }
            Format::Text => {
                let hint = report.hint.iter().map(|hint| format!("\nhint: {hint}")).collect::<String>();
                writeln!(stderr, "error: {}{hint}", report.message)
            }
        };
    }
}

/// Which stream guest output goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Writes guest output without stopping the rest of the program while the reader is slow.
pub struct GuestOutput {
    stdout: tokio::io::Stdout,
    stderr: tokio::io::Stderr,
}

impl GuestOutput {
    /// The process's own streams.
    pub fn new() -> Self {
        Self { stdout: tokio::io::stdout(), stderr: tokio::io::stderr() }
    }

    /// Writes all of `bytes` and flushes.
    pub async fn write(&mut self, stream: Stream, bytes: &[u8]) -> Result<()> {
        let written = match stream {
            Stream::Stdout => write_through(&mut self.stdout, bytes).await,
            Stream::Stderr => write_through(&mut self.stderr, bytes).await,
        };
        written.map_err(|error| Failure::stdout(&error))
    }

    /// One JSON value on a line of standard output.
    pub async fn json(&mut self, value: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(value).expect("values made here have string keys");
        line.push(b'\n');
        self.write(Stream::Stdout, &line).await
    }
}

async fn write_through(to: &mut (impl AsyncWriteExt + Unpin), bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes).await?;
    to.flush().await
}
