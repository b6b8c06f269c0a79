//! Micro-guests: flat code entered in 64-bit user mode with I/O privilege.
//!
//! Such a guest needs nothing of kernel mode: it runs at full speed also on hosts whose KVM emulates guest kernel code.
//! All RAM is identity-mapped for it; all its vCPUs start at once. On entry:
//!
//! | register | value |
//! |---|---|
//! | RIP | [`PAYLOAD_BASE`] |
//! | RDI | vCPU index |
//! | RSI | guest memory, bytes (RAM goes on at `MMIO_GAP_END` above `MMIO_GAP_START`) |
//! | RDX | number of vCPUs |
//! | RSP | top of a stack of [`STACK_BYTES`], 16-byte aligned |
//!
//! Other general registers are zero. SSE can be used. It speaks by `out` to `offshoot_protocol::ports::DOORBELL`. There
//! is no interrupt descriptor table: an exception ends the guest with a shutdown exit.

use std::path::{Path, PathBuf};

use kvm_bindings::{KVM_MP_STATE_RUNNABLE, kvm_mp_state, kvm_regs};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryRegion};

use super::layout::PAYLOAD_BASE;
use super::memory_map::{self, Memory};
use super::paging::{self, Access};
use super::segments::{self, Ring};

/// Page tables; those of 12 GiB end at 0x1_0000.
const PAGE_TABLES: GuestAddress = GuestAddress(0x1000);
/// Lowest byte of vCPU 0's stack.
const STACKS: u64 = 0x8_0000;
/// Bytes of one vCPU's stack.
pub const STACK_BYTES: u64 = 0x4000;
/// Most vCPUs a guest can have.
const MAX_VCPUS: u8 = 8;
/// RFLAGS: I/O privilege level 3, and bit 1, which is always set.
const RFLAGS: u64 = (3 << 12) | 2;

const _: () = assert!(PAGE_TABLES.0 + paging::table_bytes(13 << 30) <= STACKS);
const _: () = assert!(STACKS + MAX_VCPUS as u64 * STACK_BYTES <= PAYLOAD_BASE);

/// Why a micro-guest could not be loaded or started.
#[derive(Debug, thiserror::Error)]
pub enum PayloadError {
    /// The file could not be read.
    #[error("could not read payload {path}; give a readable flat binary")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// There is no code.
    #[error("payload is empty; give a flat binary of 64-bit code")]
    Empty,
    /// More vCPUs than there are stacks.
    #[error("a payload guest has 1 to 8 vcpus, not {vcpus}")]
    Vcpus {
        /// What was asked for.
        vcpus: u8,
    },
    /// The code does not fit.
    #[error(
        "payload of {code_bytes} bytes does not fit into {room_bytes} bytes above {PAYLOAD_BASE:#x}; give the guest more memory"
    )]
    TooBig {
        /// Bytes of code.
        code_bytes: usize,
        /// Bytes from [`PAYLOAD_BASE`] to the end of the low region.
        room_bytes: u64,
    },
    /// Guest memory could not be written.
    #[error("could not write {what} into guest memory")]
    Write {
        /// What was written.
        what: &'static str,
        /// Why it failed.
        source: GuestMemoryError,
    },
    /// KVM refused.
    #[error("kvm refused to {action} of vcpu {index}")]
    Kvm {
        /// What was attempted.
        action: &'static str,
        /// Which vCPU.
        index: u8,
        /// Its answer.
        source: kvm_ioctls::Error,
    },
}

/// Copies the code in the file `path` as [`load`] does.
///
/// # Errors
/// Names the file if it cannot be read; else as [`load`].
pub fn load_file(mem: &Memory, path: &Path, vcpus: u8) -> Result<(), PayloadError> {
    let code = std::fs::read(path).map_err(|source| PayloadError::Read { path: path.into(), source })?;
    load(mem, &code, vcpus)
}

/// Copies `code` to [`PAYLOAD_BASE`] and writes page and descriptor tables below it.
///
/// # Errors
/// Fails if there is no code, or if it does not fit.
pub fn load(mem: &Memory, code: &[u8], vcpus: u8) -> Result<(), PayloadError> {
    if code.is_empty() {
        return Err(PayloadError::Empty);
    }
    if !(1..=MAX_VCPUS).contains(&vcpus) {
        return Err(PayloadError::Vcpus { vcpus });
    }
    let room_bytes = memory_map::low_region_end(mem).saturating_sub(PAYLOAD_BASE);
    if code.len() as u64 > room_bytes {
        return Err(PayloadError::TooBig { code_bytes: code.len(), room_bytes });
    }
    let write = |what| move |source| PayloadError::Write { what, source };
    let ram: Vec<_> =
        mem.iter().map(|region| (region.start_addr().0, region.start_addr().0 + region.len())).collect();
    paging::write_identity_map(mem, PAGE_TABLES, &ram, Access::User).map_err(write("page tables"))?;
    segments::write_tables(mem, Ring::User).map_err(write("descriptor tables"))?;
    mem.write_slice(code, GuestAddress(PAYLOAD_BASE)).map_err(write("the payload"))
}

/// Sets vCPU `index` of `vcpus` to enter the payload. Its CPUID must have been set.
///
/// # Errors
/// Says which ioctl failed.
pub fn configure_vcpu(vcpu: &VcpuFd, index: u8, vcpus: u8, memory_bytes: u64) -> Result<(), PayloadError> {
    let kvm = |action| move |source| PayloadError::Kvm { action, index, source };
    let mut sregs = vcpu.get_sregs().map_err(kvm("read the segment registers"))?;
    segments::enter_long_mode(&mut sregs, Ring::User, PAGE_TABLES);
    vcpu.set_sregs(&sregs).map_err(kvm("set the segment registers"))?;
    let regs = kvm_regs {
        rip: PAYLOAD_BASE,
        rdi: u64::from(index),
        rsi: memory_bytes,
        rdx: u64::from(vcpus),
        rsp: STACKS + (u64::from(index) + 1) * STACK_BYTES,
        rflags: RFLAGS,
        ..Default::default()
    };
    vcpu.set_regs(&regs).map_err(kvm("set the registers"))?;
    let running = kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE };
    vcpu.set_mp_state(running).map_err(kvm("set the run state"))
}

#[cfg(test)]
mod tests {
    use iced_x86::code_asm::*;
    use kvm_ioctls::VcpuExit;
    use offshoot_protocol::ports::DOORBELL;

    use super::*;
    use crate::arch::x86_64::layout::MMIO_GAP_END;
    use crate::arch::x86_64::testing;

    #[test]
    fn what_does_not_fit_is_refused() {
        let mem = testing::memory(2);
        assert!(matches!(load(&mem, &[], 1), Err(PayloadError::Empty)));
        assert!(matches!(load(&mem, &[0x90], 9), Err(PayloadError::Vcpus { vcpus: 9 })));
        assert!(matches!(load(&mem, &vec![0x90; (1 << 20) + 1], 1), Err(PayloadError::TooBig { .. })));
        let error = load_file(&mem, Path::new("/no/such/payload"), 1).unwrap_err();
        assert!(error.to_string().contains("/no/such/payload"));
    }

    /// Writes index and memory size to the end of the low region or, if there is one, the high region, adds them up
    /// from there, and rings the doorbell with index * 1000 + vCPU count + MiB.
    fn program(target: u64) -> Vec<u8> {
        let mut asm = CodeAssembler::new(64).unwrap();
        asm.mov(rbx, target).unwrap();
        asm.mov(rcx, rdi).unwrap();
        asm.shl(rcx, 12).unwrap();
        asm.add(rbx, rcx).unwrap();
        asm.imul_3(rax, rdi, 1000).unwrap();
        asm.mov(qword_ptr(rbx), rax).unwrap();
        asm.shr(rsi, 20).unwrap();
        asm.push(rsi).unwrap();
        asm.pop(rax).unwrap();
        asm.add(rax, rdx).unwrap();
        asm.add(rax, qword_ptr(rbx)).unwrap();
        asm.mov(edx, u32::from(DOORBELL)).unwrap();
        asm.out(dx, eax).unwrap();
        asm.assemble(PAYLOAD_BASE).unwrap()
    }

    fn runs(memory_mib: u32, vcpus: u8, target: u64) {
        let Some(kvm) = testing::kvm() else { return };
        let mut vm = testing::payload_vm(&kvm, memory_mib, vcpus, &program(target));
        // In reverse: no vCPU waits for another one to start it.
        for index in (0..usize::from(vcpus)).rev() {
            let expected = index as u32 * 1000 + u32::from(vcpus) + memory_mib;
            match vm.vcpus[index].run().unwrap() {
                VcpuExit::IoOut(DOORBELL, data) => assert_eq!(data, expected.to_le_bytes()),
                other => {
                    let exit = format!("{other:?}");
                    panic!("vcpu {index} left with {exit}: {:#x?}", vm.vcpus[index].get_regs());
                }
            }
            let written: u64 = vm.mem.read_obj(GuestAddress(target + 4096 * index as u64)).unwrap();
            assert_eq!(written, index as u64 * 1000);
        }
    }

    #[test]
    fn a_payload_writes_adds_and_rings() {
        runs(64, 1, 0x200_0000);
        runs(64, 2, 0x3ff_0000);
    }

    #[test]
    fn a_payload_reaches_memory_above_the_gap() {
        runs(5120, 2, MMIO_GAP_END + (2 << 30) - 0x2000);
    }

    #[test]
    fn an_exception_ends_the_guest() {
        let Some(kvm) = testing::kvm() else { return };
        let mut asm = CodeAssembler::new(64).unwrap();
        asm.mov(rax, qword_ptr(0xc000_0000_u64)).unwrap();
        let mut vm = testing::payload_vm(&kvm, 64, 1, &asm.assemble(PAYLOAD_BASE).unwrap());
        let exit = vm.vcpus[0].run().unwrap();
        assert!(matches!(exit, VcpuExit::Shutdown), "{exit:?}");
    }
}
