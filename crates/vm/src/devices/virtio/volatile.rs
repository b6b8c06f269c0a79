//! System calls whose buffer is guest memory. The guest may write to it meanwhile, so no Rust reference to it is made.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Errno;
use vm_memory::VolatileSlice;

/// Fills `buffer` with random bytes of the host kernel.
///
/// # Errors
/// What `getrandom(2)` answers; the buffer may be filled in part.
pub fn fill_random(buffer: &VolatileSlice<'_>) -> Result<(), Errno> {
    fill(buffer, |address, len, _| {
        // SAFETY: `fill` passes a writable range inside `buffer`, whose mapping outlives the call.
        unsafe { libc::getrandom(address, len, 0) }
    })
}

/// Fills `buffer` with what `file` holds from `offset` on. The file's own position, which forked processes share, is
/// not used.
///
/// # Errors
/// What `pread(2)` answers, and `EIO` where the file ends before the buffer.
pub fn read_file_at(file: impl AsFd, buffer: &VolatileSlice<'_>, offset: u64) -> Result<(), Errno> {
    let file = file.as_fd().as_raw_fd();
    fill(buffer, |address, len, done| {
        let Some(position) = offset.checked_add(done as u64).and_then(|at| i64::try_from(at).ok()) else {
            return 0;
        };
        // SAFETY: `fill` passes a writable range inside `buffer`, whose mapping outlives the call; `file` is borrowed
        // for as long.
        unsafe { libc::pread(file, address, len, position) }
    })
}

/// Calls `part(address, len, done)` until all of `buffer` is filled. `part` may write to `address..address + len` only
/// and returns how much it wrote, or -1 with `errno` set.
fn fill(
    buffer: &VolatileSlice<'_>,
    part: impl Fn(*mut libc::c_void, usize, usize) -> isize,
) -> Result<(), Errno> {
    let mut done = 0;
    while done < buffer.len() {
        let rest = buffer.offset(done).expect("done is less than the length");
        let count = part(rest.ptr_guard_mut().as_ptr().cast(), rest.len(), done);
        match usize::try_from(count) {
            Ok(0) => return Err(Errno::IO),
            Ok(count) => done += count,
            Err(_) => match Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO) {
                Errno::INTR => {}
                other => return Err(other),
            },
        }
    }
    Ok(())
}
