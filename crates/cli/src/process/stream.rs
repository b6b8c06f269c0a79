//! The messages of a `process.Process` stream: `[flags: u8][length: u32, big endian][JSON]` envelopes, the last one
//! flagged with [`END_STREAM`].

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::Value;

use super::Event;
use crate::client::Reader;
use crate::failure::{Failure, Result};

const END_STREAM: u8 = 0x02;
const COMPRESSED: u8 = 0x01;
const MAX_MESSAGE_BYTES: usize = 64 << 20;

#[derive(Deserialize)]
pub struct StreamMessage {
    #[serde(default)]
    pub event: StreamEvent,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub struct StreamEvent {
    pub start: Option<StreamStart>,
    pub data: Option<StreamData>,
    pub end: Option<StreamEnd>,
}

#[derive(Deserialize)]
pub struct StreamStart {
    pub pid: u64,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub struct StreamData {
    pub stdout: Option<String>,
    pub stderr: Option<String>,
    pub pty: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct StreamEnd {
    pub exit_code: i64,
    pub exited: bool,
    pub status: String,
    pub error: Option<String>,
}

#[derive(Deserialize)]
pub struct ConnectError {
    pub code: String,
    #[serde(default)]
    pub message: String,
}

#[derive(Default, Deserialize)]
pub struct EndStream {
    pub error: Option<ConnectError>,
}

pub enum Envelope {
    Message(StreamMessage),
    End(Option<ConnectError>),
}

/// One message with its prefix.
pub fn envelope(message: &Value) -> Vec<u8> {
    let text = message.to_string();
    let length = u32::try_from(text.len()).expect("a command line is far below 4 GiB");
    let mut bytes = vec![0];
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

pub async fn next_envelope(reader: &mut Reader) -> Result<Option<Envelope>> {
    let Some(prefix) = reader.peek(5).await? else {
        return Ok(None);
    };
    let flags = prefix[0];
    let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
    if length > MAX_MESSAGE_BYTES {
        return Err(Failure::protocol(format!("the guest announces a message of {length} bytes")));
    }
    if flags & COMPRESSED != 0 {
        return Err(Failure::protocol("the guest sends a compressed message"));
    }
    let Some(bytes) = reader.exact(5 + length).await? else {
        return Ok(None);
    };
    let text = &bytes[5..];
    let malformed =
        |error| Failure::protocol(format!("the guest's message about a command is not as expected: {error}"));
    if flags & END_STREAM != 0 {
        let end: EndStream = if text.is_empty() {
            EndStream::default()
        } else {
            serde_json::from_slice(text).map_err(malformed)?
        };
        return Ok(Some(Envelope::End(end.error)));
    }
    serde_json::from_slice(text).map(|message| Some(Envelope::Message(message))).map_err(malformed)
}

pub fn output(data: StreamData) -> Result<Option<Event>> {
    let decode = |text: &str| {
        let bytes = BASE64.decode(text);
        bytes.map(Bytes::from).map_err(|_| Failure::protocol("the guest's output is not base64"))
    };
    if let Some(text) = data.stdout.or(data.pty) {
        return decode(&text).map(|bytes| Some(Event::Stdout(bytes)));
    }
    data.stderr.map(|text| decode(&text).map(Event::Stderr)).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_start_message_has_its_length_in_front() {
        let bytes = envelope(&json!({"a": 1}));
        assert_eq!(bytes, b"\x00\x00\x00\x00\x07{\"a\":1}");
    }
}
