//! Where RAM is: regions for a memory size, and the map the firmware would report.
//!
//! RAM below [`MMIO_GAP_START`] is the *low region*; what does not fit goes on at [`MMIO_GAP_END`] as the *high region*.

use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestUsize};

use super::layout::{ACPI_BASE, LOW_RAM_END, MMIO_GAP_END, MMIO_GAP_START, PAYLOAD_BASE};

const MIB: u64 = 1 << 20;

/// RAM regions, `(start, bytes)`, of a guest with `memory_mib` MiB; low first, the high one only where it is needed.
pub fn regions(memory_mib: u32) -> Vec<(GuestAddress, usize)> {
    let bytes = u64::from(memory_mib) * MIB;
    let low = bytes.min(MMIO_GAP_START);
    let mut regions = vec![(GuestAddress(0), low as usize)];
    if bytes > low {
        regions.push((GuestAddress(MMIO_GAP_END), (bytes - low) as usize));
    }
    regions
}

/// What a range of guest-physical addresses is to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum E820Kind {
    /// Usable RAM.
    Ram = 1,
    /// Not to be touched.
    Reserved = 2,
}

/// One entry of the guest's memory map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct E820Entry {
    /// First guest-physical address.
    pub start: u64,
    /// Length, bytes.
    pub bytes: u64,
    /// What it is.
    pub kind: E820Kind,
}

/// The memory map of `mem`, ascending: conventional RAM, the firmware area (ACPI tables and the generation id, which
/// must never be allocated), RAM from 1 MiB to the end of the low region, the high region.
pub fn e820(mem: &Memory) -> Vec<E820Entry> {
    let entry = |start, end: u64, kind| E820Entry { start, bytes: end - start, kind };
    let low_end = low_region_end(mem);
    let mut map = vec![
        entry(0, LOW_RAM_END, E820Kind::Ram),
        entry(ACPI_BASE, PAYLOAD_BASE, E820Kind::Reserved),
        entry(PAYLOAD_BASE, low_end, E820Kind::Ram),
    ];
    map.retain(|entry| entry.start < low_end);
    map.extend(mem.iter().filter(|region| region.start_addr().0 >= MMIO_GAP_END).map(|region| E820Entry {
        start: region.start_addr().0,
        bytes: region.len(),
        kind: E820Kind::Ram,
    }));
    map
}

/// First address above the low region's RAM.
pub fn low_region_end(mem: &Memory) -> u64 {
    mem.find_region(GuestAddress(0)).map_or(0, |region| region.len())
}

/// Guest memory as the VMM holds it.
pub type Memory = GuestMemoryMmap<()>;

/// All RAM, bytes.
pub fn total_bytes(mem: &Memory) -> GuestUsize {
    mem.iter().map(|region| region.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(ranges: &[(u64, usize)]) -> Memory {
        let ranges: Vec<_> = ranges.iter().map(|&(start, bytes)| (GuestAddress(start), bytes)).collect();
        Memory::from_ranges(&ranges).unwrap()
    }

    #[test]
    fn a_small_guest_has_one_region() {
        assert_eq!(regions(128), vec![(GuestAddress(0), 128 << 20)]);
        assert_eq!(regions(3072), vec![(GuestAddress(0), 3072 << 20)]);
    }

    #[test]
    fn ram_goes_on_above_the_gap() {
        let expected = vec![(GuestAddress(0), 3072 << 20), (GuestAddress(MMIO_GAP_END), 9216 << 20)];
        assert_eq!(regions(12288), expected);
        assert_eq!(regions(3073)[1], (GuestAddress(MMIO_GAP_END), 1 << 20));
    }

    #[test]
    fn firmware_area_is_reserved_and_nothing_overlaps() {
        let mem = memory(&[(0, 64 << 20), (MMIO_GAP_END, 32 << 20)]);
        let map = e820(&mem);
        assert!(map.windows(2).all(|pair| pair[0].start + pair[0].bytes <= pair[1].start));
        assert!(map.contains(&E820Entry { start: ACPI_BASE, bytes: 0x2_0000, kind: E820Kind::Reserved }));
        assert_eq!(map.last().map(|entry| (entry.start, entry.bytes)), Some((MMIO_GAP_END, 32 << 20)));
        let ram: u64 = map.iter().filter(|entry| entry.kind == E820Kind::Ram).map(|entry| entry.bytes).sum();
        assert_eq!(ram, total_bytes(&mem) - (PAYLOAD_BASE - LOW_RAM_END));
    }
}
