//! Reading state.

use kvm_bindings::{
    KVM_CLOCK_HOST_TSC, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_irqchip,
    kvm_lapic_state, kvm_msr_entry,
};
use kvm_ioctls::{VcpuFd, VmFd};

use super::{Differs, KVM_MAX_CPUID_ENTRIES, StateError, StateTraits, VcpuState, VmState, msrs, sys};

/// Local APIC registers (Intel SDM vol. 3A, table 11-1).
const APIC_IRR: usize = 0x200;
const APIC_LVT_TIMER: usize = 0x320;
/// LVT timer: mask bit, mode field and its value "TSC deadline".
const LVT_MASKED: u32 = 1 << 16;
const LVT_TIMER_MODE: u32 = 3 << 17;
const LVT_TSC_DEADLINE: u32 = 2 << 17;
/// IA32_APIC_BASE: this is the boot processor.
const APIC_BASE_BSP: u64 = 1 << 8;
/// A deadline that has passed in every guest's time; zero would disarm.
const PASSED: u64 = 1;

/// Reads a stopped vCPU's state. Cost: 14 ioctls.
///
/// # Errors
/// Says which ioctl failed.
pub fn save_vcpu(vcpu: &VcpuFd, traits: &StateTraits) -> Result<VcpuState, StateError> {
    let kvm = StateError::kvm;
    // First: it makes KVM act on a pending INIT or SIPI, which changes the other state.
    let mp_state = vcpu.get_mp_state().map_err(kvm("read the run state"))?;
    let cpuid = vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES).map_err(kvm("read cpuid"))?;
    let regs = vcpu.get_regs().map_err(kvm("read the registers"))?;
    let sregs = vcpu.get_sregs().map_err(kvm("read the segment registers"))?;
    let xcrs = vcpu.get_xcrs().map_err(kvm("read the extended control registers"))?;
    let mut xsave = traits.xsave_area();
    sys::read_xsave(vcpu, &mut xsave).map_err(kvm("read the extended state"))?;
    let debugregs = vcpu.get_debug_regs().map_err(kvm("read the debug registers"))?;
    let all = msrs::read(vcpu, &traits.msr_indices)?;
    let changed: Vec<kvm_msr_entry> = all
        .iter()
        .zip(&traits.fresh_msrs)
        .filter(|(msr, fresh)| msr.data != **fresh)
        .map(|(msr, _)| *msr)
        .collect();
    // The deadline before the APIC: a timer that fires in between is then in both, and not lost.
    let deadline = if traits.tsc_deadline {
        msrs::read(vcpu, &[msrs::TSC_DEADLINE])?.first().map(|msr| msr.data)
    } else {
        None
    };
    let lapic = vcpu.get_lapic().map_err(kvm("read the local apic"))?;
    let events = vcpu.get_vcpu_events().map_err(kvm("read pending events"))?;
    let offset = if traits.tsc_offset {
        Some(sys::tsc_offset(vcpu).map_err(kvm("read the tsc offset"))?)
    } else {
        None
    };
    let tsc_khz = vcpu.get_tsc_khz().map_err(kvm("read the tsc frequency"))?;
    let boot_vcpu = sregs.apic_base & APIC_BASE_BSP != 0;
    let differs = Differs {
        mp_state: !boot_vcpu || mp_state != traits.fresh.mp_state,
        xcrs: xcrs != traits.fresh.xcrs,
        debugregs: debugregs != traits.fresh.debugregs,
        events: events != traits.fresh.events,
        tsc_khz: tsc_khz != traits.fresh.tsc_khz,
    };
    Ok(VcpuState {
        differs,
        tsc_deadline: deadline.map(|deadline| rearmed(deadline, &lapic)),
        cpuid,
        mp_state,
        regs,
        sregs,
        xcrs,
        xsave,
        debugregs,
        lapic,
        events,
        changed_msrs: msrs::batches(&changed),
        msrs: all,
        tsc_offset: offset,
        tsc_khz,
    })
}

/// The deadline to load. An armed timer that KVM counts as expired reads as zero, though its interrupt may not have
/// reached the APIC's request register yet; such a vCPU would wait for ever. It gets a deadline that has passed: at
/// worst one timer interrupt too many, which Linux takes for an early one and programs the timer again.
fn rearmed(deadline: u64, lapic: &kvm_lapic_state) -> u64 {
    let timer = register(lapic, APIC_LVT_TIMER);
    let waits = timer & LVT_MASKED == 0 && timer & LVT_TIMER_MODE == LVT_TSC_DEADLINE;
    let vector = timer & 0xff;
    let request = register(lapic, APIC_IRR + 0x10 * (vector as usize / 32));
    let requested = request & (1 << (vector % 32)) != 0;
    if deadline == 0 && waits && !requested { PASSED } else { deadline }
}

fn register(lapic: &kvm_lapic_state, offset: usize) -> u32 {
    let mut bytes = [0_u8; 4];
    for (byte, register) in bytes.iter_mut().zip(&lapic.regs[offset..]) {
        *byte = register.cast_unsigned();
    }
    u32::from_le_bytes(bytes)
}

/// Reads the VM's state, after all vCPUs have been saved. Guest time stands still from here on. Cost: 5 ioctls.
///
/// # Errors
/// Says which ioctl failed.
pub fn save_vm(vm: &VmFd) -> Result<VmState, StateError> {
    let chip = |chip_id| -> Result<kvm_irqchip, StateError> {
        let mut chip = kvm_irqchip { chip_id, ..Default::default() };
        vm.get_irqchip(&mut chip).map_err(StateError::kvm("read an interrupt controller"))?;
        Ok(chip)
    };
    let irqchips = [chip(KVM_IRQCHIP_PIC_MASTER)?, chip(KVM_IRQCHIP_PIC_SLAVE)?, chip(KVM_IRQCHIP_IOAPIC)?];
    let pit = vm.get_pit2().map_err(StateError::kvm("read the pit"))?;
    let clock = vm.get_clock().map_err(StateError::kvm("read the clock"))?;
    let host_tsc = if clock.flags & KVM_CLOCK_HOST_TSC != 0 { clock.host_tsc } else { sys::host_tsc() };
    Ok(VmState { irqchips, pit, clock, host_tsc })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lapic(timer: u32, requested: Option<u32>) -> kvm_lapic_state {
        let mut lapic = kvm_lapic_state::default();
        let mut put = |offset: usize, value: u32| {
            for (register, byte) in lapic.regs[offset..].iter_mut().zip(value.to_le_bytes()) {
                *register = byte.cast_signed();
            }
        };
        put(APIC_LVT_TIMER, timer);
        if let Some(vector) = requested {
            put(APIC_IRR + 0x10 * (vector as usize / 32), 1 << (vector % 32));
        }
        lapic
    }

    #[test]
    fn a_timer_that_expired_unseen_fires_at_once() {
        assert_eq!(rearmed(0, &lapic(LVT_TSC_DEADLINE | 0xec, None)), PASSED);
    }

    #[test]
    fn other_timers_stay_as_they_are() {
        assert_eq!(rearmed(12345, &lapic(LVT_TSC_DEADLINE | 0xec, None)), 12345);
        assert_eq!(rearmed(0, &lapic(LVT_TSC_DEADLINE | LVT_MASKED | 0xec, None)), 0);
        assert_eq!(rearmed(0, &lapic(0xec, None)), 0);
        assert_eq!(rearmed(0, &lapic(LVT_TSC_DEADLINE | 0xec, Some(0xec))), 0);
    }
}
