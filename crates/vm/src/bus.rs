//! Where guest accesses to ports and MMIO go.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::arch::x86_64::layout::{SERIAL_PORT, VIRTIO_MMIO_BASE, VIRTIO_MMIO_SIZE};
use crate::devices::BusDevice;
use crate::devices::legacy::{LegacyPorts, MachineEvent};

/// Number of ports of a 16550 serial port.
const SERIAL_PORTS: u16 = 8;

/// A device shared by the vCPU threads and the control thread.
pub type Shared<D> = Arc<Mutex<D>>;

/// Locks a device. A panic while it was held cannot have left unsafe memory behind, only a confused device model, and
/// the VMM is built to abort on panic anyway.
pub fn lock<D: ?Sized>(device: &Mutex<D>) -> MutexGuard<'_, D> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The guest's port and MMIO spaces.
pub struct Bus {
    /// virtio-mmio windows in order.
    pub mmio: Vec<Shared<dyn BusDevice>>,
    /// The first serial port.
    pub serial: Shared<dyn BusDevice>,
    /// All other ports.
    pub legacy: LegacyPorts,
}

impl Bus {
    /// Guest read of a physical address outside RAM. What nobody claims reads as all ones.
    pub fn mmio_read(&self, address: u64, data: &mut [u8]) {
        match self.mmio_device(address) {
            Some((device, offset)) => lock(device).read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// Guest write to a physical address outside RAM. What nobody claims is ignored.
    pub fn mmio_write(&self, address: u64, data: &[u8]) {
        if let Some((device, offset)) = self.mmio_device(address) {
            lock(device).write(offset, data);
        }
    }

    /// Guest read of a port.
    pub fn port_read(&self, port: u16, data: &mut [u8]) {
        match serial_offset(port) {
            Some(offset) => lock(&self.serial).read(offset, data),
            None => self.legacy.read(port, data),
        }
    }

    /// Guest write to a port.
    pub fn port_write(&self, port: u16, data: &[u8]) -> Option<MachineEvent> {
        match serial_offset(port) {
            Some(offset) => {
                lock(&self.serial).write(offset, data);
                None
            }
            None => self.legacy.write(port, data),
        }
    }

    fn mmio_device(&self, address: u64) -> Option<(&Mutex<dyn BusDevice>, u64)> {
        let offset = address.checked_sub(VIRTIO_MMIO_BASE)?;
        let device = self.mmio.get(usize::try_from(offset / VIRTIO_MMIO_SIZE).ok()?)?;
        Some((device, offset % VIRTIO_MMIO_SIZE))
    }
}

fn serial_offset(port: u16) -> Option<u64> {
    port.checked_sub(SERIAL_PORT).filter(|offset| *offset < SERIAL_PORTS).map(u64::from)
}
