//! Asynchronous reading and writing of pipes and terminals.

use std::io;
use std::os::fd::OwnedFd;

use bytes::Bytes;
use tokio::io::unix::AsyncFd;

/// A pipe end or terminal, registered with the event loop.
pub struct AsyncPipe(AsyncFd<OwnedFd>);

impl AsyncPipe {
    /// Takes `fd` and makes it non-blocking.
    ///
    /// # Errors
    /// Where the descriptor cannot be polled.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        Ok(Self(crate::sys::register(fd)?))
    }

    /// The descriptor.
    pub fn fd(&self) -> &OwnedFd {
        self.0.get_ref()
    }

    /// Waits for data and reads at most `max_bytes` of it; empty at the end. The buffer is no larger than what is
    /// there, so that an idle reader holds no memory.
    ///
    /// # Errors
    /// As `read(2)`; a terminal whose other side is closed is at its end.
    pub async fn read_chunk(&self, max_bytes: usize) -> io::Result<Bytes> {
        loop {
            let mut guard = self.0.readable().await?;
            match guard.try_io(|fd| read_available(fd.get_ref(), max_bytes)) {
                Ok(result) => return result,
                Err(_would_block) => continue,
            }
        }
    }

    /// Reads at most `max_bytes` of what is there now; `None` where there is nothing.
    pub fn read_now(&self, max_bytes: usize) -> Option<Bytes> {
        read_available(self.fd(), max_bytes).ok().filter(|bytes| !bytes.is_empty())
    }

    /// Bytes that can be read now.
    pub fn available_bytes(&self) -> usize {
        rustix::io::ioctl_fionread(self.fd()).map_or(0, |bytes| bytes as usize)
    }

    /// Writes all of `data`, waiting where the reader is slow.
    ///
    /// # Errors
    /// As `write(2)`.
    pub async fn write_all(&self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let mut guard = self.0.writable().await?;
            match guard.try_io(|fd| Ok(rustix::io::write(fd.get_ref(), data)?)) {
                Ok(written) => data = &data[written?..],
                Err(_would_block) => continue,
            }
        }
        Ok(())
    }
}

fn read_available(fd: &OwnedFd, max_bytes: usize) -> io::Result<Bytes> {
    const UNKNOWN_BYTES: usize = 1024;
    let available = rustix::io::ioctl_fionread(fd).map_or(0, |bytes| bytes as usize);
    let size = if available == 0 { UNKNOWN_BYTES } else { available };
    let mut buffer = Vec::with_capacity(size.min(max_bytes));
    match rustix::io::read(fd, rustix::buffer::spare_capacity(&mut buffer)) {
        Ok(_) => Ok(buffer.into()),
        Err(rustix::io::Errno::IO) => Ok(Bytes::new()),
        Err(error) => Err(error.into()),
    }
}
