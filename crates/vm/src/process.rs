//! `fork(2)` and what a forked child must do about the descriptors it inherits.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::process::{Pid, PidfdFlags};

/// On which side of a fork this is.
#[derive(Debug)]
pub enum Forked {
    /// The parent, with a descriptor for the child.
    Parent {
        /// Process id, for display only.
        pid: u32,
        /// The child.
        pidfd: OwnedFd,
    },
    /// The child; only the thread that called exists.
    Child,
}

/// Why a process could not be forked.
#[derive(Debug, thiserror::Error)]
pub enum ForkError {
    /// The kernel refused.
    #[error("fork the vmm process; the host may be out of memory or of process ids")]
    Fork(#[source] std::io::Error),
    /// The child exists, but no descriptor for it could be made; it has been ended.
    #[error("open a pidfd for a forked vmm; the host may be out of file descriptors")]
    PidFd(#[source] rustix::io::Errno),
}

/// Forks this process with the C library's `fork`, which leaves the allocator usable in the child of a threaded
/// process. Cost: one `clone` (page tables of what is not file-backed and clean) and one `pidfd_open`.
///
/// Every other thread must be parked holding no lock, or the child may find one taken for ever.
///
/// # Errors
/// As [`ForkError`]; no child is left behind.
pub fn fork() -> Result<Forked, ForkError> {
    // SAFETY: the callers stop every vCPU thread at the gate, where it waits in a condition variable, before they call
    // this; zygote and twin have one thread. So no lock of Rust's or of a device is held by a thread that the child
    // lacks, and the C library's own locks are handled by its `fork`.
    let pid = unsafe { libc::fork() };
    match pid {
        -1 => Err(ForkError::Fork(std::io::Error::last_os_error())),
        0 => Ok(Forked::Child),
        pid => {
            let child = Pid::from_raw(pid).expect("fork returns a positive pid to the parent");
            match rustix::process::pidfd_open(child, PidfdFlags::empty()) {
                Ok(pidfd) => Ok(Forked::Parent { pid: pid.unsigned_abs(), pidfd }),
                // It has ended already, and where children are reaped by the kernel its number may be another's by now.
                Err(error @ rustix::io::Errno::SRCH) => Err(ForkError::PidFd(error)),
                Err(error) => {
                    // It lives, or ended within microseconds: too short a time for its number to come around again.
                    let _ = rustix::process::kill_process(child, rustix::process::Signal::KILL);
                    let _ = rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty());
                    Err(ForkError::PidFd(error))
                }
            }
        }
    }
}

/// Closes every descriptor except standard input, output and error and those in `keep`.
///
/// To be called in a forked child only, after every owner of another descriptor was dropped or forgotten: an owner
/// that survives would later close a descriptor that is no longer its own.
///
/// # Errors
/// The system's answer; nothing or a part is closed.
pub fn close_all_except(keep: &[RawFd]) -> std::io::Result<()> {
    let mut kept: Vec<u32> = keep.iter().map(|fd| fd.unsigned_abs()).collect();
    kept.sort_unstable();
    let mut first = 3;
    for fd in kept {
        if fd > first {
            close_range(first, fd - 1)?;
        }
        first = first.max(fd + 1);
    }
    close_range(first, u32::MAX)
}

fn close_range(first: u32, last: u32) -> std::io::Result<()> {
    // SAFETY: the caller vouches that no live owner refers to a descriptor in the range.
    let result = unsafe { libc::close_range(first, last, 0) };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Names this process in `/proc/self/comm`, at most 15 bytes; only for display.
pub fn name_process(name: &str) {
    let tail = name.get(name.len().saturating_sub(15)..).unwrap_or(name);
    if let Ok(text) = std::ffi::CString::new(tail) {
        let _ = rustix::thread::set_name(&text);
    }
}

/// One malloc arena for all threads: each further one would be private memory of every clone.
pub fn use_one_arena() {
    // SAFETY: mallopt only sets a parameter of the allocator; called before any thread exists.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Nanoseconds of `CLOCK_MONOTONIC`, the same clock in every process of the host.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// Lets the kernel reap children: a twin's end is of no interest to the VMM it was forked from.
pub fn reap_automatically() {
    // SAFETY: ignoring a signal runs no code of ours.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// In a zygote's child: takes back what [`ChildSignal::new`] did to signals.
pub fn leave_zygote() {
    reap_automatically();
    set_child_signal_mask(libc::SIG_UNBLOCK);
}

/// How a child ended.
#[derive(Debug)]
pub struct Death {
    /// Its process id.
    pub pid: u32,
    /// Exit status, if it exited.
    pub exit_status: Option<i32>,
    /// Signal, if one killed it.
    pub signal: Option<i32>,
}

/// A descriptor that is readable when a child has ended.
#[derive(Debug)]
pub struct ChildSignal {
    fd: OwnedFd,
}

impl ChildSignal {
    /// Blocks `SIGCHLD` in this thread and takes it through a descriptor (signalfd(2)).
    ///
    /// # Errors
    /// The system has no descriptor left.
    pub fn new() -> rustix::io::Result<Self> {
        // SAFETY: the default action of this signal runs no code.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
        let set = set_child_signal_mask(libc::SIG_BLOCK);
        // SAFETY: `set` is initialised; -1 asks for a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            let error = std::io::Error::last_os_error();
            return Err(rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::NFILE));
        }
        // SAFETY: the call just returned this descriptor, and nobody else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { fd })
    }

    /// Reaps every child that has ended.
    pub fn reap(&self) -> Vec<Death> {
        // Signals merge, so the descriptor only says that there is something to reap.
        let mut buffer = [0u8; 128 * 8];
        while rustix::io::read(&self.fd, &mut buffer).is_ok_and(|count| count > 0) {}
        let mut deaths = Vec::new();
        while let Ok(Some((pid, status))) = rustix::process::wait(rustix::process::WaitOptions::NOHANG) {
            let (exit_status, signal) = (status.exit_status(), status.terminating_signal());
            deaths.push(Death { pid: pid.as_raw_nonzero().get().unsigned_abs(), exit_status, signal });
        }
        deaths
    }
}

impl AsFd for ChildSignal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn set_child_signal_mask(how: libc::c_int) -> libc::sigset_t {
    // SAFETY: an all-zero set is a valid value to initialise.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is a valid set.
    unsafe { libc::sigemptyset(&raw mut set) };
    // SAFETY: `set` is a valid set and the signal number is valid.
    unsafe { libc::sigaddset(&raw mut set, libc::SIGCHLD) };
    // SAFETY: `set` is a valid set; the old mask is not asked for.
    unsafe { libc::pthread_sigmask(how, &raw const set, std::ptr::null_mut()) };
    set
}
