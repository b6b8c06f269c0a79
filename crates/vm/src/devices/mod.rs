//! Device models and what they need of the host.
//!
//! A device is split in two: its *model* (registers, queues, buffers) is ordinary memory and is cloned by `fork(2)`;
//! its *host resources* (interrupt lines, descriptors, poll registrations) belong to one process. [`Device::detach`]
//! drops the second half in a forked child, [`Device::attach`] takes a new one. Neither has a default body, so a device
//! that forgets a descriptor does not compile.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::epoll;

pub mod absent;
pub mod generation;
pub mod legacy;
pub mod serial;
#[cfg(test)]
mod testing;
pub mod virtio;

/// Raises interrupts of one VM. Implemented over KVM, and by counters in tests.
pub trait IrqSink: Send + Sync {
    /// Sets the level of global system interrupt `gsi`.
    fn set_level(&self, gsi: u32, level: IrqLevel);
}

/// Level of an interrupt line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IrqLevel {
    /// Not asserted.
    Low,
    /// Asserted.
    High,
}

/// One device's interrupt line into the VM it is attached to.
#[derive(Clone)]
pub struct IrqLine {
    sink: Arc<dyn IrqSink>,
    gsi: u32,
}

impl IrqLine {
    /// The line `gsi` of `sink`.
    pub fn new(sink: Arc<dyn IrqSink>, gsi: u32) -> Self {
        Self { sink, gsi }
    }

    /// Raises an edge-triggered interrupt. Cost: two ioctls.
    pub fn pulse(&self) {
        self.sink.set_level(self.gsi, IrqLevel::High);
        self.sink.set_level(self.gsi, IrqLevel::Low);
    }
}

/// What one device is given when it is attached to a (new) VM and process.
pub struct HostResources<'a> {
    /// Interrupts of the new VM.
    pub irqs: Arc<dyn IrqSink>,
    /// Registration with the control thread's epoll instance, already bound to this device's index.
    pub poll: PollHandle,
    /// Descriptors made ahead by the host; a device takes what is its own.
    pub descriptors: &'a mut Descriptors,
    /// The new VM generation id.
    pub vm_generation: [u8; 16],
}

/// Descriptors made by the host for one sandbox before it starts.
#[derive(Debug, Default)]
pub struct Descriptors {
    /// Listening socket of the hybrid vsock.
    pub vsock_listener: Option<OwnedFd>,
    /// Console log, read-write.
    pub log: Option<OwnedFd>,
}

/// A device's access to the control thread's epoll instance.
#[derive(Clone)]
pub struct PollHandle {
    epoll: Arc<OwnedFd>,
    device: u32,
}

impl PollHandle {
    /// A handle for device number `device`.
    pub fn new(epoll: Arc<OwnedFd>, device: u32) -> Self {
        Self { epoll, device }
    }

    fn data(&self, token: u32) -> epoll::EventData {
        epoll::EventData::new_u64((u64::from(self.device) << 32) | u64::from(token))
    }

    /// Registers `fd`: [`Device::ready`] will be called with `token`.
    pub fn add(&self, fd: impl AsFd, token: u32, interest: epoll::EventFlags) -> rustix::io::Result<()> {
        epoll::add(&self.epoll, fd, self.data(token), interest)
    }

    /// Changes the interest of a registered `fd`.
    pub fn modify(&self, fd: impl AsFd, token: u32, interest: epoll::EventFlags) -> rustix::io::Result<()> {
        epoll::modify(&self.epoll, fd, self.data(token), interest)
    }

    /// Removes `fd`; to be called before it is closed.
    pub fn remove(&self, fd: impl AsFd) -> rustix::io::Result<()> {
        epoll::delete(&self.epoll, fd)
    }

    /// The epoll instance, for the loop itself.
    pub fn epoll_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// Why a device could not take its host resources.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// A descriptor it needs was not given.
    #[error("device {device} was given no {what}")]
    Missing {
        /// Device name.
        device: &'static str,
        /// What it lacks.
        what: &'static str,
    },
    /// A descriptor could not be prepared.
    #[error("device {device} could not {action}")]
    Prepare {
        /// Device name.
        device: &'static str,
        /// What failed.
        action: &'static str,
        /// The system's answer.
        source: rustix::io::Errno,
    },
}

/// What every device does, whatever bus it is on. All calls come with the VM's bus lock for this device held.
pub trait Device: Send {
    /// Name for errors and logs.
    fn name(&self) -> &'static str;

    /// Drops everything that belongs to the old process and VM: interrupt lines, descriptors, connections. Called in
    /// a forked child first of all, while inherited descriptors are still open, and never in the parent.
    ///
    /// Only drop: the inherited epoll instance and sockets are still the parent's too, so [`PollHandle::remove`] would
    /// deregister the parent's descriptor, and `shutdown(2)` would end the parent's connection.
    fn detach(&mut self);

    /// Takes what belongs to this process and VM. Called at boot, and in a child after [`Device::detach`].
    ///
    /// # Errors
    /// Fails where a descriptor is missing or cannot be prepared; the child then ends.
    fn attach(&mut self, host: &mut HostResources<'_>) -> Result<(), AttachError>;

    /// A registered descriptor is ready. Runs on the control thread.
    fn ready(&mut self, token: u32, events: epoll::EventFlags);
}

/// A device on the MMIO or port bus.
pub trait BusDevice: Device {
    /// Guest read at `offset` into the device's range; fills `data`, little-endian.
    fn read(&mut self, offset: u64, data: &mut [u8]);
    /// Guest write at `offset` into the device's range.
    fn write(&mut self, offset: u64, data: &[u8]);
}
