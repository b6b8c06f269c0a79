//! Flat 64-bit segments, the descriptor table that matches them, and the control registers of long mode.

use kvm_bindings::{kvm_dtable, kvm_segment, kvm_sregs};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use super::memory_map::Memory;

/// Where the descriptor table is.
pub const GDT_BASE: u64 = 0x500;
/// Where the task state segment is.
pub const TSS_BASE: u64 = 0x600;
/// Bytes of a 64-bit TSS without I/O permission bitmap (Intel SDM vol. 3A, 8.7).
const TSS_HEAD_BYTES: usize = 104;
/// Offset of the 16-bit offset of the I/O permission bitmap.
const TSS_BITMAP_OFFSET: usize = 102;
/// The bitmap opens ports below 0x1000 to user mode, and ends in a byte of ones (Intel SDM vol. 1, 19.5.2). I/O privilege
/// level 3 says the same, but some hosts that emulate guest kernel mode do not keep it.
const TSS_BYTES: usize = TSS_HEAD_BYTES + 0x1000 / 8 + 1;

/// Table index of the code segment; the boot protocol's `__BOOT_CS`.
const CODE: u16 = 2;
/// Selector of the kernel code segment.
pub const CODE_SELECTOR: u16 = CODE * 8;
/// Table index of the data segment; `__BOOT_DS`.
const DATA: u16 = 3;
/// Table index of the task state segment, two entries long.
const TASK: u16 = 4;
const ENTRIES: usize = 6;

/// CR0: protection, numeric error, extension type, write protect, paging.
const CR0: u64 = 0x8001_0033;
/// CR4: PAE, OSFXSR, OSXMMEXCPT.
const CR4: u64 = (1 << 5) | (1 << 9) | (1 << 10);
/// EFER: long mode enabled and active, no-execute.
const EFER: u64 = (1 << 8) | (1 << 10) | (1 << 11);

/// Privilege at which the code starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ring {
    /// Kernel mode.
    Kernel = 0,
    /// User mode.
    User = 3,
}

/// Writes the descriptor table for `ring` and a TSS without stacks.
///
/// # Errors
/// Fails if guest memory does not reach there.
pub fn write_tables(mem: &Memory, ring: Ring) -> Result<(), GuestMemoryError> {
    let mut table = [0_u64; ENTRIES];
    table[usize::from(CODE)] = descriptor(&code(ring));
    table[usize::from(DATA)] = descriptor(&data(ring));
    table[usize::from(TASK)] = descriptor(&task());
    table[usize::from(TASK) + 1] = TSS_BASE >> 32;
    for (index, entry) in table.iter().enumerate() {
        mem.write_obj(*entry, GuestAddress(GDT_BASE + 8 * index as u64))?;
    }
    let mut tss = [0_u8; TSS_BYTES];
    tss[TSS_BITMAP_OFFSET] = TSS_HEAD_BYTES as u8;
    tss[TSS_BYTES - 1] = 0xff;
    mem.write_slice(&tss, GuestAddress(TSS_BASE))
}

/// Turns `sregs` as KVM resets them into 64-bit mode at `ring` with page tables at `page_table`; the interrupt
/// descriptor table is empty, so that an exception ends the guest in a shutdown exit.
pub fn enter_long_mode(sregs: &mut kvm_sregs, ring: Ring, page_table: GuestAddress) {
    sregs.cs = code(ring);
    let data = data(ring);
    (sregs.ds, sregs.es, sregs.ss) = (data, data, data);
    (sregs.fs, sregs.gs) = (data, data);
    sregs.tr = task();
    sregs.ldt = kvm_segment { unusable: 1, ..Default::default() };
    sregs.gdt = kvm_dtable { base: GDT_BASE, limit: (ENTRIES * 8 - 1) as u16, ..Default::default() };
    sregs.idt = kvm_dtable::default();
    sregs.cr0 = CR0;
    sregs.cr3 = page_table.0;
    sregs.cr4 = CR4;
    sregs.efer = EFER;
}

fn code(ring: Ring) -> kvm_segment {
    // Execute, read, accessed.
    kvm_segment { selector: CODE * 8 + ring as u16, type_: 0xb, l: 1, ..flat(ring) }
}

fn data(ring: Ring) -> kvm_segment {
    // Read, write, accessed.
    kvm_segment { selector: DATA * 8 + ring as u16, type_: 0x3, db: 1, ..flat(ring) }
}

fn flat(ring: Ring) -> kvm_segment {
    kvm_segment { limit: u32::MAX, present: 1, dpl: ring as u8, s: 1, g: 1, ..Default::default() }
}

/// VM entry wants a busy 64-bit TSS (Intel SDM vol. 3C, 27.3.1.2).
fn task() -> kvm_segment {
    kvm_segment {
        base: TSS_BASE,
        limit: (TSS_BYTES - 1) as u32,
        selector: TASK * 8,
        type_: 0xb,
        present: 1,
        ..Default::default()
    }
}

/// The 8-byte descriptor of `segment` (Intel SDM vol. 3A, 3.4.5).
fn descriptor(segment: &kvm_segment) -> u64 {
    let limit = u64::from(if segment.g == 1 { segment.limit >> 12 } else { segment.limit });
    let access = u64::from(segment.type_)
        | u64::from(segment.s) << 4
        | u64::from(segment.dpl) << 5
        | u64::from(segment.present) << 7;
    let flags = u64::from(segment.l) << 1 | u64::from(segment.db) << 2 | u64::from(segment.g) << 3;
    (limit & 0xffff)
        | (segment.base & 0xff_ffff) << 16
        | access << 40
        | (limit >> 16 & 0xf) << 48
        | flags << 52
        | (segment.base >> 24 & 0xff) << 56
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_the_usual_flat_ones() {
        assert_eq!(descriptor(&code(Ring::Kernel)), 0x00af_9b00_0000_ffff);
        assert_eq!(descriptor(&data(Ring::Kernel)), 0x00cf_9300_0000_ffff);
        assert_eq!(descriptor(&code(Ring::User)), 0x00af_fb00_0000_ffff);
        assert_eq!(descriptor(&data(Ring::User)), 0x00cf_f300_0000_ffff);
    }

    #[test]
    fn boot_protocol_selectors() {
        assert_eq!((code(Ring::Kernel).selector, data(Ring::Kernel).selector), (0x10, 0x18));
        assert_eq!((code(Ring::User).selector, data(Ring::User).selector), (0x13, 0x1b));
    }
}
