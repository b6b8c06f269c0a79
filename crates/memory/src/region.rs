//! One private mapping.
//!
//! ```text
//!  anonymous ──freeze──▶ layered ──freeze──▶ layered (over a new layer)
//! ```
//!
//! A region lives until the process ends or it is dropped. A forked child owns its own copy of the mapping at the same
//! address.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::mm::{Advice, MapFlags, ProtFlags};
use vm_memory::{Bytes, VolatileMemory, VolatileSlice};

use crate::layer::{self, Layer};
use crate::{PAGE_BYTES, pagemap};

/// Alignment of every region, so that 2 MiB pages can back all of it, bytes.
pub const REGION_ALIGN_BYTES: usize = 2 << 20;

/// How a region's pages are to be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageUse {
    /// 2 MiB pages wherever the kernel finds them: guest memory.
    Huge,
    /// 4 KiB pages only: what is written sparsely.
    Sparse,
}

/// Why an operation on a region failed.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// A length that cannot be mapped.
    #[error("region of {len_bytes} bytes is empty or not a multiple of the page size")]
    Length {
        /// The length asked for.
        len_bytes: usize,
    },
    /// The kernel refused a mapping.
    #[error("map {len_bytes} bytes of {what}")]
    Map {
        /// What was to be mapped.
        what: &'static str,
        /// How much.
        len_bytes: usize,
        /// The system's answer.
        source: rustix::io::Errno,
    },
    /// The kernel refused advice about a mapping.
    #[error("advise the kernel ({advice}) on {len_bytes} bytes")]
    Advise {
        /// Which advice.
        advice: &'static str,
        /// How much.
        len_bytes: usize,
        /// The system's answer.
        source: rustix::io::Errno,
    },
    /// A range that is not inside the region.
    #[error("range {offset:#x}+{len:#x} lies outside a region of {region_len:#x} bytes")]
    Range {
        /// First byte.
        offset: usize,
        /// Length, bytes.
        len: usize,
        /// The region's length, bytes.
        region_len: usize,
    },
    /// A layer could not be made or filled.
    #[error("{action} a memory layer of {len_bytes} bytes")]
    Layer {
        /// What failed.
        action: &'static str,
        /// Length of the layer.
        len_bytes: usize,
        /// The system's answer.
        source: rustix::io::Errno,
    },
    /// The kernel's page map could not be read.
    #[error("read the page map of {len_bytes} bytes")]
    PageMap {
        /// Length of the range.
        len_bytes: usize,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The regions do not form a guest address space.
    #[error("lay out guest memory")]
    Layout(#[source] vm_memory::GuestRegionCollectionError),
    /// A region could not be described to the guest memory crate.
    #[error("describe a region of {len_bytes} bytes as guest memory")]
    Describe {
        /// Length of the region.
        len_bytes: usize,
    },
}

/// One private mapping of this process.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    len: usize,
    page_use: PageUse,
    layer: Option<Arc<Layer>>,
}

// SAFETY: the pointer is to a mapping that the region owns and that lives as long as it does; all accesses through it
// are volatile or atomic (`VolatileSlice`), as the memory may be written by a guest at any time anyway.
unsafe impl Send for Region {}
// SAFETY: as above; `&Region` only allows volatile accesses.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `len_bytes` of fresh zero memory, aligned to [`REGION_ALIGN_BYTES`]. Nothing is populated.
    ///
    /// # Errors
    /// [`MemoryError::Length`] unless the length is a positive multiple of the page size; [`MemoryError::Map`].
    pub fn anonymous(len_bytes: usize, page_use: PageUse) -> Result<Self, MemoryError> {
        if len_bytes == 0 || !len_bytes.is_multiple_of(PAGE_BYTES) {
            return Err(MemoryError::Length { len_bytes });
        }
        let base = reserve_aligned(len_bytes)?;
        let region = Self { base, len: len_bytes, page_use, layer: None };
        region.advise_page_use()?;
        Ok(region)
    }

    /// Length, bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: an empty region cannot be made.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Host-virtual address of the first byte. The same in a forked child.
    pub fn host_address(&self) -> NonNull<u8> {
        self.base
    }

    /// The layer the region is mapped over, if it has been frozen.
    pub fn layer(&self) -> Option<&Arc<Layer>> {
        self.layer.as_ref()
    }

    /// Copies memory at `offset` to `buffer`. Panics if the range is outside the region: the caller has checked it.
    pub fn read(&self, offset: usize, buffer: &mut [u8]) {
        self.slice(offset, buffer.len()).copy_to(buffer);
    }

    /// Copies `data` to memory at `offset`. Panics if the range is outside the region: the caller has checked it.
    pub fn write(&self, offset: usize, data: &[u8]) {
        self.slice(offset, data.len()).copy_from(data);
    }

    /// The 32-bit word number `index`. Panics if it is outside the region.
    pub fn load_u32(&self, index: usize) -> u32 {
        self.slice(index * 4, 4).load(0, Ordering::Relaxed).expect("an aligned word inside the slice")
    }

    /// Sets the 32-bit word number `index`. Panics if it is outside the region.
    pub fn store_u32(&self, index: usize, value: u32) {
        self.slice(index * 4, 4)
            .store(value, 0, Ordering::Relaxed)
            .expect("an aligned word inside the slice");
    }

    /// Makes a range read as zero, giving whole pages back to the host where the region has no layer. Over a layer the
    /// old content would come back with the page, so there zeros are written.
    ///
    /// # Errors
    /// [`MemoryError::Range`]; [`MemoryError::Advise`].
    pub fn zero(&self, offset: usize, len: usize) -> Result<(), MemoryError> {
        let end = offset.checked_add(len).filter(|&end| end <= self.len);
        let end = end.ok_or(MemoryError::Range { offset, len, region_len: self.len })?;
        let (first, last) = (offset.next_multiple_of(PAGE_BYTES), end - end % PAGE_BYTES);
        if self.layer.is_some() || first >= last {
            self.write_zeros(offset, len);
            return Ok(());
        }
        self.write_zeros(offset, first - offset);
        self.write_zeros(last, end - last);
        self.advise(first, last - first, Advice::LinuxDontNeed, "drop pages")
    }

    /// Writes what the region holds now into a new sealed layer, without changing the region. The caller has stopped
    /// every writer. Cost: one pass over the page map, one `pwrite` for each run of non-zero pages.
    ///
    /// # Errors
    /// [`MemoryError::Layer`], [`MemoryError::PageMap`]; the region is as before.
    pub fn to_layer(&self, name: &str) -> Result<Layer, MemoryError> {
        let mut builder = layer::Builder::new(name, self.len)?;
        let mut candidates = pagemap::populated(self.base.as_ptr() as usize, self.len)?;
        if let Some(layer) = &self.layer {
            layer.add_data_pages(&mut candidates)?;
        }
        for run in candidates.runs() {
            self.store_run(&mut builder, run)?;
        }
        builder.seal()
    }

    /// Replaces the mapping by a private one over `layer`, which must hold exactly what the region does.
    ///
    /// # Errors
    /// [`MemoryError::Map`]; the region is as before.
    pub fn adopt(&mut self, layer: Arc<Layer>) -> Result<(), MemoryError> {
        if layer.len_bytes() != self.len {
            return Err(MemoryError::Length { len_bytes: layer.len_bytes() });
        }
        // SAFETY: the range is exactly the mapping this region owns, and the new mapping replaces it at once; nobody
        // holds a Rust reference into it. The memfd is sealed against shrinking, so no access can fault with SIGBUS.
        unsafe {
            rustix::mm::mmap(
                self.base.as_ptr().cast(),
                self.len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE,
                layer.fd(),
                0,
            )
        }
        .map_err(|source| MemoryError::Map {
            what: "a sealed layer",
            len_bytes: self.len,
            source,
        })?;
        self.layer = Some(layer);
        Ok(())
    }

    fn store_run(
        &self,
        builder: &mut layer::Builder,
        run: std::ops::Range<usize>,
    ) -> Result<(), MemoryError> {
        let mut start = None;
        for page in run.clone() {
            match (start, self.page_is_zero(page)) {
                (None, false) => start = Some(page),
                (Some(first), true) => {
                    self.store_pages(builder, first..page)?;
                    start = None;
                }
                _ => {}
            }
        }
        match start {
            Some(first) => self.store_pages(builder, first..run.end),
            None => Ok(()),
        }
    }

    fn store_pages(
        &self,
        builder: &mut layer::Builder,
        pages: std::ops::Range<usize>,
    ) -> Result<(), MemoryError> {
        let offset = pages.start * PAGE_BYTES;
        let slice = self.slice(offset, pages.len() * PAGE_BYTES);
        builder.write(offset, &slice)
    }

    fn page_is_zero(&self, page: usize) -> bool {
        let slice = self.slice(page * PAGE_BYTES, PAGE_BYTES);
        let words =
            slice.get_array_ref::<u64>(0, PAGE_BYTES / 8).expect("a page is an aligned array of words");
        (0..words.len()).all(|index| words.load(index) == 0)
    }

    fn write_zeros(&self, offset: usize, len: usize) {
        const ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];
        let mut done = 0;
        while done < len {
            let part = (len - done).min(PAGE_BYTES);
            self.write(offset + done, &ZEROS[..part]);
            done += part;
        }
    }

    fn slice(&self, offset: usize, len: usize) -> VolatileSlice<'_> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(inside, "range {offset:#x}+{len:#x} outside a region of {:#x} bytes", self.len);
        // SAFETY: `base` is the start of a live mapping of `self.len` bytes and `offset` is at most that.
        let start = unsafe { self.base.as_ptr().add(offset) };
        // SAFETY: `start..start + len` lies inside the mapping, which lives as long as the borrow of `self`; it is
        // only ever accessed through volatile slices, and `len` and alignment are what the mapping has.
        unsafe { VolatileSlice::new(start, len) }
    }

    fn advise_page_use(&self) -> Result<(), MemoryError> {
        let (advice, name) = match self.page_use {
            PageUse::Huge => (Advice::LinuxHugepage, "huge pages"),
            PageUse::Sparse => (Advice::LinuxNoHugepage, "small pages"),
        };
        match self.advise(0, self.len, advice, name) {
            // A kernel without transparent huge pages refuses both advices; small pages are then all there is.
            Err(MemoryError::Advise { source: rustix::io::Errno::INVAL, .. }) => Ok(()),
            other => other,
        }
    }

    fn advise(
        &self,
        offset: usize,
        len: usize,
        advice: Advice,
        name: &'static str,
    ) -> Result<(), MemoryError> {
        // SAFETY: callers pass ranges inside the mapping.
        let start = unsafe { self.base.as_ptr().add(offset) };
        // SAFETY: the range is inside a mapping that this region owns, and none of the advices used invalidates a
        // Rust reference, since there are none into it.
        unsafe { rustix::mm::madvise(start.cast(), len, advice) }.map_err(|source| MemoryError::Advise {
            advice: name,
            len_bytes: len,
            source,
        })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the region owns exactly this mapping, and every borrow of it has ended.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "a region's own mapping can be unmapped");
    }
}

fn reserve_aligned(len: usize) -> Result<NonNull<u8>, MemoryError> {
    let padded = len + REGION_ALIGN_BYTES;
    // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
    let raw = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            padded,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    }
    .map_err(|source| MemoryError::Map { what: "anonymous memory", len_bytes: padded, source })?;
    let start = raw as usize;
    let aligned = start.next_multiple_of(REGION_ALIGN_BYTES);
    trim(start, aligned - start);
    trim(aligned + len, start + padded - (aligned + len));
    Ok(NonNull::new(aligned as *mut u8).expect("the kernel maps nothing at address zero"))
}

fn trim(start: usize, len: usize) {
    if len == 0 {
        return;
    }
    // SAFETY: the range is padding of a mapping made just before, which nobody else knows.
    let unmapped = unsafe { rustix::mm::munmap(start as *mut _, len) };
    debug_assert!(unmapped.is_ok(), "padding of a fresh mapping can be unmapped");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn byte(region: &Region, offset: usize) -> u8 {
        let mut buffer = [0];
        region.read(offset, &mut buffer);
        buffer[0]
    }

    #[test]
    fn freezing_keeps_content_and_stores_only_non_zero_pages() {
        let mut region = Region::anonymous(8 << 20, PageUse::Sparse).unwrap();
        region.write(5 * PAGE_BYTES + 7, b"kept");
        region.write(9 * PAGE_BYTES, &[0; 64]);
        let layer = Arc::new(region.to_layer("test").unwrap());
        assert_eq!(layer.stored_bytes(), PAGE_BYTES as u64);
        region.adopt(layer).unwrap();
        let mut buffer = [0; 4];
        region.read(5 * PAGE_BYTES + 7, &mut buffer);
        assert_eq!(&buffer, b"kept");
        assert_eq!(byte(&region, 9 * PAGE_BYTES), 0);
    }

    #[test]
    fn a_write_after_freezing_does_not_reach_the_layer() {
        let mut region = Region::anonymous(2 << 20, PageUse::Sparse).unwrap();
        region.write(0, &[1]);
        let layer = Arc::new(region.to_layer("test").unwrap());
        region.adopt(Arc::clone(&layer)).unwrap();
        region.write(0, &[2]);
        let mut again = Region::anonymous(2 << 20, PageUse::Sparse).unwrap();
        again.adopt(layer).unwrap();
        assert_eq!((byte(&region, 0), byte(&again, 0)), (2, 1));
    }

    #[test]
    fn freezing_twice_merges_the_layer_with_what_changed() {
        let mut region = Region::anonymous(4 << 20, PageUse::Sparse).unwrap();
        region.write(0, &[1]);
        region.write(3 * PAGE_BYTES, &[3]);
        let first = Arc::new(region.to_layer("first").unwrap());
        region.adopt(first).unwrap();
        region.write(0, &[9]);
        region.write(7 * PAGE_BYTES, &[7]);
        let second = Arc::new(region.to_layer("second").unwrap());
        region.adopt(second).unwrap();
        let read: Vec<u8> = [0, 3, 7].iter().map(|page| byte(&region, page * PAGE_BYTES)).collect();
        assert_eq!(read, [9, 3, 7]);
    }

    #[test]
    fn zeroing_over_a_layer_does_not_bring_its_content_back() {
        let mut region = Region::anonymous(2 << 20, PageUse::Sparse).unwrap();
        region.write(0, &[5; 3 * PAGE_BYTES]);
        let layer = Arc::new(region.to_layer("test").unwrap());
        region.adopt(layer).unwrap();
        region.zero(100, 2 * PAGE_BYTES).unwrap();
        assert_eq!(byte(&region, 99), 5);
        assert_eq!(byte(&region, 100), 0);
        assert_eq!(byte(&region, PAGE_BYTES + 50), 0);
        assert_eq!(byte(&region, 100 + 2 * PAGE_BYTES), 5);
    }

    #[test]
    fn zeroing_anonymous_memory_gives_pages_back() {
        let region = Region::anonymous(2 << 20, PageUse::Sparse).unwrap();
        region.write(0, &[5; 8 * PAGE_BYTES]);
        region.zero(10, 6 * PAGE_BYTES).unwrap();
        assert_eq!((byte(&region, 9), byte(&region, 10), byte(&region, 10 + 6 * PAGE_BYTES)), (5, 0, 5));
        let pages = pagemap::populated(region.base.as_ptr() as usize, region.len).unwrap();
        assert!(pages.count() < 8);
    }

    #[test]
    fn a_range_outside_the_region_is_an_error_that_names_it() {
        let region = Region::anonymous(2 << 20, PageUse::Sparse).unwrap();
        let error = region.zero(usize::MAX, 2).unwrap_err();
        assert!(error.to_string().contains("outside a region of 0x200000"));
    }

    #[test]
    fn lengths_that_are_not_pages_are_refused() {
        assert!(matches!(Region::anonymous(0, PageUse::Huge), Err(MemoryError::Length { .. })));
        assert!(matches!(Region::anonymous(4097, PageUse::Huge), Err(MemoryError::Length { .. })));
    }

    #[test]
    fn regions_are_aligned_for_huge_pages() {
        let region = Region::anonymous(4096, PageUse::Huge).unwrap();
        assert_eq!(region.host_address().as_ptr() as usize % REGION_ALIGN_BYTES, 0);
    }

    #[test]
    fn words_are_stored_and_loaded() {
        let region = Region::anonymous(4096, PageUse::Sparse).unwrap();
        region.store_u32(3, 0xdead_beef);
        assert_eq!(region.load_u32(3), 0xdead_beef);
        assert_eq!(region.load_u32(2), 0);
    }
}
