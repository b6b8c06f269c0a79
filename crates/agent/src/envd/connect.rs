//! The Connect protocol, JSON codec, uncompressed, over HTTP/1.1.
//!
//! A message of a stream is an envelope: one byte of flags, four of length (big-endian), JSON. The last one has flag 2
//! and holds `{}` or `{"error":{...}}`.

use std::io;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures_util::stream::Stream;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::http::{Answer, collect, full, json, streamed};

/// Most bytes of one request message.
pub const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024;

const FLAG_COMPRESSED: u8 = 1;
const FLAG_END: u8 = 2;
const HEADER_BYTES: usize = 5;

/// Connect error codes that the agent uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// The request is wrong.
    InvalidArgument,
    /// Time was up.
    DeadlineExceeded,
    /// No such thing.
    NotFound,
    /// Not allowed.
    PermissionDenied,
    /// A bound was reached.
    ResourceExhausted,
    /// Not possible in the present state.
    FailedPrecondition,
    /// No such call.
    Unimplemented,
    /// The system refused.
    Internal,
    /// No such user.
    Unauthenticated,
}

impl Code {
    fn status(self) -> StatusCode {
        match self {
            Self::InvalidArgument | Self::FailedPrecondition => StatusCode::BAD_REQUEST,
            Self::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::PermissionDenied => StatusCode::FORBIDDEN,
            Self::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            Self::Unimplemented => StatusCode::NOT_IMPLEMENTED,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Unauthenticated => StatusCode::UNAUTHORIZED,
        }
    }
}

/// An error as Connect reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{message}")]
pub struct ConnectError {
    /// Code.
    pub code: Code,
    /// What was attempted and why it failed.
    pub message: String,
}

impl ConnectError {
    /// An error with this code.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// The answer to a unary call.
pub fn unary(result: Result<impl Serialize, ConnectError>) -> Answer {
    match result {
        Ok(message) => json(StatusCode::OK, &message),
        Err(error) => json(error.code.status(), &error),
    }
}

/// The answer to a streaming call: envelopes as they come.
pub fn stream(envelopes: impl Stream<Item = Bytes> + Send + 'static) -> Answer {
    use futures_util::StreamExt;
    streaming(streamed(envelopes.map(Ok::<_, io::Error>)))
}

/// The answer to a streaming call that failed before its first message.
pub fn stream_error(error: &ConnectError) -> Answer {
    streaming(full(end(Some(error))))
}

fn streaming(body: crate::http::Body) -> Answer {
    let mut answer = Response::new(body);
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/connect+json"));
    answer
}

/// One message as an envelope.
pub fn envelope(message: &impl Serialize) -> Bytes {
    with_header(0, &serde_json::to_vec(message).expect("messages have string keys and finite numbers"))
}

/// The last envelope of a stream.
pub fn end(error: Option<&ConnectError>) -> Bytes {
    let body = match error {
        Some(error) => serde_json::json!({ "error": error }),
        None => serde_json::json!({}),
    };
    with_header(FLAG_END, body.to_string().as_bytes())
}

fn with_header(flags: u8, payload: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(HEADER_BYTES + payload.len());
    bytes.put_u8(flags);
    bytes.put_u32(payload.len() as u32);
    bytes.put_slice(payload);
    bytes.freeze()
}

/// Reads a unary request's message; no body counts as `{}`.
///
/// # Errors
/// Other content types, too long, broken off, or not the message.
pub async fn read_unary<Message: DeserializeOwned>(
    headers: &HeaderMap,
    body: Incoming,
) -> Result<Message, ConnectError> {
    expect_type(headers, "application/json")?;
    let bytes = collect(body, MAX_MESSAGE_BYTES)
        .await
        .map_err(|error| ConnectError::new(Code::InvalidArgument, error.to_string()))?;
    parse(if bytes.is_empty() { b"{}" } else { &bytes })
}

fn expect_type(headers: &HeaderMap, expected: &str) -> Result<(), ConnectError> {
    let given = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if given.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case(expected)) {
        return Ok(());
    }
    let message =
        format!("content type '{given}' is not served here: use '{expected}' (JSON codec, no compression)");
    Err(ConnectError::new(Code::InvalidArgument, message))
}

fn parse<Message: DeserializeOwned>(bytes: &[u8]) -> Result<Message, ConnectError> {
    serde_json::from_slice(bytes).map_err(|error| {
        ConnectError::new(Code::InvalidArgument, format!("the request is not understood: {error}"))
    })
}

/// The messages of a streaming request.
pub struct Messages {
    body: Incoming,
    buffer: BytesMut,
}

impl Messages {
    /// The messages in `body`.
    ///
    /// # Errors
    /// Other content types.
    pub fn new(headers: &HeaderMap, body: Incoming) -> Result<Self, ConnectError> {
        expect_type(headers, "application/connect+json")?;
        Ok(Self { body, buffer: BytesMut::new() })
    }

    /// The next message; `None` at the end.
    ///
    /// # Errors
    /// Compressed, too long, broken off, or not the message.
    pub async fn next<Message: DeserializeOwned>(&mut self) -> Result<Option<Message>, ConnectError> {
        loop {
            if let Some((flags, payload)) = take_envelope(&mut self.buffer)? {
                if flags & FLAG_END != 0 {
                    return Ok(None);
                }
                return parse(if payload.is_empty() { b"{}" } else { &payload }).map(Some);
            }
            let broken =
                || ConnectError::new(Code::InvalidArgument, "the request ended in the middle of a message");
            match self.body.frame().await {
                None if self.buffer.is_empty() => return Ok(None),
                None | Some(Err(_)) => return Err(broken()),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
            }
        }
    }

    /// The one message of a call that takes one.
    ///
    /// # Errors
    /// As [`Messages::next`], or none.
    pub async fn only<Message: DeserializeOwned>(mut self) -> Result<Message, ConnectError> {
        let message = self.next().await?;
        message.ok_or_else(|| ConnectError::new(Code::InvalidArgument, "the request holds no message"))
    }
}

/// Takes one complete envelope out of `buffer`.
fn take_envelope(buffer: &mut BytesMut) -> Result<Option<(u8, Bytes)>, ConnectError> {
    if buffer.len() < HEADER_BYTES {
        return Ok(None);
    }
    let flags = buffer[0];
    let length = u32::from_be_bytes([buffer[1], buffer[2], buffer[3], buffer[4]]) as usize;
    if flags & FLAG_COMPRESSED != 0 {
        return Err(ConnectError::new(
            Code::Unimplemented,
            "compressed messages are not served: send them plain",
        ));
    }
    if length > MAX_MESSAGE_BYTES {
        let message = format!("a message of {length} bytes is longer than the limit of {MAX_MESSAGE_BYTES}");
        return Err(ConnectError::new(Code::ResourceExhausted, message));
    }
    if buffer.len() < HEADER_BYTES + length {
        return Ok(None);
    }
    buffer.advance(HEADER_BYTES);
    Ok(Some((flags, buffer.split_to(length).freeze())))
}

/// `Connect-Timeout-Ms`; absent or 0: none.
///
/// # Errors
/// Where it is not a number of at most ten digits.
pub fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, ConnectError> {
    let Some(value) = headers.get("connect-timeout-ms") else {
        return Ok(None);
    };
    let text = value.to_str().unwrap_or_default();
    let milliseconds: u64 = text.parse().ok().filter(|_| text.len() <= 10).ok_or_else(|| {
        let message = format!("Connect-Timeout-Ms '{text}' is not a number of at most ten digits");
        ConnectError::new(Code::InvalidArgument, message)
    })?;
    Ok((milliseconds > 0).then(|| Duration::from_millis(milliseconds)))
}

/// `Keepalive-Ping-Interval`, seconds; 90 where absent or not a number.
pub fn keepalive(headers: &HeaderMap) -> Duration {
    const DEFAULT_SECONDS: u64 = 90;
    let seconds = headers.get("keepalive-ping-interval").and_then(|value| value.to_str().ok()?.parse().ok());
    Duration::from_secs(seconds.unwrap_or(DEFAULT_SECONDS).max(1))
}

/// The user named by `Authorization: Basic`; the password is not looked at (the daemon has let the caller in).
///
/// # Errors
/// Where the header is not of that form.
pub fn basic_user(headers: &HeaderMap) -> Result<Option<String>, ConnectError> {
    let Some(value) = headers.get(AUTHORIZATION) else {
        return Ok(None);
    };
    let decoded = value
        .to_str()
        .ok()
        .and_then(|text| text.strip_prefix("Basic ").or_else(|| text.strip_prefix("basic ")))
        .and_then(super::messages::decode_base64)
        .and_then(|bytes| String::from_utf8(bytes).ok());
    let Some(decoded) = decoded else {
        return Err(ConnectError::new(
            Code::Unauthenticated,
            "the Authorization header is not 'Basic base64(user:)'",
        ));
    };
    let user = decoded.split(':').next().unwrap_or_default();
    Ok((!user.is_empty()).then(|| user.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn envelopes_are_taken_whole() {
        let mut buffer = BytesMut::new();
        let bytes = envelope(&serde_json::json!({"a": 1}));
        for (index, byte) in bytes.iter().enumerate() {
            assert_eq!(take_envelope(&mut buffer), Ok(None), "after {index} bytes");
            buffer.put_u8(*byte);
        }
        assert_eq!(take_envelope(&mut buffer), Ok(Some((0, Bytes::from_static(b"{\"a\":1}")))));
        assert!(buffer.is_empty());
    }

    #[test]
    fn long_and_compressed_envelopes_are_refused() {
        let mut long = BytesMut::from(&[0, 255, 0, 0, 0][..]);
        assert_eq!(take_envelope(&mut long).unwrap_err().code, Code::ResourceExhausted);
        let mut compressed = BytesMut::from(&[1, 0, 0, 0, 0][..]);
        assert_eq!(take_envelope(&mut compressed).unwrap_err().code, Code::Unimplemented);
    }

    #[test]
    fn headers_are_read_leniently_but_not_guessed() {
        let mut headers = HeaderMap::new();
        assert_eq!(timeout(&headers), Ok(None));
        headers.insert("connect-timeout-ms", HeaderValue::from_static("0"));
        assert_eq!(timeout(&headers), Ok(None));
        headers.insert("connect-timeout-ms", HeaderValue::from_static("1500"));
        assert_eq!(timeout(&headers), Ok(Some(Duration::from_millis(1500))));
        headers.insert("connect-timeout-ms", HeaderValue::from_static("soon"));
        assert!(timeout(&headers).is_err());
        headers.insert(AUTHORIZATION, HeaderValue::from_static("Basic cm9vdDo="));
        assert_eq!(basic_user(&headers), Ok(Some("root".to_owned())));
        headers.insert(AUTHORIZATION, HeaderValue::from_static("Bearer x"));
        assert!(basic_user(&headers).is_err());
    }
}
