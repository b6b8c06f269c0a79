//! What `offshoot doctor` measures: can this host's KVM run Linux?

use serde::{Deserialize, Serialize};

/// A KVM capability Offshoot needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capability {
    /// `KVM_CAP_…`.
    pub name: String,
    /// Whether this host has it.
    pub present: bool,
}

/// One kernel-mode instruction that was tried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelInstruction {
    /// Mnemonic.
    pub name: String,
    /// Whether it did what the manual says.
    pub ok: bool,
    /// What happened instead.
    pub detail: String,
}

/// The findings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// `/dev/kvm` could be opened.
    pub kvm_opens: bool,
    /// `KVM_GET_API_VERSION`.
    pub api_version: Option<i32>,
    /// Why the probe could not go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Needed capabilities.
    pub capabilities: Vec<Capability>,
    /// Speed of guest user-mode code, million instructions a second.
    pub user_mips: Option<f64>,
    /// Speed of guest kernel-mode code, million instructions a second.
    pub kernel_mips: Option<f64>,
    /// Kernel-mode instructions that were tried.
    pub kernel_instructions: Vec<KernelInstruction>,
    /// Whether a Linux guest can run here.
    pub runs_linux: bool,
    /// One line for people.
    pub reason: String,
}

/// Probes this host. Takes at most a few seconds, whatever the guest does.
pub fn run() -> Report {
    unimplemented!("being written")
}
