//! What the vsock device has done since boot.

/// Counters of the vsock device.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct VsockMetrics {
    /// Connections the guest accepted.
    pub opened: u64,
    /// Host connections closed before that: bad request, full table, no driver, no listener, no answer in time.
    pub refused: u64,
    /// Bytes from host to guest.
    pub to_guest_bytes: u64,
    /// Bytes from guest to host.
    pub to_host_bytes: u64,
    /// Guest packets that were no packets, or for nobody.
    pub malformed_packets: u64,
    /// Connections ended because the guest broke the protocol.
    pub violations: u64,
    /// Transport resets whose handling the guest did not show in time.
    pub resets_unhandled: u64,
}
