//! Identity-mapping page tables of 2 MiB pages.

use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use super::memory_map::Memory;

const PAGE_BYTES: u64 = 4096;
/// Bytes one entry of a page directory maps.
const LARGE_PAGE_BYTES: u64 = 2 << 20;
/// Bytes one page directory maps.
const DIRECTORY_BYTES: u64 = 1 << 30;

const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
/// Set ahead, as is [`DIRTY`], so that the processor has nothing to write: a clone's page tables stay shared.
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;

/// Who may use the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Kernel mode only.
    Kernel,
    /// User mode too.
    User,
}

/// Bytes of the tables that map up to address `end`.
pub const fn table_bytes(end: u64) -> u64 {
    (2 + end.div_ceil(DIRECTORY_BYTES)) * PAGE_BYTES
}

/// Writes tables at `base` that map each of `ranges` (first address, end; rounded outwards to 2 MiB) to itself.
/// Ranges ascend and lie below 512 GiB. The tables take [`table_bytes`] of the last range's end.
///
/// # Errors
/// Fails if guest memory does not reach there.
pub fn write_identity_map(
    mem: &Memory,
    base: GuestAddress,
    ranges: &[(u64, u64)],
    access: Access,
) -> Result<(), GuestMemoryError> {
    let link = PRESENT | WRITABLE | ACCESSED | if access == Access::User { USER } else { 0 };
    let page = link | DIRTY | LARGE;
    let end = ranges.iter().map(|range| range.1).max().unwrap_or(0);
    let (pointers, directories) = (base.0 + PAGE_BYTES, base.0 + 2 * PAGE_BYTES);
    let mut table = [0_u64; 512];
    table[0] = pointers | link;
    write_table(mem, base.0, &table)?;

    let count = end.div_ceil(DIRECTORY_BYTES);
    for (index, entry) in table.iter_mut().enumerate() {
        let index = index as u64;
        *entry = if index < count { (directories + index * PAGE_BYTES) | link } else { 0 };
    }
    write_table(mem, pointers, &table)?;

    for directory in 0..count {
        for (index, entry) in table.iter_mut().enumerate() {
            let address = directory * DIRECTORY_BYTES + index as u64 * LARGE_PAGE_BYTES;
            let mapped =
                ranges.iter().any(|&(start, end)| address + LARGE_PAGE_BYTES > start && address < end);
            *entry = if mapped { address | page } else { 0 };
        }
        write_table(mem, directories + directory * PAGE_BYTES, &table)?;
    }
    Ok(())
}

fn write_table(mem: &Memory, address: u64, table: &[u64; 512]) -> Result<(), GuestMemoryError> {
    let mut bytes = [0_u8; PAGE_BYTES as usize];
    for (chunk, entry) in bytes.chunks_exact_mut(8).zip(table) {
        chunk.copy_from_slice(&entry.to_le_bytes());
    }
    mem.write_slice(&bytes, GuestAddress(address))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Walks the tables as the processor does.
    fn translate(mem: &Memory, base: u64, address: u64) -> Option<(u64, u64)> {
        let entry = |table: u64, shift: u32| -> Option<u64> {
            let entry: u64 = mem.read_obj(GuestAddress(table + ((address >> shift) & 511) * 8)).unwrap();
            (entry & PRESENT != 0).then_some(entry)
        };
        let pointer = entry(base, 39)?;
        let directory = entry(pointer & !0xfff, 30)?;
        let page = entry(directory & !0xfff, 21)?;
        assert_ne!(page & LARGE, 0);
        Some(((page & !0x1f_ffff) | (address & 0x1f_ffff), pointer & directory & page))
    }

    #[test]
    fn ram_maps_to_itself_and_the_gap_does_not() {
        let mem = Memory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let ranges = [(0, 0xc000_0000), (0x1_0000_0000, 0x3_4000_0000)];
        write_identity_map(&mem, GuestAddress(0x1000), &ranges, Access::User).unwrap();
        for address in [0, 0x1000, 0xbfff_ffff, 0x1_0000_0000, 0x3_3fff_f000] {
            let (target, flags) = translate(&mem, 0x1000, address).unwrap();
            assert_eq!(target, address);
            assert_eq!(flags & (USER | WRITABLE), USER | WRITABLE);
        }
        for address in [0xc000_0000, 0xffff_ffff, 0x3_4000_0000] {
            assert!(translate(&mem, 0x1000, address).is_none(), "{address:#x}");
        }
    }

    #[test]
    fn kernel_pages_are_not_for_users() {
        let mem = Memory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        write_identity_map(&mem, GuestAddress(0x9000), &[(0, 1 << 32)], Access::Kernel).unwrap();
        assert_eq!(translate(&mem, 0x9000, 0xfee0_0000).unwrap().1 & USER, 0);
        assert_eq!(table_bytes(1 << 32), 6 * 4096);
    }
}
