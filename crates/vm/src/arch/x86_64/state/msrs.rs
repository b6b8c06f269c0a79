//! Model-specific registers, in as few ioctls as KVM allows.

use kvm_bindings::{KVM_MAX_MSR_ENTRIES, Msrs, kvm_msr_entry};
use kvm_ioctls::VcpuFd;

use super::StateError;

/// IA32_TIME_STAMP_COUNTER.
pub const TSC: u32 = 0x10;
/// IA32_TSC_DEADLINE.
pub const TSC_DEADLINE: u32 = 0x6e0;
/// State that `KVM_GET_MSR_INDEX_LIST` leaves out, or did in Linux 6.1, though KVM keeps it: memory types (a guest that
/// finds them off after a fork maps memory uncached), machine check banks, debug control and last branch, and AMD's
/// hardware configuration. Those that a host does not have are dropped by the probe.
pub const UNLISTED: &[std::ops::RangeInclusive<u32>] = &[
    0x1d9..=0x1d9,             // IA32_DEBUGCTL
    0x1db..=0x1de,             // last branch and interrupt, from and to
    0x200..=0x20f,             // IA32_MTRR_PHYSBASE0 to PHYSMASK7
    0x250..=0x250,             // IA32_MTRR_FIX64K
    0x258..=0x259,             // IA32_MTRR_FIX16K
    0x268..=0x26f,             // IA32_MTRR_FIX4K
    0x277..=0x277,             // IA32_PAT
    0x280..=0x29f,             // IA32_MC0_CTL2 to MC31_CTL2
    0x2ff..=0x2ff,             // IA32_MTRR_DEF_TYPE
    0x400..=0x47f,             // IA32_MC0_CTL to MC31_MISC
    0xc001_0015..=0xc001_0015, // HWCR
];
/// Hyper-V's synthetic MSRs. Our guests are told of no Hyper-V and cannot reach them; writing one makes KVM allocate.
pub const HYPERV: std::ops::RangeInclusive<u32> = 0x4000_0000..=0x4000_01ff;

/// Most MSRs of one ioctl: KVM refuses `MAX_IO_MSRS`, 256, with E2BIG (arch/x86/kvm/x86.c, `msr_io`).
const BATCH: usize = KVM_MAX_MSR_ENTRIES - 1;

fn batch(entries: &[kvm_msr_entry]) -> Msrs {
    Msrs::from_entries(entries).expect("a batch is shorter than KVM_MAX_MSR_ENTRIES")
}

fn requests(indices: &[u32]) -> Vec<kvm_msr_entry> {
    indices.iter().map(|&index| kvm_msr_entry { index, ..Default::default() }).collect()
}

/// Splits `entries` into what one ioctl takes.
pub fn batches(entries: &[kvm_msr_entry]) -> Vec<Msrs> {
    entries.chunks(BATCH).map(batch).collect()
}

/// Reads those of `indices` that KVM lets be read, and drops exactly the others.
pub fn read_tolerantly(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, StateError> {
    let mut read = Vec::with_capacity(indices.len());
    let mut rest = indices;
    while !rest.is_empty() {
        let count = rest.len().min(BATCH);
        let mut msrs = batch(&requests(&rest[..count]));
        let done = vcpu.get_msrs(&mut msrs).map_err(StateError::kvm("read msrs"))?;
        read.extend_from_slice(&msrs.as_slice()[..done]);
        // KVM stops at the first one it refuses.
        rest = &rest[if done < count { done + 1 } else { count }..];
    }
    Ok(read)
}

/// Writes `entries` back and keeps those that KVM took.
pub fn writable(vcpu: &VcpuFd, entries: &[kvm_msr_entry]) -> Result<Vec<kvm_msr_entry>, StateError> {
    let mut taken = Vec::with_capacity(entries.len());
    let mut rest = entries;
    while !rest.is_empty() {
        let count = rest.len().min(BATCH);
        let done = vcpu.set_msrs(&batch(&rest[..count])).map_err(StateError::kvm("write msrs"))?;
        taken.extend_from_slice(&rest[..done]);
        rest = &rest[if done < count { done + 1 } else { count }..];
    }
    Ok(taken)
}

/// Reads all of `indices`.
pub fn read(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, StateError> {
    let mut entries = Vec::with_capacity(indices.len());
    for chunk in indices.chunks(BATCH) {
        let mut msrs = batch(&requests(chunk));
        let done = vcpu.get_msrs(&mut msrs).map_err(StateError::kvm("read msrs"))?;
        if done < chunk.len() {
            return Err(StateError::MsrUnreadable { index: chunk[done] });
        }
        entries.extend_from_slice(msrs.as_slice());
    }
    Ok(entries)
}

/// Writes all of `batches`. Cost: one ioctl each.
pub fn write(vcpu: &VcpuFd, batches: &[Msrs]) -> Result<(), StateError> {
    for msrs in batches {
        let done = vcpu.set_msrs(msrs).map_err(StateError::kvm("write msrs"))?;
        if let Some(refused) = msrs.as_slice().get(done) {
            return Err(StateError::MsrRefused { index: refused.index, value: refused.data });
        }
    }
    Ok(())
}
