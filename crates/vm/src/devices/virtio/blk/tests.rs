use offshoot_protocol::control::DiskConfig;
use virtio_bindings::virtio_blk::*;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::devices::testing::{Driver, XorShift};

const HEADER: u64 = Driver::<Blk>::BUFFERS;
const DATA: u64 = HEADER + 0x1000;
const STATUS: u64 = HEADER + 0x800;
const BASE_BYTES: usize = 64 * BLOCK_BYTES;

fn disk() -> OverlayDisk {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("base");
    std::fs::write(&base, (0..BASE_BYTES).map(|index| (index / 512 % 251 + 1) as u8).collect::<Vec<_>>())
        .unwrap();
    OverlayDisk::open(&DiskConfig { base, size_mib: 1, overlay_limit_mib: 1 }).unwrap()
}

fn driver() -> Driver<Blk> {
    let (mut driver, _) = Driver::new(Blk::new(disk()));
    driver.start();
    driver
}

/// Sends one request and returns status and written length.
fn request(driver: &mut Driver<Blk>, kind: u32, sector: u64, data: &[(u64, u32, bool)]) -> (u8, u32) {
    let memory = driver.memory().clone();
    let mut header = [0; 16];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    header[8..].copy_from_slice(&sector.to_le_bytes());
    memory.write_slice(&header, GuestAddress(HEADER)).unwrap();
    memory.write_obj(0xffu8, GuestAddress(STATUS)).unwrap();
    let mut chain = vec![(HEADER, 16, false)];
    chain.extend(data);
    chain.push((STATUS, 1, true));
    driver.offer(0, &chain);
    driver.notify(0);
    let used = driver.used(0);
    assert_eq!(used.len(), 1);
    (memory.read_obj(GuestAddress(STATUS)).unwrap(), used[0].1)
}

fn range(driver: &Driver<Blk>, sector: u64, sectors: u32, flags: u32) {
    let memory = driver.memory();
    memory.write_obj(sector, GuestAddress(DATA)).unwrap();
    memory.write_obj(sectors, GuestAddress(DATA + 8)).unwrap();
    memory.write_obj(flags, GuestAddress(DATA + 12)).unwrap();
}

fn byte(driver: &Driver<Blk>, address: u64) -> u8 {
    driver.memory().read_obj(GuestAddress(address)).unwrap()
}

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
const UNSUPP: u8 = VIRTIO_BLK_S_UNSUPP as u8;

#[test]
fn reads_what_was_written_and_the_base_elsewhere() {
    let mut driver = driver();
    driver.memory().write_slice(&[0x77; 1024], GuestAddress(DATA)).unwrap();
    let written = request(&mut driver, VIRTIO_BLK_T_OUT, 3, &[(DATA, 512, false), (DATA + 512, 512, false)]);
    assert_eq!(written, (OK, 1));
    let read = request(&mut driver, VIRTIO_BLK_T_IN, 2, &[(DATA, 700, true), (DATA + 700, 1348, true)]);
    assert_eq!(read, (OK, 2049));
    let found: Vec<u8> = [0, 511, 512, 1535, 1536].iter().map(|at| byte(&driver, DATA + at)).collect();
    assert_eq!(found, [3, 3, 0x77, 0x77, 6]);
    let metrics = driver.device().metrics();
    assert_eq!(
        (metrics.reads, metrics.read_bytes, metrics.writes, metrics.written_bytes),
        (1, 2048, 1, 1024)
    );
    assert_eq!(driver.device().disk().overlay_bytes(), BLOCK_BYTES as u64);
}

#[test]
fn beyond_the_base_there_are_zeros_up_to_the_end() {
    let mut driver = driver();
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_IN, 511, &[(DATA, 1024, true)]), (OK, 1025));
    assert_eq!((byte(&driver, DATA), byte(&driver, DATA + 512)), (10, 0));
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_IN, 2047, &[(DATA, 512, true)]).0, OK);
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_IN, 2047, &[(DATA, 1024, true)]), (IOERR, 0));
}

#[test]
fn flush_and_id_are_answered() {
    let mut driver = driver();
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_FLUSH, 0, &[]), (OK, 1));
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_GET_ID, 0, &[(DATA, 20, true)]), (OK, 21));
    let mut id = [0; 20];
    driver.memory().read_slice(&mut id, GuestAddress(DATA)).unwrap();
    assert_eq!(&id, b"offshoot-root\0\0\0\0\0\0\0");
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_GET_ID, 0, &[(DATA, 19, true)]).0, IOERR);
}

#[test]
fn discard_and_write_zeroes_read_as_zero() {
    let mut driver = driver();
    range(&driver, 8, 8, 0);
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_DISCARD, 0, &[(DATA, 16, false)]), (OK, 1));
    range(&driver, 17, 2, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP);
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_WRITE_ZEROES, 0, &[(DATA, 16, false)]), (OK, 1));
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_IN, 0, &[(DATA, 24 * 512, true)]).0, OK);
    let sectors: Vec<u8> = (0..24).map(|sector| byte(&driver, DATA + sector * 512 + 5)).collect();
    assert_eq!(sectors, [1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0, 17, 0, 0, 20, 21, 22, 23, 24]);
}

#[test]
fn discards_of_wrong_shape_are_refused() {
    let mut driver = driver();
    for (sector, sectors, flags, expected) in [
        (8, 8, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP, UNSUPP),
        (8, 8, 0x10, UNSUPP),
        (2047, 2, 0, IOERR),
        (u64::MAX, 1, 0, IOERR),
        (u64::MAX / 512, u32::MAX, 0, IOERR),
        (0, MAX_RANGE_SECTORS + 1, 0, IOERR),
    ] {
        range(&driver, sector, sectors, flags);
        let answer = request(&mut driver, VIRTIO_BLK_T_DISCARD, 0, &[(DATA, 16, false)]);
        assert_eq!(answer.0, expected, "{sector} {sectors} {flags}");
    }
    for len in [0, 15, 17, 16 * (MAX_RANGES + 1)] {
        assert_eq!(request(&mut driver, VIRTIO_BLK_T_DISCARD, 0, &[(DATA, len, false)]).0, IOERR, "{len}");
    }
    assert_eq!(driver.device().metrics().failed_requests, 10);
}

#[test]
fn malformed_requests_get_an_error_status() {
    let mut driver = driver();
    assert_eq!(request(&mut driver, 77, 0, &[]).0, UNSUPP);
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_IN, 0, &[(DATA, 100, true)]).0, IOERR);
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_OUT, 0, &[(DATA, 100, false)]).0, IOERR);
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_OUT, u64::MAX, &[(DATA, 512, false)]).0, IOERR);
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_OUT, u64::MAX / 512, &[(DATA, 512, false)]).0, IOERR);

    driver.offer(0, &[(HEADER, 8, false), (STATUS, 1, true)]);
    driver.offer(0, &[(HEADER, 16, false)]);
    driver.offer(0, &[(HEADER, 16, false), (STATUS, 0, true)]);
    driver.offer(0, &[(HEADER, 16, false), (u64::MAX - 511, 512, true), (STATUS, 1, true)]);
    driver.offer(0, &[(STATUS, 1, true), (HEADER, 16, false)]);
    driver.notify(0);
    assert_eq!(driver.used(0).iter().map(|entry| entry.1).collect::<Vec<_>>(), [1, 0, 0, 0, 0]);
    assert_eq!(byte(&driver, STATUS), IOERR);
}

#[test]
fn full_overlay_is_an_io_error_and_the_device_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("base");
    std::fs::write(&base, vec![1; 2 << 20]).unwrap();
    let disk = OverlayDisk::open(&DiskConfig { base, size_mib: 0, overlay_limit_mib: 1 }).unwrap();
    let (mut driver, _) = Driver::new(Blk::new(disk));
    driver.start();
    let (first, second) = (0x40_000, 0x80_000);
    for (sector, expected) in
        [(0, OK), (first / 512, OK), (second / 512, OK), (0xc0_000 / 512, OK), (0x100_000 / 512, IOERR)]
    {
        let answer = request(&mut driver, VIRTIO_BLK_T_OUT, sector, &[(DATA, 0x40_000, false)]);
        assert_eq!(answer.0, expected, "{sector}");
    }
    assert_eq!(driver.device().disk().refused_writes(), 1);
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_OUT, 0, &[(DATA, 0x40_000, false)]).0, OK);
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_IN, 0x100_000 / 512, &[(DATA, 512, true)]).0, OK);
    assert_eq!(byte(&driver, DATA), 1);
}

#[test]
fn configuration_space_is_laid_out_as_specified() {
    let mut driver = driver();
    let mut config = [0; 64];
    crate::devices::BusDevice::read(driver.transport(), 0x100, &mut config);
    assert_eq!(u64::from_le_bytes(config[..8].try_into().unwrap()), 2048);
    assert_eq!(config[12], 126);
    assert_eq!(config[20..24], [0, 2, 0, 0]);
    assert_eq!((config[24], config[26]), (3, 8));
    assert_eq!((config[44], config[56]), (8, 1));
}

#[test]
fn random_rings_never_break_the_disk() {
    let mut driver = driver();
    let mut random = XorShift::new(0xb10c);
    for round in 0..5000 {
        if round % 16 == 0 {
            driver.start();
        }
        for page in 0..4 {
            let kinds = [0, 1, 4, 8, 11, 13, random.next() as u32];
            let kind = kinds[random.below(kinds.len() as u64) as usize];
            let sector = if random.below(4) == 0 { random.next() } else { random.below(2050) };
            let memory = driver.memory().clone();
            memory.write_obj(kind, GuestAddress(HEADER + page * 0x400)).unwrap();
            memory.write_obj(sector, GuestAddress(HEADER + page * 0x400 + 8)).unwrap();
        }
        driver.scribble(&mut random);
        driver.notify(0);
        assert!(driver.device().disk().overlay_bytes() <= driver.device().disk().overlay_limit_bytes());
    }
    driver.start();
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_IN, 0, &[(DATA, 512, true)]).0, OK);
}
