//! virtio-blk: the root disk, virtio 1.2 section 5.2.
//!
//! Requests are served at once by the vCPU thread that made them. A flush succeeds and does nothing: the overlay is
//! memory of the VMM and as durable as the sandbox itself.

mod disk;
mod metrics;
mod queue;
mod storage;

use rustix::event::epoll;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;

pub use disk::{BLOCK_BYTES, BlockFault, DiskError, OverlayDisk};
pub use metrics::BlkMetrics;
pub use queue::serve;
pub use storage::Storage;

use super::{QueueIo, VirtioDevice, copy_config};
use crate::devices::{AttachError, HostResources};
use queue::{MAX_RANGE_SECTORS, MAX_RANGES, SECTOR_BYTES};

const QUEUE_SIZES: &[u16] = &[256];
/// Data segments of one request: half the ring without header and status.
const SEG_MAX: u32 = 126;
/// Length of `struct virtio_blk_config` up to `write_zeroes_may_unmap`, section 5.2.4.
const CONFIG_BYTES: usize = 60;

/// The root disk.
pub struct Blk {
    disk: OverlayDisk,
    metrics: BlkMetrics,
    config: [u8; CONFIG_BYTES],
}

impl Blk {
    /// A block device over `disk`.
    pub fn new(disk: OverlayDisk) -> Self {
        let config = config_space(&disk);
        Self { disk, metrics: BlkMetrics::default(), config }
    }

    /// The disk.
    pub fn disk(&self) -> &OverlayDisk {
        &self.disk
    }

    /// The disk, for freezing.
    pub fn disk_mut(&mut self) -> &mut OverlayDisk {
        &mut self.disk
    }

    /// Counters since boot.
    pub fn metrics(&self) -> BlkMetrics {
        self.metrics
    }
}

fn config_space(disk: &OverlayDisk) -> [u8; CONFIG_BYTES] {
    let mut config = [0; CONFIG_BYTES];
    let mut put = |offset: usize, bytes: &[u8]| config[offset..offset + bytes.len()].copy_from_slice(bytes);
    let sectors_per_block = (BLOCK_BYTES as u64 / SECTOR_BYTES) as u32;
    put(0, &(disk.len_bytes() / SECTOR_BYTES).to_le_bytes());
    put(12, &SEG_MAX.to_le_bytes());
    put(20, &(SECTOR_BYTES as u32).to_le_bytes());
    // Topology: sectors per physical block as a power of two, best size of a request in sectors.
    put(24, &[sectors_per_block.trailing_zeros() as u8]);
    put(26, &(sectors_per_block as u16).to_le_bytes());
    put(36, &MAX_RANGE_SECTORS.to_le_bytes());
    put(40, &MAX_RANGES.to_le_bytes());
    put(44, &sectors_per_block.to_le_bytes());
    put(48, &MAX_RANGE_SECTORS.to_le_bytes());
    put(52, &MAX_RANGES.to_le_bytes());
    put(56, &[1]);
    config
}

impl VirtioDevice for Blk {
    fn name(&self) -> &'static str {
        "blk"
    }

    fn device_id(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn features(&self) -> u64 {
        [
            VIRTIO_BLK_F_SEG_MAX,
            VIRTIO_BLK_F_BLK_SIZE,
            VIRTIO_BLK_F_FLUSH,
            VIRTIO_BLK_F_TOPOLOGY,
            VIRTIO_BLK_F_DISCARD,
            VIRTIO_BLK_F_WRITE_ZEROES,
        ]
        .iter()
        .fold(0, |features, bit| features | 1 << bit)
    }

    fn queue_sizes(&self) -> &'static [u16] {
        QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        copy_config(&self.config, offset, data);
    }

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    fn activate(&mut self, _features: u64) {}

    fn reset(&mut self) {}

    fn notify(&mut self, queue: usize, io: &mut QueueIo<'_>) {
        for _ in 0..io.pending(queue) {
            let Some(chain) = io.pop(queue) else { return };
            let written = match chain.buffers {
                Ok((readable, writable)) => serve(&mut self.disk, &mut self.metrics, readable, writable),
                Err(_) => {
                    self.metrics.failed_requests += 1;
                    0
                }
            };
            io.push(queue, chain.head, written);
        }
    }

    fn ready(&mut self, _token: u32, _events: epoll::EventFlags, _io: &mut QueueIo<'_>) {}

    /// Nothing: the base is a layer, immutable and meant to be shared, and is only read by offset.
    fn detach(&mut self) {}

    fn attach(&mut self, _host: &mut HostResources<'_>, _io: &mut QueueIo<'_>) -> Result<(), AttachError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
