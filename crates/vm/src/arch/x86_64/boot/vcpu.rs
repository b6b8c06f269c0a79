//! vCPU registers at the kernel's entry.

use kvm_bindings::{Msrs, kvm_fpu, kvm_msr_entry, kvm_regs};
use kvm_ioctls::VcpuFd;
use vm_memory::GuestAddress;

use super::{BootError, Entry};
use crate::arch::x86_64::layout::{BOOT_PAGE_TABLES, BOOT_STACK_TOP};
use crate::arch::x86_64::segments::{self, Ring};

/// IA32_MTRR_DEF_TYPE.
const MSR_MTRR_DEF_TYPE: u32 = 0x2ff;
/// MTRRs on, all memory write-back. Off, Linux turns PAT off, too.
const MTRR_WRITE_BACK: u64 = (1 << 11) | 6;
/// Bit 1 of RFLAGS is always set; interrupts are off.
const RFLAGS: u64 = 2;
/// Local vector table entries of the two interrupt pins.
const APIC_LVT_LINT0: usize = 0x350;
const APIC_LVT_LINT1: usize = 0x360;
/// Delivery modes: through the 8259, and non-maskable.
const MODE_EXTINT: u32 = 7 << 8;
const MODE_NMI: u32 = 4 << 8;
/// Delivery mode and mask bit.
const LVT_MODE_AND_MASK: u32 = (7 << 8) | (1 << 16);

fn kvm(action: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> BootError {
    move |source| BootError::Kvm { action, source }
}

/// Sets the boot vCPU to the kernel's 64-bit entry point. CPUID must have been set.
///
/// # Errors
/// Says which ioctl failed.
pub fn configure_bsp(vcpu: &VcpuFd, entry: &Entry) -> Result<(), BootError> {
    configure_ap(vcpu)?;
    let mut sregs = vcpu.get_sregs().map_err(kvm("read the segment registers"))?;
    segments::enter_long_mode(&mut sregs, Ring::Kernel, GuestAddress(BOOT_PAGE_TABLES));
    vcpu.set_sregs(&sregs).map_err(kvm("set the segment registers"))?;
    let regs = kvm_regs {
        rip: entry.rip.0,
        rsi: entry.boot_params.0,
        rsp: BOOT_STACK_TOP,
        rflags: RFLAGS,
        ..Default::default()
    };
    vcpu.set_regs(&regs).map_err(kvm("set the registers"))?;
    // As after FNINIT and reset.
    let fpu = kvm_fpu { fcw: 0x37f, mxcsr: 0x1f80, ..Default::default() };
    vcpu.set_fpu(&fpu).map_err(kvm("set the floating point state"))
}

/// Prepares a further vCPU, which the guest starts by INIT and SIPI. CPUID must have been set.
///
/// # Errors
/// Says which ioctl failed.
pub fn configure_ap(vcpu: &VcpuFd) -> Result<(), BootError> {
    let mtrr = kvm_msr_entry { index: MSR_MTRR_DEF_TYPE, data: MTRR_WRITE_BACK, ..Default::default() };
    let msrs = Msrs::from_entries(&[mtrr]).expect("one entry is fewer than the limit");
    vcpu.set_msrs(&msrs).map_err(kvm("set the memory types"))?;
    let mut lapic = vcpu.get_lapic().map_err(kvm("read the local apic"))?;
    for (offset, mode) in [(APIC_LVT_LINT0, MODE_EXTINT), (APIC_LVT_LINT1, MODE_NMI)] {
        let mut bytes = [0_u8; 4];
        for (byte, register) in bytes.iter_mut().zip(&lapic.regs[offset..]) {
            *byte = register.cast_unsigned();
        }
        let entry = (u32::from_le_bytes(bytes) & !LVT_MODE_AND_MASK) | mode;
        for (register, byte) in lapic.regs[offset..].iter_mut().zip(entry.to_le_bytes()) {
            *register = byte.cast_signed();
        }
    }
    vcpu.set_lapic(&lapic).map_err(kvm("set the local apic"))
}
