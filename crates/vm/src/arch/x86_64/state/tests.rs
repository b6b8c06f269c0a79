//! Native tests: skipped, with a printed reason, where `/dev/kvm` does not open.

use std::time::{Duration, Instant};

use iced_x86::code_asm::*;
use kvm_ioctls::VcpuExit;
use offshoot_protocol::ports::DOORBELL;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::arch::x86_64::layout::PAYLOAD_BASE;
use crate::arch::x86_64::testing::{self, TestVm};

const COUNTER: u64 = 0x20_0000;
const TIME: u64 = COUNTER + 8;

/// Counts in a register, in memory and in a vector register, stores the TSC, and rings with the count; for ever. A
/// count that disagrees between the three rings as all ones.
fn counter() -> Vec<u8> {
    let mut asm = CodeAssembler::new(64).unwrap();
    let (mut again, mut bad, mut ring) = (asm.create_label(), asm.create_label(), asm.create_label());
    asm.mov(rcx, rdi).unwrap();
    asm.shl(rcx, 12).unwrap();
    asm.add(rcx, COUNTER as i32).unwrap();
    asm.mov(r12d, 1).unwrap();
    asm.movq(xmm1, r12).unwrap();
    asm.pxor(xmm0, xmm0).unwrap();
    asm.xor(ebx, ebx).unwrap();
    asm.set_label(&mut again).unwrap();
    asm.inc(rbx).unwrap();
    asm.inc(qword_ptr(rcx)).unwrap();
    asm.paddq(xmm0, xmm1).unwrap();
    asm.rdtsc().unwrap();
    asm.shl(rdx, 32).unwrap();
    asm.or(rax, rdx).unwrap();
    asm.mov(qword_ptr(rcx + 8), rax).unwrap();
    asm.mov(rax, rbx).unwrap();
    asm.movq(r13, xmm0).unwrap();
    asm.cmp(r13, rbx).unwrap();
    asm.jne(bad).unwrap();
    asm.cmp(qword_ptr(rcx), rbx).unwrap();
    asm.je(ring).unwrap();
    asm.set_label(&mut bad).unwrap();
    asm.mov(eax, -1).unwrap();
    asm.set_label(&mut ring).unwrap();
    asm.mov(edx, u32::from(DOORBELL)).unwrap();
    asm.out(dx, eax).unwrap();
    asm.jmp(again).unwrap();
    asm.assemble(PAYLOAD_BASE).unwrap()
}

fn ring(vm: &mut TestVm, index: usize) -> u32 {
    match vm.vcpus[index].run().unwrap() {
        VcpuExit::IoOut(DOORBELL, data) => u32::from_le_bytes(data.try_into().unwrap()),
        other => panic!("{other:?}"),
    }
}

/// Completes the vCPU's last exit without running the guest.
fn settle(vm: &mut TestVm, index: usize) {
    vm.vcpus[index].set_kvm_immediate_exit(1);
    assert_eq!(vm.vcpus[index].run().unwrap_err().errno(), libc::EINTR);
    vm.vcpus[index].set_kvm_immediate_exit(0);
}

fn save(vm: &mut TestVm, traits: &StateTraits) -> (Vec<VcpuState>, VmState) {
    for index in 0..vm.vcpus.len() {
        settle(vm, index);
    }
    let vcpus = vm.vcpus.iter().map(|vcpu| save_vcpu(vcpu, traits).unwrap()).collect();
    (vcpus, save_vm(&vm.vm).unwrap())
}

fn load(
    kvm: &Kvm,
    mem: &crate::arch::x86_64::memory_map::Memory,
    state: &(Vec<VcpuState>, VmState),
) -> TestVm {
    let vm = testing::bare_vm(kvm, mem, state.0.len() as u8);
    let plan = load_clock(&vm.vm, &state.1).unwrap();
    for (vcpu, state) in vm.vcpus.iter().zip(&state.0) {
        load_vcpu(vcpu, state, &plan).unwrap();
    }
    load_vm(&vm.vm, &state.1).unwrap();
    vm
}

fn lapic_timer_counts_down(offset: usize) -> bool {
    (0x390..0x394).contains(&offset)
}

#[test]
fn a_payload_goes_on_where_it_was() {
    let Some(kvm) = testing::kvm() else { return };
    let traits = StateTraits::probe(&kvm).unwrap();
    let mut vm = testing::payload_vm(&kvm, 64, 2, &counter());
    for count in 1..=5 {
        assert_eq!(ring(&mut vm, 0), count);
    }
    assert_eq!(ring(&mut vm, 1), 1);
    // Generation after generation, each in a new VM over the same memory.
    for generation in 0..3 {
        let state = save(&mut vm, &traits);
        let mem = vm.mem.clone();
        drop(vm);
        vm = load(&kvm, &mem, &state);
        assert_eq!(ring(&mut vm, 0), 6 + generation);
        assert_eq!(ring(&mut vm, 1), 2 + generation);
    }
    assert_eq!(vm.mem.read_obj::<u64>(GuestAddress(COUNTER)).unwrap(), 8);
}

#[test]
fn what_is_loaded_can_be_saved_again_unchanged() {
    let Some(kvm) = testing::kvm() else { return };
    let traits = StateTraits::probe(&kvm).unwrap();
    let mut vm = testing::payload_vm(&kvm, 64, 2, &counter());
    ring(&mut vm, 0);
    ring(&mut vm, 1);
    // Something in each kind of state that a fresh vCPU does not have.
    let marked = [
        (0x2ff, 0xc06),
        (0xc000_0102, 0x7fff_1234_5000),
        (0x277, 0x0007_0406_0007_0406),
        (0xc000_0081, 0x23_0010_0000_0000),
    ];
    for (index, data) in marked {
        let msr = kvm_msr_entry { index, data, ..Default::default() };
        msrs::write(&vm.vcpus[0], &msrs::batches(&[msr])).unwrap();
    }
    let mut debugregs = vm.vcpus[0].get_debug_regs().unwrap();
    debugregs.db[0] = 0x1234;
    vm.vcpus[0].set_debug_regs(&debugregs).unwrap();
    let mut pit = vm.vm.get_pit2().unwrap();
    pit.channels[2].count = 0x1234;
    vm.vm.set_pit2(&pit).unwrap();

    let first = save(&mut vm, &traits);
    for (index, data) in marked {
        assert!(first.0[0].msrs.iter().any(|msr| (msr.index, msr.data) == (index, data)), "{index:#x}");
    }
    let mut child = load(&kvm, &vm.mem, &first);
    let second = save(&mut child, &traits);
    for (first, second) in first.0.iter().zip(&second.0) {
        assert_eq!(first.cpuid.as_slice(), second.cpuid.as_slice());
        assert_eq!(first.regs, second.regs);
        assert_eq!(first.sregs, second.sregs);
        assert_eq!(first.mp_state, second.mp_state);
        assert_eq!(first.xcrs, second.xcrs);
        assert_eq!(first.debugregs, second.debugregs);
        assert_eq!(first.events, second.events);
        assert_eq!(first.tsc_deadline, second.tsc_deadline);
        assert_eq!(first.tsc_khz, second.tsc_khz);
        assert_eq!(
            first.xsave.as_fam_struct_ref().xsave.region,
            second.xsave.as_fam_struct_ref().xsave.region
        );
        assert_eq!(first.xsave.as_slice(), second.xsave.as_slice());
        for (offset, (one, other)) in first.lapic.regs.iter().zip(&second.lapic.regs).enumerate() {
            assert!(one == other || lapic_timer_counts_down(offset), "local apic at {offset:#x}");
        }
        for (one, other) in first.msrs.iter().zip(&second.msrs) {
            assert!(
                one.data == other.data || one.index == msrs::TSC,
                "msr {:#x}: {:#x} {:#x}",
                one.index,
                one.data,
                other.data
            );
        }
    }
    assert_eq!(second.1.pit.channels[2].count, 0x1234);
    for (one, other) in first.1.irqchips.iter().zip(&second.1.irqchips) {
        assert_eq!(chip_bytes(one), chip_bytes(other));
    }
    // All TSCs moved by the same distance.
    let moved = |index: usize| {
        second.0[index].tsc_offset.zip(first.0[index].tsc_offset).map(|(new, old)| new.wrapping_sub(old))
    };
    assert_eq!(moved(0), moved(1));
}

#[allow(unsafe_code)]
fn chip_bytes(chip: &kvm_irqchip) -> [i8; 512] {
    // SAFETY: every member of the union is plain integers within these 512 bytes, which `Default` zeroed.
    unsafe { chip.chip.dummy }
}

#[test]
fn guest_time_stands_still_between_save_and_load() {
    let Some(kvm) = testing::kvm() else { return };
    let traits = StateTraits::probe(&kvm).unwrap();
    let mut vm = testing::payload_vm(&kvm, 64, 2, &counter());
    ring(&mut vm, 0);
    ring(&mut vm, 1);
    let tsc = |vm: &TestVm, index: u64| vm.mem.read_obj::<u64>(GuestAddress(TIME + 4096 * index)).unwrap();
    let before = [tsc(&vm, 0), tsc(&vm, 1)];
    let host_before = sys::host_tsc();
    let state = save(&mut vm, &traits);
    let asleep = Duration::from_millis(300);
    std::thread::sleep(asleep);
    let started = Instant::now();
    let mut child = load(&kvm, &vm.mem, &state);
    ring(&mut child, 0);
    ring(&mut child, 1);
    let clock = save_vm(&child.vm).unwrap().clock.clock;
    let spent = started.elapsed();
    let ticks =
        |duration: Duration| (duration.as_nanos() * u128::from(state.0[0].tsc_khz) / 1_000_000) as u64;
    // Some hosts that emulate guest kernel mode let guest user mode see their own TSC.
    let virtual_tsc = before[0].abs_diff(host_before) > 1_000_000_000;
    if !virtual_tsc {
        eprintln!("skipped: tsc part, since this host's guests see the host's tsc");
    }
    let looked_at = if virtual_tsc { 2 } else { 0 };
    for (index, before) in before.into_iter().enumerate().take(looked_at) {
        let after = tsc(&child, index as u64);
        assert!(after > before, "vcpu {index} went back from {} to {after}", before);
        // Between the parent's ring and its save some time passes, too.
        let limit = ticks(spent + asleep / 2);
        assert!(after - before < limit, "vcpu {index} jumped by {} ticks", after - before);
    }
    assert!(clock >= state.1.clock.clock);
    assert!(clock - state.1.clock.clock < (spent + asleep / 2).as_nanos() as u64);
}

#[test]
fn probing_finds_most_msrs_and_what_a_guest_needs() {
    let Some(kvm) = testing::kvm() else { return };
    let traits = StateTraits::probe(&kvm).unwrap();
    eprintln!(
        "{} of {} msrs are state",
        traits.msr_indices.len(),
        kvm.get_msr_index_list().unwrap().as_slice().len()
    );
    // STAR, LSTAR, KERNEL_GS_BASE, PAT, MTRR_DEF_TYPE, TSC_ADJUST, kvmclock's two.
    for index in [0x2ff, 0xc000_0081, 0xc000_0082, 0xc000_0102, 0x277, 0x3b, 0x4b56_4d00, 0x4b56_4d01] {
        assert!(traits.msr_indices.contains(&index), "{index:#x}");
    }
}

/// KVM refuses 256 MSRs at once, which only a host with many showed.
#[test]
fn any_number_of_msrs_can_be_read_and_written() {
    let Some(kvm) = testing::kvm() else { return };
    let vm = testing::payload_vm(&kvm, 64, 1, &counter());
    let many = vec![0x277; 600];
    let read = msrs::read(&vm.vcpus[0], &many).unwrap();
    assert_eq!(read.len(), 600);
    assert_eq!(msrs::read_tolerantly(&vm.vcpus[0], &many).unwrap().len(), 600);
    assert_eq!(msrs::writable(&vm.vcpus[0], &read).unwrap().len(), 600);
    msrs::write(&vm.vcpus[0], &msrs::batches(&read)).unwrap();
}

#[test]
fn a_refused_msr_is_named() {
    let Some(kvm) = testing::kvm() else { return };
    let vm = testing::payload_vm(&kvm, 64, 1, &counter());
    let bogus = kvm_msr_entry { index: 0xdead_0000, data: 7, ..Default::default() };
    let error = msrs::write(&vm.vcpus[0], &msrs::batches(&[bogus])).unwrap_err();
    assert!(matches!(error, StateError::MsrRefused { index: 0xdead_0000, value: 7 }), "{error}");
}

/// Prints what each step costs; asserts only that it is not absurd, since the machine is shared.
#[test]
fn loading_is_cheap() {
    let Some(kvm) = testing::kvm() else { return };
    let traits = StateTraits::probe(&kvm).unwrap();
    let mut vm = testing::payload_vm(&kvm, 64, 1, &counter());
    ring(&mut vm, 0);
    let state = save(&mut vm, &traits);
    let mut took = vec![[Duration::ZERO; 4]; 30];
    for row in &mut took {
        let started = Instant::now();
        let child = testing::bare_vm(&kvm, &vm.mem, 1);
        row[0] = started.elapsed();
        let started = Instant::now();
        let plan = load_clock(&child.vm, &state.1).unwrap();
        row[1] = started.elapsed();
        let started = Instant::now();
        load_vcpu(&child.vcpus[0], &state.0[0], &plan).unwrap();
        row[2] = started.elapsed();
        let started = Instant::now();
        load_vm(&child.vm, &state.1).unwrap();
        row[3] = started.elapsed();
    }
    let median = |column: usize| {
        let mut values: Vec<_> = took.iter().map(|row| row[column]).collect();
        values.sort();
        values[values.len() / 2]
    };
    let names = ["make vm", "load_clock", "load_vcpu", "load_vm"];
    for (column, name) in names.iter().enumerate() {
        eprintln!("{name}: {:?}", median(column));
    }
    eprintln!("{} msrs written of {}", state.0[0].changed_msr_count(), state.0[0].msrs.len());
    assert!(median(2) < Duration::from_millis(5));
}
