//! One block request, virtio 1.2 section 5.2.6: header, data, status byte.

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

use super::disk::{BlockFault, OverlayDisk};
use super::metrics::BlkMetrics;
use super::storage::Storage;
use crate::devices::virtio::Buffers;

/// Unit of sectors and capacity, bytes.
pub const SECTOR_BYTES: u64 = 512;
/// Most data of one request, bytes: bounds how long a vCPU can be kept from the barrier by its own request.
pub const MAX_REQUEST_BYTES: u64 = 32 << 20;
/// Most ranges of one discard or write-zeroes request.
pub const MAX_RANGES: u32 = 32;
/// Most sectors of one such range.
pub const MAX_RANGE_SECTORS: u32 = 1 << 21;

const HEADER_BYTES: usize = 16;
const RANGE_BYTES: usize = 16;
const SERIAL: &[u8] = b"offshoot-root";

/// Why a request is answered with an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RequestFault {
    /// Header, data or status are missing, too long or not whole sectors.
    #[error("malformed block request")]
    Malformed,
    /// The device does not do this.
    #[error("block request of an unknown kind")]
    Unsupported,
    /// The disk refused it.
    #[error("block request failed")]
    Disk(#[from] BlockFault),
}

/// Serves one request and writes its status; the number of bytes written for the driver. A chain without room for a
/// status has none.
pub fn serve<S: Storage>(
    disk: &mut OverlayDisk<S>,
    metrics: &mut BlkMetrics,
    readable: Buffers<'_>,
    mut writable: Buffers<'_>,
) -> u32 {
    let Some(mut status) = writable.take_end(1) else {
        metrics.failed_requests += 1;
        return 0;
    };
    let room = writable.remaining();
    let result = execute(disk, metrics, readable, &mut writable);
    let code = match result {
        Ok(()) => VIRTIO_BLK_S_OK,
        Err(RequestFault::Unsupported) => VIRTIO_BLK_S_UNSUPP,
        Err(_) => VIRTIO_BLK_S_IOERR,
    };
    status.write(&[code as u8]);
    metrics.failed_requests += u64::from(result.is_err());
    // The length counts from the first byte: after an unfilled data buffer the status is not part of it.
    if writable.remaining() == 0 { room as u32 + 1 } else { (room - writable.remaining()) as u32 }
}

fn execute<S: Storage>(
    disk: &mut OverlayDisk<S>,
    metrics: &mut BlkMetrics,
    mut readable: Buffers<'_>,
    writable: &mut Buffers<'_>,
) -> Result<(), RequestFault> {
    let mut header = [0; HEADER_BYTES];
    if !readable.read(&mut header) {
        return Err(RequestFault::Malformed);
    }
    let sector = u64::from_le_bytes(header[8..].try_into().expect("8 bytes"));
    let (incoming, outgoing) = (readable.remaining() as u64, writable.remaining() as u64);
    match u32::from_le_bytes(header[..4].try_into().expect("4 bytes")) {
        VIRTIO_BLK_T_IN => {
            let offset = data_range(sector, outgoing)?;
            disk.read(offset, outgoing, writable)?;
            metrics.reads += 1;
            metrics.read_bytes += outgoing;
        }
        VIRTIO_BLK_T_OUT => {
            let offset = data_range(sector, incoming)?;
            disk.write(offset, incoming, &mut readable)?;
            metrics.writes += 1;
            metrics.written_bytes += incoming;
        }
        // The overlay is memory, so nothing is more durable after a flush than before it.
        VIRTIO_BLK_T_FLUSH => metrics.flushes += 1,
        VIRTIO_BLK_T_GET_ID => {
            let mut id = [0; VIRTIO_BLK_ID_BYTES as usize];
            id[..SERIAL.len()].copy_from_slice(SERIAL);
            if !writable.write(&id) {
                return Err(RequestFault::Malformed);
            }
        }
        kind @ (VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES) => {
            let unmap_allowed = kind == VIRTIO_BLK_T_WRITE_ZEROES;
            let (ranges, count) = read_ranges(&mut readable, unmap_allowed)?;
            for (offset, len) in &ranges[..count] {
                if kind == VIRTIO_BLK_T_DISCARD {
                    disk.discard(*offset, *len)?;
                } else {
                    disk.write_zeroes(*offset, *len)?;
                }
            }
            metrics.discards += 1;
        }
        _ => return Err(RequestFault::Unsupported),
    }
    Ok(())
}

/// The byte offset of a read or write of `len` bytes.
fn data_range(sector: u64, len: u64) -> Result<u64, RequestFault> {
    if !len.is_multiple_of(SECTOR_BYTES) || len > MAX_REQUEST_BYTES {
        return Err(RequestFault::Malformed);
    }
    Ok(sector.checked_mul(SECTOR_BYTES).ok_or(BlockFault::Range)?)
}

type Ranges = [(u64, u64); MAX_RANGES as usize];

/// The ranges of a discard or write-zeroes request, bytes, section 5.2.6: sector, number of sectors, flags.
fn read_ranges(readable: &mut Buffers<'_>, unmap_allowed: bool) -> Result<(Ranges, usize), RequestFault> {
    let count = readable.remaining() / RANGE_BYTES;
    let whole = readable.remaining().is_multiple_of(RANGE_BYTES);
    if !whole || count == 0 || count > MAX_RANGES as usize {
        return Err(RequestFault::Malformed);
    }
    let mut ranges = Ranges::default();
    for range in &mut ranges[..count] {
        let mut raw = [0; RANGE_BYTES];
        if !readable.read(&mut raw) {
            return Err(RequestFault::Malformed);
        }
        let sector = u64::from_le_bytes(raw[..8].try_into().expect("8 bytes"));
        let sectors = u32::from_le_bytes(raw[8..12].try_into().expect("4 bytes"));
        let flags = u32::from_le_bytes(raw[12..].try_into().expect("4 bytes"));
        let known = if unmap_allowed { VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP } else { 0 };
        if flags & !known != 0 {
            // Section 5.2.6.2: unknown flags, and unmap in a discard, are answered so.
            return Err(RequestFault::Unsupported);
        }
        if sectors > MAX_RANGE_SECTORS {
            return Err(RequestFault::Malformed);
        }
        let offset = sector.checked_mul(SECTOR_BYTES).ok_or(BlockFault::Range)?;
        *range = (offset, u64::from(sectors) * SECTOR_BYTES);
    }
    Ok((ranges, count))
}
