//! A daemon that answers canned bodies on a Unix socket, and the real binary driven against it.

#![allow(dead_code, reason = "each test file uses a part")]

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Bound of everything a test waits for.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// One request that the fake daemon got.
#[derive(Debug, Clone)]
pub struct Recorded {
    pub method: Method,
    pub target: String,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Recorded {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// The message of a Connect stream's request.
    pub fn envelope(&self) -> Value {
        let length = u32::from_be_bytes(self.body[1..5].try_into().unwrap()) as usize;
        assert_eq!((self.body[0], self.body.len()), (0, 5 + length), "one whole envelope");
        serde_json::from_slice(&self.body[5..]).unwrap()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }
}

/// The fake daemon; it ends with the test.
pub struct Fake {
    pub folder: TempDir,
    pub socket: PathBuf,
    requests: Arc<Mutex<Vec<Recorded>>>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Fake {
    /// Serves `routes` below the API's root.
    pub fn start(routes: Router) -> Self {
        let requests: Arc<Mutex<Vec<Recorded>>> = Arc::default();
        let log = requests.clone();
        let recorder = middleware::from_fn(move |request, next| {
            let log = log.clone();
            async move { record(&log, request, next).await }
        });
        Self::serve(Router::new().nest("/offshoot/v1", routes).layer(recorder), requests)
    }

    /// Serves `routes` below the API's root; they get each request's body as it comes, and nothing is recorded.
    pub fn start_unrecorded(routes: Router) -> Self {
        Self::serve(Router::new().nest("/offshoot/v1", routes), Arc::default())
    }

    fn serve(app: Router, requests: Arc<Mutex<Vec<Recorded>>>) -> Self {
        let folder = TempDir::new().unwrap();
        let socket = folder.path().join("d.sock");
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = {
            let _guard = runtime.enter();
            tokio::net::UnixListener::bind(&socket).unwrap()
        };
        runtime.spawn(async move { axum::serve(listener, app).await });
        Self { folder, socket, requests, runtime: Some(runtime) }
    }

    /// What was asked so far, in order.
    pub fn requests(&self) -> Vec<Recorded> {
        self.requests.lock().unwrap().clone()
    }

    /// The requests to paths that end like this.
    pub fn requests_to(&self, end: &str) -> Vec<Recorded> {
        let requests = self.requests().into_iter();
        requests.filter(|request| request.target.split('?').next().unwrap().ends_with(end)).collect()
    }

    /// The binary, told to use this daemon.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = offshoot(args);
        command.env("OFFSHOOT_SOCKET", &self.socket);
        command
    }

    /// Runs the binary to its end.
    pub fn run(&self, args: &[&str]) -> Ended {
        finish(self.command(args), b"")
    }

    /// Runs the binary with this standard input.
    pub fn run_with(&self, args: &[&str], stdin: &[u8]) -> Ended {
        finish(self.command(args), stdin)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn record(log: &Mutex<Vec<Recorded>>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    // A body that breaks off is what the client meant to send so far.
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap_or_default();
    let target = parts.uri.path_and_query().unwrap().to_string();
    let recorded =
        Recorded { method: parts.method.clone(), target, headers: parts.headers.clone(), body: body.clone() };
    log.lock().unwrap().push(recorded);
    next.run(Request::from_parts(parts, Body::from(body))).await
}

/// What a finished binary left.
#[derive(Debug)]
pub struct Ended {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }

    pub fn lines(&self) -> Vec<Value> {
        self.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The failure as `--json` tells it.
    pub fn error(&self) -> Value {
        serde_json::from_str(&self.stderr).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }
}

/// The binary, without a daemon and without colours from the surroundings.
pub fn offshoot(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_offshoot"));
    command.args(args).env_remove("OFFSHOOT_SOCKET");
    command
}

/// Runs to the end, within the deadline.
pub fn finish(mut command: Command, stdin: &[u8]) -> Ended {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut pipe = child.stdin.take().unwrap();
    let input = stdin.to_vec();
    std::thread::spawn(move || pipe.write_all(&input));
    let stdout = collect(child.stdout.take().unwrap());
    let stderr = collect(child.stderr.take().unwrap());
    let status = wait(&mut child);
    Ended {
        code: status.code().unwrap_or(-1),
        stdout: stdout.join().unwrap(),
        stderr: stderr.join().unwrap(),
    }
}

/// Reads a pipe to its end, on its own thread.
pub fn collect(mut pipe: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Waits for the end; kills and fails at the deadline.
pub fn wait(child: &mut Child) -> ExitStatus {
    let began = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if began.elapsed() > DEADLINE {
            child.kill().unwrap();
            panic!("offshoot did not end within {DEADLINE:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until `holds`; fails at the deadline.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < DEADLINE, "{what} did not come about within {DEADLINE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn answer(status: u16, body: Value) -> Response {
    (StatusCode::from_u16(status).unwrap(), axum::Json(body)).into_response()
}

pub fn not_found(id: &str) -> Response {
    let hint = "list them with: offshoot ls";
    let message = format!("there is no sandbox {id}");
    answer(404, json!({"code": "sandbox_not_found", "kind": "caller", "message": message, "hint": hint}))
}

pub fn sandbox(id: &str, state: &str) -> Value {
    json!({
        "id": id, "state": state, "template": "py", "depth": 0, "generation": 1, "created_at": 0, "pid": 1,
        "stop_lines": {"call_returned_ms": 9.0, "identity_applied_ms": 12.34},
        "memory": {"rss_kib": 1, "pss_kib": 1, "private_kib": 140, "shared_kib": 524_288, "page_table_kib": 36},
    })
}

/// A body that is sent as `chunks` come.
pub fn streamed(content_type: &str, chunks: tokio::sync::mpsc::UnboundedReceiver<Vec<u8>>) -> Response {
    let stream = futures_util::stream::unfold(chunks, |mut chunks| async move {
        let chunk = chunks.recv().await?;
        Some((Ok::<_, std::io::Error>(Bytes::from(chunk)), chunks))
    });
    ([(header::CONTENT_TYPE, content_type.to_owned())], Body::from_stream(stream)).into_response()
}

/// A body of ready chunks.
pub fn chunks(content_type: &str, ready: Vec<Vec<u8>>) -> Response {
    let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
    ready.into_iter().for_each(|chunk| sender.send(chunk).unwrap());
    streamed(content_type, receiver)
}

/// JSON objects, one a line.
pub fn lines(values: &[Value]) -> Response {
    chunks("application/x-ndjson", values.iter().map(|value| format!("{value}\n").into_bytes()).collect())
}

pub const CONNECT: &str = "application/connect+json";

fn envelope(flags: u8, message: &Value) -> Vec<u8> {
    let text = message.to_string();
    let mut bytes = vec![flags];
    bytes.extend_from_slice(&u32::try_from(text.len()).unwrap().to_be_bytes());
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

pub fn started(pid: u32) -> Vec<u8> {
    envelope(0, &json!({"event": {"start": {"pid": pid}}}))
}

pub fn data(stream: &str, bytes: &[u8]) -> Vec<u8> {
    envelope(0, &json!({"event": {"data": {stream: BASE64.encode(bytes)}}}))
}

pub fn exited(code: i32) -> Vec<u8> {
    let mut end = json!({"exited": true, "status": format!("exit status {code}")});
    if code != 0 {
        end["exitCode"] = code.into();
    }
    envelope(0, &json!({"event": {"end": end}}))
}

pub fn signalled(name: &str) -> Vec<u8> {
    let status = format!("signal: {name}");
    envelope(0, &json!({"event": {"end": {"exitCode": -1, "status": status, "error": status}}}))
}

pub fn end_stream() -> Vec<u8> {
    envelope(2, &json!({}))
}

pub fn end_stream_error(code: &str, message: &str) -> Vec<u8> {
    envelope(2, &json!({"error": {"code": code, "message": message}}))
}

/// A copy of the binary in `folder`, beside which a test can put other programs.
pub fn copy_of_offshoot(folder: &Path) -> PathBuf {
    let copy = folder.join("offshoot");
    elsewhere("cp \"$1\" \"$0\"", &copy, env!("CARGO_BIN_EXE_offshoot"));
    copy
}

/// A shell script.
pub fn script(path: &Path, text: &str) {
    elsewhere("printf '#!/bin/sh\\n%s\\n' \"$1\" > \"$0\" && chmod 755 \"$0\"", path, text);
}

/// Writes a program from another process. Written here, the open file could be inherited by what a test beside this
/// one spawns at that moment, and the program could not be run: "text file busy".
fn elsewhere(command: &str, target: &Path, argument: &str) {
    let mut sh = Command::new("sh");
    assert!(sh.args(["-c", command]).arg(target).arg(argument).status().unwrap().success());
}
