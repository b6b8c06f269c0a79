//! A log file that keeps its end.

use std::io::Write;
use std::os::fd::OwnedFd;

use rustix::fs::{self, OFlags, SeekFrom};
use rustix::io::Errno;

/// The file holds at least this much of the end of the log, and at most twice as much, bytes.
const CAP_BYTES: u64 = 1 << 20;
/// A line longer than this is written in parts.
const LINE_BYTES: usize = 256;
const COPY_BYTES: usize = 16 * 1024;

/// Appends lines to a file; when that exceeds twice the cap, its last part moves to the front. Never fails: what cannot
/// be written is dropped and counted.
#[derive(Debug, Default)]
pub struct BoundedLog {
    file: Option<OwnedFd>,
    end: u64,
    line: Vec<u8>,
    dropped_bytes: u64,
    write_errors: u64,
}

impl BoundedLog {
    /// Bytes that are no longer, or never were, in the file.
    pub fn dropped_bytes(&self) -> u64 {
        self.dropped_bytes
    }

    /// Writes that the host refused.
    pub fn write_errors(&self) -> u64 {
        self.write_errors
    }

    /// Goes on at the end of `file`, which must be a regular file open for reading and writing.
    pub(super) fn open(&mut self, file: OwnedFd) -> Result<(), Errno> {
        // With O_APPEND, pwrite(2) would ignore its offset.
        fs::fcntl_setfl(&file, fs::fcntl_getfl(&file)? - OFlags::APPEND)?;
        self.end = fs::seek(&file, SeekFrom::End(0))?;
        self.file = Some(file);
        Ok(())
    }

    /// Drops the file. A begun line stays: it is part of the guest's state and goes to the next file.
    pub(super) fn close(&mut self) {
        self.file = None;
    }

    /// Writes out what has been collected of a line.
    pub(super) fn write_out(&mut self) {
        let line = std::mem::take(&mut self.line);
        let mut rest = &line[..];
        while let (Some(file), false) = (&self.file, rest.is_empty()) {
            match rustix::io::pwrite(file, rest, self.end) {
                Ok(count) if count > 0 => {
                    self.end += count as u64;
                    rest = &rest[count..];
                }
                Err(Errno::INTR) => {}
                _ => {
                    self.write_errors += 1;
                    break;
                }
            }
        }
        self.dropped_bytes += rest.len() as u64;
        self.line = line;
        self.line.clear();
        if self.end > 2 * CAP_BYTES - LINE_BYTES as u64 {
            self.keep_end();
        }
    }

    /// Moves the last [`CAP_BYTES`] to the front and cuts the file there.
    fn keep_end(&mut self) {
        let Some(file) = &self.file else { return };
        let moved = move_to_front(file, self.end - CAP_BYTES.min(self.end));
        // Where nothing could be moved, starting over still bounds the file.
        let kept = moved.unwrap_or(0);
        self.write_errors += u64::from(moved.is_err());
        if fs::ftruncate(file, kept).is_err() {
            self.write_errors += 1;
        }
        self.dropped_bytes += self.end - kept;
        self.end = kept;
    }
}

/// Copies `file` from `start` to its beginning; the number of bytes copied.
fn move_to_front(file: &OwnedFd, start: u64) -> Result<u64, Errno> {
    let mut buffer = vec![0; COPY_BYTES];
    let mut done = 0;
    loop {
        let count = rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut buffer[..], start + done))?;
        if count == 0 {
            return Ok(done);
        }
        let mut rest = &buffer[..count];
        while !rest.is_empty() {
            let written = rustix::io::retry_on_intr(|| rustix::io::pwrite(file, rest, done))?;
            if written == 0 {
                return Err(Errno::IO);
            }
            done += written as u64;
            rest = &rest[written..];
        }
    }
}

impl Write for BoundedLog {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        for byte in data {
            self.line.push(*byte);
            if *byte == b'\n' || self.line.len() >= LINE_BYTES {
                self.write_out();
            }
        }
        Ok(data.len())
    }

    /// Does nothing: the UART model flushes after each byte, which would be a system call for each.
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for BoundedLog {
    fn drop(&mut self) {
        self.write_out();
    }
}
