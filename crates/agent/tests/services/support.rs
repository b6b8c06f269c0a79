//! An agent on Unix sockets, and a client for it. Every wait has a deadline.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

pub const DEADLINE: Duration = Duration::from_secs(30);

pub struct Agent {
    child: Child,
    directory: TempDir,
}

pub async fn within<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, work).await.unwrap_or_else(|_| panic!("not done in time: {what}"))
}

impl Agent {
    pub async fn start() -> Self {
        Self::start_with(&[]).await
    }

    pub async fn start_with(env: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_offshoot-agent"))
            .arg("--listen-unix")
            .arg(directory.path())
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let agent = Self { child, directory };
        within("agent listens", async {
            while UnixStream::connect(agent.socket(49984)).await.is_err() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
        agent
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn socket(&self, port: u32) -> PathBuf {
        self.directory.path().join(format!("{port}.sock"))
    }

    pub async fn send(&self, port: u32, request: Request<Full<Bytes>>) -> Response<Incoming> {
        let stream = UnixStream::connect(self.socket(port)).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        // The connection lives as long as the answer's body is read.
        tokio::spawn(connection);
        within("an answer begins", sender.send_request(request)).await.unwrap()
    }

    pub async fn call(&self, port: u32, request: Request<Full<Bytes>>) -> (StatusCode, HeaderMap, Bytes) {
        let response = self.send(port, request).await;
        let (parts, body) = response.into_parts();
        let body = within("an answer ends", body.collect()).await.unwrap().to_bytes();
        (parts.status, parts.headers, body)
    }

    pub async fn get(&self, path: &str) -> (StatusCode, HeaderMap, Bytes) {
        self.call(49983, Request::get(path).header("host", "x").body(Full::default()).unwrap()).await
    }

    pub async fn unary(&self, method: &str, message: Value) -> (StatusCode, Value) {
        let request = Request::post(format!("/process.Process/{method}"))
            .header("host", "x")
            .header("content-type", "application/json")
            .body(Full::from(message.to_string()))
            .unwrap();
        let (status, _, body) = self.call(49983, request).await;
        (status, serde_json::from_slice(&body).unwrap())
    }

    pub async fn stream(&self, method: &str, message: Value, headers: &[(&str, &str)]) -> Events {
        let request = Request::post(format!("/process.Process/{method}"))
            .header("host", "x")
            .header("content-type", "application/connect+json");
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let response = self.send(49983, request.body(Full::from(envelope(&message))).unwrap()).await;
        assert_eq!(response.status(), StatusCode::OK);
        Events { body: response.into_body(), buffer: BytesMut::new() }
    }

    pub async fn shell(&self, script: &str) -> Events {
        let process = json!({ "cmd": "/bin/sh", "args": ["-c", script] });
        self.stream("Start", json!({ "process": process, "stdin": false }), &[]).await
    }

    pub async fn shell_with_input(&self, script: &str) -> Events {
        self.stream("Start", json!({ "process": { "cmd": "/bin/sh", "args": ["-c", script] } }), &[]).await
    }

    pub async fn execute(&self, body: Value) -> Lines {
        let request =
            Request::post("/execute").header("host", "x").body(Full::from(body.to_string())).unwrap();
        let response = self.send(49999, request).await;
        assert_eq!(response.status(), StatusCode::OK);
        Lines { body: response.into_body(), buffer: BytesMut::new() }
    }

    pub async fn run_code(&self, code: &str) -> Vec<Value> {
        self.execute(json!({ "code": code })).await.all().await
    }

    pub async fn host(&self, request: Value) -> Value {
        let stream = UnixStream::connect(self.socket(49984)).await.unwrap();
        let mut stream = BufReader::new(stream);
        stream.write_all(format!("{request}\n").as_bytes()).await.unwrap();
        let mut line = String::new();
        within("the host-only port answers", stream.read_line(&mut line)).await.unwrap();
        serde_json::from_str(&line).unwrap()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // Its children are in sessions of their own; they end with their pipes, or are killed by their tests.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn envelope(message: &Value) -> Bytes {
    let payload = message.to_string();
    let mut bytes = vec![0];
    bytes.extend_from_slice(&(payload.len() as u32).to_be_bytes());
    bytes.extend_from_slice(payload.as_bytes());
    bytes.into()
}

/// The envelopes of a streaming answer.
pub struct Events {
    body: Incoming,
    buffer: BytesMut,
}

/// What a process put out, and how it ended.
#[derive(Debug, Default)]
pub struct Outcome {
    pub pid: i64,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub pty: Vec<u8>,
    pub end: Value,
    pub trailer: Value,
}

impl Outcome {
    pub fn stdout_text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

impl Events {
    /// The next envelope: flags and message.
    pub async fn next(&mut self) -> Option<(u8, Value)> {
        loop {
            if self.buffer.len() >= 5 {
                let length = u32::from_be_bytes(self.buffer[1..5].try_into().unwrap()) as usize;
                if self.buffer.len() >= 5 + length {
                    let bytes = self.buffer.split_to(5 + length);
                    return Some((bytes[0], serde_json::from_slice(&bytes[5..]).unwrap()));
                }
            }
            let data = within("the next envelope", self.body.frame()).await?.unwrap().into_data().unwrap();
            self.buffer.extend_from_slice(&data);
        }
    }

    pub async fn pid(&mut self) -> i64 {
        let (flags, message) = self.next().await.unwrap();
        assert_eq!(flags, 0, "{message}");
        message["event"]["start"]["pid"].as_i64().unwrap_or_else(|| panic!("no start: {message}"))
    }

    /// Reads until standard output (or the terminal) holds `text`.
    pub async fn wait_for(&mut self, text: &str) {
        let mut seen = String::new();
        while !seen.contains(text) {
            let (_, message) = self.next().await.unwrap_or_else(|| panic!("ended without '{text}': {seen}"));
            let data = &message["event"]["data"];
            let chunk = data["stdout"].as_str().or(data["pty"].as_str()).unwrap_or_default();
            seen.push_str(&String::from_utf8_lossy(&STANDARD.decode(chunk).unwrap()));
        }
    }

    pub async fn outcome(mut self) -> Outcome {
        let mut outcome = Outcome::default();
        while let Some((flags, message)) = self.next().await {
            if flags == 2 {
                outcome.trailer = message;
                continue;
            }
            assert_eq!(outcome.end, Value::Null, "nothing may follow the end: {message}");
            let event = &message["event"];
            let decode =
                |name: &str| STANDARD.decode(event["data"][name].as_str().unwrap_or_default()).unwrap();
            outcome.stdout.extend(decode("stdout"));
            outcome.stderr.extend(decode("stderr"));
            outcome.pty.extend(decode("pty"));
            if let Some(pid) = event["start"]["pid"].as_i64() {
                outcome.pid = pid;
            }
            if !event["end"].is_null() {
                outcome.end = event["end"].clone();
            }
        }
        outcome
    }
}

/// The lines of an interpreter's answer.
pub struct Lines {
    body: Incoming,
    buffer: BytesMut,
}

impl Lines {
    pub async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') {
                let line = self.buffer.split_to(end + 1);
                return Some(serde_json::from_slice(&line).unwrap());
            }
            let data = within("the next line", self.body.frame()).await?.unwrap().into_data().unwrap();
            self.buffer.extend_from_slice(&data);
        }
    }

    pub async fn wait_for(&mut self, kind: &str) -> Value {
        loop {
            let line = self.next().await.unwrap_or_else(|| panic!("ended without '{kind}'"));
            if line["type"] == kind {
                return line;
            }
        }
    }

    pub async fn all(mut self) -> Vec<Value> {
        let mut lines = Vec::new();
        while let Some(line) = self.next().await {
            lines.push(line);
        }
        assert_eq!(lines.last().map(|line| line["type"].clone()), Some("end_of_execution".into()));
        lines
    }
}

/// The text of all events of a kind.
pub fn text(lines: &[Value], kind: &str) -> String {
    lines.iter().filter(|line| line["type"] == kind).map(|line| line["text"].as_str().unwrap()).collect()
}

/// The one event of a kind.
pub fn one<'a>(lines: &'a [Value], kind: &str) -> &'a Value {
    let mut found = lines.iter().filter(|line| line["type"] == kind);
    let event = found.next().unwrap_or_else(|| panic!("no {kind} in {lines:?}"));
    assert!(found.next().is_none(), "several {kind} in {lines:?}");
    event
}

pub fn alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .is_some_and(|rest| !rest.trim().is_empty() && !rest.trim_start().starts_with(['Z', 'X']))
}

/// Bytes of memory a process holds.
pub fn resident_bytes(pid: u32) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}
