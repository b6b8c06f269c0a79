//! Micro-guests: flat code entered in 64-bit user mode with I/O privilege.

use std::path::{Path, PathBuf};

use kvm_ioctls::VcpuFd;

use super::memory_map::Memory;

/// Why a micro-guest could not be loaded or started.
#[derive(Debug, thiserror::Error)]
pub enum PayloadError {
    /// The file could not be read.
    #[error("could not read payload {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// Copies the code in the file `path` as [`load`] does.
///
/// # Errors
/// Names the file, and what is wrong with it.
pub fn load_file(_mem: &Memory, _path: &Path, _vcpus: u8) -> Result<(), PayloadError> {
    unimplemented!("being written")
}

/// Copies `code` to [`super::layout::PAYLOAD_BASE`] and writes page tables and descriptor tables below it.
///
/// # Errors
/// Fails if code and tables do not fit.
pub fn load(_mem: &Memory, _code: &[u8], _vcpus: u8) -> Result<(), PayloadError> {
    unimplemented!("being written")
}

/// Sets vCPU `index` of `vcpus` to enter the payload, RDI = index, RSI = `memory_bytes`, RDX = `vcpus`.
///
/// # Errors
/// Says which ioctl failed.
pub fn configure_vcpu(
    _vcpu: &VcpuFd,
    _index: u8,
    _vcpus: u8,
    _memory_bytes: u64,
) -> Result<(), PayloadError> {
    unimplemented!("being written")
}
