use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::devices::testing::{Driver, XorShift};

const BUFFER: u64 = Driver::<Rng>::BUFFERS;

fn bytes(driver: &Driver<Rng>, len: usize) -> Vec<u8> {
    let mut data = vec![0; len];
    driver.memory().read_slice(&mut data, GuestAddress(BUFFER)).unwrap();
    data
}

#[test]
fn every_request_gets_other_bytes() {
    let (mut driver, irqs) = Driver::new(Rng::new());
    driver.start();
    let mut seen = Vec::new();
    for round in 1..=3 {
        driver.offer(0, &[(BUFFER, 16, true), (BUFFER + 16, 48, true)]);
        driver.notify(0);
        assert_eq!(driver.used(0).len(), 1);
        assert_eq!(irqs.pulses(), round);
        let data = bytes(&driver, 64);
        assert!(!seen.contains(&data));
        seen.push(data);
    }
    assert_eq!(driver.device().metrics(), RngMetrics { bytes: 192, failed_requests: 0 });
}

#[test]
fn large_request_is_cut_and_nothing_beyond_is_written() {
    let (mut driver, _) = Driver::new(Rng::new());
    driver.start();
    driver.offer(0, &[(BUFFER, 0x8000, true)]);
    driver.notify(0);
    assert_eq!(driver.used(0), vec![(0, MAX_REQUEST_BYTES as u32)]);
    assert!(bytes(&driver, 0x8000)[MAX_REQUEST_BYTES..].iter().all(|byte| *byte == 0));
}

#[test]
fn unusable_chains_come_back_empty() {
    let (mut driver, _) = Driver::new(Rng::new());
    driver.start();
    driver.offer(0, &[(BUFFER, 16, false)]);
    driver.offer(0, &[(u64::MAX - 4, 16, true)]);
    driver.offer(0, &[(BUFFER, 16, true), (BUFFER, 16, false)]);
    driver.notify(0);
    assert_eq!(driver.used(0), vec![(0, 0), (1, 0), (2, 0)]);
    assert_eq!(driver.device().metrics().failed_requests, 3);
}

#[test]
fn random_rings_never_break_the_device() {
    let (mut driver, _) = Driver::new(Rng::new());
    let mut random = XorShift::new(77);
    for round in 0..3000 {
        if round % 16 == 0 {
            driver.start();
        }
        driver.scribble(&mut random);
        driver.notify(0);
    }
}
