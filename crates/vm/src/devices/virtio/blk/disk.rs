//! The root disk: an immutable base file under a private overlay in memory.
//!
//! ```text
//! block:  base ──write──▶ slot        base, slot ──discard, write zeroes──▶ zero ──write──▶ slot
//! ```
//!
//! A flat map says for each 4 KiB block where it is: in the base (where the disk is larger than the base, as zeros), in
//! a slot of the overlay, or nowhere, as zeros. Map, slots and free list are memory of the VMM, so a fork takes them
//! along in the same instant as RAM. The base is only read, by offset, and may be shared by any number of processes.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use offshoot_memory::{MemoryError, PageUse, Region};
use offshoot_protocol::control::DiskConfig;
use vm_memory::VolatileSlice;

use super::storage::Storage;
use crate::devices::virtio::{Buffers, volatile};

/// Unit of the map, bytes.
pub const BLOCK_BYTES: usize = 4096;
const BLOCK: u64 = BLOCK_BYTES as u64;
const ZEROS: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];
/// Map entries: not in the overlay; all zeros; otherwise one more than the slot's number.
const IN_BASE: u32 = 0;
const IS_ZERO: u32 = u32::MAX;
/// The map's numbers end here.
const MAX_BLOCKS: u64 = IS_ZERO as u64 - 1;

/// Why a disk cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The base cannot be opened.
    #[error("open root disk {path}")]
    Open {
        /// The base file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The base is a folder, pipe or device.
    #[error("root disk {path} is not a regular file")]
    NotRegular {
        /// The base file.
        path: PathBuf,
    },
    /// The base is empty and no size was given.
    #[error("root disk {path} is empty; give a disk size")]
    Empty {
        /// The base file.
        path: PathBuf,
    },
    /// The disk would cut its base.
    #[error("root disk {path} has {base_bytes} bytes, more than the disk size of {size_mib} MiB")]
    Smaller {
        /// The base file.
        path: PathBuf,
        /// Its length.
        base_bytes: u64,
        /// The size asked for.
        size_mib: u32,
    },
    /// The disk has more blocks than the map can number.
    #[error("root disk of {disk_bytes} bytes is too large; at most 16 TiB can be mapped")]
    TooLarge {
        /// The size of the disk.
        disk_bytes: u64,
    },
    /// A guest could not write at all.
    #[error("overlay limit of the root disk is 0 MiB; give at least 1")]
    NoOverlay,
    /// No memory for map or overlay.
    #[error("reserve {len_bytes} bytes for the overlay of the root disk")]
    Memory {
        /// How much.
        len_bytes: usize,
        /// Why not.
        source: MemoryError,
    },
}

/// Why a request failed. The disk is as it was, but for blocks that were already written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BlockFault {
    /// The range is not inside the disk.
    #[error("range lies outside the disk")]
    Range,
    /// The base could not be read, or is shorter than it was.
    #[error("base of the disk cannot be read")]
    Base,
    /// The overlay is full.
    #[error("overlay of the disk is full")]
    Full,
    /// The guest's buffers are shorter than the range.
    #[error("buffers are too short")]
    Buffers,
}

/// A disk of 4 KiB blocks over a base file.
pub struct OverlayDisk<S = Region> {
    base: OwnedFd,
    base_bytes: u64,
    blocks: u64,
    map: S,
    slots: S,
    slot_count: u32,
    next_slot: u32,
    free_slots: Vec<u32>,
    refused_writes: u64,
}

impl OverlayDisk<Region> {
    /// Opens the base read-only and reserves map and overlay; no page of them is populated.
    ///
    /// # Errors
    /// See [`DiskError`].
    pub fn open(config: &DiskConfig) -> Result<Self, DiskError> {
        let path = || config.base.clone();
        let open_failed = |source| DiskError::Open { path: path(), source };
        let base = File::open(&config.base).map_err(open_failed)?;
        let metadata = base.metadata().map_err(open_failed)?;
        if !metadata.is_file() {
            return Err(DiskError::NotRegular { path: path() });
        }
        let (base_bytes, size_bytes) = (metadata.len(), u64::from(config.size_mib) << 20);
        if size_bytes != 0 && size_bytes < base_bytes {
            return Err(DiskError::Smaller { path: path(), base_bytes, size_mib: config.size_mib });
        }
        let disk_bytes = size_bytes.max(base_bytes);
        let blocks = disk_bytes.div_ceil(BLOCK);
        let limit_bytes = u64::from(config.overlay_limit_mib) << 20;
        match (blocks, limit_bytes) {
            (0, _) => return Err(DiskError::Empty { path: path() }),
            (_, 0) => return Err(DiskError::NoOverlay),
            (blocks, _) if blocks > MAX_BLOCKS => return Err(DiskError::TooLarge { disk_bytes }),
            _ => {}
        }
        let slot_count = (limit_bytes / BLOCK).min(blocks) as u32;
        let map = reserve((blocks as usize * 4).next_multiple_of(BLOCK_BYTES))?;
        let slots = reserve(slot_count as usize * BLOCK_BYTES)?;
        Ok(Self::new(base.into(), base_bytes, blocks, map, slots, slot_count))
    }

    /// The read-only base; children share it.
    pub fn base_fd(&self) -> BorrowedFd<'_> {
        self.base.as_fd()
    }

    /// Map and overlay, in the order of [`OverlayDisk::regions_mut`].
    pub fn regions(&self) -> [&Region; 2] {
        [&self.map, &self.slots]
    }

    /// Map and overlay, for freezing: their content may be moved to layers, not changed.
    pub fn regions_mut(&mut self) -> [&mut Region; 2] {
        [&mut self.map, &mut self.slots]
    }
}

fn reserve(len_bytes: usize) -> Result<Region, DiskError> {
    Region::anonymous(len_bytes, PageUse::Sparse).map_err(|source| DiskError::Memory { len_bytes, source })
}

impl<S: Storage> OverlayDisk<S> {
    /// `map` has a word for each of `blocks`, all zero, and `slots` room for `slot_count` blocks.
    pub(super) fn new(
        base: OwnedFd,
        base_bytes: u64,
        blocks: u64,
        map: S,
        slots: S,
        slot_count: u32,
    ) -> Self {
        Self {
            base,
            base_bytes,
            blocks,
            map,
            slots,
            slot_count,
            next_slot: 0,
            free_slots: Vec::new(),
            refused_writes: 0,
        }
    }

    /// Size the guest sees, bytes; whole blocks.
    pub fn len_bytes(&self) -> u64 {
        self.blocks * BLOCK
    }

    /// Bytes of the overlay in use.
    pub fn overlay_bytes(&self) -> u64 {
        u64::from(self.next_slot - self.free_slots.len() as u32) * BLOCK
    }

    /// Most bytes the overlay can have in use.
    pub fn overlay_limit_bytes(&self) -> u64 {
        u64::from(self.slot_count) * BLOCK
    }

    /// Writes refused because the overlay was full.
    pub fn refused_writes(&self) -> u64 {
        self.refused_writes
    }

    /// Reads `len` bytes at `offset` into `target`. Cost: one `pread(2)` for each run of blocks that are in the base and
    /// each of the guest's buffers there.
    ///
    /// # Errors
    /// [`BlockFault::Range`], [`BlockFault::Base`], [`BlockFault::Buffers`]; `target` may be filled in part.
    pub fn read(&self, offset: u64, len: u64, target: &mut Buffers<'_>) -> Result<(), BlockFault> {
        let end = self.end_of(offset, len)?;
        let mut position = offset;
        while position < end {
            let mut stop = block_end(position).min(end);
            match self.entry(position) {
                IN_BASE => {
                    while stop < end && self.entry(stop) == IN_BASE {
                        stop = block_end(stop).min(end);
                    }
                    self.read_base(position, stop - position, target)?;
                }
                IS_ZERO => write_zeros(target, stop - position)?,
                entry => {
                    let mut block = [0; BLOCK_BYTES];
                    let part = &mut block[..(stop - position) as usize];
                    self.slots.read(slot_offset(entry) + within(position), part);
                    if !target.write(part) {
                        return Err(BlockFault::Buffers);
                    }
                }
            }
            position = stop;
        }
        Ok(())
    }

    /// Writes `len` bytes of `source` at `offset`.
    ///
    /// # Errors
    /// Any [`BlockFault`]; blocks before the one that failed are written. A full overlay counts as one refused write.
    pub fn write(&mut self, offset: u64, len: u64, source: &mut Buffers<'_>) -> Result<(), BlockFault> {
        let end = self.end_of(offset, len)?;
        let mut position = offset;
        while position < end {
            let stop = block_end(position).min(end);
            let mut block = [0; BLOCK_BYTES];
            let part = &mut block[..(stop - position) as usize];
            if !source.read(part) {
                return Err(BlockFault::Buffers);
            }
            self.write_part(position, part)?;
            position = stop;
        }
        Ok(())
    }

    /// Makes a range read as zeros and gives its slots back. Whatever of it does not fill a block is left as it is.
    ///
    /// # Errors
    /// [`BlockFault::Range`].
    pub fn discard(&mut self, offset: u64, len: u64) -> Result<(), BlockFault> {
        let end = self.end_of(offset, len)?;
        for block in offset.div_ceil(BLOCK)..end / BLOCK {
            self.drop_block(block);
        }
        Ok(())
    }

    /// Makes a range read as zeros; whole blocks give their slots back.
    ///
    /// # Errors
    /// As [`OverlayDisk::write`], of parts of blocks.
    pub fn write_zeroes(&mut self, offset: u64, len: u64) -> Result<(), BlockFault> {
        let end = self.end_of(offset, len)?;
        let mut position = offset;
        while position < end {
            let stop = block_end(position).min(end);
            if stop - position == BLOCK {
                self.drop_block(position / BLOCK);
            } else if !self.reads_as_zero(position / BLOCK) {
                self.write_part(position, &ZEROS[..(stop - position) as usize])?;
            }
            position = stop;
        }
        Ok(())
    }

    fn end_of(&self, offset: u64, len: u64) -> Result<u64, BlockFault> {
        offset.checked_add(len).filter(|end| *end <= self.len_bytes()).ok_or(BlockFault::Range)
    }

    fn entry(&self, position: u64) -> u32 {
        self.map.load_u32((position / BLOCK) as usize)
    }

    fn reads_as_zero(&self, block: u64) -> bool {
        match self.map.load_u32(block as usize) {
            IS_ZERO => true,
            IN_BASE => block * BLOCK >= self.base_bytes,
            _ => false,
        }
    }

    /// Writes `part`, which lies within one block. A block that is not in the overlay yet is copied up first.
    fn write_part(&mut self, position: u64, part: &[u8]) -> Result<(), BlockFault> {
        let entry = self.entry(position);
        if entry != IN_BASE && entry != IS_ZERO {
            self.slots.write(slot_offset(entry) + within(position), part);
            return Ok(());
        }
        let mut block = [0; BLOCK_BYTES];
        if entry == IN_BASE && part.len() < BLOCK_BYTES {
            let start = position - position % BLOCK;
            self.read_base(start, BLOCK, &mut Buffers::over(&mut block))?;
        }
        block[within(position)..][..part.len()].copy_from_slice(part);
        let Some(slot) = self.take_slot() else {
            self.refused_writes += 1;
            return Err(BlockFault::Full);
        };
        self.slots.write(slot as usize * BLOCK_BYTES, &block);
        self.map.store_u32((position / BLOCK) as usize, slot + 1);
        Ok(())
    }

    fn take_slot(&mut self) -> Option<u32> {
        if let Some(slot) = self.free_slots.pop() {
            return Some(slot);
        }
        if self.next_slot == self.slot_count {
            return None;
        }
        self.next_slot += 1;
        Some(self.next_slot - 1)
    }

    /// Marks a block as zeros, never as the base's old content.
    fn drop_block(&mut self, block: u64) {
        let entry = self.map.load_u32(block as usize);
        if self.reads_as_zero(block) {
            return;
        }
        let beyond_base = block * BLOCK >= self.base_bytes;
        self.map.store_u32(block as usize, if beyond_base { IN_BASE } else { IS_ZERO });
        if entry != IN_BASE {
            self.slots.release(slot_offset(entry), BLOCK_BYTES);
            self.free_slots.push(entry - 1);
        }
    }

    /// Reads base content, zeros past its end.
    fn read_base(&self, position: u64, len: u64, target: &mut Buffers<'_>) -> Result<(), BlockFault> {
        let in_base = self.base_bytes.saturating_sub(position).min(len);
        let mut done = 0;
        while done < in_base {
            let piece = target.take((in_base - done) as usize).ok_or(BlockFault::Buffers)?;
            volatile::read_file_at(&self.base, &piece, position + done).map_err(|_| BlockFault::Base)?;
            done += piece.len() as u64;
        }
        write_zeros(target, len - in_base)
    }
}

fn write_zeros(target: &mut Buffers<'_>, mut len: u64) -> Result<(), BlockFault> {
    while len > 0 {
        let part = len.min(BLOCK);
        if !target.write(&ZEROS[..part as usize]) {
            return Err(BlockFault::Buffers);
        }
        len -= part;
    }
    Ok(())
}

fn block_end(position: u64) -> u64 {
    (position / BLOCK + 1) * BLOCK
}

fn within(position: u64) -> usize {
    (position % BLOCK) as usize
}

fn slot_offset(entry: u32) -> usize {
    (entry - 1) as usize * BLOCK_BYTES
}

impl<'a> Buffers<'a> {
    /// Buffers over memory of the VMM itself.
    pub fn over(memory: &'a mut [u8]) -> Self {
        let mut buffers = Self::default();
        buffers.append(VolatileSlice::from(memory));
        buffers
    }
}

#[cfg(test)]
mod tests;
