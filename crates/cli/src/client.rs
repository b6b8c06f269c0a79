//! HTTP/1.1 over the daemon's Unix socket: one connection a request, a deadline on every wait.

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use crate::failure::{Failure, Kind, Report, Result};
use crate::socket::Socket;
use crate::wire::Sandbox;

/// Root of the API's paths.
pub const API: &str = "/offshoot/v1";
/// Bound of calls that only look something up.
pub const LOOKUP_DEADLINE: Duration = Duration::from_secs(30);
/// Bound of calls that make or end sandboxes.
pub const WORK_DEADLINE: Duration = Duration::from_secs(600);
/// How long a stream may be silent before the other side is asked whether it still lives.
pub const SILENCE: Duration = Duration::from_secs(15);

const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
const PROBE_DEADLINE: Duration = Duration::from_secs(30);
const MAX_BODY_BYTES: usize = 256 << 20;
const MAX_LINE_BYTES: usize = 64 << 20;

/// A request body.
pub type Body = UnsyncBoxBody<Bytes, io::Error>;

/// Where the daemon listens.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    /// A client of the daemon at `socket`; connects with each request.
    pub fn new(socket: &Path) -> Self {
        Self { socket: socket.to_owned() }
    }

    /// Sends `request` and waits at most `deadline` for the answer's head; any status counts as an answer.
    pub async fn send(&self, request: Request<Body>, deadline: Duration) -> Result<Response<Incoming>> {
        let what = format!("{} {}", request.method(), request.uri().path());
        let mut sender = self.connect().await?;
        match tokio::time::timeout(deadline, sender.send_request(request)).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) if error.is_user() => Err(unsendable(&error)),
            Ok(Err(error)) => Err(self.lost(&what, &error).into()),
            Err(_) => Err(self.late(&what, deadline).into()),
        }
    }

    /// Like [`Client::send`], but an error status becomes the daemon's own failure.
    pub async fn send_ok(&self, request: Request<Body>, deadline: Duration) -> Result<Response<Incoming>> {
        let response = self.send(request, deadline).await?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let body = self.collect(response, deadline).await?;
        Err(failure_of_answer(status, &body).into())
    }

    /// The whole answer to a call without body.
    pub async fn fetch(&self, method: Method, path: &str, deadline: Duration) -> Result<Bytes> {
        let response = self.send_ok(request(method, path, empty()), deadline).await?;
        self.collect(response, deadline).await
    }

    /// Looks something up.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let body = self.fetch(Method::GET, path, LOOKUP_DEADLINE).await?;
        parse(path, &body)
    }

    /// Posts JSON; gives the answer's status and whole body.
    pub async fn post(
        &self,
        path: &str,
        value: &impl Serialize,
        deadline: Duration,
    ) -> Result<(StatusCode, Bytes)> {
        let response = self.send(json_request(path, value), deadline).await?;
        let status = response.status();
        Ok((status, self.collect(response, deadline).await?))
    }

    /// Reads a whole body.
    pub async fn collect(&self, response: Response<Incoming>, deadline: Duration) -> Result<Bytes> {
        let body = Limited::new(response.into_body(), MAX_BODY_BYTES);
        match tokio::time::timeout(deadline, body.collect()).await {
            Ok(Ok(collected)) => Ok(collected.to_bytes()),
            Ok(Err(error)) => Err(self.lost("an answer", error.as_ref()).into()),
            Err(_) => Err(self.late("an answer's body", deadline).into()),
        }
    }

    /// Fails unless the sandbox exists and has not died; its cause of death is in the failure.
    pub async fn check_sandbox(&self, id: &str) -> Result<()> {
        let path = format!("/sandboxes/{id}");
        let body = self.fetch(Method::GET, &path, PROBE_DEADLINE).await?;
        let sandbox: Sandbox = parse(&path, &body)?;
        if sandbox.state != "dead" {
            return Ok(());
        }
        let cause = sandbox.cause.unwrap_or_else(|| "no cause was recorded".into());
        Err(Report::new(Kind::State, "sandbox_dead", format!("sandbox {id} has died: {cause}"))
            .hint(format!("its console: offshoot logs {id}"))
            .into())
    }

    /// Fails unless the daemon answers.
    pub async fn check_daemon(&self) -> Result<()> {
        self.fetch(Method::GET, "/health", PROBE_DEADLINE).await.map(drop)
    }

    async fn connect(&self) -> Result<http1::SendRequest<Body>> {
        let stream = match tokio::time::timeout(CONNECT_DEADLINE, UnixStream::connect(&self.socket)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return Err(self.refused(&error).into()),
            Err(_) => return Err(self.late("a connection", CONNECT_DEADLINE).into()),
        };
        let (sender, connection) =
            http1::handshake(Socket::new(stream)).await.map_err(|error| self.lost("a connection", &error))?;
        // Ends by itself when the response has been read or dropped.
        tokio::spawn(connection);
        Ok(sender)
    }

    fn refused(&self, error: &io::Error) -> Report {
        let hint = match error.kind() {
            io::ErrorKind::PermissionDenied => "run as the user that started offshootd, or as root",
            _ => "start it with: offshoot serve",
        };
        let message = format!("no daemon answers at {}: {error}", self.socket.display());
        Report::new(Kind::Unreachable, "daemon_unreachable", message).hint(hint)
    }

    fn late(&self, what: &str, deadline: Duration) -> Report {
        let socket = self.socket.display();
        let message = format!("the daemon at {socket} did not answer {what} within {} s", deadline.as_secs());
        Report::new(Kind::Unreachable, "daemon_timeout", message)
    }

    /// The daemon went away in the middle of `what`.
    pub fn lost(&self, what: &str, error: &(dyn std::error::Error + 'static)) -> Report {
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(inner) = source {
            text = format!("{text}: {inner}");
            source = inner.source();
        }
        let message =
            format!("the connection to the daemon at {} ended during {what}: {text}", self.socket.display());
        Report::new(Kind::Unreachable, "daemon_connection_lost", message)
    }
}

/// The request's own body failed: what it was read from.
fn unsendable(error: &hyper::Error) -> Failure {
    let source = std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
    Failure::local("cannot send", &io::Error::other(source))
}

/// A request to `path` below the API's root.
pub fn request(method: Method, path: &str, body: Body) -> Request<Body> {
    Request::builder()
        .method(method)
        .uri(format!("{API}{path}"))
        .header(header::HOST, "offshootd")
        .body(body)
        .expect("paths are made of checked names and encoded text")
}

/// A request that posts `value` as JSON to `path` below the API's root.
pub fn json_request(path: &str, value: &impl Serialize) -> Request<Body> {
    let body = serde_json::to_vec(value).expect("values made here have string keys");
    let mut request = request(Method::POST, path, full(body));
    request.headers_mut().insert(header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    request
}

/// A body that is already there.
pub fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

/// No body.
pub fn empty() -> Body {
    full(Bytes::new())
}

/// Decodes the answer to `path`.
pub fn parse<T: DeserializeOwned>(path: &str, body: &[u8]) -> Result<T> {
    serde_json::from_slice(body).map_err(|error| {
        Failure::protocol(format!("the daemon's answer to {path} is not as expected: {error}"))
    })
}

/// The failure in an error answer: the daemon's own body, an error of the guest's services, or plain text.
pub fn failure_of_answer(status: StatusCode, body: &[u8]) -> Report {
    if let Ok(report) = serde_json::from_slice::<Report>(body) {
        return report;
    }
    let value: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    let message = match value["message"].as_str() {
        Some(message) => message.to_owned(),
        None if body.is_empty() => format!("the daemon answered {status} without a reason"),
        None => format!(
            "the daemon answered {status}: {}",
            String::from_utf8_lossy(&body[..body.len().min(500)]).trim()
        ),
    };
    match value["code"].as_str() {
        Some(code) => Report::new(Kind::of_connect_code(code), code, message),
        None => Report::new(Kind::of_status(status), &format!("http_{}", status.as_u16()), message),
    }
}

/// Waits for `next`; after each [`SILENCE`] without it, `alive` must hold, or its failure is the result.
pub async fn unless_dead<T, A>(next: impl Future<Output = Result<T>>, alive: impl Fn() -> A) -> Result<T>
where
    A: Future<Output = Result<()>>,
{
    let mut next = std::pin::pin!(next);
    loop {
        match tokio::time::timeout(SILENCE, &mut next).await {
            Ok(result) => return result,
            Err(_) => alive().await?,
        }
    }
}

/// A response body read piece by piece.
pub struct Reader {
    client: Client,
    what: String,
    body: Incoming,
    buffer: BytesMut,
}

impl Reader {
    /// Reads `response`, the answer to `what`.
    pub fn new(client: &Client, what: &str, response: Response<Incoming>) -> Self {
        Self {
            client: client.clone(),
            what: what.into(),
            body: response.into_body(),
            buffer: BytesMut::new(),
        }
    }

    /// The next bytes as they arrive; none at the end.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>> {
        if !self.buffer.is_empty() {
            return Ok(Some(self.buffer.split().freeze()));
        }
        while let Some(frame) = self.body.frame().await {
            let frame = frame.map_err(|error| self.client.lost(&self.what, &error))?;
            match frame.into_data() {
                Ok(data) if !data.is_empty() => return Ok(Some(data)),
                _ => continue,
            }
        }
        Ok(None)
    }

    /// The next line, without its end; none at the end. Safe to cancel.
    pub async fn line(&mut self) -> Result<Option<Bytes>> {
        let mut searched = 0;
        loop {
            if let Some(at) = self.buffer[searched..].iter().position(|&byte| byte == b'\n') {
                let mut line = self.buffer.split_to(searched + at + 1);
                line.truncate(searched + at);
                if line.iter().all(u8::is_ascii_whitespace) {
                    searched = 0;
                    continue;
                }
                return Ok(Some(line.freeze()));
            }
            searched = self.buffer.len();
            if searched > MAX_LINE_BYTES {
                return Err(Failure::protocol(format!(
                    "a line in the answer to {} has over {MAX_LINE_BYTES} bytes",
                    self.what
                )));
            }
            if !self.fill().await? {
                return Ok((!self.buffer.is_empty()).then(|| self.buffer.split().freeze()));
            }
        }
    }

    /// Exactly `count` bytes; none at a clean end. Safe to cancel.
    pub async fn exact(&mut self, count: usize) -> Result<Option<Bytes>> {
        Ok(self.holds(count).await?.then(|| self.buffer.split_to(count).freeze()))
    }

    /// The next `count` bytes stay in the buffer; none at a clean end. Safe to cancel.
    pub async fn peek(&mut self, count: usize) -> Result<Option<&[u8]>> {
        Ok(self.holds(count).await?.then(|| &self.buffer[..count]))
    }

    /// Waits until the buffer holds `count` bytes; false at a clean end.
    async fn holds(&mut self, count: usize) -> Result<bool> {
        while self.buffer.len() < count {
            if !self.fill().await? {
                if self.buffer.is_empty() {
                    return Ok(false);
                }
                return Err(Failure::protocol(format!(
                    "the answer to {} ends in the middle of a message",
                    self.what
                )));
            }
        }
        Ok(true)
    }

    async fn fill(&mut self) -> Result<bool> {
        match self.body.frame().await {
            None => Ok(false),
            Some(Err(error)) => Err(self.client.lost(&self.what, &error).into()),
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    self.buffer.extend_from_slice(&data);
                }
                Ok(true)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_error_keeps_its_hint() {
        let body = br#"{"code":"template_not_found","kind":"caller","message":"no template x","hint":"offshoot template ls"}"#;
        let report = failure_of_answer(StatusCode::NOT_FOUND, body);
        assert_eq!((report.kind, report.hint.as_deref()), (Kind::Caller, Some("offshoot template ls")));
    }

    #[test]
    fn guest_service_errors_and_plain_text_are_understood() {
        let connect =
            failure_of_answer(StatusCode::NOT_FOUND, br#"{"code":"not_found","message":"no process 7"}"#);
        assert_eq!((connect.code.as_str(), connect.kind), ("not_found", Kind::Caller));
        let envd =
            failure_of_answer(StatusCode::INSUFFICIENT_STORAGE, br#"{"code":507,"message":"disk full"}"#);
        assert_eq!(
            (envd.code.as_str(), envd.kind, envd.message.as_str()),
            ("http_507", Kind::Host, "disk full")
        );
        let text = failure_of_answer(StatusCode::BAD_REQUEST, b"nope");
        assert_eq!(text.message, "the daemon answered 400 Bad Request: nope");
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_stream_ends_when_the_other_side_has_died() {
        let asked = std::cell::Cell::new(0);
        let alive = async || {
            asked.set(asked.get() + 1);
            if asked.get() < 4 { Ok(()) } else { Err(Failure::usage("died")) }
        };
        let began = tokio::time::Instant::now();
        let result: Result<()> = unless_dead(std::future::pending(), alive).await;
        assert!(matches!(result, Err(Failure::Report(report)) if report.message == "died"));
        assert_eq!((asked.get(), began.elapsed().as_secs()), (4, 4 * SILENCE.as_secs()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_answer_from_a_living_side_is_waited_for() {
        let slow = async {
            tokio::time::sleep(SILENCE * 10).await;
            Ok(7)
        };
        assert_eq!(unless_dead(slow, async || Ok(())).await.unwrap(), 7);
    }
}
