//! A process in a guest, over the agent's `process.Process` service (Connect protocol, JSON).
//!
//! `Start` is a server stream: `[flags: u8][length: u32, big endian][JSON]` envelopes, the last one with
//! [`END_STREAM`]. Input, signals and window size are calls of their own.

use std::collections::BTreeMap;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use http::{HeaderValue, Method, Request, header};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::client::{self, Body, Client, LOOKUP_DEADLINE, Reader, WORK_DEADLINE};
use crate::failure::{Failure, Kind, Report, Result};

const END_STREAM: u8 = 0x02;
const COMPRESSED: u8 = 0x01;
const MAX_MESSAGE_BYTES: usize = 64 << 20;
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

/// How a guest process ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// With this status.
    Exited(u8),
    /// By this signal.
    Signalled {
        /// Its number, where its name is known here.
        number: Option<u8>,
        /// As the guest tells it.
        status: String,
    },
}

impl End {
    /// The status a shell would show.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Exited(code) => *code,
            Self::Signalled { number, .. } => 128 + number.unwrap_or(0),
        }
    }
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

#[derive(Deserialize)]
struct StreamMessage {
    #[serde(default)]
    event: StreamEvent,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct StreamEvent {
    start: Option<StreamStart>,
    data: Option<StreamData>,
    end: Option<StreamEnd>,
}

#[derive(Deserialize)]
struct StreamStart {
    pid: u64,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct StreamData {
    stdout: Option<String>,
    stderr: Option<String>,
    pty: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct StreamEnd {
    exit_code: i64,
    exited: bool,
    status: String,
    error: Option<String>,
}

#[derive(Deserialize)]
struct ConnectError {
    code: String,
    #[serde(default)]
    message: String,
}

#[derive(Default, Deserialize)]
struct EndStream {
    error: Option<ConnectError>,
}

enum Envelope {
    Message(StreamMessage),
    End(Option<ConnectError>),
}

impl Process {
    /// Starts a process and waits until the guest says that it runs.
    pub async fn start(client: &Client, spec: &Spec) -> Result<Self> {
        let request = start_request(spec);
        let response = client.send_ok(request, WORK_DEADLINE).await?;
        let mut reader = Reader::new(client, &format!("a command in sandbox {}", spec.sandbox), response);
        let started = client::unless_dead(next_envelope(&mut reader), || client.check_sandbox(&spec.sandbox)).await?;
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
            match client::unless_dead(next_envelope(reader), alive).await? {
                Some(Envelope::Message(message)) => {
                    if let Some(end) = message.event.end {
                        return self.finish(end).await;
                    }
                    if let Some(event) = output(message.event.data.unwrap_or_default())? {
                        return Ok(event);
                    }
                }
                Some(Envelope::End(Some(error))) => return Err(stream_failure(handle, *timeout, &error).into()),
                Some(Envelope::End(None)) | None => return Err(cut_short(&handle.client, &handle.sandbox).await),
            }
        }
    }

    /// A time-out is told after the exit that it caused, so the stream is read to its end.
    async fn finish(&mut self, end: StreamEnd) -> Result<Event> {
        match tokio::time::timeout(TRAILER_DEADLINE, next_envelope(&mut self.reader)).await {
            Ok(Ok(Some(Envelope::End(Some(error))))) => Err(stream_failure(&self.handle, self.timeout, &error).into()),
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
                Err(Failure::Report(report)) if report.code == "invalid_argument" || report.code == "unimplemented" => {}
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

/// Whether a call failed because the process had already ended.
pub fn already_ended(failure: &Failure) -> bool {
    matches!(failure, Failure::Report(report) if report.code == "not_found")
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
    let body = envelope(&message);
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

/// One message with its prefix.
fn envelope(message: &Value) -> Vec<u8> {
    let text = message.to_string();
    let length = u32::try_from(text.len()).expect("a command line is far below 4 GiB");
    let mut bytes = vec![0];
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

fn select_user(request: &mut Request<Body>, user: Option<&str>) {
    if let Some(user) = user {
        let value = format!("Basic {}", BASE64.encode(format!("{user}:")));
        let value = HeaderValue::try_from(value).expect("base64 is ASCII");
        request.headers_mut().insert(header::AUTHORIZATION, value);
    }
}

async fn next_envelope(reader: &mut Reader) -> Result<Option<Envelope>> {
    let Some(prefix) = reader.peek(5).await? else { return Ok(None) };
    let flags = prefix[0];
    let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
    if length > MAX_MESSAGE_BYTES {
        return Err(Failure::protocol(format!("the guest announces a message of {length} bytes")));
    }
    if flags & COMPRESSED != 0 {
        return Err(Failure::protocol("the guest sends a compressed message"));
    }
    let Some(bytes) = reader.exact(5 + length).await? else { return Ok(None) };
    let text = &bytes[5..];
    let malformed = |error| Failure::protocol(format!("the guest's message about a command is not as expected: {error}"));
    if flags & END_STREAM != 0 {
        let end: EndStream = if text.is_empty() { EndStream::default() } else { serde_json::from_slice(text).map_err(malformed)? };
        return Ok(Some(Envelope::End(end.error)));
    }
    serde_json::from_slice(text).map(|message| Some(Envelope::Message(message))).map_err(malformed)
}

fn output(data: StreamData) -> Result<Option<Event>> {
    let decode = |text: &str| {
        let bytes = BASE64.decode(text);
        bytes.map(Bytes::from).map_err(|_| Failure::protocol("the guest's output is not base64"))
    };
    if let Some(text) = data.stdout.or(data.pty) {
        return decode(&text).map(|bytes| Some(Event::Stdout(bytes)));
    }
    data.stderr.map(|text| decode(&text).map(Event::Stderr)).transpose()
}

fn not_started(spec: &Spec, error: &ConnectError) -> Report {
    let message = format!("cannot start {:?} in sandbox {}: {}", spec.cmd, spec.sandbox, error.message);
    Report::new(Kind::of_connect_code(&error.code), &error.code, message)
}

fn stream_failure(handle: &Handle, timeout: Option<Duration>, error: &ConnectError) -> Report {
    if error.code == "deadline_exceeded" {
        let limit = timeout.map_or_else(|| "its time limit".into(), |limit| humantime::format_duration(limit).to_string());
        let message = format!("the command in sandbox {} did not end within {limit} and was killed", handle.sandbox);
        let mut report = Report::new(Kind::Guest, "command_timed_out", message).hint("allow more with --timeout");
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
    Report::new(Kind::State, "connection_ended", message).hint(format!("its console: offshoot logs {sandbox}")).into()
}

impl From<StreamEnd> for End {
    fn from(end: StreamEnd) -> Self {
        let signal = end.status.strip_prefix("signal: ").or(end.error.as_deref().and_then(|error| error.strip_prefix("signal: ")));
        match signal {
            Some(name) if !end.exited => Self::Signalled { number: signal_number(name), status: end.status.clone() },
            _ => Self::Exited((end.exit_code & 0xff) as u8),
        }
    }
}

/// The number of a signal as a guest names it: a number, `SIGTERM`, or the words of Go's run-time (`terminated`).
fn signal_number(name: &str) -> Option<u8> {
    const NAMES: [(u8, &str, &str); 24] = [
        (1, "HUP", "hangup"),
        (2, "INT", "interrupt"),
        (3, "QUIT", "quit"),
        (4, "ILL", "illegal instruction"),
        (5, "TRAP", "trace/breakpoint trap"),
        (6, "ABRT", "aborted"),
        (7, "BUS", "bus error"),
        (8, "FPE", "floating point exception"),
        (9, "KILL", "killed"),
        (10, "USR1", "user defined signal 1"),
        (11, "SEGV", "segmentation fault"),
        (12, "USR2", "user defined signal 2"),
        (13, "PIPE", "broken pipe"),
        (14, "ALRM", "alarm clock"),
        (15, "TERM", "terminated"),
        (16, "STKFLT", "stack fault"),
        (24, "XCPU", "CPU time limit exceeded"),
        (25, "XFSZ", "file size limit exceeded"),
        (26, "VTALRM", "virtual timer expired"),
        (27, "PROF", "profiling timer expired"),
        (28, "WINCH", "window changed"),
        (29, "IO", "I/O possible"),
        (30, "PWR", "power failure"),
        (31, "SYS", "bad system call"),
    ];
    let name = name.trim_end_matches(" (core dumped)");
    if let Ok(number) = name.trim_start_matches("signal ").parse() {
        return (number <= 64).then_some(number);
    }
    let short = name.strip_prefix("SIG").unwrap_or(name);
    NAMES.iter().find(|(_, abbreviation, words)| *abbreviation == short || *words == name).map(|&(number, ..)| number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(text: &str) -> End {
        serde_json::from_str::<StreamEnd>(text).unwrap().into()
    }

    #[test]
    fn an_absent_exit_code_is_success() {
        assert_eq!(end(r#"{"exited":true,"status":"exit status 0"}"#), End::Exited(0));
        assert_eq!(end(r#"{"exitCode":3,"exited":true,"status":"exit status 3"}"#), End::Exited(3));
    }

    #[test]
    fn signals_become_128_plus_their_number() {
        let killed = end(r#"{"exitCode":-1,"status":"signal: killed","error":"signal: killed"}"#);
        assert_eq!(killed.exit_code(), 137);
        let forms = ["signal: terminated", "signal: SIGTERM", "signal: 15", "signal: terminated (core dumped)"];
        for form in forms {
            assert_eq!(end(&json!({"exitCode": -1, "status": form}).to_string()).exit_code(), 143, "{form}");
        }
        assert_eq!(end(r#"{"exitCode":-1,"status":"signal: novel"}"#).exit_code(), 128);
    }

    #[test]
    fn a_start_message_has_its_length_in_front() {
        let bytes = envelope(&json!({"a": 1}));
        assert_eq!(bytes, b"\x00\x00\x00\x00\x07{\"a\":1}");
    }
}
