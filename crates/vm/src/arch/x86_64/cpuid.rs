//! The guest's CPUID: what KVM supports, with this vCPU's place in the topology.
//!
//! Hidden on purpose, because their state would have to be saved or would outlive a fork: the PMU (its MSRs), nested
//! virtualisation (`KVM_GET_NESTED_STATE`), MONITOR/MWAIT (exits), and KVM's asynchronous page faults (a child would
//! wait for completions that only its parent's KVM knows). The guest is one package of `vcpus` cores with one thread each.
//!
//! The same CPUID must be loaded into every clone: it is part of [`super::state::VcpuState`].

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::{Cap, Kvm};

/// Why CPUID could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CpuidError {
    /// KVM refused to list what it supports.
    #[error("kvm refused to list the cpuid leaves it supports")]
    Supported(#[source] kvm_ioctls::Error),
    /// More leaves than `KVM_SET_CPUID2` takes.
    #[error("the guest's cpuid has {count} leaves, more than kvm takes")]
    TooMany {
        /// How many.
        count: usize,
    },
}

/// CPUID of vCPU `index` of `vcpus`; its APIC id is `index`.
///
/// # Errors
/// Fails if KVM does not say what it supports.
pub fn for_vcpu(kvm: &Kvm, index: u8, vcpus: u8) -> Result<CpuId, CpuidError> {
    let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(CpuidError::Supported)?;
    let tsc_deadline = kvm.check_extension(Cap::TscDeadlineTimer);
    let entries = guest_entries(supported.as_slice(), Topology { index, vcpus, tsc_deadline });
    CpuId::from_entries(&entries).map_err(|_| CpuidError::TooMany { count: entries.len() })
}

/// What differs between guests and vCPUs.
#[derive(Debug, Clone, Copy)]
struct Topology {
    index: u8,
    vcpus: u8,
    tsc_deadline: bool,
}

impl Topology {
    /// Bits of the APIC id that number cores within the package.
    fn core_bits(self) -> u32 {
        u32::from(self.vcpus.max(1)).next_power_of_two().trailing_zeros()
    }

    fn apic_id(self) -> u32 {
        u32::from(self.index)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Vendor {
    Intel,
    Amd,
}

/// Leaf 1 ECX (Intel SDM vol. 2A, CPUID).
mod leaf1_ecx {
    pub const DTES64: u32 = 1 << 2;
    pub const MONITOR: u32 = 1 << 3;
    pub const VMX: u32 = 1 << 5;
    pub const PDCM: u32 = 1 << 15;
    pub const X2APIC: u32 = 1 << 21;
    pub const TSC_DEADLINE: u32 = 1 << 24;
    pub const HYPERVISOR: u32 = 1 << 31;
}
/// Leaf 1 EDX: debug store.
const LEAF1_EDX_DS: u32 = 1 << 21;
/// Leaf 1 EDX: EBX bits 16 to 23 are valid.
const LEAF1_EDX_HTT: u32 = 1 << 28;
/// Leaf 0x8000_0001 ECX: SVM, and the performance counter extensions (AMD APM vol. 3, appendix E).
const EXT1_ECX_HIDDEN: u32 = (1 << 2) | (1 << 23) | (1 << 24) | (1 << 28);
/// Leaf 0x4000_0001 EAX: KVM_FEATURE_ASYNC_PF, _ASYNC_PF_VMEXIT, _ASYNC_PF_INT (Documentation/virt/kvm/x86/cpuid.rst).
const KVM_ASYNC_PF: u32 = (1 << 4) | (1 << 10) | (1 << 14);

fn guest_entries(supported: &[kvm_cpuid_entry2], topology: Topology) -> Vec<kvm_cpuid_entry2> {
    let leaf0 = supported.iter().find(|entry| entry.function == 0);
    let vendor = match leaf0.map(|entry| entry.ebx.to_le_bytes()) {
        Some(name) if &name == b"Genu" => Vendor::Intel,
        _ => Vendor::Amd,
    };
    let max_leaf = leaf0.map_or(0, |entry| entry.eax);
    let mut entries: Vec<_> =
        supported.iter().filter(|entry| !matches!(entry.function, 0xb | 0x1f)).copied().collect();
    for entry in &mut entries {
        adjust(entry, vendor, topology);
    }
    let topology_leaves: &[u32] = if vendor == Vendor::Intel { &[0xb, 0x1f] } else { &[0xb] };
    for &leaf in topology_leaves.iter().filter(|&&leaf| leaf <= max_leaf) {
        entries.extend(extended_topology(leaf, topology));
    }
    entries
}

fn adjust(entry: &mut kvm_cpuid_entry2, vendor: Vendor, topology: Topology) {
    match entry.function {
        0x1 => adjust_leaf1(entry, topology),
        // Deterministic cache parameters: same layout on both vendors.
        0x4 | 0x8000_001d => adjust_cache(entry, topology),
        // MONITOR/MWAIT, architectural and AMD performance monitoring, debug store's leaf.
        0x5 | 0xa | 0x8000_0022 => zero(entry),
        0x4000_0001 => entry.eax &= !KVM_ASYNC_PF,
        0x8000_0001 => entry.ecx &= !EXT1_ECX_HIDDEN,
        0x8000_0008 if vendor == Vendor::Amd => {
            let cores = u32::from(topology.vcpus.max(1)) - 1;
            entry.ecx = (entry.ecx & !0xf0ff) | (topology.core_bits() << 12) | cores;
        }
        // SVM revision and features.
        0x8000_000a => zero(entry),
        0x8000_001e => {
            entry.eax = topology.apic_id();
            entry.ebx = topology.apic_id() & 0xff;
            entry.ecx = 0;
        }
        _ => {}
    }
}

fn adjust_leaf1(entry: &mut kvm_cpuid_entry2, topology: Topology) {
    let logical = 1 << topology.core_bits();
    entry.ebx = (entry.ebx & 0xffff) | (topology.apic_id() << 24) | (logical << 16);
    entry.ecx &= !(leaf1_ecx::DTES64 | leaf1_ecx::MONITOR | leaf1_ecx::VMX | leaf1_ecx::PDCM);
    entry.ecx |= leaf1_ecx::HYPERVISOR | leaf1_ecx::X2APIC;
    entry.ecx &= !leaf1_ecx::TSC_DEADLINE;
    if topology.tsc_deadline {
        entry.ecx |= leaf1_ecx::TSC_DEADLINE;
    }
    entry.edx &= !(LEAF1_EDX_DS | LEAF1_EDX_HTT);
    if topology.vcpus > 1 {
        entry.edx |= LEAF1_EDX_HTT;
    }
}

fn adjust_cache(entry: &mut kvm_cpuid_entry2, topology: Topology) {
    if entry.eax & 0x1f == 0 {
        return; // no more caches
    }
    let package = (1 << topology.core_bits()) - 1;
    let level = (entry.eax >> 5) & 0x7;
    let sharing = if level >= 3 { package } else { 0 };
    entry.eax = (entry.eax & 0x3fff) | (sharing << 14);
    if entry.function == 0x4 {
        entry.eax |= package << 26;
    }
}

fn zero(entry: &mut kvm_cpuid_entry2) {
    (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
}

/// Leaves 0xb and 0x1f: one thread a core, `vcpus` cores, then the empty level that ends the list.
fn extended_topology(leaf: u32, topology: Topology) -> [kvm_cpuid_entry2; 3] {
    const SMT: u32 = 1;
    const CORE: u32 = 2;
    let level = |index: u32, kind: u32, shift: u32, count: u32| kvm_cpuid_entry2 {
        function: leaf,
        index,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: count,
        ecx: index | (kind << 8),
        edx: topology.apic_id(),
        ..Default::default()
    };
    [
        level(0, SMT, 0, 1),
        level(1, CORE, topology.core_bits(), u32::from(topology.vcpus.max(1))),
        level(2, 0, 0, 0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(function: u32, regs: [u32; 4]) -> kvm_cpuid_entry2 {
        let [eax, ebx, ecx, edx] = regs;
        kvm_cpuid_entry2 { function, eax, ebx, ecx, edx, ..Default::default() }
    }

    fn find(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> kvm_cpuid_entry2 {
        *entries.iter().find(|entry| entry.function == function && entry.index == index).expect("leaf")
    }

    fn intel() -> Vec<kvm_cpuid_entry2> {
        vec![
            leaf(0, [0x1f, u32::from_le_bytes(*b"Genu"), u32::from_le_bytes(*b"ntel"), 0x4965_6e69]),
            leaf(1, [0x806f8, 0x0012_0800, !leaf1_ecx::TSC_DEADLINE, u32::MAX]),
            leaf(0x4, [0x7c00_4121, 0, 0, 0]),
            kvm_cpuid_entry2 { index: 3, ..leaf(0x4, [0xfc1f_c163, 0, 0, 0]) },
            leaf(0xa, [0x0730_0402, 0, 0, 0x603]),
            leaf(0xb, [0; 4]),
            leaf(0x1f, [0; 4]),
            leaf(0x4000_0001, [0x0100_7efb, 0, 0, 0]),
            leaf(0x8000_0008, [0x3934, 0, 0, 0]),
        ]
    }

    fn topology(index: u8, vcpus: u8) -> Topology {
        Topology { index, vcpus, tsc_deadline: true }
    }

    #[test]
    fn every_vcpu_has_its_own_apic_id_in_every_leaf() {
        for index in 0..6 {
            let entries = guest_entries(&intel(), topology(index, 6));
            assert_eq!(find(&entries, 1, 0).ebx >> 24, u32::from(index));
            for (function, sub) in [(0xb, 0), (0xb, 1), (0x1f, 0), (0x1f, 1)] {
                assert_eq!(find(&entries, function, sub).edx, u32::from(index));
            }
        }
    }

    #[test]
    fn one_package_of_cores_with_one_thread() {
        let entries = guest_entries(&intel(), topology(0, 6));
        let core = find(&entries, 0xb, 1);
        assert_eq!((core.eax, core.ebx, core.ecx), (3, 6, 0x201));
        let smt = find(&entries, 0xb, 0);
        assert_eq!((smt.eax, smt.ebx, smt.ecx), (0, 1, 0x100));
        assert_eq!(find(&entries, 0xb, 2).ebx, 0);
        assert_eq!((find(&entries, 1, 0).ebx >> 16) & 0xff, 8);
        assert_eq!(find(&entries, 0x4, 0).eax, 0x1c00_0121);
        assert_eq!(find(&entries, 0x4, 3).eax, 0x1c01_c163);
    }

    #[test]
    fn a_single_vcpu_claims_no_siblings() {
        let entries = guest_entries(&intel(), topology(0, 1));
        assert_eq!(find(&entries, 1, 0).edx & LEAF1_EDX_HTT, 0);
        assert_eq!((find(&entries, 1, 0).ebx >> 16) & 0xff, 1);
        assert_eq!(find(&entries, 0x4, 3).eax >> 14, 0);
    }

    #[test]
    fn what_a_fork_could_not_carry_is_hidden() {
        let entries = guest_entries(&intel(), topology(0, 2));
        let leaf1 = find(&entries, 1, 0);
        assert_eq!(leaf1.ecx & (leaf1_ecx::VMX | leaf1_ecx::MONITOR | leaf1_ecx::PDCM), 0);
        let wanted = leaf1_ecx::HYPERVISOR | leaf1_ecx::X2APIC | leaf1_ecx::TSC_DEADLINE;
        assert_eq!(leaf1.ecx & wanted, wanted);
        assert_eq!(find(&entries, 0xa, 0), leaf(0xa, [0; 4]));
        assert_eq!(find(&entries, 0x4000_0001, 0).eax & KVM_ASYNC_PF, 0);
        // kvmclock and its stable bit stay.
        assert_eq!(find(&entries, 0x4000_0001, 0).eax & 0x0100_0009, 0x0100_0009);
    }

    #[test]
    fn amd_topology_is_in_the_extended_leaves() {
        let supported = vec![
            leaf(0, [0xd, u32::from_le_bytes(*b"Auth"), 0, 0]),
            leaf(0x8000_0001, [0, 0, 0x0080_0004, 0]),
            leaf(0x8000_0008, [0x3030, 0, 0x7040, 0]),
            leaf(0x8000_001e, [0; 4]),
        ];
        let entries = guest_entries(&supported, topology(3, 4));
        assert_eq!(find(&entries, 0x8000_0008, 0).ecx, 0x2003);
        assert_eq!(find(&entries, 0x8000_001e, 0).eax, 3);
        assert_eq!(find(&entries, 0x8000_0001, 0).ecx, 0);
        assert!(entries.iter().all(|entry| entry.function != 0x1f));
    }

    #[test]
    fn kvm_takes_it() {
        let Some(kvm) = crate::arch::x86_64::testing::kvm() else {
            return;
        };
        let vm = kvm.create_vm().unwrap();
        for index in 0..4 {
            vm.create_vcpu(u64::from(index)).unwrap().set_cpuid2(&for_vcpu(&kvm, index, 4).unwrap()).unwrap();
        }
    }
}
