//! What the lab's two sides say to each other.
//!
//! The host puts a [`Job`] into the lab's initramfs. Three virtio-serial ports carry the rest: the command's standard
//! output and error as they are, and a control port with one JSON object a line, [`FromLab`] outwards and [`ToLab`]
//! inwards. A fourth port carries the terminal's keystrokes into an interactive lab.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Where the job is in the initramfs.
pub const JOB_FILE: &str = "/job.json";
/// Port of the command's standard output, or of the terminal's.
pub const STDOUT_PORT: &str = "lab.stdout";
/// Port of the command's standard error.
pub const STDERR_PORT: &str = "lab.stderr";
/// Port of the JSON lines.
pub const CONTROL_PORT: &str = "lab.control";
/// Port of the terminal's keystrokes.
pub const STDIN_PORT: &str = "lab.stdin";
/// All ports, in the order of their numbers.
pub const PORTS: [&str; 4] = [CONTROL_PORT, STDOUT_PORT, STDERR_PORT, STDIN_PORT];

/// What the lab shall do.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Working directory, in the lab as on the host.
    pub cwd: PathBuf,
    /// Environment on top of the lab's own.
    pub env: BTreeMap<String, String>,
    /// Run on a terminal of this size.
    pub terminal: Option<TerminalSize>,
    /// Directories of the host, at the same path.
    pub shares: Vec<Share>,
    /// The kernel's modules directory, within one of the shares.
    pub modules_dir: PathBuf,
    /// Limit of the writable part of the root, and of `/tmp` and `/dev/shm` each, MiB.
    pub tmpfs_mib: u64,
}

/// A directory shared with the lab.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// virtiofs tag.
    pub tag: String,
    /// Absolute path, on both sides.
    pub path: PathBuf,
}

/// Size of a terminal, characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub columns: u16,
}

/// What the lab tells.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromLab {
    /// The lab is up, the command is about to start.
    Up {
        /// Whether `/dev/kvm` opens.
        kvm: bool,
    },
    /// The command has ended, and all it wrote to the shares is written.
    Exited {
        /// Exit status, or 128 and the signal that killed it.
        code: u8,
        /// What it wrote to standard output, bytes; the host waits until it has them.
        stdout_bytes: u64,
        /// The same for standard error.
        stderr_bytes: u64,
    },
    /// The command could not be started.
    NotStarted {
        /// Why.
        message: String,
    },
}

/// What the lab is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToLab {
    /// The terminal has another size.
    Resize(TerminalSize),
}
