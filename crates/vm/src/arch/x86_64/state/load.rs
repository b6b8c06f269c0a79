//! Loading state into a new VM.
//!
//! Order, each step needing those before it: clock; then per vCPU CPUID (what the others are checked against), run
//! state, registers, segment registers (they place the local APIC), extended state, TSC, MSRs, local APIC (the timer's
//! mode), TSC deadline, events (setting registers clears a pending exception); then the interrupt controllers, which
//! may deliver to the APICs at once; last the PIT, which may raise an interrupt at once.

use kvm_bindings::{KVM_CLOCK_HOST_TSC, kvm_clock_data, kvm_msr_entry};
use kvm_ioctls::{VcpuFd, VmFd};

use super::{StateError, VcpuState, VmState, msrs, sys};

/// How the guest's TSCs go on in a new VM; made by [`load_clock`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TscPlan {
    /// How far the host's TSC has gone on since the state was saved, wrapping.
    elapsed_host_tsc: u64,
    /// How far kvmclock had gone on when that was read, nanoseconds.
    ahead_ns: u64,
}

impl TscPlan {
    /// The offset that lets a TSC go on where it was, as much ahead as kvmclock is.
    fn offset(&self, saved_offset: u64, tsc_khz: u32) -> u64 {
        let ahead = u128::from(self.ahead_ns) * u128::from(tsc_khz) / 1_000_000;
        saved_offset.wrapping_sub(self.elapsed_host_tsc).wrapping_add(ahead as u64)
    }
}

/// First step: sets the clock of a new VM whose vCPUs have all been created. Guest time goes on from here. Cost: 2
/// ioctls.
///
/// # Errors
/// Says which ioctl failed.
pub fn load_clock(vm: &VmFd, state: &VmState) -> Result<TscPlan, StateError> {
    // Without KVM_CLOCK_REALTIME: the clock does not catch up with the time in between.
    let clock = kvm_clock_data { clock: state.clock.clock, ..Default::default() };
    vm.set_clock(&clock).map_err(StateError::kvm("set the clock"))?;
    let set_at = sys::host_tsc();
    let now = vm.get_clock().map_err(StateError::kvm("read the clock back"))?;
    // Clock and TSC of one instant, if KVM can say.
    let (host_tsc, ahead_ns) = if now.flags & KVM_CLOCK_HOST_TSC != 0 {
        (now.host_tsc, now.clock.saturating_sub(state.clock.clock))
    } else {
        (set_at, 0)
    };
    Ok(TscPlan { elapsed_host_tsc: host_tsc.wrapping_sub(state.host_tsc), ahead_ns })
}

/// Second step: once for each vCPU, freshly created. Cost: 6 ioctls, and one for each
/// of MSRs, TSC deadline, run state, extended control registers, debug registers, events and TSC frequency that differs
/// from a fresh vCPU's.
///
/// # Errors
/// Says which ioctl failed, or which MSR was refused; the VM is then not to be run.
pub fn load_vcpu(vcpu: &VcpuFd, state: &VcpuState, plan: &TscPlan) -> Result<(), StateError> {
    let kvm = StateError::kvm;
    vcpu.set_cpuid2(&state.cpuid).map_err(kvm("set cpuid"))?;
    if state.differs.mp_state {
        vcpu.set_mp_state(state.mp_state).map_err(kvm("set the run state"))?;
    }
    vcpu.set_regs(&state.regs).map_err(kvm("set the registers"))?;
    vcpu.set_sregs(&state.sregs).map_err(kvm("set the segment registers"))?;
    if state.differs.xcrs {
        vcpu.set_xcrs(&state.xcrs).map_err(kvm("set the extended control registers"))?;
    }
    sys::write_xsave(vcpu, &state.xsave).map_err(kvm("set the extended state"))?;
    if state.differs.debugregs {
        vcpu.set_debug_regs(&state.debugregs).map_err(kvm("set the debug registers"))?;
    }
    if state.differs.tsc_khz {
        vcpu.set_tsc_khz(state.tsc_khz).map_err(kvm("set the tsc frequency"))?;
    }
    if let Some(offset) = state.tsc_offset {
        let offset = plan.offset(offset, state.tsc_khz);
        sys::set_tsc_offset(vcpu, offset).map_err(kvm("set the tsc offset"))?;
    }
    msrs::write(vcpu, &state.changed_msrs)?;
    vcpu.set_lapic(&state.lapic).map_err(kvm("set the local apic"))?;
    // Zero is what a fresh vCPU has.
    if let Some(data) = state.tsc_deadline.filter(|&deadline| deadline != 0) {
        let msr = kvm_msr_entry { index: msrs::TSC_DEADLINE, data, ..Default::default() };
        msrs::write(vcpu, &msrs::batches(&[msr]))?;
    }
    if state.differs.events {
        vcpu.set_vcpu_events(&state.events).map_err(kvm("set pending events"))?;
    }
    Ok(())
}

/// Last step: interrupt controllers and timer. Cost: 4 ioctls.
///
/// # Errors
/// Says which ioctl failed.
pub fn load_vm(vm: &VmFd, state: &VmState) -> Result<(), StateError> {
    for chip in &state.irqchips {
        vm.set_irqchip(chip).map_err(StateError::kvm("set an interrupt controller"))?;
    }
    vm.set_pit2(&state.pit).map_err(StateError::kvm("set the pit"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tsc_goes_on_where_it_was() {
        let plan = TscPlan { elapsed_host_tsc: 1000, ahead_ns: 0 };
        let (saved_host, saved_offset) = (5_000_u64, 0_u64.wrapping_sub(4_000));
        let at_save = saved_host.wrapping_add(saved_offset);
        let at_load = (saved_host + 1000).wrapping_add(plan.offset(saved_offset, 2_000_000));
        assert_eq!(at_load, at_save);
    }

    #[test]
    fn the_tsc_stays_in_step_with_the_clock() {
        let plan = TscPlan { elapsed_host_tsc: 1000, ahead_ns: 500 };
        // 500 ns at 2 GHz are 1000 ticks.
        assert_eq!(plan.offset(0, 2_000_000), 0);
    }
}
