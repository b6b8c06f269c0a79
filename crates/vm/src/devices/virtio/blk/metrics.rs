//! What the block device has done since boot.

/// Counters of the block device.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct BlkMetrics {
    /// Reads that succeeded.
    pub reads: u64,
    /// Bytes they read.
    pub read_bytes: u64,
    /// Writes that succeeded.
    pub writes: u64,
    /// Bytes they wrote.
    pub written_bytes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Discard and write-zeroes requests that succeeded.
    pub discards: u64,
    /// Requests answered with an error, or not answerable at all.
    pub failed_requests: u64,
}
