//! A process in a guest, over the agent's `process.Process` service (Connect protocol, JSON).
//!
//! `Start` is answered by a stream of messages ([`stream`]); input, signals and window size are calls of their own.

mod end;
mod stream;

use std::collections::BTreeMap;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use http::{HeaderValue, Method, Request, header};
use serde::Serialize;
use serde_json::{Value, json};

pub use self::end::End;
use self::stream::{ConnectError, Envelope, StreamEnd};

use crate::client::{self, Body, Client, LOOKUP_DEADLINE, Reader, WORK_DEADLINE};
use crate::failure::{Failure, Kind, Report, Result};

/// The stream's last envelope follows the exit at once; a guest that keeps it open does not hold us up.
const TRAILER_DEADLINE: Duration = Duration::from_secs(2);

/// What to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Sandbox id or name.
    pub sandbox: String,
    /// Program.
    pub cmd: String,
    /// Its arguments.
    pub args: Vec<String>,
    /// Added to its environment.
    pub envs: BTreeMap<String, String>,
    /// Working directory; absent: the user's home.
    pub cwd: Option<String>,
    /// Guest user; absent: the guest's default.
    pub user: Option<String>,
    /// Killed after this time.
    pub timeout: Option<Duration>,
    /// Where its input comes from.
    pub input: Input,
}

/// Where a guest process reads from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// An empty file.
    Null,
    /// What [`Handle::send`] sends.
    Pipe,
    /// A terminal of this size.
    Terminal(WindowSize),
}

/// Size of a terminal, characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct WindowSize {
    /// Columns.
    pub cols: u16,
    /// Rows.
    pub rows: u16,
}

/// What a guest process does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Wrote to standard output, or to its terminal.
    Stdout(Bytes),
    /// Wrote to standard error.
    Stderr(Bytes),
    /// Ended.
    End(End),
}

/// A started process and its output.
pub struct Process {
    reader: Reader,
    handle: Handle,
    timeout: Option<Duration>,
}

/// Reaches a started process from any task.
#[derive(Debug, Clone)]
pub struct Handle {
    client: Client,
    sandbox: String,
    user: Option<String>,
    /// Process id in the guest.
    pub pid: u64,
}

impl Process {
    /// Starts a process and waits until the guest says that it runs.
    pub async fn start(client: &Client, spec: &Spec) -> Result<Self> {
        let request = start_request(spec);
        let response = client.send_ok(request, WORK_DEADLINE).await?;
        let mut reader = Reader::new(client, &format!("a command in sandbox {}", spec.sandbox), response);
        let started =
            client::unless_dead(stream::next_envelope(&mut reader), || client.check_sandbox(&spec.sandbox))
                .await?;
        let message = match started {
            Some(Envelope::Message(message)) => message,
            Some(Envelope::End(Some(error))) => return Err(not_started(spec, &error).into()),
            Some(Envelope::End(None)) | None => return Err(cut_short(client, &spec.sandbox).await),
        };
        let Some(start) = message.event.start else {
            return Err(Failure::protocol("the guest's first message about a command is not its start"));
        };
        let handle = Handle {
            client: client.clone(),
            sandbox: spec.sandbox.clone(),
            user: spec.user.clone(),
            pid: start.pid,
        };
        Ok(Self { reader, handle, timeout: spec.timeout })
    }

    /// Reaches the process.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// The next event; [`Event::End`] is the last one. A sandbox that dies meanwhile is a failure.
    pub async fn next(&mut self) -> Result<Event> {
        let Self { reader, handle, timeout } = self;
        let alive = || handle.client.check_sandbox(&handle.sandbox);
        loop {
            match client::unless_dead(stream::next_envelope(reader), alive).await? {
                Some(Envelope::Message(message)) => {
                    if let Some(end) = message.event.end {
                        return self.finish(end).await;
                    }
                    if let Some(event) = stream::output(message.event.data.unwrap_or_default())? {
                        return Ok(event);
                    }
                }
                Some(Envelope::End(Some(error))) => {
                    return Err(stream_failure(handle, *timeout, &error).into());
                }
                Some(Envelope::End(None)) | None => {
                    return Err(cut_short(&handle.client, &handle.sandbox).await);
                }
            }
        }
    }

    /// A time-out is told after the exit that it caused, so the stream is read to its end.
    async fn finish(&mut self, end: StreamEnd) -> Result<Event> {
        match tokio::time::timeout(TRAILER_DEADLINE, stream::next_envelope(&mut self.reader)).await {
            Ok(Ok(Some(Envelope::End(Some(error))))) => {
                Err(stream_failure(&self.handle, self.timeout, &error).into())
            }
            _ => Ok(Event::End(end.into())),
        }
    }
}

impl Handle {
    /// Sends bytes to the process's standard input.
    pub async fn send(&self, bytes: &[u8]) -> Result<()> {
        // A process that does not read holds this up for as long as it likes; the caller drops us when it ends.
        self.call("SendInput", json!({"input": {"stdin": BASE64.encode(bytes)}}), None).await
    }

    /// Types bytes into the process's terminal.
    pub async fn type_in(&self, bytes: &[u8]) -> Result<()> {
        self.call("SendInput", json!({"input": {"pty": BASE64.encode(bytes)}}), Some(LOOKUP_DEADLINE)).await
    }

    /// Ends the process's standard input.
    pub async fn close_stdin(&self) -> Result<()> {
        self.call("CloseStdin", json!({}), Some(LOOKUP_DEADLINE)).await
    }

    /// Tells the process its terminal's size.
    pub async fn resize(&self, size: WindowSize) -> Result<()> {
        self.call("Update", json!({"pty": {"size": size}}), Some(LOOKUP_DEADLINE)).await
    }

    /// Sends the first of these signals that the guest's service knows.
    pub async fn signal(&self, names: &[&str]) -> Result<()> {
        let mut result = Ok(());
        for name in names {
            result = self.call("SendSignal", json!({"signal": name}), Some(LOOKUP_DEADLINE)).await;
            match &result {
                Err(Failure::Report(report))
                    if report.code == "invalid_argument" || report.code == "unimplemented" => {}
                _ => break,
            }
        }
        result
    }

    async fn call(&self, method: &str, mut message: Value, deadline: Option<Duration>) -> Result<()> {
        message["process"] = json!({"pid": self.pid});
        let path = format!("/sandboxes/{}/envd/process.Process/{method}", self.sandbox);
        let mut request = client::json_request(&path, &message);
        request.headers_mut().insert("connect-protocol-version", HeaderValue::from_static("1"));
        select_user(&mut request, self.user.as_deref());
        let response = self.client.send_ok(request, deadline.unwrap_or(Duration::MAX)).await?;
        self.client.collect(response, LOOKUP_DEADLINE).await.map(drop)
    }
}

/// Whether a call failed because the process had already ended, or reads no more input.
pub fn is_over(failure: &Failure) -> bool {
    matches!(failure, Failure::Report(report) if matches!(report.code.as_str(), "not_found" | "failed_precondition"))
}

fn start_request(spec: &Spec) -> Request<Body> {
    let mut process = json!({"cmd": spec.cmd, "args": spec.args, "envs": spec.envs});
    if let Some(cwd) = &spec.cwd {
        process["cwd"] = json!(cwd);
    }
    let mut message = json!({"process": process, "stdin": spec.input == Input::Pipe});
    if let Input::Terminal(size) = spec.input {
        message["pty"] = json!({"size": size});
    }
    let body = stream::envelope(&message);
    let path = format!("/sandboxes/{}/envd/process.Process/Start", spec.sandbox);
    let mut request = client::request(Method::POST, &path, client::full(body));
    select_user(&mut request, spec.user.as_deref());
    let headers = request.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/connect+json"));
    headers.insert("connect-protocol-version", HeaderValue::from_static("1"));
    headers.insert("keepalive-ping-interval", HeaderValue::from_static("50"));
    if let Some(timeout) = spec.timeout {
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX).max(1);
        headers.insert("connect-timeout-ms", HeaderValue::from(timeout_ms));
    }
    request
}

fn select_user(request: &mut Request<Body>, user: Option<&str>) {
    if let Some(user) = user {
        let value = format!("Basic {}", BASE64.encode(format!("{user}:")));
        let value = HeaderValue::try_from(value).expect("base64 is ASCII");
        request.headers_mut().insert(header::AUTHORIZATION, value);
    }
}

fn not_started(spec: &Spec, error: &ConnectError) -> Report {
    let message = format!("sandbox {} did not start the command: {}", spec.sandbox, error.message);
    Report::new(Kind::of_connect_code(&error.code), &error.code, message)
}

fn stream_failure(handle: &Handle, timeout: Option<Duration>, error: &ConnectError) -> Report {
    if error.code == "deadline_exceeded" {
        let limit = timeout
            .map_or_else(|| "its time limit".into(), |limit| humantime::format_duration(limit).to_string());
        let message =
            format!("the command in sandbox {} did not end within {limit} and was killed", handle.sandbox);
        let mut report =
            Report::new(Kind::Guest, "command_timed_out", message).hint("allow more with --timeout");
        report.exit_code = Some(crate::failure::TIMED_OUT_EXIT);
        return report;
    }
    let message = format!("the command in sandbox {} was lost: {}", handle.sandbox, error.message);
    Report::new(Kind::of_connect_code(&error.code), &error.code, message)
}

/// Why a stream of this sandbox ended early: its death where that is known.
pub async fn cut_short(client: &Client, sandbox: &str) -> Failure {
    if let Err(failure) = client.check_sandbox(sandbox).await {
        return failure;
    }
    let message = format!("the connection to sandbox {sandbox} ended before the work did");
    Report::new(Kind::State, "connection_ended", message)
        .hint(format!("its console: offshoot logs {sandbox}"))
        .into()
}
