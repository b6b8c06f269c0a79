//! The daemon's answers (`docs/api.md`), read tolerantly: what a field is missing from prints as unknown.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::failure::Report;

/// Memory of a sandbox or template, KiB.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// Proportional set size.
    pub pss_kib: Option<u64>,
    /// Pages nobody else maps.
    pub private_kib: Option<u64>,
    /// Pages shared with layers and siblings.
    pub shared_kib: Option<u64>,
    /// Page tables.
    pub page_table_kib: Option<u64>,
}

/// Times of a sandbox's creation, milliseconds.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub struct StopLines {
    /// The guest's agent answered.
    pub agent_replied_ms: Option<f64>,
    /// The guest has its own identity.
    pub identity_applied_ms: Option<f64>,
}

/// A sandbox.
#[derive(Debug, Clone, Deserialize)]
pub struct Sandbox {
    /// Its id.
    pub id: String,
    /// Its name, if it was given one.
    #[serde(default)]
    pub name: Option<String>,
    /// `starting`, `running` or `dead`.
    #[serde(default)]
    pub state: String,
    /// Why it is dead.
    #[serde(default)]
    pub cause: Option<String>,
    /// The template at the root of its lineage.
    #[serde(default)]
    pub template: String,
    /// The sandbox it was forked from.
    #[serde(default)]
    pub parent: Option<String>,
    /// RFC 3339 text or seconds since the Unix epoch.
    #[serde(default)]
    pub created_at: Value,
    /// Times of its creation.
    #[serde(default)]
    pub stop_lines: StopLines,
    /// What it costs.
    #[serde(default)]
    pub memory: Memory,
}

/// `GET /sandboxes`.
#[derive(Debug, Deserialize)]
pub struct Sandboxes {
    /// All of them.
    pub sandboxes: Vec<Sandbox>,
}

/// An image.
#[derive(Debug, Deserialize)]
pub struct Image {
    /// Its name.
    pub name: String,
    /// RFC 3339 text or seconds since the Unix epoch.
    #[serde(default)]
    pub created_at: Value,
    /// Version of its kernel.
    #[serde(default)]
    pub kernel_version: Option<String>,
    /// Size of its root disk, MiB.
    #[serde(default)]
    pub disk_mib: Option<u64>,
    /// Digest of its content.
    #[serde(default)]
    pub digest: Option<String>,
}

/// `GET /images`.
#[derive(Debug, Deserialize)]
pub struct Images {
    /// All of them.
    pub images: Vec<Image>,
}

/// A template.
#[derive(Debug, Deserialize)]
pub struct Template {
    /// Its name.
    pub name: String,
    /// The image it was booted from.
    #[serde(default)]
    pub image: String,
    /// RFC 3339 text or seconds since the Unix epoch.
    #[serde(default)]
    pub created_at: Value,
    /// Guest memory, MiB.
    #[serde(default)]
    pub memory_mib: Option<u64>,
    /// Number of vCPUs.
    #[serde(default)]
    pub vcpus: Option<u64>,
    /// Page size of guest memory.
    #[serde(default)]
    pub page_size: Option<String>,
    /// Pages stored in its layers, bytes.
    #[serde(default)]
    pub layer_bytes: Option<u64>,
    /// Ids of its live clones.
    #[serde(default)]
    pub clones: Vec<String>,
}

/// `GET /templates`.
#[derive(Debug, Deserialize)]
pub struct Templates {
    /// All of them.
    pub templates: Vec<Template>,
}

/// What became of one child.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It runs.
    Ok(Box<Sandbox>),
    /// It could not be made.
    Error(Report),
}

/// Times of a fork, milliseconds.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ForkTimes {
    /// How long the parent's vCPUs stood still.
    pub pause_ms: Option<f64>,
}

/// Answer to creating or forking.
#[derive(Debug, Deserialize)]
pub struct Outcomes {
    /// One for each child, in order.
    pub results: Vec<Outcome>,
    /// Of a fork.
    #[serde(default)]
    pub times: ForkTimes,
}

/// A node of the lineage.
#[derive(Debug, Deserialize)]
pub struct Node {
    /// `template` or `sandbox`.
    #[serde(default)]
    pub kind: String,
    /// Its id or name.
    pub id: String,
    /// Its state.
    #[serde(default)]
    pub state: String,
    /// What was made from it.
    #[serde(default)]
    pub children: Vec<Node>,
}

/// `GET /tree`.
#[derive(Debug, Deserialize)]
pub struct Tree {
    /// The templates, and sandboxes whose template is gone.
    pub roots: Vec<Node>,
}

/// One line of a long call's answer.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Work {
    /// Where it stands.
    Progress {
        /// Short name of the step.
        step: String,
        /// What is being done.
        #[serde(default)]
        message: String,
        /// Parts done.
        #[serde(default)]
        done: Option<u64>,
        /// Parts in all.
        #[serde(default)]
        total: Option<u64>,
    },
    /// It succeeded.
    Result {
        /// What was made.
        value: Value,
    },
    /// It failed.
    Error {
        /// Why.
        error: Report,
    },
    /// A line of a newer daemon.
    #[serde(other)]
    Unknown,
}

/// Body of `POST /templates`.
#[derive(Debug, Serialize)]
pub struct NewTemplate {
    /// Its name.
    pub name: String,
    /// Image to boot.
    pub image: String,
    /// Guest memory, MiB.
    pub memory_mib: u32,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Page size of guest memory.
    pub page_size: offshoot_protocol::control::PageSize,
    /// Bound of a sandbox's private disk overlay, MiB.
    pub overlay_limit_mib: u32,
    /// Appended to the kernel command line.
    pub cmdline: String,
    /// What to run before freezing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warm: Option<Warm>,
    /// Bound of the warm-up, milliseconds.
    pub warm_timeout_ms: u64,
    /// Bound of the boot, milliseconds.
    pub boot_timeout_ms: u64,
}

/// A warm-up.
#[derive(Debug, Serialize)]
pub struct Warm {
    /// Python source text.
    pub source: String,
    /// File name for tracebacks.
    pub file_name: String,
}
