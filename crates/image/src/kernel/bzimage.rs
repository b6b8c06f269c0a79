//! Takes the ELF kernel out of a bzImage.
//!
//! The setup header (Linux, Documentation/arch/x86/boot.rst, protocol 2.08) says where in the file the compressed
//! kernel lies. Its last four bytes are the length of what it decompresses to. Debian's kernels are LZ4 in the legacy
//! frame format; zstd is what most other distributions use.

use std::io::Read;

/// Offsets in the setup header, from the file's begin.
const SETUP_SECTS: usize = 0x1f1;
const HEADER_MAGIC: usize = 0x202;
const HEADER_VERSION: usize = 0x206;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
/// First protocol version with the payload fields.
const PAYLOAD_VERSION: u16 = 0x208;
const SECTOR_BYTES: usize = 512;

const LZ4_LEGACY_MAGIC: &[u8] = &[0x02, 0x21, 0x4c, 0x18];
const ZSTD_MAGIC: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
/// Uncompressed size of every block of a legacy LZ4 frame but the last (lz4, doc/lz4_Frame_format.md).
const LZ4_BLOCK_BYTES: usize = 8 << 20;
/// Bound of the extracted kernel; real ones have 30 to 80 MiB.
const MAX_KERNEL_BYTES: usize = 512 << 20;
/// `e_machine` of x86-64 in an ELF header, at this offset.
const ELF_MACHINE: (usize, u16) = (18, 62);

/// Why no ELF kernel came out.
#[derive(Debug, thiserror::Error)]
pub enum BzImageError {
    /// It is no bzImage.
    #[error("not a bzImage: no setup header at 0x202")]
    NotBzImage,
    /// The boot protocol is too old to say where the kernel lies.
    #[error("boot protocol {version:#x} does not say where the kernel lies; 0x208 is the first that does")]
    OldProtocol {
        /// The version.
        version: u16,
    },
    /// The header points outside the file.
    #[error(
        "payload at {offset:#x} of {length} bytes lies outside the file of {size} bytes; is it truncated?"
    )]
    OutOfBounds {
        /// Where the payload begins.
        offset: usize,
        /// Its length, bytes.
        length: usize,
        /// The file's, bytes.
        size: usize,
    },
    /// The compression is not one that is read here.
    #[error("unknown compression with magic {magic}; LZ4 and zstd are read, or give an ELF vmlinux")]
    UnknownCompression {
        /// First bytes, hexadecimal.
        magic: String,
    },
    /// The compressed data are damaged.
    #[error("could not decompress the kernel: {reason}")]
    Damaged {
        /// What is wrong.
        reason: String,
    },
    /// What came out is no x86-64 ELF file.
    #[error("the decompressed kernel is not an x86-64 ELF file")]
    NotElf,
}

/// Whether `bytes` begin like a bzImage.
pub fn is_bzimage(bytes: &[u8]) -> bool {
    bytes.get(HEADER_MAGIC..HEADER_MAGIC + 4) == Some(b"HdrS")
}

/// Whether `bytes` begin like an x86-64 ELF file.
pub fn is_elf(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF") && u16_at(bytes, ELF_MACHINE.0) == Some(ELF_MACHINE.1)
}

/// The ELF kernel in the bzImage `image`.
///
/// # Errors
/// Fails on anything that is not a whole bzImage with an x86-64 ELF kernel compressed by LZ4 or zstd.
pub fn extract(image: &[u8]) -> Result<Vec<u8>, BzImageError> {
    let payload = payload(image)?;
    let (data, length) = payload.split_at(payload.len() - 4);
    let expected = u32_at(length, 0).unwrap_or(0) as usize;
    let damaged = |reason: String| BzImageError::Damaged { reason };
    let decompress = match data {
        _ if data.starts_with(LZ4_LEGACY_MAGIC) => lz4_legacy,
        _ if data.starts_with(ZSTD_MAGIC) => zstd,
        _ => {
            let magic = crate::digest::hex(&data[..data.len().min(6)]);
            return Err(BzImageError::UnknownCompression { magic });
        }
    };
    if expected > MAX_KERNEL_BYTES {
        return Err(damaged(format!("it claims to have {expected} bytes")));
    }
    let kernel = decompress(data, expected)?;
    if kernel.len() != expected {
        return Err(damaged(format!("{} bytes came out where {expected} are announced", kernel.len())));
    }
    if !is_elf(&kernel) {
        return Err(BzImageError::NotElf);
    }
    Ok(kernel)
}

/// The compressed kernel, at least four bytes long.
fn payload(image: &[u8]) -> Result<&[u8], BzImageError> {
    if !is_bzimage(image) {
        return Err(BzImageError::NotBzImage);
    }
    let version = u16_at(image, HEADER_VERSION).ok_or(BzImageError::NotBzImage)?;
    if version < PAYLOAD_VERSION {
        return Err(BzImageError::OldProtocol { version });
    }
    let field = |at| u32_at(image, at).map(|value| value as usize).ok_or(BzImageError::NotBzImage);
    // Zero means four, for historical reasons (boot.rst, "setup_sects").
    let setup_sectors = match image[SETUP_SECTS] {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let offset = (setup_sectors + 1) * SECTOR_BYTES + field(PAYLOAD_OFFSET)?;
    let length = field(PAYLOAD_LENGTH)?;
    let out = BzImageError::OutOfBounds { offset, length, size: image.len() };
    let end = offset.checked_add(length).filter(|_| length > 4);
    end.and_then(|end| image.get(offset..end)).ok_or(out)
}

fn lz4_legacy(data: &[u8], expected: usize) -> Result<Vec<u8>, BzImageError> {
    let mut blocks = &data[LZ4_LEGACY_MAGIC.len()..];
    let damaged = |reason: String| BzImageError::Damaged { reason };
    let mut kernel = Vec::with_capacity(expected);
    let mut buffer = vec![0u8; LZ4_BLOCK_BYTES];
    while kernel.len() < expected {
        let length = u32_at(blocks, 0).ok_or_else(|| damaged("a block has no length".to_owned()))? as usize;
        let block = blocks.get(4..).and_then(|rest| rest.get(..length));
        let block = block.ok_or_else(|| damaged(format!("a block of {length} bytes is cut short")))?;
        let written = lz4_flex::block::decompress_into(block, &mut buffer)
            .map_err(|error| damaged(error.to_string()))?;
        if written == 0 {
            return Err(damaged("a block is empty".to_owned()));
        }
        kernel.extend_from_slice(&buffer[..written]);
        blocks = &blocks[4 + length..];
    }
    Ok(kernel)
}

fn zstd(data: &[u8], expected: usize) -> Result<Vec<u8>, BzImageError> {
    let damaged = |reason: String| BzImageError::Damaged { reason };
    let decoder =
        ruzstd::decoding::StreamingDecoder::new(data).map_err(|error| damaged(error.to_string()))?;
    let mut kernel = Vec::with_capacity(expected);
    // One byte more than expected, so that too long an output shows.
    decoder.take(expected as u64 + 1).read_to_end(&mut kernel).map_err(|error| damaged(error.to_string()))?;
    Ok(kernel)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elf() -> Vec<u8> {
        let mut elf = vec![0u8; 100_000];
        elf[..4].copy_from_slice(b"\x7fELF");
        elf[18] = 62;
        for (n, byte) in elf.iter_mut().enumerate().skip(64) {
            *byte = (n / 7) as u8;
        }
        elf
    }

    /// A bzImage whose compressed kernel is `payload`.
    fn bzimage(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0u8; 3 * SECTOR_BYTES + 16];
        image[SETUP_SECTS] = 2;
        image[HEADER_MAGIC..][..4].copy_from_slice(b"HdrS");
        image[HEADER_VERSION..][..2].copy_from_slice(&0x20f_u16.to_le_bytes());
        image[PAYLOAD_OFFSET..][..4].copy_from_slice(&16_u32.to_le_bytes());
        image[PAYLOAD_LENGTH..][..4].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        image.extend_from_slice(payload);
        image
    }

    fn lz4(content: &[u8]) -> Vec<u8> {
        let block = lz4_flex::block::compress(content);
        let mut payload = LZ4_LEGACY_MAGIC.to_vec();
        payload.extend_from_slice(&(block.len() as u32).to_le_bytes());
        payload.extend_from_slice(&block);
        payload.extend_from_slice(&(content.len() as u32).to_le_bytes());
        payload
    }

    #[test]
    fn lz4_kernels_come_out_whole() {
        assert_eq!(extract(&bzimage(&lz4(&elf()))).unwrap(), elf());
    }

    #[test]
    fn zstd_kernels_come_out_whole() {
        let mut payload =
            ruzstd::encoding::compress_to_vec(&elf()[..], ruzstd::encoding::CompressionLevel::Fastest);
        payload.extend_from_slice(&(elf().len() as u32).to_le_bytes());
        assert_eq!(extract(&bzimage(&payload)).unwrap(), elf());
    }

    #[test]
    fn every_truncation_is_an_error_and_never_a_panic() {
        let image = bzimage(&lz4(&elf()));
        for length in (0..image.len()).step_by(7) {
            assert!(extract(&image[..length]).is_err(), "{length}");
        }
    }

    #[test]
    fn damage_in_the_compressed_data_is_found() {
        let mut payload = lz4(&elf());
        let end = payload.len();
        payload[end - 4..].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(extract(&bzimage(&payload)), Err(BzImageError::Damaged { .. })));
        payload[end - 4..].copy_from_slice(&99_u32.to_le_bytes());
        assert!(matches!(extract(&bzimage(&payload)), Err(BzImageError::Damaged { .. })));
    }

    #[test]
    fn other_contents_are_named() {
        assert!(matches!(extract(b"short"), Err(BzImageError::NotBzImage)));
        assert!(matches!(extract(&bzimage(&lz4(&[1; 5000]))), Err(BzImageError::NotElf)));
        let error = extract(&bzimage(b"\xfd7zXZ\0...........")).unwrap_err().to_string();
        assert!(error.contains("fd377a585a00"), "{error}");
    }
}
