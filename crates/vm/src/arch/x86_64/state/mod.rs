//! Complete vCPU and VM state, read from KVM into ordinary memory and loaded into a new VM.
//!
//! ```text
//! vCPUs stopped ─ save_vcpu (each) ─ save_vm ─ fork(2) ─┬ parent runs on
//!                                                       └ new VM, vCPUs ─ load_clock ─ load_vcpu (each) ─ load_vm ─ run
//! ```
//!
//! A vCPU that left for I/O must have completed it (`KVM_RUN` once more with `immediate_exit`) before it is saved:
//! until then KVM keeps part of its state where nobody can read it.
//!
//! **Time.** Guest time stands still between [`save_vm`] and [`load_clock`]: kvmclock goes on at its saved value, every
//! TSC at what it was at that instant. All TSCs are moved by the same distance, so that vCPUs whose TSCs agreed before
//! agree after. Where KVM keeps no offsets because the host's TSC is unstable, the TSC is an MSR like others, and KVM brings
//! vCPUs into step that are loaded within a second. Wall time is behind afterwards; setting it is the identity's task.
//!
//! **MSRs.** Saved is what `KVM_GET_MSR_INDEX_LIST` names and `msrs::UNLISTED`, without Hyper-V's, which our CPUID keeps from the guest, and
//! without what this KVM does not let a vCPU with our CPUID read, or does not take back though the value is its own (host
//! properties and counters, not state); the latter are found once, by [`StateTraits::probe`]. Loaded is what differs from a fresh vCPU with the same CPUID: such a vCPU is what it is loaded
//! into; so is other small state. An MSR that is refused then is an error: a guest that silently lost state would fail much later.

mod load;
mod msrs;
mod save;
mod sys;

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, Msrs, Xsave, kvm_clock_data, kvm_debugregs, kvm_irqchip, kvm_lapic_state,
    kvm_mp_state, kvm_msr_entry, kvm_pit_state2, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd};

pub use self::load::{TscPlan, load_clock, load_vcpu, load_vm};
pub use self::save::{save_vcpu, save_vm};
use super::cpuid::{self, CpuidError};

/// What this host's KVM can save; found once for a process tree.
#[derive(Debug, Clone)]
pub struct StateTraits {
    /// MSRs that are state, without `msrs::TSC_DEADLINE` and, where there is the offset attribute, `msrs::TSC`.
    msr_indices: Vec<u32>,
    /// What a fresh vCPU has in them, in the same order.
    fresh_msrs: Vec<u64>,
    /// Words of the extended state beyond its first 4096 bytes.
    xsave_extra_words: usize,
    /// The TSC is saved and loaded as an offset.
    tsc_offset: bool,
    /// The guest has `msrs::TSC_DEADLINE`.
    tsc_deadline: bool,
    /// What else a fresh vCPU has.
    fresh: Fresh,
}

/// Small state of a fresh vCPU. What equals it is not loaded: each ioctl costs as much as entering the vCPU's context.
#[derive(Debug, Clone)]
struct Fresh {
    /// Of the boot vCPU; the others wait for INIT.
    mp_state: kvm_mp_state,
    xcrs: kvm_xcrs,
    debugregs: kvm_debugregs,
    events: kvm_vcpu_events,
    tsc_khz: u32,
}

/// State of one vCPU.
#[derive(Debug, Clone)]
pub struct VcpuState {
    cpuid: CpuId,
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    xcrs: kvm_xcrs,
    xsave: Xsave,
    debugregs: kvm_debugregs,
    lapic: kvm_lapic_state,
    events: kvm_vcpu_events,
    /// All of them.
    msrs: Vec<kvm_msr_entry>,
    /// Those of `msrs` that differ from a fresh vCPU's, ready to be written.
    changed_msrs: Vec<Msrs>,
    /// To be written after the local APIC; `None`: the guest has no such MSR.
    tsc_deadline: Option<u64>,
    /// Added to the host's TSC; `None`: the TSC is among `msrs`.
    tsc_offset: Option<u64>,
    tsc_khz: u32,
    differs: Differs,
}

/// Which small parts differ from a fresh vCPU's, and so must be loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Differs {
    mp_state: bool,
    xcrs: bool,
    debugregs: bool,
    events: bool,
    tsc_khz: bool,
}

impl VcpuState {
    /// The general registers.
    pub fn regs(&self) -> &kvm_regs {
        &self.regs
    }

    /// All saved MSRs.
    pub fn msrs(&self) -> &[kvm_msr_entry] {
        &self.msrs
    }

    /// How many MSRs loading has to write.
    pub fn changed_msr_count(&self) -> usize {
        self.changed_msrs.iter().map(|batch| batch.as_slice().len()).sum()
    }
}

/// State of one VM's interrupt controllers, timer and clock.
#[derive(Debug, Clone)]
pub struct VmState {
    /// Both 8259s and the I/O APIC, by chip id.
    irqchips: [kvm_irqchip; 3],
    pit: kvm_pit_state2,
    clock: kvm_clock_data,
    /// The host's TSC at the instant of `clock`.
    host_tsc: u64,
}

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
    /// This KVM cannot save everything.
    #[error("kvm has no {capability}; offshoot needs linux 6.1 or newer")]
    Lacks {
        /// The capability.
        capability: &'static str,
    },
    /// The probe's CPUID could not be made.
    #[error("could not make the cpuid of a fresh vcpu")]
    Cpuid(#[from] CpuidError),
    /// An MSR could be read when probed, but not now.
    #[error("kvm refused to read msr {index:#x}")]
    MsrUnreadable {
        /// Which.
        index: u32,
    },
    /// An MSR's saved value was not taken.
    #[error("kvm refused to set msr {index:#x} to {value:#x}")]
    MsrRefused {
        /// Which.
        index: u32,
        /// The saved value.
        value: u64,
    },
}

impl StateError {
    fn kvm(action: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |source| Self::Kvm { action, source }
    }
}

impl StateTraits {
    /// Asks KVM, by means of a VM of its own. Cost: that of making a VM; a template's clones inherit the answer.
    ///
    /// # Errors
    /// Says what failed, or what this KVM lacks.
    pub fn probe(kvm: &Kvm) -> Result<Self, StateError> {
        let vm = kvm.create_vm().map_err(StateError::kvm("create a vm"))?;
        vm.create_irq_chip().map_err(StateError::kvm("create an irqchip"))?;
        let vcpu = vm.create_vcpu(0).map_err(StateError::kvm("create a vcpu"))?;
        vcpu.set_cpuid2(&cpuid::for_vcpu(kvm, 0, 1)?).map_err(StateError::kvm("set cpuid"))?;

        let xsave_bytes = usize::try_from(vm.check_extension_int(Cap::Xsave2)).unwrap_or(0);
        if xsave_bytes < size_of::<kvm_xsave>() {
            return Err(StateError::Lacks { capability: "KVM_CAP_XSAVE2" });
        }
        let xsave_extra_words = (xsave_bytes - size_of::<kvm_xsave>()).div_ceil(size_of::<u32>());
        let fresh = Fresh {
            mp_state: vcpu.get_mp_state().map_err(StateError::kvm("read the run state"))?,
            xcrs: vcpu.get_xcrs().map_err(StateError::kvm("read the extended control registers"))?,
            debugregs: vcpu.get_debug_regs().map_err(StateError::kvm("read the debug registers"))?,
            events: vcpu.get_vcpu_events().map_err(StateError::kvm("read pending events"))?,
            tsc_khz: vcpu.get_tsc_khz().map_err(StateError::kvm("read the tsc frequency"))?,
        };
        // Last of what is read here: it moves the vCPU's clock.
        let tsc_offset = sys::keeps_tsc_offset(&vcpu);
        let (msrs, tsc_deadline) = Self::probe_msrs(kvm, &vcpu, tsc_offset)?;
        Ok(Self {
            msr_indices: msrs.iter().map(|msr| msr.index).collect(),
            fresh_msrs: msrs.iter().map(|msr| msr.data).collect(),
            xsave_extra_words,
            tsc_offset,
            tsc_deadline,
            fresh,
        })
    }

    /// The fresh values of all MSRs that are state, TSC first; and whether there is a TSC deadline.
    fn probe_msrs(
        kvm: &Kvm,
        vcpu: &VcpuFd,
        tsc_offset: bool,
    ) -> Result<(Vec<kvm_msr_entry>, bool), StateError> {
        let list = kvm.get_msr_index_list().map_err(StateError::kvm("list msrs"))?;
        let mut indices = list.as_slice().to_vec();
        let tsc_deadline = indices.contains(&msrs::TSC_DEADLINE);
        indices.extend(msrs::UNLISTED.iter().cloned().flatten());
        indices.sort_unstable();
        indices.dedup();
        indices.retain(|&index| {
            index != msrs::TSC_DEADLINE && index != msrs::TSC && !msrs::HYPERV.contains(&index)
        });
        let readable = msrs::read_tolerantly(vcpu, &indices)?;
        let mut state = msrs::writable(vcpu, &readable)?;
        if !tsc_offset {
            // Its fresh value is no default: all ones never equals a saved one, so that it is always written.
            state.insert(0, kvm_msr_entry { index: msrs::TSC, data: u64::MAX, ..Default::default() });
        }
        Ok((state, tsc_deadline))
    }

    /// An empty extended state area of the right size.
    fn xsave_area(&self) -> Xsave {
        Xsave::new(self.xsave_extra_words).expect("the size is a few KiB")
    }
}

#[cfg(test)]
mod tests;
