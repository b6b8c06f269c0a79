//! The register file as a driver, sane or hostile, sees it.

use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::devices::testing::{CountingIrqs, Driver, XorShift, host};
use crate::devices::virtio::Buffers;

const QUEUE_SIZE: u16 = 16;

/// Gives every chain back at once, one byte written for each byte it could have written.
#[derive(Default)]
struct Echo {
    activated: Option<u64>,
    resets: usize,
    notified: usize,
}

impl VirtioDevice for Echo {
    fn name(&self) -> &'static str {
        "echo"
    }
    fn device_id(&self) -> u32 {
        42
    }
    fn features(&self) -> u64 {
        0b101
    }
    fn queue_sizes(&self) -> &'static [u16] {
        &[QUEUE_SIZE, QUEUE_SIZE]
    }
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        crate::devices::virtio::copy_config(&[1, 2, 3, 4, 5], offset, data);
    }
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}
    fn activate(&mut self, features: u64) {
        self.activated = Some(features);
    }
    fn reset(&mut self) {
        self.activated = None;
        self.resets += 1;
    }
    fn notify(&mut self, queue: usize, io: &mut QueueIo<'_>) {
        self.notified += 1;
        for _ in 0..io.pending(queue) {
            let Some(chain) = io.pop(queue) else { return };
            let written = chain.buffers.map_or(0, |(_, writable)| writable.remaining());
            io.push(queue, chain.head, written as u32);
        }
    }
    fn ready(&mut self, _token: u32, _events: epoll::EventFlags, _io: &mut QueueIo<'_>) {}
    fn detach(&mut self) {}
    fn attach(&mut self, _host: &mut HostResources<'_>, _io: &mut QueueIo<'_>) -> Result<(), AttachError> {
        Ok(())
    }
}

fn driver() -> (Driver<Echo>, Arc<CountingIrqs>) {
    Driver::new(Echo::default())
}

#[test]
fn identifies_itself_as_a_version_2_device() {
    let (mut driver, _) = driver();
    assert_eq!(driver.read(VIRTIO_MMIO_MAGIC_VALUE), MAGIC);
    assert_eq!(driver.read(VIRTIO_MMIO_VERSION), 2);
    assert_eq!(driver.read(VIRTIO_MMIO_DEVICE_ID), 42);
    assert_eq!(driver.read(VIRTIO_MMIO_SHM_LEN_LOW), u32::MAX);
    assert_eq!(driver.read(VIRTIO_MMIO_QUEUE_NUM_MAX), u32::from(QUEUE_SIZE));
    driver.write(VIRTIO_MMIO_QUEUE_SEL, 2);
    assert_eq!(driver.read(VIRTIO_MMIO_QUEUE_NUM_MAX), 0);
}

#[test]
fn handshake_ends_in_an_activated_device() {
    let (mut driver, irqs) = driver();
    driver.start();
    assert_eq!(driver.device().activated, Some(0b101 | 1 << VIRTIO_F_VERSION_1));
    driver.offer(0, &[(0x9000, 8, true)]);
    driver.notify(0);
    assert_eq!(driver.used(0), vec![(0, 8)]);
    assert_eq!(irqs.pulses(), 1);
    assert_eq!(driver.read(VIRTIO_MMIO_INTERRUPT_STATUS), VIRTIO_MMIO_INT_VRING);
    driver.write(VIRTIO_MMIO_INTERRUPT_ACK, VIRTIO_MMIO_INT_VRING);
    assert_eq!(driver.read(VIRTIO_MMIO_INTERRUPT_STATUS), 0);
}

#[test]
fn features_that_were_not_offered_are_refused() {
    let (mut driver, _) = driver();
    for features in [1 << 1 | 1 << VIRTIO_F_VERSION_1, 0b101, 1 << 63 | 1 << VIRTIO_F_VERSION_1] {
        driver.write(VIRTIO_MMIO_STATUS, 0);
        driver.write(VIRTIO_MMIO_STATUS, 1);
        driver.write(VIRTIO_MMIO_STATUS, 3);
        driver.write_features(features);
        driver.write(VIRTIO_MMIO_STATUS, 11);
        assert_eq!(driver.read(VIRTIO_MMIO_STATUS), 3, "{features:#x}");
        driver.write(VIRTIO_MMIO_STATUS, 15);
        assert_eq!(driver.device().activated, None);
    }
}

#[test]
fn status_bits_are_taken_in_order_and_never_dropped() {
    let (mut driver, _) = driver();
    driver.write(VIRTIO_MMIO_STATUS, 4);
    assert_eq!(driver.read(VIRTIO_MMIO_STATUS), 0);
    driver.write(VIRTIO_MMIO_STATUS, 1);
    driver.write(VIRTIO_MMIO_STATUS, 2);
    assert_eq!(driver.read(VIRTIO_MMIO_STATUS), 1);
    driver.write(VIRTIO_MMIO_STATUS, 1 | 128);
    assert_eq!(driver.read(VIRTIO_MMIO_STATUS), 129);
}

#[test]
fn queues_cannot_be_moved_while_live() {
    let (mut driver, _) = driver();
    driver.start();
    driver.write(VIRTIO_MMIO_QUEUE_SEL, 0);
    driver.write(VIRTIO_MMIO_QUEUE_DESC_LOW, 0xdead_0000);
    driver.write(VIRTIO_MMIO_QUEUE_READY, 0);
    assert_eq!(driver.read(VIRTIO_MMIO_QUEUE_READY), 1);
    driver.offer(0, &[(0x9000, 8, true)]);
    driver.notify(0);
    assert_eq!(driver.used(0).len(), 1);
}

#[test]
fn queue_outside_memory_needs_a_reset() {
    let (mut driver, irqs) = driver();
    driver.handshake();
    driver.set_up_queue(0);
    driver.set_up_queue(1);
    driver.write(VIRTIO_MMIO_QUEUE_READY, 0);
    driver.write(VIRTIO_MMIO_QUEUE_USED_HIGH, 0xffff_ffff);
    driver.write(VIRTIO_MMIO_QUEUE_READY, 1);
    driver.write(VIRTIO_MMIO_STATUS, 15);
    assert_eq!(driver.read(VIRTIO_MMIO_STATUS), 15 | VIRTIO_CONFIG_S_NEEDS_RESET);
    assert_eq!(driver.read(VIRTIO_MMIO_INTERRUPT_STATUS), VIRTIO_MMIO_INT_CONFIG);
    assert_eq!(irqs.pulses(), 1);
    driver.notify(0);
    assert_eq!(driver.device().notified, 0);

    driver.write(VIRTIO_MMIO_STATUS, 0);
    assert_eq!((driver.read(VIRTIO_MMIO_STATUS), driver.device().resets), (0, 2));
    driver.start();
    driver.notify(0);
    assert_eq!(driver.device().notified, 1);
}

#[test]
fn available_index_beyond_the_ring_needs_a_reset() {
    let (mut driver, _) = driver();
    driver.start();
    driver.set_avail_index(0, QUEUE_SIZE + 1);
    driver.notify(0);
    assert_ne!(driver.read(VIRTIO_MMIO_STATUS) & VIRTIO_CONFIG_S_NEEDS_RESET, 0);
    driver.notify(0);
    assert_eq!(driver.device().notified, 1);
}

#[test]
fn head_beyond_the_table_needs_a_reset() {
    let (mut driver, _) = driver();
    driver.start();
    driver.offer_head(0, QUEUE_SIZE);
    driver.notify(0);
    assert_ne!(driver.read(VIRTIO_MMIO_STATUS) & VIRTIO_CONFIG_S_NEEDS_RESET, 0);
}

#[test]
fn driver_that_wants_no_interrupt_gets_none() {
    let (mut driver, irqs) = driver();
    driver.start();
    driver.set_avail_flags(0, 1);
    driver.offer(0, &[(0x9000, 8, true)]);
    driver.notify(0);
    assert_eq!((driver.used(0).len(), irqs.pulses()), (1, 0));
}

#[test]
fn pending_interrupt_is_raised_again_after_a_fork() {
    let (mut driver, irqs) = driver();
    driver.start();
    driver.offer(0, &[(0x9000, 8, true)]);
    driver.notify(0);
    assert_eq!(irqs.pulses(), 1);

    let transport = driver.transport();
    transport.detach();
    let child = Arc::new(CountingIrqs::default());
    transport.attach(&mut host(child.clone(), &mut Default::default())).unwrap();
    assert_eq!((irqs.pulses(), child.pulses()), (1, 1));

    transport.detach();
    transport.write(u64::from(VIRTIO_MMIO_INTERRUPT_ACK), &1u32.to_le_bytes());
    let grandchild = Arc::new(CountingIrqs::default());
    transport.attach(&mut host(grandchild.clone(), &mut Default::default())).unwrap();
    assert_eq!(grandchild.pulses(), 0);
}

#[test]
fn configuration_reads_are_zero_past_the_end() {
    let (mut driver, _) = driver();
    let mut data = [0xff; 8];
    driver.transport().read(0x102, &mut data);
    assert_eq!(data, [3, 4, 5, 0, 0, 0, 0, 0]);
    driver.transport().read(u64::MAX, &mut data);
    assert_eq!(data, [0; 8]);
}

#[test]
fn odd_access_widths_change_nothing() {
    let (mut driver, _) = driver();
    for len in [0, 1, 2, 3, 8] {
        driver.transport().write(u64::from(VIRTIO_MMIO_STATUS), &[1; 8][..len]);
        let mut data = vec![0xaa; len];
        driver.transport().read(0, &mut data);
        assert_eq!(data, vec![0; len]);
    }
    assert_eq!(driver.read(VIRTIO_MMIO_STATUS), 0);
}

#[test]
fn buffers_come_off_both_ends() {
    let (driver, _) = driver();
    let memory = driver.memory();
    let slice = |address: u64, len| {
        vm_memory::GuestMemoryBackend::get_slice(memory, GuestAddress(address), len).unwrap()
    };
    memory.write_slice(&[1, 2, 3, 4, 5, 6, 7], GuestAddress(0x9000)).unwrap();
    let mut buffers = Buffers::default();
    for part in [(0x9000, 2), (0x9002, 3), (0x9005, 2)] {
        buffers.append(slice(part.0, part.1));
    }
    assert!(buffers.take_end(8).is_none());
    let mut end = buffers.take_end(3).unwrap();
    assert_eq!((buffers.remaining(), end.remaining()), (4, 3));
    let mut data = [0; 4];
    assert!(buffers.read(&mut data));
    assert_eq!(data, [1, 2, 3, 4]);
    assert!(end.read(&mut data[..3]));
    assert_eq!(data[..3], [5, 6, 7]);
    assert!(!end.read(&mut data[..1]));
}

/// Any sequence of register accesses over any memory contents leaves the transport able to start afresh.
#[test]
fn random_register_writes_never_break_the_device() {
    let (mut driver, _) = driver();
    let mut random = XorShift::new(0x0ff5_4007);
    let values = [0, 1, 2, 3, 4, 8, 11, 15, 16, 64, 128, 0x1000, 0x2000, 0xffff_fff0, u32::MAX];
    for _ in 0..20_000 {
        let offset = random.below(0x40) * 4;
        let value = if random.below(3) == 0 {
            random.next() as u32
        } else {
            values[random.below(values.len() as u64) as usize]
        };
        match random.below(12) {
            0 => driver.start(),
            1 => driver.scribble(&mut random),
            2..=4 => driver.notify(random.below(3) as u32),
            5 => {
                driver.read(offset as u32);
            }
            _ => driver.write(offset as u32, value),
        }
    }
    driver.start();
    driver.offer(1, &[(0x9000, 8, true)]);
    driver.notify(1);
    assert_eq!(driver.used(1), vec![(0, 8)]);
}
