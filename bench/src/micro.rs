//! Micro-guests: tiny programs that run in 64-bit user mode with I/O privilege, on any host that has `/dev/kvm`.
//!
//! Entry: RDI is the vCPU's index, RSI the guest's memory in bytes. They read `DOORBELL` to wait and to learn that they
//! are a clone, and write it to answer (see `offshoot_protocol::ports`).

use iced_x86::IcedError;
use iced_x86::code_asm::{
    CodeAssembler, CodeLabel, al, dword_ptr, dx, eax, ebx, edi, edx, qword_ptr, r8, r9, r10, r11, r12, r13,
    r14, rax, rbx, rcx, rdi,
};
use offshoot_protocol::ports::{DOORBELL, GENERATION};

/// Rung once by the template when its memory is filled.
pub const READY: u32 = 1;
/// Rung when a page does not hold what this guest wrote last.
pub const TORN: u32 = 0xbad;
/// Guest-physical address of the code.
const BASE: u64 = 0x10_0000;
/// Guest-physical address of the first page that is filled.
pub const FILL_BASE: u64 = 0x20_0000;
const PAGE: i32 = 4096;
/// Pages of the pattern that a clone checks, evenly spread.
pub const CHECKED_PAGES: u64 = 16;
/// Sweeps over its pages that a writer makes before it reports that all is well.
pub const SWEEPS: i32 = 10;
/// Guest-physical address of high memory.
const HIGH_BASE: u64 = 1 << 32;
/// Distance between two writers' areas, bytes.
const AREA_STRIDE: i32 = 16 << 20;

/// The VM generation id of which a micro-guest reads `number`: its first four bytes.
pub fn generation_id(number: u32) -> String {
    format!("{number:08x}{:024}", 0)
}

/// Fills `fill_bytes` with a pattern and rings [`READY`]; then, each time it finds itself a clone, checks a part of
/// the pattern, writes one page, and rings its generation, or [`TORN`].
///
/// # Errors
/// The assembler's, if the code is wrong.
pub fn answering(fill_bytes: u64) -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    let (mut idle, mut wait, mut fill, mut torn) =
        (a.create_label(), a.create_label(), a.create_label(), a.create_label());
    a.mov(edx, u32::from(DOORBELL))?;
    a.in_(eax, dx)?;
    a.mov(ebx, eax)?;
    a.test(edi, edi)?;
    a.jne(idle)?;
    a.mov(r9, FILL_BASE + fill_bytes)?;
    a.mov(rcx, FILL_BASE)?;
    a.set_label(&mut fill)?;
    a.mov(qword_ptr(rcx), rcx)?;
    a.add(rcx, PAGE)?;
    a.cmp(rcx, r9)?;
    a.jb(fill)?;
    a.mov(eax, READY)?;
    a.out(dx, eax)?;
    a.set_label(&mut wait)?;
    a.in_(eax, dx)?;
    a.cmp(eax, ebx)?;
    a.je(wait)?;
    a.mov(ebx, eax)?;
    check_pattern(&mut a, fill_bytes, torn)?;
    a.mov(rcx, FILL_BASE)?;
    a.mov(dword_ptr(rcx + 8), ebx)?;
    a.mov(eax, ebx)?;
    a.out(dx, eax)?;
    a.jmp(wait)?;
    a.set_label(&mut torn)?;
    a.mov(eax, TORN)?;
    a.out(dx, eax)?;
    a.set_label(&mut idle)?;
    a.in_(eax, dx)?;
    a.jmp(idle)?;
    a.assemble(BASE)
}

/// What [`answering`] does as a clone and nothing else: checks the pattern of `fill_bytes` and rings 1.
///
/// # Errors
/// The assembler's, if the code is wrong.
pub fn floor(fill_bytes: u64) -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    let mut torn = a.create_label();
    a.mov(edx, u32::from(DOORBELL))?;
    a.mov(r9, FILL_BASE + fill_bytes)?;
    check_pattern(&mut a, fill_bytes, torn)?;
    a.mov(rcx, FILL_BASE)?;
    a.mov(dword_ptr(rcx + 8), edi)?;
    a.mov(eax, 1)?;
    a.out(dx, eax)?;
    a.set_label(&mut torn)?;
    a.mov(eax, TORN)?;
    a.out(dx, eax)?;
    a.assemble(BASE)
}

/// Bytes between two pages that [`check_pattern`] looks at.
pub fn check_stride_bytes(fill_bytes: u64) -> u64 {
    (fill_bytes / CHECKED_PAGES).next_multiple_of(PAGE as u64)
}

/// Compares [`CHECKED_PAGES`] pages up to R9 with their addresses.
fn check_pattern(a: &mut CodeAssembler, fill_bytes: u64, torn: CodeLabel) -> Result<(), IcedError> {
    let stride =
        i32::try_from(check_stride_bytes(fill_bytes)).expect("a sixteenth of a guest is below 2 GiB");
    let mut check = a.create_label();
    a.mov(rcx, FILL_BASE)?;
    a.set_label(&mut check)?;
    a.cmp(qword_ptr(rcx), rcx)?;
    a.jne(torn)?;
    a.add(rcx, stride)?;
    a.cmp(rcx, r9)?;
    a.jb(check)
}

/// Every vCPU sweeps without end over `pages` pages of low memory and, if `high`, as many above 4 GiB. Each page holds
/// `generation << 32 | sweep`; before a vCPU writes the next value it checks that the last one is there, so that memory
/// of one instant and registers of another, or a page of any other VM, show at once as [`TORN`]. After each change of
/// generation it rings the new one, and after [`SWEEPS`] more sweeps the generation's complement.
///
/// # Errors
/// The assembler's, if the code is wrong.
pub fn writers(pages: u32, high: bool) -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    let (mut sweep, mut torn, mut dead) = (a.create_label(), a.create_label(), a.create_label());
    let mut quiet = a.create_label();
    // R10: low area, R11: high area, R12: last value, R13: next value, R14: sweeps until all is well.
    a.imul_3(rcx, rdi, AREA_STRIDE)?;
    a.mov(r10, FILL_BASE)?;
    a.add(r10, rcx)?;
    a.mov(r11, HIGH_BASE)?;
    a.add(r11, rcx)?;
    a.xor(r12, r12)?;
    a.mov(edx, u32::from(GENERATION))?;
    a.in_(eax, dx)?;
    a.mov(ebx, eax)?;
    a.mov(r13, rbx)?;
    a.shl(r13, 32)?;
    a.mov(r14, i64::from(SWEEPS))?;
    a.set_label(&mut sweep)?;
    a.inc(r13)?;
    sweep_area(&mut a, r10, pages, torn)?;
    if high {
        sweep_area(&mut a, r11, pages, torn)?;
    }
    a.mov(r12, r13)?;
    let mut same = a.create_label();
    a.mov(edx, u32::from(GENERATION))?;
    a.in_(eax, dx)?;
    a.cmp(eax, ebx)?;
    a.je(same)?;
    a.mov(ebx, eax)?;
    a.mov(rax, rbx)?;
    a.shl(rax, 32)?;
    a.mov(r13, rax)?;
    a.mov(r14, i64::from(SWEEPS))?;
    a.mov(edx, u32::from(DOORBELL))?;
    a.mov(eax, ebx)?;
    a.out(dx, eax)?;
    a.set_label(&mut same)?;
    a.dec(r14)?;
    a.jne(quiet)?;
    a.mov(edx, u32::from(DOORBELL))?;
    a.mov(eax, ebx)?;
    a.not(eax)?;
    a.out(dx, eax)?;
    a.set_label(&mut quiet)?;
    a.jmp(sweep)?;
    a.set_label(&mut torn)?;
    a.mov(edx, u32::from(DOORBELL))?;
    a.mov(eax, TORN)?;
    a.out(dx, eax)?;
    a.set_label(&mut dead)?;
    a.in_(al, dx)?;
    a.jmp(dead)?;
    a.assemble(BASE)
}

/// One pass over an area: check the last value, write the next.
fn sweep_area(
    a: &mut CodeAssembler,
    area: iced_x86::code_asm::AsmRegister64,
    pages: u32,
    torn: CodeLabel,
) -> Result<(), IcedError> {
    let mut next = a.create_label();
    a.mov(rcx, area)?;
    a.mov(r8, u64::from(pages))?;
    a.set_label(&mut next)?;
    a.cmp(qword_ptr(rcx), r12)?;
    a.jne(torn)?;
    a.mov(qword_ptr(rcx), r13)?;
    a.add(rcx, PAGE)?;
    a.dec(r8)?;
    a.jne(next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_micro_guest_assembles() {
        assert!(answering(64 << 20).is_ok_and(|code| code.len() > 50));
        assert!(floor(64 << 20).is_ok_and(|code| code.len() > 30));
        assert!(writers(16, true).is_ok_and(|code| code.len() > 100));
    }
}
