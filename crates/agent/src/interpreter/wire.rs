//! The messages between agent and driver.

use std::collections::BTreeMap;

use bytes::{Buf, BytesMut};
use serde::{Deserialize, Serialize};

/// Most bytes of one message from the driver: a value's text and JSON, or a traceback, all bounded by the driver.
const MAX_MESSAGE_BYTES: usize = 64 * 1024 * 1024;
const HEADER_BYTES: usize = 4;

/// Asks the driver to run code.
#[derive(Debug, Serialize)]
pub struct Run<'a> {
    /// Source text.
    pub code: &'a str,
    /// File name for tracebacks.
    pub file: &'a str,
    /// The set environment.
    pub env: &'a BTreeMap<String, String>,
    /// Variables for this run.
    pub vars: &'a BTreeMap<String, String>,
    /// Make what exists afterwards exempt from garbage collection.
    pub freeze: bool,
}

/// What the driver says.
#[derive(Debug, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Message {
    /// It waits for requests.
    Ready,
    /// The code can be interrupted from now on.
    Started,
    /// The code is done, its output is flushed.
    Done {
        /// Value of the last expression.
        #[serde(default)]
        result: Option<Value>,
        /// Exception.
        #[serde(default)]
        error: Option<Raised>,
    },
}

/// A value.
#[derive(Debug, Deserialize)]
pub struct Value {
    /// `repr`, without a string's quotes.
    pub text: String,
    /// As JSON, where it is plain data.
    #[serde(default)]
    pub json: Option<serde_json::Value>,
}

/// An exception.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Raised {
    /// Class.
    pub name: String,
    /// `str` of it.
    pub value: String,
    /// Traceback.
    pub traceback: String,
}

/// What came instead of a message: code wrote to the driver's descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the interpreter's control channel holds something else than its messages")]
pub struct Garbled;

/// A message with its header.
pub fn encode(message: &impl Serialize) -> Vec<u8> {
    let payload = serde_json::to_vec(message).expect("messages have string keys");
    let mut bytes = (payload.len() as u32).to_be_bytes().to_vec();
    bytes.extend_from_slice(&payload);
    bytes
}

/// Takes a whole message out of `buffer`, if there is one.
///
/// # Errors
/// Where there is something else.
pub fn take(buffer: &mut BytesMut) -> Result<Option<Message>, Garbled> {
    let Some(header) = buffer.first_chunk::<HEADER_BYTES>() else {
        return Ok(None);
    };
    let length = u32::from_be_bytes(*header) as usize;
    if length > MAX_MESSAGE_BYTES {
        return Err(Garbled);
    }
    if buffer.len() < HEADER_BYTES + length {
        return Ok(None);
    }
    buffer.advance(HEADER_BYTES);
    serde_json::from_slice(&buffer.split_to(length)).map(Some).map_err(|_| Garbled)
}

/// Makes text of bytes that may end within a character.
#[derive(Debug, Default)]
pub struct Utf8Decoder {
    incomplete: Vec<u8>,
}

impl Utf8Decoder {
    /// The text so far; what cannot be text is replaced by U+FFFD, what may become text is kept back.
    pub fn decode(&mut self, bytes: &[u8]) -> String {
        let mut all = std::mem::take(&mut self.incomplete);
        all.extend_from_slice(bytes);
        let kept = incomplete_tail(&all);
        self.incomplete = all.split_off(all.len() - kept);
        String::from_utf8_lossy(&all).into_owned()
    }

    /// What was kept back.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.incomplete)).into_owned()
    }
}

/// Length of a character's beginning at the end of `bytes`.
fn incomplete_tail(bytes: &[u8]) -> usize {
    let longest = bytes.len().min(3);
    for back in 1..=longest {
        let byte = bytes[bytes.len() - back];
        let needed = match byte {
            0xc2..=0xdf => 2,
            0xe0..=0xef => 3,
            0xf0..=0xf4 => 4,
            0x80..=0xbf => continue,
            _ => return 0,
        };
        return if needed > back { back } else { 0 };
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_cut_in_two_are_whole_again() {
        for text in ["a", "ü", "€", "🌱", "x🌱y"] {
            for cut in 0..=text.len() {
                let mut decoder = Utf8Decoder::default();
                let (first, second) = text.as_bytes().split_at(cut);
                let joined = decoder.decode(first) + &decoder.decode(second) + &decoder.finish();
                assert_eq!(joined, text, "cut at {cut}");
            }
        }
    }

    #[test]
    fn what_is_no_text_is_replaced_and_not_kept() {
        let mut decoder = Utf8Decoder::default();
        assert_eq!(decoder.decode(b"a\xffb\x80"), "a\u{fffd}b\u{fffd}");
        assert_eq!(decoder.decode(b"\xf0\x9f"), "");
        assert_eq!(decoder.finish(), "\u{fffd}");
    }

    #[test]
    fn messages_are_taken_whole_or_refused() {
        let mut buffer = BytesMut::new();
        let bytes = encode(&serde_json::json!({"event": "ready"}));
        buffer.extend_from_slice(&bytes[..6]);
        assert!(matches!(take(&mut buffer), Ok(None)));
        buffer.extend_from_slice(&bytes[6..]);
        assert!(matches!(take(&mut buffer), Ok(Some(Message::Ready))));
        buffer.extend_from_slice(b"hello, this is no message");
        assert!(matches!(take(&mut buffer), Err(Garbled)));
    }
}
