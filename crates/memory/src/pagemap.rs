//! Which pages of a mapping hold anything, from `/proc/self/pagemap`
//! (Documentation/admin-guide/mm/pagemap.rst: bit 63 present, bit 62 swapped).

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crate::PAGE_BYTES;
use crate::region::MemoryError;

const PRESENT_OR_SWAPPED: u64 = 0b11 << 62;
const ENTRIES_PER_READ: usize = 64 * 1024;

/// A set of page numbers, as one bit each.
pub(crate) struct PageSet {
    words: Vec<u64>,
    pages: usize,
}

impl PageSet {
    fn new(pages: usize) -> Self {
        Self { words: vec![0; pages.div_ceil(64)], pages }
    }

    pub(crate) fn insert(&mut self, range: Range<usize>) {
        for page in range.start..range.end.min(self.pages) {
            self.words[page / 64] |= 1 << (page % 64);
        }
    }

    fn contains(&self, page: usize) -> bool {
        self.words[page / 64] & (1 << (page % 64)) != 0
    }

    /// Number of pages in the set.
    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Maximal runs of pages in the set, in order.
    pub(crate) fn runs(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let mut next = 0;
        std::iter::from_fn(move || {
            while next < self.pages && !self.contains(next) {
                next += if self.words[next / 64] == 0 { 64 - next % 64 } else { 1 };
            }
            if next >= self.pages {
                return None;
            }
            let start = next;
            while next < self.pages && self.contains(next) {
                next += 1;
            }
            Some(start..next)
        })
    }
}

/// The pages of `address..address + len` that are present or swapped out.
pub(crate) fn populated(address: usize, len: usize) -> Result<PageSet, MemoryError> {
    let fail = |source| MemoryError::PageMap { len_bytes: len, source };
    let pagemap = File::open("/proc/self/pagemap").map_err(fail)?;
    let pages = len / PAGE_BYTES;
    let mut set = PageSet::new(pages);
    let mut buffer = vec![0; ENTRIES_PER_READ * 8];
    let mut page = 0;
    while page < pages {
        let count = (pages - page).min(ENTRIES_PER_READ);
        let bytes = &mut buffer[..count * 8];
        pagemap.read_exact_at(bytes, ((address / PAGE_BYTES + page) * 8) as u64).map_err(fail)?;
        for (index, entry) in bytes.as_chunks::<8>().0.iter().enumerate() {
            if u64::from_le_bytes(*entry) & PRESENT_OR_SWAPPED != 0 {
                set.insert(page + index..page + index + 1);
            }
        }
        page += count;
    }
    Ok(set)
}

#[cfg(test)]
mod tests {
    use super::PageSet;

    #[test]
    fn runs_are_maximal_and_in_order() {
        let mut set = PageSet::new(200);
        for range in [0..1, 3..70, 127..129, 199..200] {
            set.insert(range);
        }
        assert_eq!(set.runs().collect::<Vec<_>>(), [0..1, 3..70, 127..129, 199..200]);
        assert_eq!(set.count(), 71);
    }
}
