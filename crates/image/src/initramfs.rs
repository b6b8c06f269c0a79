//! The guest's initramfs: the agent as `/init`, and the modules it loads before it can mount its root.
//!
//! `/modules/order` has the path of one module a line, in the order of loading.

use std::fs;
use std::path::{Path, PathBuf};

use crate::cpio::Cpio;
use crate::kernel::bzimage::is_elf;
use crate::modules::{ModuleIndex, ModulesError};

/// Modules a guest needs; ext4 is built into Debian's cloud kernel.
pub const GUEST_MODULES: [&str; 6] =
    ["virtio_mmio", "virtio_blk", "virtio_rng", "vmw_vsock_virtio_transport", "overlay", "crc32c_intel"];

/// `p_type` of the program interpreter (elf(5)).
const PT_INTERP: u32 = 3;

/// Why there is no initramfs.
#[derive(Debug, thiserror::Error)]
pub enum InitramfsError {
    /// A file could not be read.
    #[error("could not read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The agent is not a program for the guest.
    #[error("agent {path} is not an x86-64 ELF program")]
    NotProgram {
        /// The file.
        path: PathBuf,
    },
    /// The agent needs libraries that an initramfs does not have.
    #[error("agent {path} is dynamically linked; build it with: cargo xtask build")]
    Dynamic {
        /// The file.
        path: PathBuf,
    },
    /// The modules cannot be ordered.
    #[error(transparent)]
    Modules(#[from] ModulesError),
}

/// An initramfs with `agent` as `/init` and the modules `names` of the kernel whose modules are in `modules_dir`.
///
/// The bytes depend only on the contents of the agent and the modules.
///
/// # Errors
/// Fails where a file cannot be read, a module is unknown, or the agent is not a static x86-64 program.
pub fn build(agent: &Path, modules_dir: &Path, names: &[&str]) -> Result<Vec<u8>, InitramfsError> {
    let program = read(agent)?;
    if !is_elf(&program) {
        return Err(InitramfsError::NotProgram { path: agent.to_owned() });
    }
    if needs_interpreter(&program) {
        return Err(InitramfsError::Dynamic { path: agent.to_owned() });
    }
    let mut cpio = Cpio::new();
    for dir in ["dev", "proc", "sys", "run", "root"] {
        cpio.dir(dir, 0o755);
    }
    cpio.char_device("dev/console", 0o600, (5, 1));
    add_modules(&mut cpio, modules_dir, names)?;
    cpio.file("init", 0o755, &program);
    Ok(cpio.finish())
}

/// Adds `/modules` with `names`, what they depend on, and `order`.
///
/// # Errors
/// Fails where a module is unknown or cannot be read.
pub fn add_modules(cpio: &mut Cpio, modules_dir: &Path, names: &[&str]) -> Result<(), InitramfsError> {
    cpio.dir("modules", 0o755);
    let mut order = String::new();
    for path in ModuleIndex::open(modules_dir)?.closure(names)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        cpio.file(&format!("modules/{name}"), 0o644, &read(&path)?);
        order.push_str(&format!("/modules/{name}\n"));
    }
    cpio.file("modules/order", 0o644, order.as_bytes());
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>, InitramfsError> {
    fs::read(path).map_err(|source| InitramfsError::Read { path: path.to_owned(), source })
}

/// Whether an ELF program names a dynamic loader. A program header outside the file counts as none: the kernel will
/// refuse such a program by itself.
fn needs_interpreter(program: &[u8]) -> bool {
    // e_phoff, e_phentsize and e_phnum of an ELF64 header (elf(5)).
    let (Some(offset), Some(size), Some(count)) =
        (number(program, 32, 8), number(program, 54, 2), number(program, 56, 2))
    else {
        return false;
    };
    (0..count).any(|n| {
        let at = offset.saturating_add(n * size);
        usize::try_from(at).ok().and_then(|at| number(program, at, 4)) == Some(u64::from(PT_INTERP))
    })
}

/// The little-endian number of `width` bytes at `at`.
fn number(bytes: &[u8], at: usize, width: usize) -> Option<u64> {
    let field = bytes.get(at..at.checked_add(width)?)?;
    Some(field.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A 64-byte ELF header and one program header of type `kind`.
    fn program(kind: u32) -> Vec<u8> {
        let mut elf = vec![0u8; 64 + 56];
        elf[..4].copy_from_slice(b"\x7fELF");
        elf[18] = 62;
        elf[32] = 64;
        elf[54] = 56;
        elf[56] = 1;
        elf[64..68].copy_from_slice(&kind.to_le_bytes());
        elf
    }

    fn kernel_dir() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("modules.dep"), "b.ko: a.ko\na.ko:\n").unwrap();
        fs::write(dir.path().join("modules.builtin"), "").unwrap();
        fs::write(dir.path().join("a.ko"), "AAAA").unwrap();
        fs::write(dir.path().join("b.ko"), "BBBB").unwrap();
        dir
    }

    #[test]
    fn the_bytes_depend_on_contents_only() {
        let dir = kernel_dir();
        let agent = dir.path().join("agent");
        fs::write(&agent, program(1)).unwrap();
        let first = build(&agent, dir.path(), &["b"]).unwrap();
        fs::write(&agent, program(1)).unwrap();
        assert_eq!(build(&agent, dir.path(), &["b"]).unwrap(), first);
        let text = String::from_utf8_lossy(&first);
        assert!(text.contains("/modules/a.ko\n/modules/b.ko\n"));
        assert!(text.find("AAAA").unwrap() < text.find("BBBB").unwrap());
    }

    #[test]
    fn an_agent_that_could_not_start_is_refused() {
        let dir = kernel_dir();
        let agent = dir.path().join("agent");
        fs::write(&agent, program(PT_INTERP)).unwrap();
        assert!(matches!(build(&agent, dir.path(), &[]), Err(InitramfsError::Dynamic { .. })));
        fs::write(&agent, "#!/bin/sh\n").unwrap();
        assert!(matches!(build(&agent, dir.path(), &[]), Err(InitramfsError::NotProgram { .. })));
        let missing = build(&dir.path().join("none"), dir.path(), &[]).unwrap_err();
        assert!(missing.to_string().contains("none"));
    }
}
