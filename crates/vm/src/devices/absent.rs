//! An empty virtio-mmio window.

use rustix::event::epoll;

use super::{AttachError, BusDevice, Device, HostResources};

/// Reads as zero, which a driver takes for no device (virtio 1.2 section 4.2.3.1.1: device id 0).
pub struct Absent;

impl Device for Absent {
    fn name(&self) -> &'static str {
        "absent"
    }

    fn detach(&mut self) {}

    fn attach(&mut self, _host: &mut HostResources<'_>) -> Result<(), AttachError> {
        Ok(())
    }

    fn ready(&mut self, _token: u32, _events: epoll::EventFlags) {}
}

impl BusDevice for Absent {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        // The magic value must be right for the driver to look at the device id.
        let value: u32 = if offset == 0 { 0x7472_6976 } else { u32::from(offset == 4) * 2 };
        for (byte, part) in data.iter_mut().zip(value.to_le_bytes()) {
            *byte = part;
        }
    }

    fn write(&mut self, _offset: u64, _data: &[u8]) {}
}
