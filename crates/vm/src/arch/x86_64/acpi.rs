//! ACPI tables.

use vm_memory::GuestAddress;

use super::memory_map::Memory;

/// Why the tables could not be written.
#[derive(Debug, thiserror::Error)]
pub enum AcpiError {
    /// Guest memory does not reach there.
    #[error("could not write {bytes} bytes of acpi tables at {address:#x}")]
    Write {
        /// Guest-physical address.
        address: u64,
        /// Length.
        bytes: usize,
        /// Why.
        source: vm_memory::GuestMemoryError,
    },
}

/// Writes all tables for `vcpus` vCPUs and `virtio_mmio_count` virtio-mmio devices; returns where the RSDP is.
///
/// # Errors
/// Fails if the tables do not fit.
pub fn write_tables(_mem: &Memory, _vcpus: u8, _virtio_mmio_count: u32) -> Result<GuestAddress, AcpiError> {
    unimplemented!("being written")
}

/// Stores the VM generation id; the guest hears of it by an edge on [`super::layout::GED_GSI`], raised by the caller.
///
/// # Errors
/// Fails if guest memory does not reach the page.
pub fn write_vm_generation(_mem: &Memory, _id: [u8; 16]) -> Result<(), AcpiError> {
    unimplemented!("being written")
}
