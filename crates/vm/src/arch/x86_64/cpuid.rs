//! The guest's CPUID.

use kvm_bindings::CpuId;
use kvm_ioctls::Kvm;

/// Why CPUID could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CpuidError {
    /// KVM refused to list what it supports.
    #[error("kvm refused to list the supported cpuid leaves")]
    Supported(#[source] kvm_ioctls::Error),
}

/// CPUID of vCPU `index` of `vcpus`, from what KVM supports.
///
/// # Errors
/// Fails if KVM does not say what it supports.
pub fn for_vcpu(_kvm: &Kvm, _index: u8, _vcpus: u8) -> Result<CpuId, CpuidError> {
    unimplemented!("being written")
}
