//! virtio-mmio version 2, virtio 1.2 section 4.2.2.
//!
//! ```text
//! status:  0 -> ACKNOWLEDGE -> DRIVER -> FEATURES_OK -> DRIVER_OK (rings are live)
//!          any -> 0 (reset);  any -> FAILED (driver gave up);  DRIVER_OK -> NEEDS_RESET (a ring broke its rules)
//! ```
//!
//! Features can be written between DRIVER and FEATURES_OK, queues between FEATURES_OK and DRIVER_OK; writes at another
//! time, and writes of another width than four bytes to a register, change nothing.

use rustix::event::epoll;
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FAILED,
    VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET, VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_mmio::{
    VIRTIO_MMIO_CONFIG, VIRTIO_MMIO_CONFIG_GENERATION, VIRTIO_MMIO_DEVICE_FEATURES,
    VIRTIO_MMIO_DEVICE_FEATURES_SEL, VIRTIO_MMIO_DEVICE_ID, VIRTIO_MMIO_DRIVER_FEATURES,
    VIRTIO_MMIO_DRIVER_FEATURES_SEL, VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING,
    VIRTIO_MMIO_INTERRUPT_ACK, VIRTIO_MMIO_INTERRUPT_STATUS, VIRTIO_MMIO_MAGIC_VALUE,
    VIRTIO_MMIO_QUEUE_AVAIL_HIGH, VIRTIO_MMIO_QUEUE_AVAIL_LOW, VIRTIO_MMIO_QUEUE_DESC_HIGH,
    VIRTIO_MMIO_QUEUE_DESC_LOW, VIRTIO_MMIO_QUEUE_NOTIFY, VIRTIO_MMIO_QUEUE_NUM, VIRTIO_MMIO_QUEUE_NUM_MAX,
    VIRTIO_MMIO_QUEUE_READY, VIRTIO_MMIO_QUEUE_SEL, VIRTIO_MMIO_QUEUE_USED_HIGH, VIRTIO_MMIO_QUEUE_USED_LOW,
    VIRTIO_MMIO_SHM_LEN_HIGH, VIRTIO_MMIO_SHM_LEN_LOW, VIRTIO_MMIO_STATUS, VIRTIO_MMIO_VENDOR_ID,
    VIRTIO_MMIO_VERSION,
};
use virtio_queue::{Queue, QueueT};

use super::queue::QueueIo;
use super::{GuestMap, VirtioDevice};
use crate::devices::{AttachError, BusDevice, Device, HostResources, IrqLine};

/// "virt", section 4.2.2 register `MagicValue`.
const MAGIC: u32 = 0x7472_6976;
/// Version of devices that are not legacy.
const VERSION: u32 = 2;
/// "OFFS".
const VENDOR: u32 = 0x5346_464f;
const REGISTER_BYTES: usize = 4;

/// One virtio device on the MMIO bus: registers, rings and interrupt of a [`VirtioDevice`].
pub struct MmioTransport<D> {
    device: D,
    memory: GuestMap,
    queues: Vec<Queue>,
    gsi: u32,
    irq: Option<IrqLine>,
    registers: Registers,
}

/// What the driver has written, and what it must read back.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Registers {
    status: u32,
    interrupt_status: u32,
    driver_features: u64,
    device_features_select: u32,
    driver_features_select: u32,
    queue_select: u32,
}

impl<D: VirtioDevice> MmioTransport<D> {
    /// A device in its reset state that will interrupt on global system interrupt `gsi` once attached.
    pub fn new(device: D, memory: GuestMap, gsi: u32) -> Self {
        let queues = device
            .queue_sizes()
            .iter()
            .map(|size| Queue::new(*size).expect("queue sizes of a device are constant powers of two"))
            .collect();
        Self { device, memory, queues, gsi, irq: None, registers: Registers::default() }
    }

    /// The device behind the transport.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The device behind the transport.
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    fn has_status(&self, bits: u32) -> bool {
        self.registers.status & bits == bits
    }

    fn is_active(&self) -> bool {
        self.has_status(VIRTIO_CONFIG_S_DRIVER_OK)
            && self.registers.status & (VIRTIO_CONFIG_S_NEEDS_RESET | VIRTIO_CONFIG_S_FAILED) == 0
    }

    fn offered_features(&self) -> u64 {
        self.device.features() | 1 << VIRTIO_F_VERSION_1
    }

    /// Lets the device work on its rings, then tells the driver what came of it.
    fn with_rings<R>(&mut self, work: impl FnOnce(&mut D, &mut QueueIo<'_>) -> R) -> R {
        let active = self.is_active();
        let mut io = QueueIo::new(&self.memory, &mut self.queues, active);
        let result = work(&mut self.device, &mut io);
        let (interrupt, broken) = io.finish();
        if broken {
            self.break_down();
        }
        if interrupt {
            self.interrupt(VIRTIO_MMIO_INT_VRING);
        }
        result
    }

    /// Section 2.1.1: the device cannot go on until the driver resets it.
    fn break_down(&mut self) {
        self.registers.status |= VIRTIO_CONFIG_S_NEEDS_RESET;
        if self.has_status(VIRTIO_CONFIG_S_DRIVER_OK) {
            self.interrupt(VIRTIO_MMIO_INT_CONFIG);
        }
    }

    fn interrupt(&mut self, cause: u32) {
        self.registers.interrupt_status |= cause;
        if let Some(irq) = &self.irq {
            irq.pulse();
        }
    }

    fn read_register(&self, offset: u32) -> u32 {
        let queue = self.queues.get(self.registers.queue_select as usize);
        match offset {
            VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            VIRTIO_MMIO_VERSION => VERSION,
            VIRTIO_MMIO_DEVICE_ID => self.device.device_id(),
            VIRTIO_MMIO_VENDOR_ID => VENDOR,
            VIRTIO_MMIO_DEVICE_FEATURES => {
                half(self.offered_features(), self.registers.device_features_select)
            }
            VIRTIO_MMIO_QUEUE_NUM_MAX => queue.map_or(0, |queue| u32::from(queue.max_size())),
            VIRTIO_MMIO_QUEUE_READY => queue.map_or(0, |queue| u32::from(queue.ready())),
            VIRTIO_MMIO_INTERRUPT_STATUS => self.registers.interrupt_status,
            VIRTIO_MMIO_STATUS => self.registers.status,
            // Section 4.2.2: a shared memory region that does not exist has length -1.
            VIRTIO_MMIO_SHM_LEN_LOW | VIRTIO_MMIO_SHM_LEN_HIGH => u32::MAX,
            // No device here changes its configuration behind the driver's back.
            VIRTIO_MMIO_CONFIG_GENERATION => 0,
            _ => 0,
        }
    }

    fn write_register(&mut self, offset: u32, value: u32) {
        match offset {
            VIRTIO_MMIO_DEVICE_FEATURES_SEL => self.registers.device_features_select = value,
            VIRTIO_MMIO_DRIVER_FEATURES_SEL => self.registers.driver_features_select = value,
            VIRTIO_MMIO_DRIVER_FEATURES => self.write_features(value),
            VIRTIO_MMIO_QUEUE_SEL => self.registers.queue_select = value,
            VIRTIO_MMIO_QUEUE_NOTIFY => {
                if self.is_active() && (value as usize) < self.queues.len() {
                    self.with_rings(|device, io| device.notify(value as usize, io));
                }
            }
            VIRTIO_MMIO_INTERRUPT_ACK => self.registers.interrupt_status &= !value,
            VIRTIO_MMIO_STATUS => self.write_status(value),
            _ => self.write_queue(offset, value),
        }
    }

    fn write_features(&mut self, value: u32) {
        if !self.has_status(VIRTIO_CONFIG_S_DRIVER) || self.has_status(VIRTIO_CONFIG_S_FEATURES_OK) {
            return;
        }
        let value = u64::from(value);
        let features = &mut self.registers.driver_features;
        match self.registers.driver_features_select {
            0 => *features = *features & !0xffff_ffff | value,
            1 => *features = *features & 0xffff_ffff | value << 32,
            _ => {}
        }
    }

    fn write_queue(&mut self, offset: u32, value: u32) {
        if !self.has_status(VIRTIO_CONFIG_S_FEATURES_OK) || self.has_status(VIRTIO_CONFIG_S_DRIVER_OK) {
            return;
        }
        let Some(queue) = self.queues.get_mut(self.registers.queue_select as usize) else {
            return;
        };
        if offset == VIRTIO_MMIO_QUEUE_READY {
            queue.set_ready(value & 1 == 1);
            return;
        }
        if queue.ready() {
            return;
        }
        // Misaligned addresses and impossible sizes are not taken over; DRIVER_OK checks what is there then.
        match offset {
            VIRTIO_MMIO_QUEUE_NUM => queue.set_size(u16::try_from(value).unwrap_or(0)),
            VIRTIO_MMIO_QUEUE_DESC_LOW => queue.set_desc_table_address(Some(value), None),
            VIRTIO_MMIO_QUEUE_DESC_HIGH => queue.set_desc_table_address(None, Some(value)),
            VIRTIO_MMIO_QUEUE_AVAIL_LOW => queue.set_avail_ring_address(Some(value), None),
            VIRTIO_MMIO_QUEUE_AVAIL_HIGH => queue.set_avail_ring_address(None, Some(value)),
            VIRTIO_MMIO_QUEUE_USED_LOW => queue.set_used_ring_address(Some(value), None),
            VIRTIO_MMIO_QUEUE_USED_HIGH => queue.set_used_ring_address(None, Some(value)),
            _ => {}
        }
    }

    fn write_status(&mut self, value: u32) {
        if value == 0 {
            return self.reset();
        }
        let old = self.registers.status & !VIRTIO_CONFIG_S_NEEDS_RESET;
        if value & old != old {
            // Section 2.1.1: the driver must not clear bits other than by a reset.
            return;
        }
        let added = value & !old;
        if added & VIRTIO_CONFIG_S_ACKNOWLEDGE != 0 {
            self.registers.status |= VIRTIO_CONFIG_S_ACKNOWLEDGE;
        }
        if added & VIRTIO_CONFIG_S_DRIVER != 0 && self.has_status(VIRTIO_CONFIG_S_ACKNOWLEDGE) {
            self.registers.status |= VIRTIO_CONFIG_S_DRIVER;
        }
        if added & VIRTIO_CONFIG_S_FEATURES_OK != 0
            && self.has_status(VIRTIO_CONFIG_S_DRIVER)
            && self.features_acceptable()
        {
            self.registers.status |= VIRTIO_CONFIG_S_FEATURES_OK;
        }
        if added & VIRTIO_CONFIG_S_DRIVER_OK != 0 && self.has_status(VIRTIO_CONFIG_S_FEATURES_OK) {
            self.start();
        }
        if added & VIRTIO_CONFIG_S_FAILED != 0 {
            self.registers.status |= VIRTIO_CONFIG_S_FAILED;
        }
    }

    fn features_acceptable(&self) -> bool {
        let driver = self.registers.driver_features;
        driver & !self.offered_features() == 0 && driver & 1 << VIRTIO_F_VERSION_1 != 0
    }

    fn start(&mut self) {
        self.registers.status |= VIRTIO_CONFIG_S_DRIVER_OK;
        let memory = &self.memory;
        let sound = |queue: &Queue| !queue.ready() || (queue.avail_ring() != 0 && queue.is_valid(memory));
        if self.queues.iter().all(sound) {
            self.device.activate(self.registers.driver_features);
        } else {
            self.break_down();
        }
    }

    fn reset(&mut self) {
        self.registers = Registers::default();
        self.queues.iter_mut().for_each(Queue::reset);
        self.device.reset();
    }
}

/// The 32-bit half of `features` that `select` names; there are no others.
fn half(features: u64, select: u32) -> u32 {
    match select {
        0 => features as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}

impl<D: VirtioDevice> Device for MmioTransport<D> {
    fn name(&self) -> &'static str {
        self.device.name()
    }

    fn detach(&mut self) {
        self.irq = None;
        self.device.detach();
    }

    fn attach(&mut self, host: &mut HostResources<'_>) -> Result<(), AttachError> {
        self.irq = Some(IrqLine::new(host.irqs.clone(), self.gsi));
        self.with_rings(|device, io| device.attach(host, io))?;
        if self.registers.interrupt_status != 0 {
            // The edge may have been lost between saving the old interrupt controller and loading the new one.
            self.interrupt(0);
        }
        Ok(())
    }

    fn ready(&mut self, token: u32, events: epoll::EventFlags) {
        self.with_rings(|device, io| device.ready(token, events, io));
    }
}

impl<D: VirtioDevice> BusDevice for MmioTransport<D> {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        if let Some(offset) = offset.checked_sub(u64::from(VIRTIO_MMIO_CONFIG)) {
            return self.device.read_config(offset, data);
        }
        data.fill(0);
        if let Ok(register) = <&mut [u8; REGISTER_BYTES]>::try_from(data) {
            *register = self.read_register(offset as u32).to_le_bytes();
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let Some(offset) = offset.checked_sub(u64::from(VIRTIO_MMIO_CONFIG)) {
            if self.has_status(VIRTIO_CONFIG_S_DRIVER) {
                self.device.write_config(offset, data);
            }
            return;
        }
        if let Ok(register) = <[u8; REGISTER_BYTES]>::try_from(data) {
            self.write_register(offset as u32, u32::from_le_bytes(register));
        }
    }
}

#[cfg(test)]
mod tests;
