//! The VMM's end of the control socket: JSON messages with descriptors over `SOCK_SEQPACKET`.

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use offshoot_protocol::control::{Envelope, Event, MAX_MESSAGE_BYTES, Message};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

/// Most descriptors one message carries.
const MAX_FDS: usize = 4;

/// Why the control socket failed.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The other side is gone.
    #[error("the host closed the control socket")]
    Closed,
    /// The system refused.
    #[error("{action} a control message")]
    System {
        /// What was attempted.
        action: &'static str,
        /// The system's answer.
        source: rustix::io::Errno,
    },
    /// A message that is not JSON of the protocol.
    #[error("decode a control message of {len_bytes} bytes")]
    Decode {
        /// Its length.
        len_bytes: usize,
        /// Where it is wrong.
        source: serde_json::Error,
    },
    /// A message or its descriptors did not fit.
    #[error(
        "control message is longer than {MAX_MESSAGE_BYTES} bytes or has more than {MAX_FDS} descriptors"
    )]
    TooLong,
}

/// One request with the descriptors that came along.
#[derive(Debug)]
pub struct Received {
    /// The request.
    pub envelope: Envelope,
    /// Its descriptors, in order.
    pub fds: VecDeque<OwnedFd>,
}

/// The VMM's end of one control socket. Sending is safe from several threads: each message is one packet.
#[derive(Debug)]
pub struct ControlSocket {
    fd: OwnedFd,
}

impl ControlSocket {
    /// Takes over a connected `SOCK_SEQPACKET` socket.
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Waits for one request.
    ///
    /// # Errors
    /// [`SocketError::Closed`] at end of file; the others as named.
    pub fn receive(&self) -> Result<Received, SocketError> {
        let mut buffer = vec![0; MAX_MESSAGE_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [rustix::io::IoSliceMut::new(&mut buffer)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received =
            rustix::io::retry_on_intr(|| rustix::net::recvmsg(&self.fd, &mut parts, &mut ancillary, flags));
        let received = match received {
            Ok(received) => received,
            Err(rustix::io::Errno::CONNRESET) => return Err(SocketError::Closed),
            Err(source) => {
                return Err(SocketError::System { action: "receive", source });
            }
        };
        let mut fds = VecDeque::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        let truncated = rustix::net::ReturnFlags::TRUNC | rustix::net::ReturnFlags::CTRUNC;
        if received.flags.intersects(truncated) {
            return Err(SocketError::TooLong);
        }
        if received.bytes == 0 {
            return Err(SocketError::Closed);
        }
        let envelope = serde_json::from_slice(&buffer[..received.bytes])
            .map_err(|source| SocketError::Decode { len_bytes: received.bytes, source })?;
        Ok(Received { envelope, fds })
    }

    /// Sends one message and at most [`MAX_FDS`] descriptors, waiting while the socket is full.
    ///
    /// # Errors
    /// [`SocketError::Closed`] if the host is gone; the others as named.
    pub fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<(), SocketError> {
        self.send_with(message, fds, SendFlags::NOSIGNAL)
    }

    /// Sends an event, or drops it if the socket is full: for events that a guest can cause as often as it likes.
    pub fn send_or_drop(&self, event: Event) {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        // A full or closed socket is the host's choice not to listen; the guest must not notice.
        let _ = self.send_with(&Message::Event(event), &[], flags);
    }

    fn send_with(
        &self,
        message: &Message,
        fds: &[BorrowedFd<'_>],
        flags: SendFlags,
    ) -> Result<(), SocketError> {
        let json = serde_json::to_vec(message).expect("protocol messages always encode");
        if json.len() > MAX_MESSAGE_BYTES || fds.len() > MAX_FDS {
            return Err(SocketError::TooLong);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(SocketError::TooLong);
        }
        let parts = [rustix::io::IoSlice::new(&json)];
        let sent =
            rustix::io::retry_on_intr(|| rustix::net::sendmsg(&self.fd, &parts, &mut ancillary, flags));
        match sent {
            Ok(_) => Ok(()),
            Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => Err(SocketError::Closed),
            Err(source) => Err(SocketError::System { action: "send", source }),
        }
    }
}

impl AsFd for ControlSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use offshoot_protocol::control::{Reply, Request};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    fn pair() -> (OwnedFd, ControlSocket) {
        let (host, vmm) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        (host, ControlSocket::new(vmm))
    }

    #[test]
    fn a_request_arrives_whole() {
        let (host, vmm) = pair();
        let json = serde_json::to_vec(&Envelope { seq: 7, request: Request::Status }).unwrap();
        rustix::net::send(&host, &json, SendFlags::empty()).unwrap();
        let received = vmm.receive().unwrap();
        assert_eq!(received.envelope.seq, 7);
        assert!(received.fds.is_empty());
    }

    #[test]
    fn wrong_json_is_an_error_and_the_next_message_still_arrives() {
        let (host, vmm) = pair();
        rustix::net::send(&host, b"{\"seq\":", SendFlags::empty()).unwrap();
        rustix::net::send(&host, br#"{"seq":1,"request":"stop"}"#, SendFlags::empty()).unwrap();
        assert!(matches!(vmm.receive(), Err(SocketError::Decode { len_bytes: 7, .. })));
        assert_eq!(vmm.receive().unwrap().envelope.seq, 1);
    }

    #[test]
    fn a_closed_socket_is_told_apart() {
        let (host, vmm) = pair();
        drop(host);
        assert!(matches!(vmm.receive(), Err(SocketError::Closed)));
        let reply = Message::Reply { seq: 1, result: Ok(Reply::Done) };
        assert!(matches!(vmm.send(&reply, &[]), Err(SocketError::Closed)));
    }

    #[test]
    fn a_full_socket_drops_what_may_be_dropped() {
        let (_host, vmm) = pair();
        for value in 0..100_000 {
            vmm.send_or_drop(Event::Doorbell { vcpu: 0, value, at_ns: 0 });
        }
    }
}
