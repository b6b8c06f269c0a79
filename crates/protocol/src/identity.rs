//! Identity: what must differ between clones, and its acknowledgement.
//!
//! The host connects to vsock port [`crate::ports::HOST_ONLY`] and sends one JSON object ([`HostRequest`]) on one
//! line; the agent answers with one JSON object ([`HostReply`]) on one line. One connection may carry several
//! requests, one after the other.

use serde::{Deserialize, Serialize};

/// A request on the host-only port.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum HostRequest {
    /// Applies a new identity; answered by [`HostReply::IdentityApplied`] once the kernel has it.
    Identity(Identity),
    /// Sync file systems and power off.
    Shutdown,
    /// Answers [`HostReply::Pong`]; used to wait for the agent at first boot.
    Ping,
    /// Starts or restarts the warm interpreter and runs the warm-up source in it (its globals stay).
    Warm {
        /// Python source text.
        source: String,
        /// File name for tracebacks.
        file_name: String,
        /// Milliseconds until the warm-up is killed and reported as failed.
        timeout_ms: u64,
    },
}

/// A reply on the host-only port.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum HostReply {
    /// The identity is in force.
    IdentityApplied {
        /// Echo of [`Identity::generation`].
        generation: u64,
        /// Guest wall clock after applying, nanoseconds since the Unix epoch.
        wall_clock_ns: u64,
        /// Hooks in `/etc/offshoot/on-fork.d` that failed: name and reason. They do not undo the identity.
        failed_hooks: Vec<String>,
    },
    /// The guest is going down.
    ShuttingDown,
    /// The agent is up.
    Pong {
        /// The agent's version.
        version: String,
    },
    /// The warm-up finished without an exception.
    Warmed {
        /// What the warm-up wrote to standard output, bounded.
        stdout: String,
        /// What the warm-up wrote to standard error, bounded.
        stderr: String,
    },
    /// The request failed.
    Failed {
        /// Which step failed and why.
        message: String,
    },
}

/// Everything that makes a clone its own machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The sandbox's id; also exported to processes as `E2B_SANDBOX_ID`.
    pub sandbox_id: String,
    /// Fresh random bytes (base64, at least 64 bytes) credited to the kernel's entropy pool before a reseed.
    pub entropy_base64: String,
    /// Host wall clock when sent, nanoseconds since the Unix epoch.
    pub wall_clock_ns: u64,
    /// New hostname.
    pub hostname: String,
    /// New `/etc/machine-id`: 32 lower-case hexadecimal digits.
    pub machine_id: String,
    /// Grows by one with each clone or fork along a lineage; written to `/run/offshoot/generation`.
    pub generation: u64,
    /// New environment for processes started from now on, replacing the previous set.
    #[serde(default)]
    pub env: std::collections::BTreeMap<String, String>,
}
