//! The VM generation id (VMGenID): 16 bytes in guest memory that change with every clone and fork, and an interrupt of
//! the ACPI generic event device that tells a guest kernel to reseed.

use rustix::event::epoll;
use rustix::io::Errno;
use vm_memory::{Bytes, GuestAddress};

use super::virtio::GuestMap;
use super::{AttachError, Device, HostResources, IrqLine};

/// Keeps the generation id of the VM it is attached to.
pub struct Generation {
    memory: GuestMap,
    address: GuestAddress,
    gsi: u32,
    /// The guest may have seen a former id.
    announced: bool,
}

impl Generation {
    /// Writes ids to `address` in guest memory and announces changes on global system interrupt `gsi`.
    pub fn new(memory: GuestMap, address: GuestAddress, gsi: u32) -> Self {
        Self { memory, address, gsi, announced: false }
    }
}

impl Device for Generation {
    fn name(&self) -> &'static str {
        "generation"
    }

    fn detach(&mut self) {}

    fn attach(&mut self, host: &mut HostResources<'_>) -> Result<(), AttachError> {
        self.memory.write_slice(&host.vm_generation, self.address).map_err(|_| AttachError::Prepare {
            device: "generation",
            action: "write the generation id to guest memory",
            source: Errno::FAULT,
        })?;
        if self.announced {
            IrqLine::new(host.irqs.clone(), self.gsi).pulse();
        }
        self.announced = true;
        Ok(())
    }

    fn ready(&mut self, _token: u32, _events: epoll::EventFlags) {}
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::devices::testing::{CountingIrqs, host};

    #[test]
    fn only_a_changed_id_is_announced() {
        let memory = GuestMap::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        let mut device = Generation::new(memory.clone(), GuestAddress(40), 16);
        let irqs = Arc::new(CountingIrqs::default());
        device.attach(&mut host(irqs.clone(), &mut Default::default())).unwrap();
        assert_eq!(irqs.pulses(), 0);
        let mut id = [0; 16];
        memory.read_slice(&mut id, GuestAddress(40)).unwrap();
        assert_eq!(id, [7; 16]);

        device.detach();
        let mut descriptors = Default::default();
        let mut child = host(irqs.clone(), &mut descriptors);
        child.vm_generation = [9; 16];
        device.attach(&mut child).unwrap();
        memory.read_slice(&mut id, GuestAddress(40)).unwrap();
        assert_eq!((irqs.pulses(), id), (1, [9; 16]));
    }

    #[test]
    fn address_outside_memory_is_an_error() {
        let memory = GuestMap::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        let mut device = Generation::new(memory, GuestAddress(0xff8), 16);
        let attached = device.attach(&mut host(Arc::default(), &mut Default::default()));
        assert!(matches!(attached, Err(AttachError::Prepare { .. })));
    }
}
