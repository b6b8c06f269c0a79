//! Virtio devices over MMIO (virtio 1.2), split rings, `VIRTIO_F_VERSION_1` only.
//!
//! [`transport::MmioTransport`] owns registers, rings and the interrupt line of one device; what the device does with
//! its buffers is a [`VirtioDevice`]. Queue notifications are handled by the vCPU thread that wrote them, so no device
//! work is in flight while the vCPUs stand still. The guest is hostile: whatever it writes to registers, rings and
//! buffers ends in an error status, in `DEVICE_NEEDS_RESET` or in nothing, never in a panic, and never in a loop longer
//! than one ring.

pub mod blk;
pub mod queue;
pub mod rng;
pub mod transport;
mod volatile;
pub mod vsock;

use rustix::event::epoll;

use super::{AttachError, HostResources};
pub use queue::{Buffers, Chain, ChainFault, QueueIo};
pub use transport::MmioTransport;

/// Guest memory as devices see it: a cloneable handle whose addresses stay the same in a forked child.
pub type GuestMap = vm_memory::GuestMemoryMmap<()>;

/// A device behind a [`MmioTransport`]. All calls come with the device's lock held.
pub trait VirtioDevice: Send {
    /// Name for errors and logs.
    fn name(&self) -> &'static str;

    /// Device id, virtio 1.2 section 5.
    fn device_id(&self) -> u32;

    /// Feature bits offered besides `VIRTIO_F_VERSION_1`.
    fn features(&self) -> u64;

    /// Largest size of each queue; powers of two.
    fn queue_sizes(&self) -> &'static [u16];

    /// Fills `data` from the configuration space at `offset`; bytes past its end are zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// The driver writes to the configuration space.
    fn write_config(&mut self, offset: u64, data: &[u8]);

    /// The driver has set `DRIVER_OK` with these features.
    fn activate(&mut self, features: u64);

    /// The driver resets the device: every request and connection of it is forgotten.
    fn reset(&mut self);

    /// The driver notified `queue`, which is one of [`VirtioDevice::queue_sizes`].
    fn notify(&mut self, queue: usize, io: &mut QueueIo<'_>);

    /// A registered descriptor is ready; see [`super::Device::ready`].
    fn ready(&mut self, token: u32, events: epoll::EventFlags, io: &mut QueueIo<'_>);

    /// See [`super::Device::detach`].
    fn detach(&mut self);

    /// See [`super::Device::attach`]. `io` is inactive until the driver has set `DRIVER_OK`.
    ///
    /// # Errors
    /// As for [`super::Device::attach`].
    fn attach(&mut self, host: &mut HostResources<'_>, io: &mut QueueIo<'_>) -> Result<(), AttachError>;
}

/// Copies what `config` has at `offset` into `data`, zero beyond its end.
fn copy_config(config: &[u8], offset: u64, data: &mut [u8]) {
    data.fill(0);
    let tail = usize::try_from(offset).ok().and_then(|start| config.get(start..)).unwrap_or_default();
    let count = tail.len().min(data.len());
    data[..count].copy_from_slice(&tail[..count]);
}
