//! Immutable memory: sealed memfds.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags, SeekFrom};
use vm_memory::VolatileSlice;

use crate::PAGE_BYTES;
use crate::pagemap::PageSet;
use crate::region::MemoryError;

/// An immutable piece of memory: a memfd sealed against writing, growing and shrinking (memfd_create(2),
/// `F_ADD_SEALS`). Regions are mapped privately over it, in any number of processes.
#[derive(Debug)]
pub struct Layer {
    fd: OwnedFd,
    len: usize,
    stored: u64,
}

impl Layer {
    /// The memfd. It may be shared with any process: nothing can change it any more.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Length, bytes.
    pub fn len_bytes(&self) -> usize {
        self.len
    }

    /// Bytes of pages that were stored when it was made; the rest are zeros and take no space.
    pub fn stored_bytes(&self) -> u64 {
        self.stored
    }

    /// Adds the pages that the layer holds data for to `pages`.
    pub(crate) fn add_data_pages(&self, pages: &mut PageSet) -> Result<(), MemoryError> {
        let mut offset = 0;
        loop {
            let data = match rustix::fs::seek(&self.fd, SeekFrom::Data(offset)) {
                Ok(data) => data,
                Err(rustix::io::Errno::NXIO) => return Ok(()),
                Err(source) => return Err(layer_error("find data in", self.len)(source)),
            };
            let hole = rustix::fs::seek(&self.fd, SeekFrom::Hole(data))
                .map_err(layer_error("find holes in", self.len))?;
            pages.insert(data as usize / PAGE_BYTES..(hole as usize).div_ceil(PAGE_BYTES));
            offset = hole;
        }
    }
}

/// A layer while it is written.
pub(crate) struct Builder {
    fd: OwnedFd,
    len: usize,
    stored: u64,
}

impl Builder {
    pub(crate) fn new(name: &str, len: usize) -> Result<Self, MemoryError> {
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(layer_error("create", len))?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(layer_error("size", len))?;
        Ok(Self { fd, len, stored: 0 })
    }

    /// Writes memory at `offset`; the kernel copies straight from the mapping.
    pub(crate) fn write(&mut self, offset: usize, slice: &VolatileSlice<'_>) -> Result<(), MemoryError> {
        let guard = slice.ptr_guard();
        let mut done = 0;
        while done < slice.len() {
            // SAFETY: `done` is less than the length of the slice.
            let start = unsafe { guard.as_ptr().add(done) };
            // SAFETY: the range is inside the live slice, and the caller has stopped every writer, so for the time of
            // this call nothing changes it; it only goes to a system call.
            let bytes = unsafe { std::slice::from_raw_parts(start, slice.len() - done) };
            match rustix::io::pwrite(&self.fd, bytes, (offset + done) as u64) {
                Ok(0) => return Err(layer_error("write", self.len)(rustix::io::Errno::NOSPC)),
                Ok(written) => done += written,
                Err(rustix::io::Errno::INTR) => {}
                Err(source) => return Err(layer_error("write", self.len)(source)),
            }
        }
        self.stored += slice.len() as u64;
        Ok(())
    }

    pub(crate) fn seal(self) -> Result<Layer, MemoryError> {
        let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&self.fd, seals).map_err(layer_error("seal", self.len))?;
        Ok(Layer { fd: self.fd, len: self.len, stored: self.stored })
    }
}

fn layer_error(action: &'static str, len_bytes: usize) -> impl Fn(rustix::io::Errno) -> MemoryError {
    move |source| MemoryError::Layer { action, len_bytes, source }
}

#[cfg(test)]
mod tests {
    use crate::region::{PageUse, Region};

    #[test]
    fn a_sealed_layer_can_be_neither_written_nor_resized() {
        let region = Region::anonymous(4096, PageUse::Sparse).unwrap();
        region.write(0, &[1]);
        let layer = region.to_layer("test").unwrap();
        assert_eq!(rustix::io::pwrite(layer.fd(), &[2], 0), Err(rustix::io::Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(layer.fd(), 0), Err(rustix::io::Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(layer.fd(), 8192), Err(rustix::io::Errno::PERM));
    }
}
