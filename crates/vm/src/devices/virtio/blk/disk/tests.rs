//! The overlay disk against a plain array of bytes.

use std::io::Write;
use std::path::Path;

use super::*;
use crate::devices::testing::XorShift;

struct Plain(Vec<u8>);

impl Storage for Plain {
    fn read(&self, offset: usize, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.0[offset..offset + buffer.len()]);
    }
    fn write(&mut self, offset: usize, data: &[u8]) {
        self.0[offset..offset + data.len()].copy_from_slice(data);
    }
    fn load_u32(&self, index: usize) -> u32 {
        u32::from_le_bytes(self.0[index * 4..index * 4 + 4].try_into().unwrap())
    }
    fn store_u32(&mut self, index: usize, value: u32) {
        self.write(index * 4, &value.to_le_bytes());
    }
    fn release(&mut self, offset: usize, len: usize) {
        self.0[offset..offset + len].fill(0xee);
    }
}

fn base_file(bytes: &[u8]) -> OwnedFd {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file.into()
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index / 7 % 251 + 1) as u8).collect()
}

fn plain_disk(base: &[u8], blocks: u64, slots: u32) -> OverlayDisk<Plain> {
    let map = Plain(vec![0; blocks as usize * 4]);
    let slots_memory = Plain(vec![0xdd; slots as usize * BLOCK_BYTES]);
    OverlayDisk::new(base_file(base), base.len() as u64, blocks, map, slots_memory, slots)
}

fn read<S: Storage>(disk: &OverlayDisk<S>, offset: u64, len: usize) -> Result<Vec<u8>, BlockFault> {
    let mut data = vec![0xaa; len];
    disk.read(offset, len as u64, &mut Buffers::over(&mut data))?;
    Ok(data)
}

fn write<S: Storage>(disk: &mut OverlayDisk<S>, offset: u64, data: &[u8]) -> Result<(), BlockFault> {
    let mut data = data.to_vec();
    disk.write(offset, data.len() as u64, &mut Buffers::over(&mut data))
}

/// Random reads, writes, discards and zeroes over a base that ends inside a block, with an overlay of `slots` blocks.
fn compare_with_model<S: Storage>(mut disk: OverlayDisk<S>, base: &[u8], slots: u64, seed: u64) -> u64 {
    let size = disk.len_bytes();
    let mut model = base.to_vec();
    model.resize(size as usize, 0);
    let mut random = XorShift::new(seed);
    let mut refused = 0;
    for _ in 0..3000 {
        let offset = random.below(size / 512) * 512;
        let len = (random.below(24) * 512).min(size - offset);
        let range = offset as usize..(offset + len) as usize;
        match random.below(6) {
            0 | 1 => assert_eq!(read(&disk, offset, len as usize).unwrap(), model[range]),
            2 | 3 => {
                let data: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
                match write(&mut disk, offset, &data) {
                    Ok(()) => model[range].copy_from_slice(&data),
                    Err(fault) => {
                        assert_eq!(fault, BlockFault::Full);
                        refused += 1;
                        adopt(&disk, &mut model, range, Some(&data));
                    }
                }
            }
            4 => {
                disk.discard(offset, len).unwrap();
                let first = range.start.next_multiple_of(BLOCK_BYTES);
                let last = range.end / BLOCK_BYTES * BLOCK_BYTES;
                if first < last {
                    model[first..last].fill(0);
                }
            }
            _ => match disk.write_zeroes(offset, len) {
                Ok(()) => model[range].fill(0),
                Err(fault) => {
                    assert_eq!(fault, BlockFault::Full);
                    refused += 1;
                    let zeros = vec![0; range.len()];
                    adopt(&disk, &mut model, range, Some(&zeros));
                }
            },
        }
        assert!(disk.overlay_bytes() <= slots * BLOCK);
        assert_eq!(disk.refused_writes(), refused);
    }
    assert_eq!(read(&disk, 0, size as usize).unwrap(), model);
    disk.discard(0, size).unwrap();
    assert_eq!(disk.overlay_bytes(), 0);
    assert_eq!(read(&disk, 0, size as usize).unwrap(), vec![0; size as usize]);
    refused
}

/// After a refused request each byte is the old or the new one, and the model goes on with what is there.
fn adopt<S: Storage>(
    disk: &OverlayDisk<S>,
    model: &mut [u8],
    range: std::ops::Range<usize>,
    new: Option<&[u8]>,
) {
    let found = read(disk, range.start as u64, range.len()).unwrap();
    for (index, byte) in found.iter().enumerate() {
        let old = model[range.start + index];
        assert!(*byte == old || new.is_some_and(|new| *byte == new[index]));
    }
    model[range].copy_from_slice(&found);
}

#[test]
fn behaves_like_a_plain_disk() {
    let base = pattern(20 * BLOCK_BYTES + 1300);
    for seed in 1..6 {
        let disk = plain_disk(&base, 32, 32);
        assert_eq!(compare_with_model(disk, &base, 32, seed), 0);
    }
}

#[test]
fn behaves_like_a_plain_disk_until_its_overlay_is_full() {
    let base = pattern(30 * BLOCK_BYTES + 512);
    for seed in 1..6 {
        let disk = plain_disk(&base, 32, 5);
        assert!(compare_with_model(disk, &base, 5, seed) > 0);
    }
}

#[test]
fn behaves_the_same_in_mapped_memory() {
    let folder = tempfile::tempdir().unwrap();
    let base = pattern(100 * BLOCK_BYTES + 4);
    let disk = open(folder.path(), &base, 1, 1).unwrap();
    assert_eq!(disk.len_bytes(), 1 << 20);
    compare_with_model(disk, &base, 256, 9);
}

fn open(folder: &Path, base: &[u8], size_mib: u32, overlay_limit_mib: u32) -> Result<OverlayDisk, DiskError> {
    let path = folder.join("base");
    std::fs::write(&path, base).unwrap();
    OverlayDisk::open(&DiskConfig { base: path, size_mib, overlay_limit_mib })
}

#[test]
fn full_overlay_still_takes_writes_to_blocks_it_has() {
    let mut disk = plain_disk(&pattern(4 * BLOCK_BYTES), 4, 1);
    write(&mut disk, 0, &[1; 512]).unwrap();
    assert_eq!(write(&mut disk, BLOCK, &[2; 512]), Err(BlockFault::Full));
    assert_eq!((disk.refused_writes(), disk.overlay_bytes()), (1, BLOCK));
    write(&mut disk, 512, &[3; 512]).unwrap();
    disk.discard(0, BLOCK).unwrap();
    write(&mut disk, BLOCK, &[2; 512]).unwrap();
    assert_eq!(read(&disk, BLOCK, 513).unwrap()[511..], [2, pattern(2 * BLOCK_BYTES)[BLOCK_BYTES + 512]]);
}

/// A discarded block once came back with the base's bytes, after its slot had been given to another block.
#[test]
fn discarded_block_never_shows_old_content() {
    let mut disk = plain_disk(&pattern(2 * BLOCK_BYTES), 2, 2);
    write(&mut disk, 0, &[9; BLOCK_BYTES]).unwrap();
    disk.discard(0, BLOCK).unwrap();
    write(&mut disk, BLOCK, &[8; BLOCK_BYTES]).unwrap();
    assert_eq!(read(&disk, 0, BLOCK_BYTES).unwrap(), vec![0; BLOCK_BYTES]);
    write(&mut disk, 512, &[7; 512]).unwrap();
    let block = read(&disk, 0, BLOCK_BYTES).unwrap();
    assert_eq!((block[0], block[512], block[1024]), (0, 7, 0));
}

#[test]
fn ranges_outside_the_disk_are_refused() {
    let mut disk = plain_disk(&pattern(BLOCK_BYTES), 2, 2);
    for (offset, len) in
        [(2 * BLOCK, 512), (BLOCK + 512, BLOCK as usize), (u64::MAX - 511, 512), (u64::MAX, 1)]
    {
        assert_eq!(read(&disk, offset, len), Err(BlockFault::Range));
        assert_eq!(write(&mut disk, offset, &vec![0; len]), Err(BlockFault::Range));
        assert_eq!(disk.discard(offset, len as u64), Err(BlockFault::Range));
        assert_eq!(disk.write_zeroes(offset, len as u64), Err(BlockFault::Range));
    }
}

#[test]
fn base_cut_under_us_is_an_error_and_not_zeros() {
    let folder = tempfile::tempdir().unwrap();
    let mut disk = open(folder.path(), &pattern(8 * BLOCK_BYTES), 0, 1).unwrap();
    File::options().write(true).open(folder.path().join("base")).unwrap().set_len(BLOCK + 100).unwrap();
    assert!(read(&disk, 0, BLOCK_BYTES).is_ok());
    assert_eq!(read(&disk, BLOCK, BLOCK_BYTES), Err(BlockFault::Base));
    assert_eq!(write(&mut disk, 2 * BLOCK, &[1; 512]), Err(BlockFault::Base));
    assert_eq!(disk.overlay_bytes(), 0);
    write(&mut disk, 2 * BLOCK, &[1; BLOCK_BYTES]).unwrap();
    assert_eq!(read(&disk, 2 * BLOCK, BLOCK_BYTES).unwrap(), vec![1; BLOCK_BYTES]);
}

#[test]
fn frozen_regions_go_on_as_the_same_disk() {
    let folder = tempfile::tempdir().unwrap();
    let base = pattern(16 * BLOCK_BYTES);
    let mut disk = open(folder.path(), &base, 1, 1).unwrap();
    write(&mut disk, 0, &[5; BLOCK_BYTES]).unwrap();
    write(&mut disk, BLOCK, &[6; BLOCK_BYTES]).unwrap();
    for region in disk.regions_mut() {
        let layer = region.to_layer("test").unwrap();
        region.adopt(layer.into()).unwrap();
    }
    assert_eq!(read(&disk, 0, 2 * BLOCK_BYTES).unwrap()[BLOCK_BYTES - 1..][..2], [5, 6]);
    disk.discard(0, BLOCK).unwrap();
    assert_eq!(read(&disk, 0, BLOCK_BYTES).unwrap(), vec![0; BLOCK_BYTES]);
    write(&mut disk, 5 * BLOCK, &[7; 512]).unwrap();
    assert_eq!(read(&disk, 5 * BLOCK + 512, 512).unwrap(), base[5 * BLOCK_BYTES + 512..][..512]);
    assert_eq!(disk.overlay_bytes(), 2 * BLOCK);
}

#[test]
fn unusable_configurations_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let missing = DiskConfig { base: folder.path().join("none"), size_mib: 1, overlay_limit_mib: 1 };
    assert!(matches!(OverlayDisk::open(&missing), Err(DiskError::Open { .. })));
    let is_folder = DiskConfig { base: folder.path().into(), ..missing };
    assert!(matches!(OverlayDisk::open(&is_folder), Err(DiskError::NotRegular { .. })));
    assert!(matches!(open(folder.path(), &[], 0, 1), Err(DiskError::Empty { .. })));
    assert!(matches!(open(folder.path(), &vec![1; 2 << 20], 1, 1), Err(DiskError::Smaller { .. })));
    assert!(matches!(open(folder.path(), &[1; 512], 1, 0), Err(DiskError::NoOverlay)));
    assert!(matches!(open(folder.path(), &[1; 512], u32::MAX, 1), Err(DiskError::TooLarge { .. })));
    assert_eq!(open(folder.path(), &[1; 513], 0, u32::MAX).unwrap().overlay_limit_bytes(), BLOCK);
}
