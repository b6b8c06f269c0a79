//! Fakes for device tests: an interrupt counter, host resources, and a driver that writes rings by hand.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::event::epoll;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_mmio::*;
use virtio_bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use vm_memory::{Bytes, GuestAddress};

use super::virtio::{GuestMap, MmioTransport, VirtioDevice};
use super::{BusDevice, Descriptors, Device, HostResources, IrqLevel, IrqSink, PollHandle};

/// Counts rising edges.
#[derive(Default)]
pub struct CountingIrqs {
    pulses: AtomicUsize,
}

impl CountingIrqs {
    pub fn pulses(&self) -> usize {
        self.pulses.load(Ordering::SeqCst)
    }
}

impl IrqSink for CountingIrqs {
    fn set_level(&self, _gsi: u32, level: IrqLevel) {
        if level == IrqLevel::High {
            self.pulses.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// Host resources with an epoll instance of their own.
pub fn host(irqs: Arc<CountingIrqs>, descriptors: &mut Descriptors) -> HostResources<'_> {
    let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap());
    HostResources { irqs, poll: PollHandle::new(epoll, 0), descriptors, vm_generation: [7; 16] }
}

/// A small reproducible generator.
pub struct XorShift(u64);

impl XorShift {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// Guest memory of the fake machine; rings lie below [`Driver::BUFFERS`].
pub const MEMORY_BYTES: usize = 0x20_0000;
const RING_BYTES: u64 = 0x2000;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x1800;

/// A driver of one virtio-mmio device.
pub struct Driver<D> {
    transport: MmioTransport<D>,
    memory: GuestMap,
    sizes: &'static [u16],
    next_descriptor: Vec<u16>,
    seen_used: Vec<u16>,
    pub poll: Option<PollHandle>,
}

impl<D: VirtioDevice> Driver<D> {
    /// First guest address that rings do not use.
    pub const BUFFERS: u64 = 0x1_0000;

    /// A device in reset state, attached.
    pub fn new(device: D) -> (Self, Arc<CountingIrqs>) {
        Self::with_descriptors(device, &mut Descriptors::default())
    }

    pub fn with_descriptors(device: D, descriptors: &mut Descriptors) -> (Self, Arc<CountingIrqs>) {
        let memory = GuestMap::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).unwrap();
        let sizes = device.queue_sizes();
        let transport = MmioTransport::new(device, memory.clone(), 5);
        let mut driver = Self {
            transport,
            memory,
            sizes,
            next_descriptor: vec![0; sizes.len()],
            seen_used: vec![0; sizes.len()],
            poll: None,
        };
        let irqs = Arc::new(CountingIrqs::default());
        driver.attach(irqs.clone(), descriptors);
        (driver, irqs)
    }

    /// Attaches the device to a new machine, keeping its epoll instance for [`Driver::poll_events`].
    pub fn attach(&mut self, irqs: Arc<CountingIrqs>, descriptors: &mut Descriptors) {
        let mut host = host(irqs, descriptors);
        self.poll = Some(host.poll.clone());
        self.transport.attach(&mut host).unwrap();
    }

    pub fn transport(&mut self) -> &mut MmioTransport<D> {
        &mut self.transport
    }

    pub fn device(&self) -> &D {
        self.transport.device()
    }

    pub fn memory(&self) -> &GuestMap {
        &self.memory
    }

    pub fn read(&mut self, register: u32) -> u32 {
        let mut data = [0; 4];
        self.transport.read(u64::from(register), &mut data);
        u32::from_le_bytes(data)
    }

    pub fn write(&mut self, register: u32, value: u32) {
        self.transport.write(u64::from(register), &value.to_le_bytes());
    }

    pub fn write_features(&mut self, features: u64) {
        for (select, value) in [(0, features as u32), (1, (features >> 32) as u32)] {
            self.write(VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
            self.write(VIRTIO_MMIO_DRIVER_FEATURES, value);
        }
    }

    /// Reset up to FEATURES_OK, with all features.
    pub fn handshake(&mut self) {
        self.write(VIRTIO_MMIO_STATUS, 0);
        self.next_descriptor.fill(0);
        self.seen_used.fill(0);
        self.write(VIRTIO_MMIO_STATUS, 1);
        self.write(VIRTIO_MMIO_STATUS, 3);
        self.write_features(self.transport.device().features() | 1 << VIRTIO_F_VERSION_1);
        self.write(VIRTIO_MMIO_STATUS, 11);
        assert_eq!(self.read(VIRTIO_MMIO_STATUS), 11);
    }

    fn ring(queue: usize) -> u64 {
        RING_BYTES * (1 + queue as u64)
    }

    pub fn set_up_queue(&mut self, queue: usize) {
        let base = Self::ring(queue);
        self.memory.write_slice(&[0; RING_BYTES as usize], GuestAddress(base)).unwrap();
        self.write(VIRTIO_MMIO_QUEUE_SEL, queue as u32);
        self.write(VIRTIO_MMIO_QUEUE_NUM, u32::from(self.sizes[queue]));
        for (register, address) in [
            (VIRTIO_MMIO_QUEUE_DESC_LOW, base),
            (VIRTIO_MMIO_QUEUE_AVAIL_LOW, base + AVAIL),
            (VIRTIO_MMIO_QUEUE_USED_LOW, base + USED),
        ] {
            self.write(register, address as u32);
            self.write(register + 4, 0);
        }
        self.write(VIRTIO_MMIO_QUEUE_READY, 1);
    }

    /// Reset, handshake, queues, DRIVER_OK.
    pub fn start(&mut self) {
        self.handshake();
        for queue in 0..self.sizes.len() {
            self.set_up_queue(queue);
        }
        self.write(VIRTIO_MMIO_STATUS, 15);
        assert_eq!(self.read(VIRTIO_MMIO_STATUS), 15);
    }

    pub fn set_avail_index(&mut self, queue: usize, index: u16) {
        self.memory.write_obj(index, GuestAddress(Self::ring(queue) + AVAIL + 2)).unwrap();
    }

    pub fn set_avail_flags(&mut self, queue: usize, flags: u16) {
        self.memory.write_obj(flags, GuestAddress(Self::ring(queue) + AVAIL)).unwrap();
    }

    /// Makes `head` available.
    pub fn offer_head(&mut self, queue: usize, head: u16) {
        let avail = Self::ring(queue) + AVAIL;
        let index: u16 = self.memory.read_obj(GuestAddress(avail + 2)).unwrap();
        let slot = avail + 4 + 2 * u64::from(index % self.sizes[queue]);
        self.memory.write_obj(head, GuestAddress(slot)).unwrap();
        self.set_avail_index(queue, index.wrapping_add(1));
    }

    /// Writes one chain of (address, length, device-writable) and makes it available; its head.
    pub fn offer(&mut self, queue: usize, buffers: &[(u64, u32, bool)]) -> u16 {
        let size = self.sizes[queue];
        let head = self.next_descriptor[queue] % size;
        for (position, (address, len, writable)) in buffers.iter().enumerate() {
            let index = (head + position as u16) % size;
            let last = position + 1 == buffers.len();
            let flags =
                if last { 0 } else { VRING_DESC_F_NEXT } | if *writable { VRING_DESC_F_WRITE } else { 0 };
            self.write_descriptor(queue, index, *address, *len, flags as u16, (index + 1) % size);
        }
        self.next_descriptor[queue] = (head + buffers.len() as u16) % size;
        self.offer_head(queue, head);
        head
    }

    pub fn write_descriptor(
        &mut self,
        queue: usize,
        index: u16,
        address: u64,
        len: u32,
        flags: u16,
        next: u16,
    ) {
        let mut raw = [0; 16];
        raw[..8].copy_from_slice(&address.to_le_bytes());
        raw[8..12].copy_from_slice(&len.to_le_bytes());
        raw[12..14].copy_from_slice(&flags.to_le_bytes());
        raw[14..].copy_from_slice(&next.to_le_bytes());
        self.memory.write_slice(&raw, GuestAddress(Self::ring(queue) + 16 * u64::from(index))).unwrap();
    }

    pub fn notify(&mut self, queue: u32) {
        self.write(VIRTIO_MMIO_QUEUE_NOTIFY, queue);
    }

    /// Used entries since the last call: head and written length.
    pub fn used(&mut self, queue: usize) -> Vec<(u32, u32)> {
        let used = Self::ring(queue) + USED;
        let index: u16 = self.memory.read_obj(GuestAddress(used + 2)).unwrap();
        let mut entries = Vec::new();
        while self.seen_used[queue] != index {
            let slot = used + 4 + 8 * u64::from(self.seen_used[queue] % self.sizes[queue]);
            entries.push((
                self.memory.read_obj(GuestAddress(slot)).unwrap(),
                self.memory.read_obj(GuestAddress(slot + 4)).unwrap(),
            ));
            self.seen_used[queue] = self.seen_used[queue].wrapping_add(1);
        }
        entries
    }

    /// Fills the rings with plausible rubbish: addresses, lengths, flags, links and indexes near the edges.
    pub fn scribble(&mut self, random: &mut XorShift) {
        for queue in 0..self.sizes.len() {
            let size = self.sizes[queue];
            for index in 0..size.min(16) {
                let address = match random.below(8) {
                    0 => random.next(),
                    1 => MEMORY_BYTES as u64 - random.below(32),
                    2 => u64::MAX - random.below(32),
                    _ => Self::BUFFERS + random.below(0x1000),
                };
                let len = match random.below(6) {
                    0 => random.next() as u32,
                    1 => 0,
                    _ => random.below(0x900) as u32,
                };
                let flags = random.below(8) as u16;
                let next = random.below(u64::from(size.min(16)) + 1) as u16;
                self.write_descriptor(queue, index, address, len, flags, next);
            }
            let avail: u16 = self.memory.read_obj(GuestAddress(Self::ring(queue) + AVAIL + 2)).unwrap();
            for _ in 0..random.below(4) {
                let beyond = u64::from(random.below(40) == 0);
                self.offer_head(queue, random.below(u64::from(size.min(16)) + beyond) as u16);
            }
            if random.below(50) == 0 {
                self.set_avail_index(queue, avail.wrapping_add(random.next() as u16));
            }
        }
    }

    /// Runs [`Device::ready`] for what the epoll instance reports within `timeout_ms`; the number of events.
    pub fn poll_events(&mut self, timeout_ms: i64) -> usize {
        let poll = self.poll.clone().unwrap();
        let timeout =
            rustix::time::Timespec { tv_sec: timeout_ms / 1000, tv_nsec: timeout_ms % 1000 * 1_000_000 };
        let mut events = Vec::with_capacity(16);
        let count = epoll::wait(poll.epoll_fd(), rustix::buffer::spare_capacity(&mut events), Some(&timeout))
            .unwrap();
        for event in events {
            self.transport.ready(event.data.u64() as u32, event.flags);
        }
        count
    }
}
