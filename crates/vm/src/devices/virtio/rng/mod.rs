//! virtio-rng: random bytes of the host kernel, virtio 1.2 section 5.4.
//!
//! Nothing is fetched ahead or kept, so two forks of one guest never get the same bytes.

use rustix::event::epoll;
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;

use super::{QueueIo, VirtioDevice, volatile};
use crate::devices::{AttachError, HostResources};

const QUEUE_SIZES: &[u16] = &[64];
/// Most bytes given for one request; a driver that wants more asks again.
const MAX_REQUEST_BYTES: usize = 4096;

/// The entropy device.
#[derive(Debug, Default)]
pub struct Rng {
    metrics: RngMetrics,
}

/// What the entropy device has done since boot.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct RngMetrics {
    /// Random bytes given to the guest.
    pub bytes: u64,
    /// Requests that got nothing: malformed chains, or the host had no randomness.
    pub failed_requests: u64,
}

impl Rng {
    /// An entropy device.
    pub fn new() -> Self {
        Self::default()
    }

    /// Counters since boot.
    pub fn metrics(&self) -> RngMetrics {
        self.metrics
    }
}

impl VirtioDevice for Rng {
    fn name(&self) -> &'static str {
        "rng"
    }

    fn device_id(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &'static [u16] {
        QUEUE_SIZES
    }

    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    fn activate(&mut self, _features: u64) {}

    fn reset(&mut self) {}

    fn notify(&mut self, queue: usize, io: &mut QueueIo<'_>) {
        for _ in 0..io.pending(queue) {
            let Some(chain) = io.pop(queue) else { return };
            let mut written = 0;
            if let Ok((_, mut buffers)) = chain.buffers {
                while let Some(buffer) = buffers.take(MAX_REQUEST_BYTES - written) {
                    if volatile::fill_random(&buffer).is_err() {
                        break;
                    }
                    written += buffer.len();
                }
            }
            if written == 0 {
                self.metrics.failed_requests += 1;
            }
            self.metrics.bytes += written as u64;
            io.push(queue, chain.head, written as u32);
        }
    }

    fn ready(&mut self, _token: u32, _events: epoll::EventFlags, _io: &mut QueueIo<'_>) {}

    fn detach(&mut self) {}

    fn attach(&mut self, _host: &mut HostResources<'_>, _io: &mut QueueIo<'_>) -> Result<(), AttachError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
