//! What this folder's native tests share: skipping where `/dev/kvm` does not open, and small VMs.
#![allow(unsafe_code)]

use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_pit_config, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::memory_map::{self, Memory};
use super::{cpuid, payload};

/// KVM, or a printed reason why the test is skipped.
pub fn kvm() -> Option<Kvm> {
    match Kvm::new() {
        Ok(kvm) => Some(kvm),
        Err(error) => {
            eprintln!("skipped: /dev/kvm does not open: {error}");
            None
        }
    }
}

/// A VM over `mem`; keeps the memory alive as long as itself.
pub struct TestVm {
    pub vcpus: Vec<VcpuFd>,
    pub vm: VmFd,
    pub mem: Memory,
}

/// Sparse guest memory of `memory_mib` MiB.
pub fn memory(memory_mib: u32) -> Memory {
    Memory::from_ranges(&memory_map::regions(memory_mib)).unwrap()
}

/// A new VM with irqchip, PIT and `vcpus` vCPUs without CPUID.
pub fn bare_vm(kvm: &Kvm, mem: &Memory, vcpus: u8) -> TestVm {
    let vm = kvm.create_vm().unwrap();
    vm.set_tss_address(super::layout::KVM_TSS_BASE as usize).unwrap();
    vm.create_irq_chip().unwrap();
    vm.create_pit2(kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() }).unwrap();
    for (slot, region) in mem.iter().enumerate() {
        let slot = kvm_userspace_memory_region {
            slot: slot as u32,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
            flags: 0,
        };
        // SAFETY: the region is mapped as long as `mem`, a clone of which the returned value holds after `vm`.
        unsafe { vm.set_user_memory_region(slot) }.unwrap();
    }
    let vcpus = (0..vcpus).map(|index| vm.create_vcpu(u64::from(index)).unwrap()).collect();
    TestVm { vcpus, vm, mem: mem.clone() }
}

/// A VM ready to run the payload `code`.
pub fn payload_vm(kvm: &Kvm, memory_mib: u32, vcpus: u8, code: &[u8]) -> TestVm {
    let mem = memory(memory_mib);
    payload::load(&mem, code, vcpus).unwrap();
    let vm = bare_vm(kvm, &mem, vcpus);
    for (index, vcpu) in vm.vcpus.iter().enumerate() {
        let index = index as u8;
        vcpu.set_cpuid2(&cpuid::for_vcpu(kvm, index, vcpus).unwrap()).unwrap();
        payload::configure_vcpu(vcpu, index, vcpus, memory_map::total_bytes(&mem)).unwrap();
    }
    vm
}
