//! The few system calls that have no safe wrapper. The only unsafe code of the agent.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::fs::{Gid, Uid};
use tokio::io::unix::AsyncFd;

/// What a new process does between `fork` and `exec`, in this order.
pub struct ChildSetup {
    /// `cgroup.procs` of the cgroup it moves itself into.
    pub cgroup_procs: Option<OwnedFd>,
    /// Makes standard input, a terminal, its controlling terminal.
    pub controlling_terminal: bool,
    /// Descriptors that become 3, 4, and so on.
    pub extra_fds: Vec<OwnedFd>,
    /// User to become; absent: stays what the agent is.
    pub credentials: Option<Credentials>,
    /// Working directory, entered with the new credentials.
    pub cwd: CString,
}

/// User, group and supplementary groups.
pub struct Credentials {
    /// User id.
    pub uid: Uid,
    /// Primary group id.
    pub gid: Gid,
    /// Supplementary groups.
    pub groups: Vec<Gid>,
}

const FIRST_EXTRA_FD: RawFd = 3;

impl ChildSetup {
    /// Lets `command` go through this setup, in a session of its own, before `exec`.
    pub fn install(self, command: &mut Command) {
        // SAFETY: the closure runs in the forked child, where only async-signal-safe calls are allowed. `apply` makes
        // raw system calls on memory prepared before the fork and allocates nothing; an allocation added to it would
        // break this.
        unsafe { command.pre_exec(move || self.apply()) };
    }

    fn apply(&self) -> io::Result<()> {
        rustix::process::setsid()?;
        if let Some(procs) = &self.cgroup_procs {
            rustix::io::write(procs, b"0")?;
        }
        if self.controlling_terminal {
            rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
        }
        for (fd, target) in self.extra_fds.iter().zip(FIRST_EXTRA_FD..) {
            // SAFETY: dup2 takes plain numbers; `target` is a number that nothing in this child uses, since the
            // descriptors moved here were placed above the range of targets.
            if unsafe { libc::dup2(fd.as_raw_fd(), target) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        if let Some(credentials) = &self.credentials {
            rustix::thread::set_thread_groups(&credentials.groups)?;
            let (uid, gid) = (credentials.uid, credentials.gid);
            rustix::thread::set_thread_res_gid(gid, gid, gid)?;
            rustix::thread::set_thread_res_uid(uid, uid, uid)?;
        }
        rustix::process::chdir(self.cwd.as_c_str())?;
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
        Ok(())
    }
}

/// Sends signal `signal` to `pid`, as `kill(2)` reads it: negative for a process group.
///
/// # Errors
/// As `kill(2)`.
pub fn send_signal(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: kill takes plain numbers.
    if unsafe { libc::kill(pid, signal) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

// include/uapi/linux/random.h, Linux 6.1: _IOW('R', 0x03, int[2]) and _IO('R', 0x07).
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
const ENTROPY_MAX_BYTES: usize = 512;

#[repr(C)]
struct RandPoolInfo {
    entropy_bits: libc::c_int,
    size_bytes: libc::c_int,
    bytes: [u8; ENTROPY_MAX_BYTES],
}

/// Adds `bytes` (at most 512) to the kernel's entropy pool, credited in full, and reseeds its generators.
///
/// # Errors
/// Needs `CAP_SYS_ADMIN`; `device` is `/dev/urandom`.
pub fn credit_entropy(device: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<()> {
    let length = bytes.len().min(ENTROPY_MAX_BYTES);
    let mut info = RandPoolInfo {
        entropy_bits: (length * 8) as libc::c_int,
        size_bytes: length as libc::c_int,
        bytes: [0; ENTROPY_MAX_BYTES],
    };
    info.bytes[..length].copy_from_slice(&bytes[..length]);
    // SAFETY: RNDADDENTROPY reads a rand_pool_info header and `size_bytes` bytes after it; `info` has that layout and
    // `size_bytes` never exceeds its array.
    if unsafe { libc::ioctl(device.as_raw_fd(), RNDADDENTROPY, &raw const info) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: RNDRESEEDCRNG takes no argument.
    if unsafe { libc::ioctl(device.as_raw_fd(), RNDRESEEDCRNG) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Sets the flag `IFF_UP` of the loopback interface.
///
/// # Errors
/// Needs `CAP_NET_ADMIN`.
pub fn bring_up_loopback() -> io::Result<()> {
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None)?;
    // SAFETY: all-zero bytes are a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: SIOCSIFFLAGS reads an ifreq, which `request` is, for the length of the call.
    if unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Keeps the C allocator to one arena: every page it touches after a fork is private to the clone.
pub fn use_one_allocator_arena() {
    // SAFETY: mallopt takes plain numbers, and is called before any thread is started.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Registers `fd` with the event loop.
///
/// # Errors
/// Where it cannot be polled.
pub fn register(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: `AsyncFd` owns the descriptor until it is dropped and hands out only shared references, through which
    // an `OwnedFd` can be neither closed nor replaced.
    unsafe { AsyncFd::register(fd) }.map_err(io::Error::from)
}
