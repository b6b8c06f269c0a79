//! Loading the kernel file: format, completeness, placement.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::elf::Elf;
use linux_loader::loader::{BzImage, KernelLoader};
use vm_memory::GuestAddress;

use super::error::{BootError, FileRole};
use crate::arch::x86_64::layout::HIGH_MEMORY;
use crate::arch::x86_64::memory_map::{self, Memory};

/// A kernel in guest memory.
pub struct Kernel {
    /// 64-bit entry point.
    pub entry: GuestAddress,
    /// First address it does not need while it starts.
    pub end: u64,
    /// Setup header of a bzImage; the one to begin with for a vmlinux.
    pub header: setup_header,
    /// Bytes of command line it takes, without the terminating zero.
    pub cmdline_limit: usize,
}

/// `COMMAND_LINE_SIZE` of x86 (arch/x86/include/asm/setup.h) without the terminating zero.
const VMLINUX_CMDLINE_LIMIT: usize = 2047;
/// "HdrS".
const SETUP_MAGIC: u32 = 0x5372_6448;
/// Where the setup header begins in the file, and in `boot_params`.
const SETUP_OFFSET: usize = 0x1f1;
/// First boot protocol with `xloadflags`.
const PROTOCOL_64: u16 = 0x020c;
/// `XLF_KERNEL_64`: there is a 64-bit entry point.
const HAS_64_BIT_ENTRY: u16 = 1;
/// The 64-bit entry point's distance from the load address.
const ENTRY_64_OFFSET: u64 = 0x200;
const SECTOR_BYTES: u64 = 512;

/// Opens a regular, not empty file; returns it with its length.
pub fn open(role: FileRole, path: &Path) -> Result<(File, u64), BootError> {
    let read = |source| BootError::Read { role, path: path.into(), source };
    // Before opening: a pipe would block.
    let metadata = std::fs::metadata(path).map_err(read)?;
    if !metadata.is_file() {
        return Err(BootError::NotAFile { role, path: path.into() });
    }
    if metadata.len() == 0 {
        return Err(BootError::Empty { role, path: path.into() });
    }
    Ok((File::open(path).map_err(read)?, metadata.len()))
}

/// Loads the kernel in the file `path`.
///
/// # Errors
/// Names the file and what is wrong with it.
pub fn load(mem: &Memory, path: &Path) -> Result<Kernel, BootError> {
    let (mut file, bytes) = open(FileRole::Kernel, path)?;
    let mut head = [0_u8; 1024];
    let mut filled = 0;
    while filled < head.len() {
        match file.read(&mut head[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(source) => {
                return Err(BootError::Read { role: FileRole::Kernel, path: path.into(), source });
            }
        }
    }
    let image = Image { path, file, bytes, head: &head[..filled] };
    if image.head.starts_with(b"\x7fELF") {
        image.load_elf(mem)
    } else if image.u32(0x202) == Some(SETUP_MAGIC) {
        image.load_bzimage(mem)
    } else {
        Err(BootError::NotAKernel { path: path.into() })
    }
}

struct Image<'a> {
    path: &'a Path,
    file: File,
    bytes: u64,
    head: &'a [u8],
}

impl Image<'_> {
    fn u16(&self, offset: usize) -> Option<u16> {
        Some(u16::from_le_bytes(*self.head.get(offset..)?.first_chunk()?))
    }

    fn u32(&self, offset: usize) -> Option<u32> {
        Some(u32::from_le_bytes(*self.head.get(offset..)?.first_chunk()?))
    }

    fn u64(&self, offset: usize) -> Option<u64> {
        Some(u64::from_le_bytes(*self.head.get(offset..)?.first_chunk()?))
    }

    fn truncated(&self, expected_bytes: u64) -> BootError {
        BootError::Truncated { path: self.path.into(), expected_bytes, actual_bytes: self.bytes }
    }

    fn unsupported(&self, reason: &'static str) -> BootError {
        BootError::Unsupported { path: self.path.into(), reason }
    }

    fn need(&self, bytes: u64) -> Result<(), BootError> {
        if self.bytes < bytes { Err(self.truncated(bytes)) } else { Ok(()) }
    }

    fn fits(&self, mem: &Memory, end: u64) -> Result<(), BootError> {
        let limit = memory_map::low_region_end(mem);
        if end > limit { Err(BootError::KernelTooBig { path: self.path.into(), end, limit }) } else { Ok(()) }
    }

    fn load_elf(mut self, mem: &Memory) -> Result<Kernel, BootError> {
        const HEADER_BYTES: u64 = 64;
        const PROGRAM_HEADER_BYTES: u64 = 56;
        self.need(HEADER_BYTES)?;
        // e_ident[EI_CLASS] 64-bit, [EI_DATA] little-endian; e_machine x86-64.
        let field = |value: Option<u16>| value.unwrap_or(0);
        if self.head.get(4..6) != Some(&[2, 1]) || field(self.u16(18)) != 62 {
            return Err(self.unsupported("it is no 64-bit x86 elf file"));
        }
        if u64::from(field(self.u16(54))) != PROGRAM_HEADER_BYTES {
            return Err(self.unsupported("its program headers have an unknown size"));
        }
        let (table, count) = (self.u64(32).unwrap_or(0), u64::from(field(self.u16(56))));
        self.need(table.saturating_add(count * PROGRAM_HEADER_BYTES))?;
        let entry = self.u64(24).unwrap_or(0);
        let mut end = 0;
        let mut entry_is_loaded = false;
        for index in 0..count {
            let Some(segment) = self.program_header(table + index * PROGRAM_HEADER_BYTES)? else {
                continue;
            };
            self.need(segment.offset.saturating_add(segment.file_bytes))?;
            if segment.address < HIGH_MEMORY {
                return Err(self.unsupported("it wants to be loaded below 1 MiB"));
            }
            let segment_end = segment.address.saturating_add(segment.memory_bytes.max(segment.file_bytes));
            entry_is_loaded |= (segment.address..segment_end).contains(&entry);
            end = end.max(segment_end);
        }
        if !entry_is_loaded {
            return Err(self.unsupported("its entry point is in none of its segments"));
        }
        self.fits(mem, end)?;
        let loaded = Elf::load(mem, None, &mut self.file, Some(GuestAddress(HIGH_MEMORY)))
            .map_err(|source| BootError::Load { path: self.path.into(), source })?;
        let header = setup_header {
            boot_flag: 0xaa55,
            header: SETUP_MAGIC,
            kernel_alignment: 0x0100_0000,
            ..Default::default()
        };
        Ok(Kernel { entry: loaded.kernel_load, end, header, cmdline_limit: VMLINUX_CMDLINE_LIMIT })
    }

    /// The program header at `offset` of the file, if it is to be loaded.
    fn program_header(&mut self, offset: u64) -> Result<Option<Segment>, BootError> {
        const PT_LOAD: u64 = 1;
        let read = |source| BootError::Read { role: FileRole::Kernel, path: self.path.into(), source };
        let mut bytes = [0_u8; 56];
        self.file.seek(SeekFrom::Start(offset)).map_err(read)?;
        self.file.read_exact(&mut bytes).map_err(read)?;
        // Words of Elf64_Phdr: type and flags, offset, virtual address, address, bytes in file, bytes in memory, alignment.
        let mut words = [0_u64; 7];
        for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(*chunk.first_chunk().expect("chunks have eight bytes"));
        }
        let [kind, offset, _, address, file_bytes, memory_bytes, _] = words;
        let loads = kind & 0xffff_ffff == PT_LOAD && memory_bytes > 0;
        Ok(loads.then_some(Segment { offset, address, file_bytes, memory_bytes }))
    }

    fn load_bzimage(mut self, mem: &Memory) -> Result<Kernel, BootError> {
        self.need(1024)?;
        let version = self.u16(0x206).unwrap_or(0);
        let flags = self.u16(0x236).unwrap_or(0);
        if version < PROTOCOL_64 || flags & HAS_64_BIT_ENTRY == 0 {
            return Err(self.unsupported("it has no 64-bit entry point"));
        }
        let setup_sectors = match self.head[SETUP_OFFSET] {
            0 => 4,
            sectors => u64::from(sectors),
        };
        let setup_bytes = (setup_sectors + 1) * SECTOR_BYTES;
        let code_bytes = u64::from(self.u32(0x1f4).unwrap_or(0)) * 16;
        self.need(setup_bytes + code_bytes)?;
        let load = u64::from(self.u32(0x214).unwrap_or(0));
        if load < HIGH_MEMORY {
            return Err(self.unsupported("it wants to be loaded below 1 MiB"));
        }
        // It moves itself to its preferred address, and needs init_size there.
        let preferred = self.u64(0x258).unwrap_or(0).max(load);
        let room = u64::from(self.u32(0x260).unwrap_or(0));
        let end = preferred.saturating_add(room).max(load + self.bytes - setup_bytes);
        self.fits(mem, end)?;
        let loaded = BzImage::load(mem, None, &mut self.file, Some(GuestAddress(HIGH_MEMORY)))
            .map_err(|source| BootError::Load { path: self.path.into(), source })?;
        let header = loaded.setup_header.unwrap_or_default();
        let cmdline_limit = (header.cmdline_size as usize).min(VMLINUX_CMDLINE_LIMIT);
        let entry = GuestAddress(loaded.kernel_load.0 + ENTRY_64_OFFSET);
        Ok(Kernel { entry, end, header, cmdline_limit })
    }
}

struct Segment {
    offset: u64,
    address: u64,
    file_bytes: u64,
    memory_bytes: u64,
}
