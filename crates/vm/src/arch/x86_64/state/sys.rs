//! The few ioctls that need `unsafe`: the per-vCPU TSC attribute, the extended state area, the host's TSC.
#![allow(unsafe_code)]

use std::os::fd::AsRawFd;

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, Xsave, kvm_device_attr};
use kvm_ioctls::{Error, VcpuFd};

/// `_IOW(KVMIO, 0xe1, struct kvm_device_attr)` and its neighbour (include/uapi/linux/kvm.h).
const KVM_SET_DEVICE_ATTR: libc::c_ulong = 0x4018_aee1;
const KVM_GET_DEVICE_ATTR: libc::c_ulong = 0x4018_aee2;
const _: () = assert!(size_of::<kvm_device_attr>() == 0x18);

/// Calls `request` with the TSC offset attribute and the address of `value`.
fn tsc_attribute(vcpu: &VcpuFd, request: libc::c_ulong, value: &mut u64) -> Result<(), Error> {
    let attribute = kvm_device_attr {
        group: KVM_VCPU_TSC_CTRL,
        attr: u64::from(KVM_VCPU_TSC_OFFSET),
        addr: std::ptr::from_mut(value) as u64,
        flags: 0,
    };
    // SAFETY: both requests read `attribute` and move the eight bytes of `value`, which is borrowed
    // exclusively for the call (Documentation/virt/kvm/devices/vcpu.rst, 4.1). Another attribute could be longer.
    let result = unsafe { libc::ioctl(vcpu.as_raw_fd(), request, &raw const attribute) };
    if result == 0 { Ok(()) } else { Err(Error::last()) }
}

/// Whether this KVM has the TSC offset attribute (Linux 5.16) and keeps what it is given. It does not where the host's TSC
/// is unstable: there it makes the offset anew whenever it loads the vCPU (`kvm_arch_vcpu_load`).
pub fn keeps_tsc_offset(vcpu: &VcpuFd) -> bool {
    const SOME: u64 = 1 << 40;
    set_tsc_offset(vcpu, SOME).and_then(|()| tsc_offset(vcpu)) == Ok(SOME)
}

/// What is added to the host's TSC, wrapping.
pub fn tsc_offset(vcpu: &VcpuFd) -> Result<u64, Error> {
    let mut offset = 0;
    tsc_attribute(vcpu, KVM_GET_DEVICE_ATTR, &mut offset)?;
    Ok(offset)
}

/// Sets what is added to the host's TSC.
pub fn set_tsc_offset(vcpu: &VcpuFd, mut offset: u64) -> Result<(), Error> {
    tsc_attribute(vcpu, KVM_SET_DEVICE_ATTR, &mut offset)
}

/// Reads the extended state into an area that [`super::StateTraits::probe`] found to be large enough.
pub fn read_xsave(vcpu: &VcpuFd, area: &mut Xsave) -> Result<(), Error> {
    // SAFETY: `area` was made with the size KVM_CAP_XSAVE2 named. That size grows only when a process asks for AMX by
    // arch_prctl(ARCH_REQ_XCOMP_GUEST_PERM), which nothing here does; whoever adds it must probe afterwards.
    unsafe { vcpu.get_xsave2(area) }
}

/// Writes the extended state.
pub fn write_xsave(vcpu: &VcpuFd, area: &Xsave) -> Result<(), Error> {
    // SAFETY: as for `read_xsave`: KVM reads as many bytes as KVM_CAP_XSAVE2 named, and `area` has them.
    unsafe { vcpu.set_xsave2(area) }
}

/// The host's time stamp counter.
pub fn host_tsc() -> u64 {
    // SAFETY: every x86-64 processor has RDTSC, and Linux lets processes use it unless they ask otherwise.
    unsafe { std::arch::x86_64::_rdtsc() }
}
