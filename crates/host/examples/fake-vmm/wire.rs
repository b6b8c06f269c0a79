//! Messages with descriptors, and `fork(2)`.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use offshoot_protocol::control::{Envelope, MAX_MESSAGE_BYTES, Message};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    Yes,
    No,
}

/// One request; `None` if there is none now. Ends the process when the host has closed its end.
pub fn receive(control: &OwnedFd, wait: Wait) -> Option<(Envelope, Vec<OwnedFd>)> {
    let mut bytes = vec![0; MAX_MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = if wait == Wait::No { RecvFlags::DONTWAIT } else { RecvFlags::empty() };
    let received =
        recvmsg(control, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags | RecvFlags::CMSG_CLOEXEC);
    let length = match received {
        Ok(message) => message.bytes,
        Err(rustix::io::Errno::AGAIN) => return None,
        Err(_) => 0,
    };
    if length == 0 {
        std::process::exit(0);
    }
    let mut fds = Vec::new();
    for part in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = part {
            fds.extend(received);
        }
    }
    Some((serde_json::from_slice(&bytes[..length]).expect("the host sends requests"), fds))
}

/// Blocks until there is room, as a simple VMM would.
pub fn send(control: &OwnedFd, message: &Message, fd: Option<BorrowedFd<'_>>) {
    let bytes = serde_json::to_vec(message).expect("a message is plain data");
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    }
    if sendmsg(control, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL).is_err() {
        std::process::exit(0);
    }
}

/// Waits until one of `fds` is readable, or a moment.
pub fn wait_readable(fds: &[BorrowedFd<'_>]) {
    let mut fds: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 20_000_000 }));
}

/// `fork(2)`: the child's pid and pidfd in the parent, `None` in the child.
pub fn fork() -> Option<(u32, OwnedFd)> {
    // SAFETY: this process has one thread, so the child inherits no lock that another thread holds.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork failed");
    let pid = Pid::from_raw(pid)?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("a child that is not waited for yet");
    Some((pid.as_raw_pid().cast_unsigned(), pidfd))
}
