//! A throw-away guest of one vCPU, watched by a deadline.
#![allow(unsafe_code)]

use std::os::unix::thread::JoinHandleExt;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use kvm_bindings::{CpuId, kvm_dtable, kvm_regs, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::code;
use crate::arch::x86_64::memory_map::Memory;
use crate::arch::x86_64::paging::{self, Access};
use crate::arch::x86_64::segments::{self, Ring};
use crate::arch::x86_64::{cpuid, layout};

const MEMORY_BYTES: usize = 4 << 20;
const CODE: GuestAddress = GuestAddress(layout::PAYLOAD_BASE);
const SCRATCH: GuestAddress = GuestAddress(0x20_0000);
const STACK_TOP: u64 = 0x30_0000;
const IDT: GuestAddress = GuestAddress(0x3000);
const PAGE_TABLES: GuestAddress = GuestAddress(layout::BOOT_PAGE_TABLES);
const IDT_BYTES: u16 = 32 * 16;
const BREAKPOINT: u64 = 3;
/// CR4: XSAVE and the extended control registers.
const CR4_OSXSAVE: u64 = 1 << 18;
/// RFLAGS: I/O privilege level 3, and bit 1.
const RFLAGS: u64 = (3 << 12) | 2;
/// How often a guest past its deadline is interrupted, and how long it is then waited for.
const KICK_EVERY: Duration = Duration::from_millis(20);
const KICK_FOR: Duration = Duration::from_secs(2);

/// One run of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// What it wrote to the port.
    pub value: u32,
    /// From entering the guest until its exit was back.
    pub took: Duration,
}

/// A program, and how to enter it.
#[derive(Debug, Clone, Copy)]
pub struct Program {
    /// Code.
    pub code: &'static [u8],
    /// Privilege.
    pub ring: Ring,
    /// RDI: turns, at first.
    pub count: u64,
}

/// Runs `program` in a new VM, for at most `deadline`.
///
/// # Errors
/// One line: what the guest did instead of writing to the port, or what KVM refused.
pub fn run(program: Program, deadline: Duration) -> Result<Run, String> {
    watched(deadline, move || Guest::new(program)?.run(program.count))
}

/// Time of one turn of the loop `program`, seconds. Its turns grow from [`Program::count`] until a run lasts `enough`; what a
/// run without turns takes is not counted.
///
/// # Errors
/// As [`run`].
pub fn seconds_a_turn(program: Program, enough: Duration, deadline: Duration) -> Result<f64, String> {
    const GROWTH: u64 = 8;
    const MOST: u64 = 1 << 26;
    watched(deadline, move || {
        let mut guest = Guest::new(program)?;
        // The first run also brings code and page tables into the caches of whoever translates them.
        guest.run(1)?;
        let entry = guest.run(1)?.took;
        let mut turns = program.count;
        loop {
            let took = guest.run(turns)?.took.saturating_sub(entry);
            if took >= enough || turns >= MOST {
                // A clock that did not move says nothing better than its resolution.
                return Ok(took.max(Duration::from_nanos(1)).as_secs_f64() / turns as f64);
            }
            turns *= GROWTH;
        }
    })
}

/// Does `work`, which runs guests, on a thread of its own and interrupts it after `deadline`.
fn watched<T: Send + 'static>(
    deadline: Duration,
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    install_kick_handler();
    let (sender, receiver) = mpsc::channel();
    let thread = std::thread::Builder::new()
        .name("probe".into())
        .spawn(move || {
            // The receiver may have given up.
            let _ = sender.send(work());
        })
        .map_err(|error| format!("could not start a thread: {error}"))?;
    let started = Instant::now();
    loop {
        let past = started.elapsed() >= deadline;
        let wait = if past { KICK_EVERY } else { deadline - started.elapsed() };
        match receiver.recv_timeout(wait) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Disconnected) => return Err("the probe's thread ended early".into()),
            // KVM did not even give the thread back: leave it behind.
            Err(RecvTimeoutError::Timeout) if started.elapsed() >= deadline + KICK_FOR => {
                return Err(format!(
                    "the guest hung for {} ms and could not be stopped",
                    deadline.as_millis()
                ));
            }
            Err(RecvTimeoutError::Timeout) => kick(&thread),
        }
    }
}

extern "C" fn ignore(_: libc::c_int) {}

/// A signal of no meaning: its arrival alone makes `KVM_RUN` return.
fn kick_signal() -> libc::c_int {
    libc::SIGRTMIN() + 2
}

fn install_kick_handler() {
    // SAFETY: all zeros is a valid `sigaction`: no flags, so that system calls are not restarted; empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = ignore as *const () as libc::sighandler_t;
    // SAFETY: the handler does nothing, which is safe at any instant; `action` is initialised.
    unsafe { libc::sigaction(kick_signal(), &raw const action, std::ptr::null_mut()) };
}

fn kick(thread: &std::thread::JoinHandle<()>) {
    // SAFETY: the thread is neither joined nor detached while its handle lives, so its id is valid.
    unsafe { libc::pthread_kill(thread.as_pthread_t(), kick_signal()) };
}

/// Whether the guest's processor has XSAVE (leaf 1 ECX bit 26).
pub fn has_xsave(cpuid: &CpuId) -> bool {
    cpuid.as_slice().iter().any(|entry| entry.function == 1 && entry.ecx & (1 << 26) != 0)
}

struct Guest {
    vcpu: VcpuFd,
    // Both must outlive `vcpu`, in this order.
    _vm: VmFd,
    _mem: Memory,
}

fn because<E: std::fmt::Display>(action: &'static str) -> impl FnOnce(E) -> String {
    move |error| format!("could not {action}: {error}")
}

impl Guest {
    fn new(program: Program) -> Result<Self, String> {
        let kvm = Kvm::new().map_err(because("open /dev/kvm"))?;
        let vm = kvm.create_vm().map_err(because("create a vm"))?;
        // Intel processors without unrestricted guest mode need it; others ignore it.
        vm.set_tss_address(layout::KVM_TSS_BASE as usize).map_err(because("set the tss address"))?;
        let mem =
            Memory::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).map_err(because("map guest memory"))?;
        for (slot, region) in mem.iter().enumerate() {
            let region = kvm_userspace_memory_region {
                slot: slot as u32,
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: region.as_ptr() as u64,
                flags: 0,
            };
            // SAFETY: the region stays mapped until `_mem` is dropped, after the VM.
            unsafe { vm.set_user_memory_region(region) }.map_err(because("set a memory region"))?;
        }
        write_guest(&mem, program).map_err(because("write guest memory"))?;
        let vcpu = vm.create_vcpu(0).map_err(because("create a vcpu"))?;
        let cpuid = cpuid::for_vcpu(&kvm, 0, 1).map_err(because("make the guest's cpuid"))?;
        vcpu.set_cpuid2(&cpuid).map_err(because("set cpuid"))?;
        let mut sregs = vcpu.get_sregs().map_err(because("read the segment registers"))?;
        segments::enter_long_mode(&mut sregs, program.ring, PAGE_TABLES);
        if has_xsave(&cpuid) {
            sregs.cr4 |= CR4_OSXSAVE;
        }
        sregs.idt = kvm_dtable { base: IDT.0, limit: IDT_BYTES - 1, ..Default::default() };
        vcpu.set_sregs(&sregs).map_err(because("set the segment registers"))?;
        Ok(Self { vcpu, _vm: vm, _mem: mem })
    }

    fn run(&mut self, count: u64) -> Result<Run, String> {
        // Completes the port write that ended the run before, which would else overwrite the registers.
        self.vcpu.set_kvm_immediate_exit(1);
        let settled = self.vcpu.run().map(|exit| format!("{exit:?}"));
        self.vcpu.set_kvm_immediate_exit(0);
        if let Ok(exit) = settled {
            return Err(format!("unexpected exit {exit} before the guest was entered"));
        }
        let regs = kvm_regs {
            rip: CODE.0,
            rdi: count,
            rsi: SCRATCH.0,
            rsp: STACK_TOP,
            rflags: RFLAGS,
            ..Default::default()
        };
        self.vcpu.set_regs(&regs).map_err(because("set the registers"))?;
        let started = Instant::now();
        let exit = self.vcpu.run();
        let took = started.elapsed();
        match exit {
            Ok(VcpuExit::IoOut(code::PORT, data)) => {
                let data = data.first_chunk().ok_or("the guest wrote fewer than 4 bytes")?;
                Ok(Run { value: u32::from_le_bytes(*data), took })
            }
            Ok(VcpuExit::InternalError) => Err("kvm cannot emulate it (internal error exit)".into()),
            Ok(VcpuExit::Shutdown) => Err("an exception ended the guest (shutdown exit)".into()),
            Ok(other) => Err(format!("unexpected exit {other:?}")),
            Err(error) if error.errno() == libc::EINTR => {
                Err(format!("the guest did not finish within {} ms", took.as_millis()))
            }
            Err(error) => Err(format!("kvm could not run the guest: {error}")),
        }
    }
}

fn write_guest(mem: &Memory, program: Program) -> Result<(), vm_memory::GuestMemoryError> {
    let access = if program.ring == Ring::User { Access::User } else { Access::Kernel };
    paging::write_identity_map(mem, PAGE_TABLES, &[(0, MEMORY_BYTES as u64)], access)?;
    segments::write_tables(mem, program.ring)?;
    // An interrupt gate to the kernel code segment (Intel SDM vol. 3A, 7.14.1).
    let handler = CODE.0 + code::BREAKPOINT_HANDLER_OFFSET;
    let gate = (handler & 0xffff)
        | u64::from(segments::CODE_SELECTOR) << 16
        | 0x8e00 << 32
        | (handler >> 16 & 0xffff) << 48;
    mem.write_obj(gate, GuestAddress(IDT.0 + 16 * BREAKPOINT))?;
    mem.write_slice(program.code, CODE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::x86_64::testing;

    #[test]
    fn a_guest_that_hangs_is_stopped() {
        if testing::kvm().is_none() {
            return;
        }
        // jmp $
        let program = Program { code: &[0xeb, 0xfe], ring: Ring::User, count: 0 };
        let started = Instant::now();
        let error = run(program, Duration::from_millis(100)).unwrap_err();
        assert!(error.contains("did not finish"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(1));
    }

    #[test]
    fn a_guest_that_faults_is_reported() {
        if testing::kvm().is_none() {
            return;
        }
        // ud2
        let program = Program { code: &[0x0f, 0x0b], ring: Ring::User, count: 0 };
        assert!(run(program, Duration::from_secs(2)).is_err());
    }
}
