//! What can be wrong with a kernel, an initramfs or a command line.

use std::path::PathBuf;

use offshoot_protocol::control::ErrorKind;
use vm_memory::GuestMemoryError;

/// Which file an error is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileRole {
    /// The kernel.
    Kernel,
    /// The initial RAM file system.
    Initramfs,
}

impl std::fmt::Display for FileRole {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            FileRole::Kernel => "kernel",
            FileRole::Initramfs => "initramfs",
        })
    }
}

/// Why a kernel could not be loaded or a vCPU not be set up.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// Missing or unreadable.
    #[error("could not read {role} {path}; check that it exists and that the VMM may read it")]
    Read {
        /// Which file.
        role: FileRole,
        /// Its path.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A directory, device or pipe.
    #[error("{role} {path} is not a regular file; name the file itself")]
    NotAFile {
        /// Which file.
        role: FileRole,
        /// Its path.
        path: PathBuf,
    },
    /// Zero bytes long.
    #[error("{role} {path} is empty; get it again")]
    Empty {
        /// Which file.
        role: FileRole,
        /// Its path.
        path: PathBuf,
    },
    /// Neither format.
    #[error(
        "{path} is no kernel: neither an elf vmlinux nor a bzimage; name the kernel of an x86-64 distribution"
    )]
    NotAKernel {
        /// Its path.
        path: PathBuf,
    },
    /// The right format, but not one that can be booted.
    #[error("kernel {path} cannot be booted: {reason}; use a 64-bit x86 linux kernel")]
    Unsupported {
        /// Its path.
        path: PathBuf,
        /// What it lacks.
        reason: &'static str,
    },
    /// Shorter than its headers say.
    #[error(
        "kernel {path} is truncated: it has {actual_bytes} bytes, its headers name {expected_bytes}; get it again"
    )]
    Truncated {
        /// Its path.
        path: PathBuf,
        /// Bytes the headers name.
        expected_bytes: u64,
        /// Bytes there are.
        actual_bytes: u64,
    },
    /// The kernel does not fit into the low region.
    #[error(
        "kernel {path} needs memory up to {end:#x}, the guest's ends at {limit:#x}; give the guest more memory"
    )]
    KernelTooBig {
        /// Its path.
        path: PathBuf,
        /// First address it does not need.
        end: u64,
        /// First address that may not be used.
        limit: u64,
    },
    /// The initramfs does not fit above the kernel.
    #[error(
        "initramfs {path} of {bytes} bytes does not fit between the kernel's end {kernel_end:#x} and {limit:#x}; \
         give the guest more memory or make it smaller"
    )]
    InitramfsTooBig {
        /// Its path.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// First free address.
        kernel_end: u64,
        /// First address that may not be used.
        limit: u64,
    },
    /// Longer than the kernel takes.
    #[error("kernel command line has {bytes} bytes, this kernel takes {limit_bytes}; shorten it")]
    CmdlineTooLong {
        /// Its length.
        bytes: usize,
        /// What the kernel takes.
        limit_bytes: usize,
    },
    /// It would end early.
    #[error("kernel command line contains a zero byte at {at}; remove it")]
    CmdlineZero {
        /// Its position.
        at: usize,
    },
    /// The loader refused what the checks before let pass.
    #[error("could not load kernel {path}")]
    Load {
        /// Its path.
        path: PathBuf,
        /// What the loader said.
        source: linux_loader::loader::Error,
    },
    /// Guest memory could not be written.
    #[error("could not write {what} into guest memory")]
    Write {
        /// What was written.
        what: &'static str,
        /// Why it failed.
        source: GuestMemoryError,
    },
    /// KVM refused.
    #[error("kvm refused to {action}")]
    Kvm {
        /// What was attempted.
        action: &'static str,
        /// Its answer.
        source: kvm_ioctls::Error,
    },
}

impl BootError {
    /// Who must act.
    pub fn kind(&self) -> ErrorKind {
        match self {
            BootError::Truncated { .. } | BootError::Empty { .. } => ErrorKind::Corrupt,
            BootError::Unsupported { .. } => ErrorKind::Unsupported,
            BootError::Kvm { .. } => ErrorKind::Host,
            BootError::Write { .. } => ErrorKind::Bug,
            _ => ErrorKind::Caller,
        }
    }
}
