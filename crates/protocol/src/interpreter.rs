//! The warm interpreter: `POST /execute` on vsock port [`crate::ports::INTERPRETER`], answered by one JSON object per
//! line ([`Event`]), as E2B's code interpreter does.

use serde::{Deserialize, Serialize};

/// Body of `POST /execute`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Execute {
    /// Python source. The value of a last expression statement becomes the main result.
    pub code: String,
    /// `python`, or absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub language: Option<String>,
    /// Absent or null for the warm default context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_id: Option<String>,
    /// Variables set in the interpreter's environment for this execution.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_vars: Option<std::collections::BTreeMap<String, String>>,
    /// Milliseconds until the code is interrupted with `KeyboardInterrupt`; absent: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
}

/// One line of the answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Event {
    /// Sent when execution begins.
    NumberOfExecutions {
        /// Executions of this context so far, this one included.
        execution_count: u64,
    },
    /// Text written to standard output.
    Stdout {
        /// The text, as written.
        text: String,
        /// Guest wall clock, RFC 3339.
        timestamp: String,
    },
    /// Text written to standard error.
    Stderr {
        /// The text, as written.
        text: String,
        /// Guest wall clock, RFC 3339.
        timestamp: String,
    },
    /// The value of the last expression.
    Result {
        /// Always true for the value of the last expression.
        is_main_result: bool,
        /// `repr` of the value, outer quotes stripped for a string.
        text: String,
        /// The value as JSON where it is plain data; absent otherwise.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        json: Option<serde_json::Value>,
    },
    /// An exception ended the code.
    Error {
        /// Exception class.
        name: String,
        /// `str` of the exception.
        value: String,
        /// The traceback.
        traceback: String,
    },
    /// Sent when nothing else was for five seconds.
    Keepalive,
    /// The last line.
    EndOfExecution,
}
