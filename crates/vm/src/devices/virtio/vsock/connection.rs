//! One connection between a host client and a guest listener.
//!
//! ```text
//! Reading ──"CONNECT port"──▶ Held ──guest past its reset──▶ Requesting ──REQUEST sent──▶ Requested
//!   Requested ──RESPONSE──▶ Open ──guest RST after it closed, client slow──▶ Draining
//! ```
//!
//! From host to guest nothing is buffered here: data is read straight into the guest's buffers, as far as its credit
//! goes. From guest to host at most [`BUFFER_BYTES`] wait for a slow client, in memory that exists only meanwhile.

use std::io::{self, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::net::{RecvFlags, Shutdown};
use vm_memory::{ReadVolatile, VolatileMemoryError, VolatileSlice, WriteVolatile};

use super::packet::{Header, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, op};
use crate::devices::virtio::Buffers;

/// What the guest may have in flight towards the host on one connection, bytes.
pub const BUFFER_BYTES: usize = 64 * 1024;
/// Most payload put into one packet, bytes.
const MAX_PAYLOAD_BYTES: usize = 64 * 1024;
/// Longest request line, with its end, bytes.
const MAX_LINE_BYTES: usize = 32;

/// Where a connection stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The client has not sent its request line.
    Reading,
    /// The guest is not past a transport reset.
    Held,
    /// A REQUEST is to be sent.
    Requesting,
    /// The guest has not answered.
    Requested,
    /// Data flows.
    Open,
    /// The guest is done; the client has not taken everything yet.
    Draining,
}

/// How a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The guest knows, or never knew of it.
    Quiet,
    /// The guest must be told.
    TellGuest,
    /// The guest broke the protocol, and must be told.
    Violation,
}

/// What a client's request line says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Line {
    /// Its end is not there yet.
    Incomplete,
    /// A connection to this guest port.
    Connect(u32),
    /// Something else, or the client is gone.
    Invalid,
}

/// A packet to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    /// One of [`op`].
    pub op: u16,
    /// Shutdown flags.
    pub flags: u32,
    /// Payload already in the guest's buffer, bytes.
    pub len: u32,
}

impl Packet {
    fn control(op: u16) -> Self {
        Self { op, flags: 0, len: 0 }
    }
}

/// One connection.
pub struct Connection {
    /// The host client.
    pub socket: UnixStream,
    /// Known once the request line is.
    pub guest_port: u32,
    /// See [`State`].
    pub state: State,
    /// When it ends if nothing happens.
    pub deadline: Option<Instant>,
    /// It stands in the list of connections with something for the guest.
    pub queued: bool,
    /// The socket may have data (edge-triggered: true until a read would block).
    readable: bool,
    host_eof: bool,
    host_gone: bool,
    shutdown_sent: u32,
    guest_shutdown: u32,
    write_closed: bool,
    update_due: bool,
    backlog: Vec<u8>,
    /// Bytes handed to the client; the guest computes its credit from it.
    forwarded: u32,
    forwarded_announced: u32,
    sent: u32,
    peer_buf_alloc: u32,
    peer_fwd_cnt: u32,
}

impl Connection {
    /// A client that was just accepted, with a non-blocking socket.
    pub fn new(socket: UnixStream, deadline: Instant) -> Self {
        Self {
            socket,
            guest_port: 0,
            state: State::Reading,
            deadline: Some(deadline),
            queued: false,
            readable: true,
            host_eof: false,
            host_gone: false,
            shutdown_sent: 0,
            guest_shutdown: 0,
            write_closed: false,
            update_due: false,
            backlog: Vec::new(),
            forwarded: 0,
            forwarded_announced: 0,
            sent: 0,
            peer_buf_alloc: 0,
            peer_fwd_cnt: 0,
        }
    }

    /// Takes the request line off the socket, and nothing after it.
    pub fn read_line(&mut self) -> Line {
        let mut line = [0; MAX_LINE_BYTES];
        let peeked =
            rustix::io::retry_on_intr(|| rustix::net::recv(&self.socket, &mut line, RecvFlags::PEEK));
        let count = match peeked {
            Ok((_, 0)) => return Line::Invalid,
            Ok((_, count)) => count.min(MAX_LINE_BYTES),
            Err(rustix::io::Errno::AGAIN) => return Line::Incomplete,
            Err(_) => return Line::Invalid,
        };
        let Some(end) = line[..count].iter().position(|byte| *byte == b'\n') else {
            return if count < MAX_LINE_BYTES { Line::Incomplete } else { Line::Invalid };
        };
        let mut taken = [0; MAX_LINE_BYTES];
        let took = rustix::io::retry_on_intr(|| {
            rustix::net::recv(&self.socket, &mut taken[..=end], RecvFlags::empty())
        });
        match took {
            Ok((_, count)) if count == end + 1 => {
                parse_line(&line[..end]).map_or(Line::Invalid, Line::Connect)
            }
            _ => Line::Invalid,
        }
    }

    /// Bytes the guest can still take.
    fn credit(&self) -> usize {
        let in_flight = self.sent.wrapping_sub(self.peer_fwd_cnt);
        self.peer_buf_alloc.saturating_sub(in_flight) as usize
    }

    fn can_read(&self) -> bool {
        self.readable && !self.host_eof && self.guest_shutdown & SHUTDOWN_RECEIVE == 0 && self.credit() > 0
    }

    /// Shutdown flags that the guest should have seen by now and has not.
    fn shutdown_due(&self) -> u32 {
        let due = match (self.host_eof, self.host_gone) {
            (true, true) => SHUTDOWN_BOTH,
            (true, false) => SHUTDOWN_SEND,
            (false, _) => 0,
        };
        due & !self.shutdown_sent
    }

    /// Whether it has something for the guest, or may have once the socket is read.
    pub fn wants_to_send(&self) -> bool {
        match self.state {
            State::Requesting => true,
            State::Open => self.update_due || self.shutdown_due() != 0 || self.can_read(),
            State::Reading | State::Held | State::Requested | State::Draining => false,
        }
    }

    /// The next packet for the guest; a payload is read straight into `room`.
    pub fn next_packet(&mut self, room: &Buffers<'_>) -> Option<Packet> {
        if self.state == State::Requesting {
            self.state = State::Requested;
            return Some(Packet::control(op::REQUEST));
        }
        if self.state != State::Open {
            return None;
        }
        if self.can_read() {
            let len = self.fill(room.clone());
            if len > 0 {
                self.sent = self.sent.wrapping_add(len as u32);
                return Some(Packet { op: op::DATA, flags: 0, len: len as u32 });
            }
        }
        let flags = self.shutdown_due();
        if flags != 0 {
            self.shutdown_sent |= flags;
            return Some(Packet { op: op::SHUTDOWN, flags: self.shutdown_sent, len: 0 });
        }
        self.update_due.then(|| Packet::control(op::CREDIT_UPDATE))
    }

    /// The part of a header that tells the guest its credit; what it says is then known to the guest.
    pub fn announce_credit(&mut self, header: &mut Header) {
        header.buf_alloc = BUFFER_BYTES as u32;
        header.fwd_cnt = self.forwarded;
        self.forwarded_announced = self.forwarded;
        self.update_due = false;
    }

    /// Reads from the socket into the guest's buffers; 0 when there is nothing now.
    fn fill(&mut self, mut room: Buffers<'_>) -> usize {
        let limit = self.credit().min(MAX_PAYLOAD_BYTES);
        let mut total = 0;
        while let Some(mut piece) = room.take(limit - total) {
            match (&self.socket).read_volatile(&mut piece) {
                Ok(0) => self.host_eof = true,
                Ok(count) => {
                    total += count;
                    if count == piece.len() {
                        continue;
                    }
                }
                Err(error) => match kind(&error) {
                    ErrorKind::WouldBlock => self.readable = false,
                    // A signal: the edge is not used up, the next packet tries again.
                    ErrorKind::Interrupted => {}
                    _ => (self.host_eof, self.host_gone) = (true, true),
                },
            }
            break;
        }
        total
    }

    /// Takes over what a guest packet says about the guest's buffer.
    pub fn update_credit(&mut self, header: &Header) {
        self.peer_buf_alloc = header.buf_alloc;
        self.peer_fwd_cnt = header.fwd_cnt;
    }

    /// The guest accepted: tells the client.
    ///
    /// # Errors
    /// The client is gone.
    pub fn accepted(&mut self, host_port: u32) -> Result<(), End> {
        let line = format!("OK {host_port}\n");
        match (&self.socket).write(line.as_bytes()) {
            Ok(count) if count == line.len() => {}
            _ => return Err(End::TellGuest),
        }
        self.state = State::Open;
        self.deadline = None;
        Ok(())
    }

    /// Takes `len` bytes of guest data.
    ///
    /// # Errors
    /// The guest sent more than it had credit for, or after it said that it would not; the client is gone.
    pub fn take_data(&mut self, payload: &mut Buffers<'_>, len: usize) -> Result<(), End> {
        if len > BUFFER_BYTES - self.backlog.len() || self.guest_shutdown & SHUTDOWN_SEND != 0 {
            return Err(End::Violation);
        }
        let mut left = len;
        while let Some(piece) = payload.take(left) {
            left -= piece.len();
            let mut done = 0;
            if self.backlog.is_empty() {
                done = write_some(&self.socket, &piece)?;
                self.forward(done);
            }
            if done < piece.len() {
                let start = self.backlog.len();
                self.backlog.resize(start + piece.len() - done, 0);
                let rest = piece.offset(done).expect("done is at most the length");
                rest.copy_to(&mut self.backlog[start..]);
            }
        }
        Ok(())
    }

    /// The guest asked for its credit.
    pub fn credit_requested(&mut self) {
        self.update_due = true;
    }

    /// The guest will not send, not receive, or neither.
    pub fn guest_shuts_down(&mut self, flags: u32) {
        self.guest_shutdown |= flags & SHUTDOWN_BOTH;
        if self.guest_shutdown & SHUTDOWN_RECEIVE != 0 {
            // The client's writes fail from here on. It may have closed already, which is what this is for.
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Read);
        }
    }

    /// The guest has reset the connection.
    ///
    /// # Errors
    /// Always, unless the guest had closed it in order and the client has not taken all of its data.
    pub fn guest_resets(&mut self) -> Result<(), End> {
        if self.guest_shutdown != SHUTDOWN_BOTH || self.backlog.is_empty() {
            return Err(End::Quiet);
        }
        self.state = State::Draining;
        Ok(())
    }

    /// The client's socket is ready.
    ///
    /// # Errors
    /// The client is gone.
    pub fn socket_ready(&mut self, hung_up: bool) -> Result<(), End> {
        self.readable = true;
        self.host_gone |= hung_up;
        self.flush()
    }

    /// Whether the client has closed its socket.
    pub fn host_is_gone(&self) -> bool {
        self.host_gone
    }

    fn forward(&mut self, count: usize) {
        self.forwarded = self.forwarded.wrapping_add(count as u32);
        if self.forwarded.wrapping_sub(self.forwarded_announced) as usize >= BUFFER_BYTES / 2 {
            self.update_due = true;
        }
    }

    fn flush(&mut self) -> Result<(), End> {
        let mut done = 0;
        while done < self.backlog.len() {
            match (&self.socket).write(&self.backlog[done..]) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return Err(End::TellGuest),
            }
        }
        if done == self.backlog.len() {
            self.backlog = Vec::new();
        } else {
            self.backlog.drain(..done);
        }
        self.forward(done);
        Ok(())
    }

    /// What follows from the present state, after anything has changed.
    ///
    /// # Errors
    /// The connection is over.
    pub fn settle(&mut self) -> Result<(), End> {
        if self.host_gone && self.guest_shutdown & SHUTDOWN_RECEIVE != 0 {
            self.host_eof = true;
        }
        if !self.backlog.is_empty() {
            return Ok(());
        }
        if self.state == State::Draining {
            return Err(End::Quiet);
        }
        if self.guest_shutdown == SHUTDOWN_BOTH {
            // Linux keeps a closed socket for eight seconds unless a reset confirms (`virtio_transport_close`).
            return Err(End::TellGuest);
        }
        if self.guest_shutdown & SHUTDOWN_SEND != 0 && !self.write_closed {
            self.write_closed = true;
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
        }
        Ok(())
    }
}

/// The port of `CONNECT <port>`, in decimal.
fn parse_line(line: &[u8]) -> Option<u32> {
    let digits = line.strip_prefix(b"CONNECT ")?;
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}

fn kind(error: &VolatileMemoryError) -> ErrorKind {
    match error {
        VolatileMemoryError::IOError(error) => io::Error::kind(error),
        _ => ErrorKind::Other,
    }
}

/// Writes as much as the client's socket takes now; for the rest an edge will come.
fn write_some(mut socket: &UnixStream, piece: &VolatileSlice<'_>) -> Result<usize, End> {
    loop {
        match socket.write_volatile(piece) {
            Ok(count) => return Ok(count),
            Err(error) => match kind(&error) {
                ErrorKind::Interrupted => {}
                ErrorKind::WouldBlock => return Ok(0),
                _ => return Err(End::TellGuest),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_lines_are_taken_literally() {
        assert_eq!(parse_line(b"CONNECT 49983"), Some(49983));
        assert_eq!(parse_line(b"CONNECT 4294967295"), Some(u32::MAX));
        for line in [
            "",
            "CONNECT",
            "CONNECT ",
            "connect 1",
            "CONNECT -1",
            "CONNECT +1",
            "CONNECT 1 ",
            "CONNECT 4294967296",
        ] {
            assert_eq!(parse_line(line.as_bytes()), None, "{line:?}");
        }
    }
}
