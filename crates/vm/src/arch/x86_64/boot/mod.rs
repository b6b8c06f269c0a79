//! Booting Linux by the 64-bit boot protocol (Documentation/arch/x86/boot.rst).

use std::path::Path;

use kvm_ioctls::VcpuFd;
use vm_memory::GuestAddress;

use super::memory_map::Memory;

/// What to boot.
#[derive(Debug, Clone, Copy)]
pub struct LinuxBoot<'a> {
    /// ELF vmlinux or bzImage.
    pub kernel: &'a Path,
    /// Initial RAM file system.
    pub initramfs: Option<&'a Path>,
    /// Kernel command line, without a terminating zero.
    pub cmdline: &'a str,
    /// Where [`super::acpi::write_tables`] put the root pointer.
    pub rsdp: GuestAddress,
}

/// Where the boot vCPU starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The kernel's 64-bit entry point.
    pub rip: GuestAddress,
    /// The `boot_params` page.
    pub boot_params: GuestAddress,
}

/// Why a kernel could not be loaded or a vCPU not be set up.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// KVM refused.
    #[error("kvm refused to {action}")]
    Kvm {
        /// What was attempted.
        action: &'static str,
        /// Its answer.
        source: kvm_ioctls::Error,
    },
}

/// Loads kernel, initramfs, command line and boot parameters into `mem`.
///
/// # Errors
/// Names the file that is missing, unreadable, truncated, no kernel or too big, or the command line that is too long.
pub fn load_linux(_mem: &Memory, _boot: &LinuxBoot<'_>) -> Result<Entry, BootError> {
    unimplemented!("being written")
}

/// Sets the boot vCPU to the kernel's 64-bit entry point. CPUID must have been set.
///
/// # Errors
/// Says which ioctl failed.
pub fn configure_bsp(_vcpu: &VcpuFd, _entry: &Entry) -> Result<(), BootError> {
    unimplemented!("being written")
}

/// Prepares a further vCPU, which the guest starts by INIT and SIPI. CPUID must have been set.
///
/// # Errors
/// Says which ioctl failed.
pub fn configure_ap(_vcpu: &VcpuFd) -> Result<(), BootError> {
    unimplemented!("being written")
}
