//! Messages of the package `process`, as proto3 JSON: zero values are left out, bytes are base64, numbers may come as
//! strings, enums as numbers, and `null` means absent.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::alphabet;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, STANDARD};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::process::hub::{End, Stream};
use crate::process::table::Selector;
use crate::reaper::Exit;
use crate::spawn::PtySize;

use super::connect::{Code, ConnectError};

/// `ProcessConfig`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ProcessConfig {
    /// Program.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "String::is_empty")]
    pub cmd: String,
    /// Arguments.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Environment.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub envs: BTreeMap<String, String>,
    /// Working directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

/// `PTY.Size`.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Size {
    /// Columns.
    #[serde(default, deserialize_with = "lenient_number")]
    pub cols: u32,
    /// Rows.
    #[serde(default, deserialize_with = "lenient_number")]
    pub rows: u32,
}

/// `PTY`.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Pty {
    /// Size.
    #[serde(default)]
    pub size: Option<Size>,
}

impl Pty {
    /// The size; 80 by 24 where none is given.
    pub fn size(&self) -> PtySize {
        let given = |number: u32, default: u16| {
            if number == 0 { default } else { number.min(u16::MAX.into()) as u16 }
        };
        let size = self.size.clone().unwrap_or_default();
        PtySize { cols: given(size.cols, 80), rows: given(size.rows, 24) }
    }
}

/// `StartRequest`.
#[derive(Debug, Clone, Deserialize)]
pub struct StartRequest {
    /// What to start.
    #[serde(default, deserialize_with = "or_default")]
    pub process: ProcessConfig,
    /// With a terminal.
    #[serde(default)]
    pub pty: Option<Pty>,
    /// Name for later calls.
    #[serde(default)]
    pub tag: Option<String>,
    /// With standard input; absent: yes.
    #[serde(default)]
    pub stdin: Option<bool>,
}

/// `ProcessSelector`.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct ProcessSelector {
    #[serde(default)]
    pid: Option<Value>,
    #[serde(default)]
    tag: Option<String>,
}

impl ProcessSelector {
    /// What it selects by.
    ///
    /// # Errors
    /// Where it names nothing.
    pub fn selector(&self) -> Result<Selector, ConnectError> {
        let number = |value: &Value| value.as_i64().or_else(|| value.as_str()?.parse().ok());
        match (&self.pid, &self.tag) {
            (Some(pid), _) => {
                number(pid).and_then(|pid| i32::try_from(pid).ok()).map(Selector::Pid).ok_or_else(|| {
                    ConnectError::new(Code::InvalidArgument, format!("pid {pid} is not a process id"))
                })
            }
            (None, Some(tag)) => Ok(Selector::Tag(tag.clone())),
            (None, None) => {
                Err(ConnectError::new(Code::InvalidArgument, "name the process by \"pid\" or \"tag\""))
            }
        }
    }
}

/// `ConnectRequest`, `CloseStdinRequest`.
#[derive(Debug, Clone, Deserialize)]
pub struct SelectRequest {
    /// Which process.
    #[serde(default, deserialize_with = "or_default")]
    pub process: ProcessSelector,
}

/// `UpdateRequest`.
#[derive(Debug, Clone, Deserialize)]
pub struct UpdateRequest {
    /// Which process.
    #[serde(default, deserialize_with = "or_default")]
    pub process: ProcessSelector,
    /// New size.
    #[serde(default)]
    pub pty: Option<Pty>,
}

/// `ProcessInput`.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct ProcessInput {
    #[serde(default)]
    stdin: Option<String>,
    #[serde(default)]
    pty: Option<String>,
}

/// Decoded input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// For standard input.
    Stdin(Vec<u8>),
    /// For the terminal.
    Pty(Vec<u8>),
}

impl ProcessInput {
    /// The bytes.
    ///
    /// # Errors
    /// Where they are not base64, or there are none.
    pub fn decode(&self) -> Result<Input, ConnectError> {
        let decode = |text: &str| {
            decode_base64(text)
                .ok_or_else(|| ConnectError::new(Code::InvalidArgument, "the input is not base64"))
        };
        match (&self.stdin, &self.pty) {
            (Some(text), _) => decode(text).map(Input::Stdin),
            (None, Some(text)) => decode(text).map(Input::Pty),
            (None, None) => {
                Err(ConnectError::new(Code::InvalidArgument, "give input as \"stdin\" or \"pty\""))
            }
        }
    }
}

/// `SendInputRequest`.
#[derive(Debug, Clone, Deserialize)]
pub struct SendInputRequest {
    /// Which process.
    #[serde(default, deserialize_with = "or_default")]
    pub process: ProcessSelector,
    /// What to write.
    #[serde(default, deserialize_with = "or_default")]
    pub input: ProcessInput,
}

/// `StreamInputRequest`: one of three events.
#[derive(Debug, Clone, Deserialize)]
pub struct StreamInputRequest {
    /// First: which process.
    #[serde(default)]
    pub start: Option<SelectRequest>,
    /// Input.
    #[serde(default)]
    pub data: Option<DataEvent>,
}

/// `StreamInputRequest.DataEvent`.
#[derive(Debug, Clone, Deserialize)]
pub struct DataEvent {
    /// What to write.
    #[serde(default, deserialize_with = "or_default")]
    pub input: ProcessInput,
}

/// `SendSignalRequest`.
#[derive(Debug, Clone, Deserialize)]
pub struct SendSignalRequest {
    /// Which process.
    #[serde(default, deserialize_with = "or_default")]
    pub process: ProcessSelector,
    #[serde(default)]
    signal: Value,
}

impl SendSignalRequest {
    /// The signal's number.
    ///
    /// # Errors
    /// All but `SIGNAL_SIGKILL` and `SIGNAL_SIGTERM`.
    pub fn signal(&self) -> Result<i32, ConnectError> {
        match (self.signal.as_str(), self.signal.as_i64()) {
            (Some("SIGNAL_SIGKILL"), _) | (_, Some(9)) => Ok(libc::SIGKILL),
            (Some("SIGNAL_SIGTERM"), _) | (_, Some(15)) => Ok(libc::SIGTERM),
            _ => {
                let message =
                    format!("signal {} cannot be sent: use SIGNAL_SIGTERM or SIGNAL_SIGKILL", self.signal);
                Err(ConnectError::new(Code::InvalidArgument, message))
            }
        }
    }
}

/// The event `start`.
pub fn start_event(pid: i32) -> Value {
    serde_json::json!({ "event": { "start": { "pid": pid } } })
}

/// The event `data`.
pub fn data_event(stream: Stream, bytes: &[u8]) -> Value {
    let name = match stream {
        Stream::Stdout => "stdout",
        Stream::Stderr => "stderr",
        Stream::Pty => "pty",
    };
    serde_json::json!({ "event": { "data": { name: STANDARD.encode(bytes) } } })
}

/// The event `keepalive`.
pub fn keepalive_event() -> Value {
    serde_json::json!({ "event": { "keepalive": {} } })
}

/// The event `end`, worded as Go's `os.ProcessState` words it, which E2B's clients know.
pub fn end_event(end: End) -> Value {
    let mut event = serde_json::Map::new();
    match end.exit {
        Exit::Code(code) => {
            let status = format!("exit status {code}");
            event.insert("exited".to_owned(), true.into());
            if code != 0 {
                event.insert("exitCode".to_owned(), code.into());
                event.insert("error".to_owned(), status.clone().into());
            }
            event.insert("status".to_owned(), status.into());
        }
        Exit::Signal { number, core_dumped } => {
            let dump = if core_dumped { " (core dumped)" } else { "" };
            let status = format!("signal: {}{dump}", signal_name(number));
            event.insert("exitCode".to_owned(), (-1).into());
            event.insert("error".to_owned(), status.clone().into());
            event.insert("status".to_owned(), status.into());
        }
    }
    serde_json::json!({ "event": { "end": event } })
}

fn signal_name(number: i32) -> String {
    let name = match number {
        libc::SIGHUP => "hangup",
        libc::SIGINT => "interrupt",
        libc::SIGQUIT => "quit",
        libc::SIGILL => "illegal instruction",
        libc::SIGTRAP => "trace/breakpoint trap",
        libc::SIGABRT => "aborted",
        libc::SIGBUS => "bus error",
        libc::SIGFPE => "floating point exception",
        libc::SIGKILL => "killed",
        libc::SIGUSR1 => "user defined signal 1",
        libc::SIGSEGV => "segmentation fault",
        libc::SIGUSR2 => "user defined signal 2",
        libc::SIGPIPE => "broken pipe",
        libc::SIGALRM => "alarm clock",
        libc::SIGTERM => "terminated",
        other => return format!("signal {other}"),
    };
    name.to_owned()
}

/// Base64, standard or URL-safe, padded or not, as proto3 JSON takes it.
pub fn decode_base64(text: &str) -> Option<Vec<u8>> {
    const LENIENT: GeneralPurposeConfig =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    const STANDARD_LENIENT: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, LENIENT);
    const URL_LENIENT: GeneralPurpose = GeneralPurpose::new(&alphabet::URL_SAFE, LENIENT);
    let engine = if text.contains(['-', '_']) { URL_LENIENT } else { STANDARD_LENIENT };
    engine.decode(text).ok()
}

fn or_default<'de, D: Deserializer<'de>, T: DeserializeOwned + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

fn lenient_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    match Value::deserialize(deserializer)? {
        Value::Null => Ok(0),
        value => value
            .as_u64()
            .or_else(|| value.as_str()?.parse().ok())
            .and_then(|number| u32::try_from(number).ok())
            .ok_or_else(|| D::Error::custom(format!("{value} is not a 32-bit number"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end_of(exit: Exit) -> Value {
        end_event(End { exit, timed_out: false })["event"]["end"].take()
    }

    #[test]
    fn ends_leave_out_zero_values() {
        let success = serde_json::json!({"exited": true, "status": "exit status 0"});
        assert_eq!(end_of(Exit::Code(0)), success);
        let failure = serde_json::json!({"exitCode": 3, "exited": true, "status": "exit status 3", "error": "exit status 3"});
        assert_eq!(end_of(Exit::Code(3)), failure);
        let killed =
            serde_json::json!({"exitCode": -1, "status": "signal: killed", "error": "signal: killed"});
        assert_eq!(end_of(Exit::Signal { number: 9, core_dumped: false }), killed);
    }

    #[test]
    fn requests_are_read_leniently() {
        let start: StartRequest = serde_json::from_str(
            r#"{ "process": {"cmd": "ls", "args": null, "new": 1}, "pty": {"size": {"cols": "9"}}, "tag": null }"#,
        )
        .unwrap();
        assert_eq!(start.pty.unwrap().size(), PtySize { cols: 9, rows: 24 });
        let select: SelectRequest = serde_json::from_str(r#"{"process": {"pid": "12"}}"#).unwrap();
        assert_eq!(select.process.selector(), Ok(Selector::Pid(12)));
        let select: SelectRequest = serde_json::from_str("{}").unwrap();
        assert_eq!(select.process.selector().unwrap_err().code, Code::InvalidArgument);
    }

    #[test]
    fn base64_of_either_alphabet_is_read() {
        assert_eq!(decode_base64("+/8="), Some(vec![0xfb, 0xff]));
        assert_eq!(decode_base64("-_8"), Some(vec![0xfb, 0xff]));
        assert_eq!(decode_base64("!"), None);
    }
}
