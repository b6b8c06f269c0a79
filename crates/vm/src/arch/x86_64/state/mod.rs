//! Complete vCPU and VM state, read from KVM into ordinary memory and loaded into a new VM.

use kvm_ioctls::{Kvm, VcpuFd, VmFd};

/// What this host's KVM can save; found once for a process tree.
#[derive(Debug, Clone)]
pub struct StateTraits {}

/// State of one vCPU.
#[derive(Debug, Clone)]
pub struct VcpuState {}

/// State of one VM's interrupt controllers, timer and clock.
#[derive(Debug, Clone)]
pub struct VmState {}

/// How the guest's TSCs go on in a new VM; made by [`load_clock`].
#[derive(Debug, Clone, Copy)]
pub struct TscPlan {}

/// Why state could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// KVM refused.
    #[error("kvm refused to {action}")]
    Kvm {
        /// What was attempted.
        action: &'static str,
        /// Its answer.
        source: kvm_ioctls::Error,
    },
}

impl StateTraits {
    /// Asks KVM once.
    ///
    /// # Errors
    /// Says which question failed.
    pub fn probe(_kvm: &Kvm) -> Result<Self, StateError> {
        unimplemented!("being written")
    }
}

/// Reads a stopped vCPU's state.
///
/// # Errors
/// Says which ioctl failed.
pub fn save_vcpu(_vcpu: &VcpuFd, _traits: &StateTraits) -> Result<VcpuState, StateError> {
    unimplemented!("being written")
}

/// Reads the VM's state; after all vCPUs have stopped.
///
/// # Errors
/// Says which ioctl failed.
pub fn save_vm(_vm: &VmFd) -> Result<VmState, StateError> {
    unimplemented!("being written")
}

/// First step of loading: sets the clock of a new VM whose vCPUs are all created.
///
/// # Errors
/// Says which ioctl failed.
pub fn load_clock(_vm: &VmFd, _state: &VmState) -> Result<TscPlan, StateError> {
    unimplemented!("being written")
}

/// Second step: once for each vCPU.
///
/// # Errors
/// Says which ioctl failed.
pub fn load_vcpu(_vcpu: &VcpuFd, _state: &VcpuState, _plan: &TscPlan) -> Result<(), StateError> {
    unimplemented!("being written")
}

/// Last step: interrupt controllers and timer, which may deliver to the vCPUs at once.
///
/// # Errors
/// Says which ioctl failed.
pub fn load_vm(_vm: &VmFd, _state: &VmState) -> Result<(), StateError> {
    unimplemented!("being written")
}
