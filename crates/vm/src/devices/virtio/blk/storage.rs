//! Where the overlay disk keeps its blocks and its map.

use offshoot_memory::Region;

/// Memory of fixed length that `fork(2)` clones. Offsets and indexes are the caller's to check.
pub trait Storage: Send {
    /// Copies bytes at `offset` to `buffer`.
    fn read(&self, offset: usize, buffer: &mut [u8]);
    /// Copies `data` to `offset`.
    fn write(&mut self, offset: usize, data: &[u8]);
    /// The 32-bit word number `index`; zero until it is stored.
    fn load_u32(&self, index: usize) -> u32;
    /// Sets the 32-bit word number `index`.
    fn store_u32(&mut self, index: usize, value: u32);
    /// The content of a range is not needed any more and may become anything.
    fn release(&mut self, offset: usize, len: usize);
}

impl Storage for Region {
    fn read(&self, offset: usize, buffer: &mut [u8]) {
        Region::read(self, offset, buffer);
    }

    fn write(&mut self, offset: usize, data: &[u8]) {
        Region::write(self, offset, data);
    }

    fn load_u32(&self, index: usize) -> u32 {
        Region::load_u32(self, index)
    }

    fn store_u32(&mut self, index: usize, value: u32) {
        Region::store_u32(self, index, value);
    }

    fn release(&mut self, offset: usize, len: usize) {
        // Over a layer, zeroing would make a private page instead of giving one back. A refusal costs memory only.
        if self.layer().is_none() {
            let _ = self.zero(offset, len);
        }
    }
}
