//! Packet headers, virtio 1.2 section 5.10.6.
//!
//! The `virtio-vsock` crate takes the payload of a packet for one descriptor; Linux 6.17 and newer send large ones in
//! many (`virtio_transport_alloc_skb`, non-linear), so headers are decoded here and payloads are [`Buffers`].
//!
//! [`Buffers`]: crate::devices::virtio::Buffers

/// Length of a header, bytes.
pub const HEADER_BYTES: usize = 44;
/// Context id of the host.
pub const HOST_CID: u64 = 2;
/// The only socket type offered.
pub const TYPE_STREAM: u16 = 1;
/// Shutdown flag: the sender will receive no more.
pub const SHUTDOWN_RECEIVE: u32 = 1;
/// Shutdown flag: the sender will send no more.
pub const SHUTDOWN_SEND: u32 = 2;
/// Both directions.
pub const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// What a packet does.
pub mod op {
    /// Asks for a connection.
    pub const REQUEST: u16 = 1;
    /// Accepts one.
    pub const RESPONSE: u16 = 2;
    /// Ends one at once.
    pub const RESET: u16 = 3;
    /// Closes one or both directions.
    pub const SHUTDOWN: u16 = 4;
    /// Carries data.
    pub const DATA: u16 = 5;
    /// Tells the receiver's buffer state.
    pub const CREDIT_UPDATE: u16 = 6;
    /// Asks for it.
    pub const CREDIT_REQUEST: u16 = 7;
}

/// A packet header in host byte order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Header {
    /// Sender's context id.
    pub src_cid: u64,
    /// Receiver's context id.
    pub dst_cid: u64,
    /// Sender's port.
    pub src_port: u32,
    /// Receiver's port.
    pub dst_port: u32,
    /// Payload length, bytes.
    pub len: u32,
    /// Socket type.
    pub kind: u16,
    /// One of [`op`].
    pub op: u16,
    /// Shutdown flags.
    pub flags: u32,
    /// Size of the sender's receive buffer, bytes.
    pub buf_alloc: u32,
    /// Bytes the sender has taken out of it since the connection began, modulo 2^32.
    pub fwd_cnt: u32,
}

impl Header {
    /// Reads a header; any bytes are one.
    pub fn decode(raw: &[u8; HEADER_BYTES]) -> Self {
        let mut rest = &raw[..];
        Self {
            src_cid: u64::from_le_bytes(field(&mut rest)),
            dst_cid: u64::from_le_bytes(field(&mut rest)),
            src_port: u32::from_le_bytes(field(&mut rest)),
            dst_port: u32::from_le_bytes(field(&mut rest)),
            len: u32::from_le_bytes(field(&mut rest)),
            kind: u16::from_le_bytes(field(&mut rest)),
            op: u16::from_le_bytes(field(&mut rest)),
            flags: u32::from_le_bytes(field(&mut rest)),
            buf_alloc: u32::from_le_bytes(field(&mut rest)),
            fwd_cnt: u32::from_le_bytes(field(&mut rest)),
        }
    }

    /// Writes a header.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut raw = [0; HEADER_BYTES];
        raw[0..8].copy_from_slice(&self.src_cid.to_le_bytes());
        raw[8..16].copy_from_slice(&self.dst_cid.to_le_bytes());
        raw[16..20].copy_from_slice(&self.src_port.to_le_bytes());
        raw[20..24].copy_from_slice(&self.dst_port.to_le_bytes());
        raw[24..28].copy_from_slice(&self.len.to_le_bytes());
        raw[28..30].copy_from_slice(&self.kind.to_le_bytes());
        raw[30..32].copy_from_slice(&self.op.to_le_bytes());
        raw[32..36].copy_from_slice(&self.flags.to_le_bytes());
        raw[36..40].copy_from_slice(&self.buf_alloc.to_le_bytes());
        raw[40..44].copy_from_slice(&self.fwd_cnt.to_le_bytes());
        raw
    }
}

fn field<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let (now, later) = rest.split_first_chunk().expect("the fields add up to the header's length");
    *rest = later;
    *now
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_is_laid_out_as_specified() {
        let raw: [u8; HEADER_BYTES] = std::array::from_fn(|index| index as u8);
        let header = Header::decode(&raw);
        assert_eq!(header.encode(), raw);
        assert_eq!((header.src_cid, header.dst_port), (0x0706_0504_0302_0100, 0x1716_1514));
        assert_eq!((header.len, header.kind, header.op), (0x1b1a_1918, 0x1d1c, 0x1f1e));
        assert_eq!((header.flags, header.buf_alloc, header.fwd_cnt), (0x2322_2120, 0x2726_2524, 0x2b2a_2928));
    }
}
