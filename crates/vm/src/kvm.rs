//! Making a KVM VM over guest memory that exists already.
#![allow(unsafe_code)]

use std::sync::Arc;

use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_pit_config, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VmFd};
use offshoot_memory::GuestRam;

use crate::arch::x86_64::layout::{KVM_IDENTITY_MAP_BASE, KVM_TSS_BASE};
use crate::devices::{IrqLevel, IrqSink};

/// Why a KVM VM could not be made.
#[derive(Debug, thiserror::Error)]
#[error("kvm refused to {action}")]
pub struct KvmError {
    /// What was attempted.
    pub action: &'static str,
    /// KVM's answer.
    pub source: kvm_ioctls::Error,
}

impl KvmError {
    /// For `map_err`.
    pub fn during(action: &'static str) -> impl Fn(kvm_ioctls::Error) -> Self {
        move |source| Self { action, source }
    }
}

/// Opens `/dev/kvm`.
///
/// # Errors
/// KVM is missing or may not be opened.
pub fn open() -> Result<Kvm, KvmError> {
    Kvm::new()
        .map_err(KvmError::during("open /dev/kvm (is the kvm module loaded, and may this user open it?)"))
}

/// Makes a VM with in-kernel interrupt controllers and timer and one memory slot for each region of `ram`.
///
/// # Errors
/// As [`KvmError`].
pub fn create_vm(kvm: &Kvm, ram: &GuestRam) -> Result<Arc<VmFd>, KvmError> {
    let vm = loop {
        match kvm.create_vm() {
            Err(error) if error.errno() == libc::EINTR => {}
            result => break result.map_err(KvmError::during("create a vm"))?,
        }
    };
    vm.set_identity_map_address(KVM_IDENTITY_MAP_BASE).map_err(KvmError::during("place the identity map"))?;
    vm.set_tss_address(KVM_TSS_BASE as usize).map_err(KvmError::during("place the task state segment"))?;
    vm.create_irq_chip().map_err(KvmError::during("create the interrupt controllers"))?;
    let pit = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
    vm.create_pit2(pit).map_err(KvmError::during("create the interval timer"))?;
    for (slot, (base, region)) in ram.regions().iter().enumerate() {
        let slot = kvm_userspace_memory_region {
            slot: slot as u32,
            flags: 0,
            guest_phys_addr: base.0,
            memory_size: region.len() as u64,
            userspace_addr: region.host_address().as_ptr() as u64,
        };
        // SAFETY: the region is a live mapping of exactly this size. The machine that owns it drops its VM first; in a
        // forked child the mapping exists at the same address. Dropping `ram` before the VM would break this.
        unsafe { vm.set_user_memory_region(slot) }.map_err(KvmError::during("map guest memory"))?;
    }
    Ok(Arc::new(vm))
}

/// Interrupts of one KVM VM.
pub struct KvmIrqs(pub Arc<VmFd>);

impl IrqSink for KvmIrqs {
    fn set_level(&self, gsi: u32, level: IrqLevel) {
        let set = self.0.set_irq_line(gsi, level == IrqLevel::High);
        debug_assert!(set.is_ok(), "an in-kernel interrupt controller takes every line below 24");
    }
}
