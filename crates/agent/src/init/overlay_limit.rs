//! Makes the guest see "no space left on device" before the disk's overlay is full.
//!
//! The disk's writes are kept in an overlay of bounded size on the host. When it is full, virtio-blk can only fail the
//! request, which the guest sees as an I/O error, if not as a broken file system. So ext4 is made to refuse
//! allocation earlier: `/sys/fs/ext4/DEV/reserved_clusters` sets `s_resv_clusters`, and `ext4_has_free_clusters()`
//! (Linux 6.1, fs/ext4/balloc.c) gives nobody but metadata writeback (`EXT4_MB_USE_RESERVED`) a cluster unless
//! `free_clusters >= nclusters + dirty_clusters + resv_clusters`: root, which may use the blocks reserved for it by
//! mkfs, may not use these. `statfs` reports them as not available, so `df` shows the limit, too.
//!
//! What it cannot see: writing over blocks that the image already uses takes room in the overlay, but no free
//! cluster. The margin is for that and for metadata and journal.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

const MIB: u64 = 1 << 20;
/// Kept for metadata and journal besides a sixteenth, MiB.
const MARGIN_MIB: u64 = 16;

/// Why the limit is not in force.
#[derive(Debug, thiserror::Error)]
pub enum LimitError {
    /// Not ext4, or not readable.
    #[error("{device} has no ext4 superblock that could be read: {source}")]
    Superblock {
        /// The device.
        device: String,
        /// Why.
        source: io::Error,
    },
    /// Free space is not known.
    #[error("free space is not known: {0}")]
    Free(io::Error),
    /// The kernel refused.
    #[error("{path} did not take {clusters}: {source}")]
    Write {
        /// File of sysfs.
        path: String,
        /// What was written.
        clusters: u64,
        /// Why.
        source: io::Error,
    },
}

/// An ext4 file system's clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Clusters {
    /// Bytes of one.
    size_bytes: u64,
    /// Number of all.
    total: u64,
}

/// Clusters to reserve, so that at most `limit_mib` less the margin can be allocated of `free_bytes`.
fn reserved_clusters(free_bytes: u64, clusters: Clusters, limit_mib: u64) -> u64 {
    let margin_mib = limit_mib / 16 + MARGIN_MIB;
    let usable_bytes = limit_mib.saturating_sub(margin_mib) * MIB;
    let reserved = free_bytes.saturating_sub(usable_bytes) / clusters.size_bytes;
    // The kernel refuses to reserve as many as there are (fs/ext4/sysfs.c, reserved_clusters_store).
    reserved.min(clusters.total.saturating_sub(1))
}

/// Reads block and cluster size out of the superblock's first bytes (Documentation/filesystems/ext4/super.rst).
fn parse_superblock(superblock: &[u8; 1024]) -> Option<Clusters> {
    let u32_at = |offset: usize| {
        let bytes = superblock.get(offset..offset + 4)?;
        Some(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    };
    let (magic_low, magic_high) = (superblock[0x38], superblock[0x39]);
    if u16::from_le_bytes([magic_low, magic_high]) != 0xef53 {
        return None;
    }
    const INCOMPAT_64BIT: u32 = 0x80;
    let has_high_words = u32_at(0x60)? & INCOMPAT_64BIT != 0;
    let high = if has_high_words { u32_at(0x150)? } else { 0 };
    let blocks = (u64::from(high) << 32) | u64::from(u32_at(0x4)?);
    let (block_shift, cluster_shift) = (u32_at(0x18)?, u32_at(0x1c)?);
    if block_shift > 6 || cluster_shift < block_shift || cluster_shift > 20 {
        return None;
    }
    Some(Clusters { size_bytes: 1024 << cluster_shift, total: blocks >> (cluster_shift - block_shift) })
}

fn read_superblock(device: &Path) -> io::Result<Clusters> {
    let mut superblock = [0; 1024];
    File::open(device)?.read_exact_at(&mut superblock, 1024)?;
    parse_superblock(&superblock).ok_or_else(|| io::Error::other("it is of another file system"))
}

/// Limits allocation on the root file system, which is on `device`.
///
/// # Errors
/// Where it is not ext4, or the kernel refuses.
pub fn apply(device: &Path, limit_mib: u64) -> Result<(), LimitError> {
    let clusters = read_superblock(device)
        .map_err(|source| LimitError::Superblock { device: device.display().to_string(), source })?;
    let disk = rustix::fs::statvfs("/").map_err(|error| LimitError::Free(error.into()))?;
    let reserved = reserved_clusters(disk.f_bfree * disk.f_frsize, clusters, limit_mib);
    let name = device.file_name().unwrap_or_default().to_string_lossy();
    let path = format!("/sys/fs/ext4/{name}/reserved_clusters");
    std::fs::write(&path, reserved.to_string()).map_err(|source| LimitError::Write {
        path,
        clusters: reserved,
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Clusters = Clusters { size_bytes: 4096, total: 1 << 20 };

    #[test]
    fn what_may_be_allocated_is_the_limit_less_the_margin() {
        let free = 4096 * MIB;
        let reserved = reserved_clusters(free, SMALL, 1024);
        assert_eq!(free - reserved * 4096, (1024 - 64 - 16) * MIB);
    }

    #[test]
    fn a_limit_above_free_space_reserves_nothing() {
        assert_eq!(reserved_clusters(100 * MIB, SMALL, 1024), 0);
    }

    #[test]
    fn a_limit_below_the_margin_reserves_all_but_what_the_kernel_insists_on() {
        assert_eq!(reserved_clusters(4096 * MIB, SMALL, 8), SMALL.total - 1);
        assert_eq!(reserved_clusters(1024 * MIB, SMALL, 8), 1024 * MIB / 4096);
    }

    #[test]
    fn superblocks_are_read_or_refused() {
        let mut superblock = [0; 1024];
        assert_eq!(parse_superblock(&superblock), None);
        superblock[0x38..0x3a].copy_from_slice(&0xef53_u16.to_le_bytes());
        superblock[0x4..0x8].copy_from_slice(&262_144_u32.to_le_bytes());
        superblock[0x18] = 2;
        superblock[0x1c] = 2;
        assert_eq!(parse_superblock(&superblock), Some(Clusters { size_bytes: 4096, total: 262_144 }));
        superblock[0x1c] = 6;
        assert_eq!(parse_superblock(&superblock), Some(Clusters { size_bytes: 65_536, total: 16_384 }));
        superblock[0x18] = 200;
        assert_eq!(parse_superblock(&superblock), None);
    }
}
