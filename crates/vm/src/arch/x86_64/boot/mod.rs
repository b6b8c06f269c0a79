//! Booting Linux by the 64-bit boot protocol (Documentation/arch/x86/boot.rst, "64-bit Boot Protocol").
//!
//! ```text
//! 0x500 GDT, TSS │ 0x7000 boot_params │ 0x9000 page tables │ 0x20000 command line │ 1 MiB kernel … initramfs │ end
//! ```
//!
//! The initramfs ends as high in the low region as the protocol allows, so that the kernel has room below it.

mod error;
mod kernel;
mod vcpu;

use std::path::Path;

use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use vm_memory::{Bytes, GuestAddress};

pub use self::error::{BootError, FileRole};
use self::kernel::Kernel;
pub use self::vcpu::{configure_ap, configure_bsp};
use super::layout::{BOOT_PAGE_TABLES, BOOT_PARAMS, CMDLINE, INITRAMFS_LIMIT};
use super::memory_map::{self, Memory};
use super::paging::{self, Access};
use super::segments::{self, Ring};

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

/// `type_of_loader` of a loader without a number.
const LOADER_UNDEFINED: u8 = 0xff;
/// `vid_mode` "normal".
const VIDEO_NORMAL: u16 = 0xffff;
/// Page tables map this much to itself.
const IDENTITY_BYTES: u64 = 1 << 32;
const PAGE_BYTES: u64 = 4096;

/// Loads kernel, initramfs, command line, boot parameters, page and descriptor tables into `mem`.
///
/// # Errors
/// Names the file that is missing, unreadable, truncated, no kernel or too big, or the command line that is too long.
pub fn load_linux(mem: &Memory, boot: &LinuxBoot<'_>) -> Result<Entry, BootError> {
    let kernel = kernel::load(mem, boot.kernel)?;
    check_cmdline(boot.cmdline, kernel.cmdline_limit)?;
    let initramfs = boot.initramfs.map(|path| load_initramfs(mem, path, &kernel)).transpose()?;

    let write = |what| move |source| BootError::Write { what, source };
    let cmdline = [boot.cmdline.as_bytes(), &[0]].concat();
    mem.write_slice(&cmdline, GuestAddress(CMDLINE)).map_err(write("the command line"))?;
    let params = parameters(mem, boot, &kernel, initramfs);
    mem.write_obj(params, GuestAddress(BOOT_PARAMS)).map_err(write("the boot parameters"))?;
    let tables = GuestAddress(BOOT_PAGE_TABLES);
    paging::write_identity_map(mem, tables, &[(0, IDENTITY_BYTES)], Access::Kernel)
        .map_err(write("page tables"))?;
    segments::write_tables(mem, Ring::Kernel).map_err(write("descriptor tables"))?;
    Ok(Entry { rip: kernel.entry, boot_params: GuestAddress(BOOT_PARAMS) })
}

fn check_cmdline(cmdline: &str, limit_bytes: usize) -> Result<(), BootError> {
    if let Some(at) = cmdline.find('\0') {
        return Err(BootError::CmdlineZero { at });
    }
    if cmdline.len() > limit_bytes {
        return Err(BootError::CmdlineTooLong { bytes: cmdline.len(), limit_bytes });
    }
    Ok(())
}

/// Start and length, bytes, of the loaded initramfs.
fn load_initramfs(mem: &Memory, path: &Path, kernel: &Kernel) -> Result<(u64, u64), BootError> {
    let (mut file, bytes) = kernel::open(FileRole::Initramfs, path)?;
    let limit = memory_map::low_region_end(mem).min(INITRAMFS_LIMIT);
    let start =
        limit.checked_sub(bytes).map(|start| start & !(PAGE_BYTES - 1)).filter(|&start| start >= kernel.end);
    let Some(start) = start else {
        return Err(BootError::InitramfsTooBig { path: path.into(), bytes, kernel_end: kernel.end, limit });
    };
    // The length was checked: what fails here is the file, cut or unreadable meanwhile.
    mem.read_exact_volatile_from(GuestAddress(start), &mut file, bytes as usize).map_err(|error| {
        let source = std::io::Error::other(error);
        BootError::Read { role: FileRole::Initramfs, path: path.into(), source }
    })?;
    Ok((start, bytes))
}

fn parameters(
    mem: &Memory,
    boot: &LinuxBoot<'_>,
    kernel: &Kernel,
    initramfs: Option<(u64, u64)>,
) -> boot_params {
    let mut params = boot_params { hdr: kernel.header, acpi_rsdp_addr: boot.rsdp.0, ..Default::default() };
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.vid_mode = VIDEO_NORMAL;
    params.hdr.cmd_line_ptr = CMDLINE as u32;
    params.hdr.cmdline_size = boot.cmdline.len() as u32;
    if let Some((start, bytes)) = initramfs {
        params.hdr.ramdisk_image = start as u32;
        params.hdr.ramdisk_size = bytes as u32;
    }
    let map = memory_map::e820(mem);
    params.e820_entries = map.len() as u8;
    for (slot, entry) in map.iter().enumerate() {
        params.e820_table[slot] =
            boot_e820_entry { addr: entry.start, size: entry.bytes, r#type: entry.kind as u32 };
    }
    params
}

const _: () = assert!(size_of::<boot_params>() == PAGE_BYTES as usize);

#[cfg(test)]
mod tests;
