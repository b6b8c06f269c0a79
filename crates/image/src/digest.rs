//! Content digests and cache keys.
//!
//! A file's digest is a two-level SHA-256: of the concatenated SHA-256 of each [`BLOCK_BYTES`] block, the last one as
//! short as it is. A disk image is mostly holes; the digest of a block of zeros is known without reading it, so that
//! digesting costs what is stored, not what the disk's size is.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::SeekFrom;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

/// Bytes that are digested at a time.
pub const BLOCK_BYTES: u64 = 1 << 20;

/// Lower-case hexadecimal text of `bytes`.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The cache key of `inputs`: SHA-256 of their JSON form, hexadecimal.
pub fn key_of(inputs: &impl Serialize) -> String {
    let json = serde_json::to_vec(inputs).expect("inputs are plain data with text keys");
    hex(&Sha256::digest(json))
}

/// The two-level digest of the file at `path`, hexadecimal.
///
/// # Errors
/// Fails where the file cannot be read.
pub fn of_file(path: &Path) -> io::Result<String> {
    let file = File::open(path)?;
    let size_bytes = file.metadata()?.len();
    let mut block = vec![0u8; BLOCK_BYTES as usize];
    let zero_block = Sha256::digest(&block);
    let mut whole = Sha256::new();
    let mut at = 0;
    let mut data_begins = 0;
    while at < size_bytes {
        let length = BLOCK_BYTES.min(size_bytes - at);
        if data_begins <= at {
            data_begins = next_data(&file, at, size_bytes);
        }
        if length == BLOCK_BYTES && data_begins >= at + BLOCK_BYTES {
            whole.update(zero_block);
        } else {
            let part = &mut block[..length as usize];
            file.read_exact_at(part, at)?;
            whole.update(Sha256::digest(part));
        }
        at += length;
    }
    Ok(hex(&whole.finalize()))
}

/// Offset of the first stored byte at or after `at`; `at` itself where the file system cannot tell.
fn next_data(file: &File, at: u64, size_bytes: u64) -> u64 {
    match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(offset) => offset,
        // Linux answers ENXIO when only a hole follows (lseek(2)).
        Err(rustix::io::Errno::NXIO) => size_bytes,
        Err(_) => at,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_digest_like_zeros() {
        let dir = tempfile::tempdir().unwrap();
        let (sparse, dense) = (dir.path().join("sparse"), dir.path().join("dense"));
        let size_bytes = 5 * BLOCK_BYTES + 17;
        let file = File::create(&sparse).unwrap();
        file.set_len(size_bytes).unwrap();
        file.write_all_at(b"data", 3 * BLOCK_BYTES + 5).unwrap();
        let mut content = vec![0u8; size_bytes as usize];
        content[(3 * BLOCK_BYTES + 5) as usize..][..4].copy_from_slice(b"data");
        std::fs::write(&dense, &content).unwrap();
        assert_eq!(of_file(&sparse).unwrap(), of_file(&dense).unwrap());
    }

    #[test]
    fn any_changed_byte_and_any_length_changes_the_digest() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mut seen = std::collections::BTreeSet::new();
        let contents: [&[u8]; 5] = [b"", b"\0", b"\0\0", b"a", b"a\0"];
        for content in contents {
            std::fs::write(&path, content).unwrap();
            assert!(seen.insert(of_file(&path).unwrap()));
        }
    }

    #[test]
    fn keys_differ_with_their_inputs() {
        assert_eq!(key_of(&("a", 1)), key_of(&("a", 1)));
        assert_ne!(key_of(&("a", 1)), key_of(&("a", 2)));
    }
}
