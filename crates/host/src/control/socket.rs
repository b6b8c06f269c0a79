//! One message, with descriptors, over a `SOCK_SEQPACKET` socket. Nothing here blocks without a deadline.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use offshoot_protocol::control::MAX_MESSAGE_BYTES;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

use crate::clock::Deadline;

/// Descriptors one message may carry.
pub(crate) const MAX_FDS: usize = 8;
/// How long a sender rests when the kernel has too many descriptors in flight for this user.
const IN_FLIGHT_PAUSE: Duration = Duration::from_millis(1);

/// Why a message could not be sent or received.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The other side has closed its end.
    #[error("the control socket is closed")]
    Closed,
    /// The other side did not take or answer a message in time.
    #[error("no answer within the deadline")]
    TimedOut,
    /// A message is longer than the protocol allows.
    #[error("message of {bytes} bytes is longer than {MAX_MESSAGE_BYTES}")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// The other side sent something that is no message.
    #[error("malformed control message")]
    Malformed(#[source] serde_json::Error),
    /// A message arrived cut short, or with more descriptors than allowed.
    #[error("truncated control message")]
    Truncated,
    /// A system call failed.
    #[error("control socket failed")]
    Io(#[source] Errno),
}

/// A connected pair, both ends close-on-exec and blocking (this side passes `MSG_DONTWAIT` where it needs to).
pub(crate) fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Sends `bytes` with `fds` as one message, waiting for room until `deadline`.
///
/// Cost: one `sendmsg` when there is room.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    deadline: Deadline,
) -> Result<(), ChannelError> {
    if bytes.len() > MAX_MESSAGE_BYTES {
        return Err(ChannelError::TooLong { bytes: bytes.len() });
    }
    debug_assert!(fds.len() <= MAX_FDS, "callers attach at most CHILD_FDS descriptors");
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait_writable(socket, deadline)?,
            // The kernel bounds descriptors in flight per user; it falls as the peer receives.
            Err(Errno::TOOMANYREFS | Errno::NOBUFS) if !deadline.is_over() => {
                std::thread::sleep(IN_FLIGHT_PAUSE);
            }
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => return Err(ChannelError::Closed),
            Err(errno) => return Err(ChannelError::Io(errno)),
        }
    }
}

fn wait_writable(socket: BorrowedFd<'_>, deadline: Deadline) -> Result<(), ChannelError> {
    let left = deadline.left();
    if left.is_zero() {
        return Err(ChannelError::TimedOut);
    }
    let timeout = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 3600, tv_nsec: 0 });
    match poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(ChannelError::Io(errno)),
    }
}

/// What [`receive`] found.
pub(crate) enum Received {
    /// A message of that many bytes, with its descriptors.
    Message(usize, Vec<OwnedFd>),
    /// Nothing at the moment.
    Empty,
    /// The other side has closed.
    Closed,
}

/// Receives one message into `buffer` (at least [`MAX_MESSAGE_BYTES`]) without waiting. Cost: one `recvmsg`.
pub(crate) fn receive(socket: impl AsFd, buffer: &mut [u8]) -> Result<Received, ChannelError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let message = match recvmsg(&socket, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
        Ok(message) => message,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Empty),
        Err(Errno::CONNRESET | Errno::PIPE | Errno::NOTCONN) => return Ok(Received::Closed),
        Err(errno) => return Err(ChannelError::Io(errno)),
    };
    let mut fds = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = part {
            fds.extend(received);
        }
    }
    if message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(ChannelError::Truncated);
    }
    if message.bytes == 0 {
        return Ok(Received::Closed);
    }
    Ok(Received::Message(message.bytes, fds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_keep_their_bounds_and_descriptors() {
        let (ours, theirs) = pair().unwrap();
        let (extra, _kept) = pair().unwrap();
        let deadline = Deadline::after(Duration::from_secs(5));
        send(ours.as_fd(), b"one", &[extra.as_fd()], deadline).unwrap();
        send(ours.as_fd(), b"two", &[], deadline).unwrap();
        let mut buffer = vec![0; MAX_MESSAGE_BYTES];
        let Received::Message(3, fds) = receive(&theirs, &mut buffer).unwrap() else { panic!("no message") };
        assert_eq!((&buffer[..3], fds.len()), (&b"one"[..], 1));
        let Received::Message(3, fds) = receive(&theirs, &mut buffer).unwrap() else { panic!("no message") };
        assert_eq!((&buffer[..3], fds.len()), (&b"two"[..], 0));
        assert!(matches!(receive(&theirs, &mut buffer).unwrap(), Received::Empty));
        drop(ours);
        assert!(matches!(receive(&theirs, &mut buffer).unwrap(), Received::Closed));
    }

    #[test]
    fn a_peer_that_does_not_read_is_a_timeout_not_a_hang() {
        let (ours, _theirs) = pair().unwrap();
        let deadline = Deadline::after(Duration::from_millis(50));
        let message = vec![b'x'; 32 * 1024];
        let error = loop {
            if let Err(error) = send(ours.as_fd(), &message, &[], deadline) {
                break error;
            }
        };
        assert!(matches!(error, ChannelError::TimedOut), "{error:?}");
    }

    #[test]
    fn a_message_over_the_bound_is_refused_before_it_is_sent() {
        let (ours, _theirs) = pair().unwrap();
        let long = vec![b'x'; MAX_MESSAGE_BYTES + 1];
        let error = send(ours.as_fd(), &long, &[], Deadline::after(Duration::from_secs(1))).unwrap_err();
        assert!(matches!(error, ChannelError::TooLong { .. }));
    }
}
