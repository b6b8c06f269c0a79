//! Guest memory: private regions over immutable layers, and how they are frozen.
//!
//! A [`Region`] is one private, writable mapping of this process: fresh anonymous memory at first, or a private mapping
//! over a [`Layer`]. Freezing a region writes what it holds into a new layer, a sealed memfd, and maps the region over
//! it; from then on `fork(2)` copies none of its page tables, and every forked process shares the layer's pages until
//! it writes.
//!
//! Invariants:
//! * A region is never `MAP_SHARED`.
//! * A layer is sealed against writing and resizing before a mapping of it exists.
//! * Nothing here hands out a Rust reference into a region: a guest may write at any time.
//!
//! Start with [`region`].

mod layer;
mod pagemap;
pub mod ram;
pub mod region;

pub use layer::Layer;
pub use ram::GuestRam;
pub use region::{MemoryError, PageUse, Region};

/// Size of the pages in which memory is tracked, stored and shared, bytes.
pub const PAGE_BYTES: usize = 4096;
