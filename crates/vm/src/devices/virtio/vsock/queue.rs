//! Packets from and to the guest.

use super::connection::{End, State};
use super::packet::{HEADER_BYTES, HOST_CID, Header, TYPE_STREAM, op};
use super::table::Pair;
use super::{RX_QUEUE, TX_QUEUE, Vsock};
use crate::devices::virtio::{Buffers, QueueIo};

/// Most payload of a packet from the guest, bytes (Linux `VIRTIO_VSOCK_MAX_PKT_BUF_SIZE`).
const MAX_PAYLOAD_BYTES: u32 = 64 * 1024;

impl Vsock {
    /// Takes the packets the guest has sent.
    pub(super) fn take_packets(&mut self, io: &mut QueueIo<'_>) {
        for _ in 0..io.pending(TX_QUEUE) {
            let Some(chain) = io.pop(TX_QUEUE) else { return };
            match chain.buffers {
                Ok((packet, _)) => self.take_packet(packet),
                Err(_) => self.metrics.malformed_packets += 1,
            }
            io.push(TX_QUEUE, chain.head, 0);
        }
    }

    /// Takes one packet: a header and its payload, any bytes.
    pub fn take_packet(&mut self, mut packet: Buffers<'_>) {
        let mut raw = [0; HEADER_BYTES];
        if !packet.read(&mut raw) {
            self.metrics.malformed_packets += 1;
            return;
        }
        let header = Header::decode(&raw);
        if header.src_cid != self.guest_cid || header.dst_cid != HOST_CID {
            self.metrics.malformed_packets += 1;
            return;
        }
        let pair = Pair { host: header.dst_port, guest: header.src_port };
        let known = self.table.find(pair.host).is_some_and(|connection| {
            let with_guest = matches!(connection.state, State::Requested | State::Open);
            with_guest && connection.guest_port == pair.guest
        });
        let sound = header.kind == TYPE_STREAM
            && header.len <= MAX_PAYLOAD_BYTES
            && header.len as usize <= packet.remaining();
        match (known, sound) {
            (true, true) => {
                let outcome = self.deliver(pair, &header, &mut packet);
                self.conclude(pair.host, outcome);
            }
            (true, false) => self.conclude(pair.host, Err(End::Violation)),
            // Connections are only made by the host: a request of the guest is for nobody, too.
            (false, _) => {
                self.metrics.malformed_packets += u64::from(!sound);
                if header.op != op::RESET {
                    self.table.reset(pair);
                }
            }
        }
    }

    fn deliver(&mut self, pair: Pair, header: &Header, payload: &mut Buffers<'_>) -> Result<(), End> {
        let Some(connection) = self.table.find(pair.host) else {
            return Ok(());
        };
        connection.update_credit(header);
        match (connection.state, header.op) {
            (State::Requested, op::RESPONSE) => {
                connection.accepted(pair.host)?;
                self.metrics.opened += 1;
                Ok(())
            }
            (State::Requested, op::RESET) => Err(End::Quiet),
            (State::Open, op::RESET) => connection.guest_resets(),
            (State::Open, op::SHUTDOWN) => {
                connection.guest_shuts_down(header.flags);
                Ok(())
            }
            (State::Open, op::DATA) => {
                connection.take_data(payload, header.len as usize)?;
                self.metrics.to_host_bytes += u64::from(header.len);
                Ok(())
            }
            (State::Open, op::CREDIT_UPDATE) => Ok(()),
            (State::Open, op::CREDIT_REQUEST) => {
                connection.credit_requested();
                Ok(())
            }
            _ => Err(End::Violation),
        }
    }

    /// Fills the guest's receive buffers with what waits for it.
    pub(super) fn send_packets(&mut self, io: &mut QueueIo<'_>) {
        if !self.table.has_work() {
            return;
        }
        for _ in 0..io.pending(RX_QUEUE) {
            let Some(chain) = io.pop(RX_QUEUE) else { return };
            let parts =
                chain.buffers.ok().and_then(|(_, mut room)| Some((room.take_front(HEADER_BYTES)?, room)));
            let Some((mut front, room)) = parts.filter(|(_, room)| room.remaining() > 0) else {
                // Of no use: without room for a payload, a client with data would never have its turn.
                io.push(RX_QUEUE, chain.head, 0);
                continue;
            };
            let Some(header) = self.next_packet(&room) else {
                io.undo_pop(RX_QUEUE);
                return;
            };
            front.write(&header.encode());
            io.push(RX_QUEUE, chain.head, HEADER_BYTES as u32 + header.len);
        }
    }

    /// The next packet for the guest, its payload already in `room`.
    fn next_packet(&mut self, room: &Buffers<'_>) -> Option<Header> {
        if let Some(pair) = self.table.next_reset() {
            return Some(self.header(pair, op::RESET));
        }
        while let Some(port) = self.table.next_turn() {
            let connection = self.table.find(port)?;
            let Some(packet) = connection.next_packet(room) else {
                // Reading may have shown that the client is gone.
                self.conclude(port, Ok(()));
                continue;
            };
            let pair = Pair { host: port, guest: connection.guest_port };
            let mut header = Header {
                src_cid: HOST_CID,
                dst_cid: self.guest_cid,
                src_port: pair.host,
                dst_port: pair.guest,
                len: packet.len,
                kind: TYPE_STREAM,
                op: packet.op,
                flags: packet.flags,
                ..Header::default()
            };
            connection.announce_credit(&mut header);
            self.metrics.to_guest_bytes += u64::from(packet.len);
            self.conclude(port, Ok(()));
            return Some(header);
        }
        None
    }

    fn header(&self, pair: Pair, op: u16) -> Header {
        Header {
            src_cid: HOST_CID,
            dst_cid: self.guest_cid,
            src_port: pair.host,
            dst_port: pair.guest,
            kind: TYPE_STREAM,
            op,
            ..Header::default()
        }
    }
}
