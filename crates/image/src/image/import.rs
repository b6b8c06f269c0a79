//! Makes an image of files that come from elsewhere.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::{INITRAMFS, Image, ImageError, ROOTFS, VMLINUX, VMLINUZ, copy, seal, stage};
use crate::cache::{io, publish};
use crate::kernel::bzimage;
use crate::manifest::Source;

/// Files to make an image of.
#[derive(Debug, Clone)]
pub struct ImportFiles {
    /// Kernel, ELF vmlinux or bzImage.
    pub kernel: PathBuf,
    /// Initramfs, as the kernel unpacks it.
    pub initramfs: PathBuf,
    /// Raw root disk; a whole number of 512-byte sectors.
    pub rootfs: PathBuf,
}

impl Image {
    /// Copies `files` into a new image in `dest`, which must not exist; its parent must.
    ///
    /// # Errors
    /// Fails where a file cannot be read or is not what it should be, and where `dest` exists; nothing is left then.
    pub fn import_files(files: &ImportFiles, dest: &Path) -> Result<Self, ImageError> {
        let kernel = check_import(files)?;
        let staging = stage(dest)?;
        let write = |name: &str, bytes: &[u8]| {
            let path = staging.path().join(name);
            fs::write(&path, bytes).map_err(io("write", &path))
        };
        if bzimage::is_bzimage(&kernel) {
            let elf = bzimage::extract(&kernel)
                .map_err(|source| ImageError::ImportKernel { path: files.kernel.clone(), source })?;
            write(VMLINUX, &elf)?;
            write(VMLINUZ, &kernel)?;
        } else {
            write(VMLINUX, &kernel)?;
        }
        copy(&files.initramfs, &staging.path().join(INITRAMFS))?;
        copy(&files.rootfs, &staging.path().join(ROOTFS))?;
        seal(staging.path(), None, Source::Files)?;
        publish(staging, dest)?;
        Self::open(dest)
    }
}

/// Checks what can be seen of the files from outside, and returns the kernel's bytes.
fn check_import(files: &ImportFiles) -> Result<Vec<u8>, ImageError> {
    let read = |what: &'static str, path: &Path| {
        let path = path.to_owned();
        move |source| ImageError::ImportRead { what, path, source }
    };
    let content =
        |what, path: &Path, problem| Err(ImageError::ImportContent { what, path: path.to_owned(), problem });
    let kernel = fs::read(&files.kernel).map_err(read("kernel", &files.kernel))?;
    if !bzimage::is_bzimage(&kernel) && !bzimage::is_elf(&kernel) {
        return content("kernel", &files.kernel, "is neither a bzImage nor an x86-64 ELF file");
    }
    let opened =
        |what, path: &Path| File::open(path).and_then(|file| file.metadata()).map_err(read(what, path));
    let initramfs = opened("initramfs", &files.initramfs)?;
    if !initramfs.is_file() || initramfs.len() == 0 {
        return content("initramfs", &files.initramfs, "is empty or not a regular file");
    }
    let rootfs = opened("root disk", &files.rootfs)?;
    if !rootfs.is_file() || rootfs.len() == 0 || !rootfs.len().is_multiple_of(512) {
        return content(
            "root disk",
            &files.rootfs,
            "is not a regular file of whole 512-byte sectors; is it truncated?",
        );
    }
    Ok(kernel)
}
