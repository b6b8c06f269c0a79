//! An image: a directory with a manifest and the files it names.
//!
//! | file | content |
//! |---|---|
//! | `manifest.json` | [`Manifest`] |
//! | `vmlinux` | the kernel as an ELF file |
//! | `vmlinuz` | the same as a bzImage; absent where an ELF file was imported |
//! | `initramfs.cpio` | the agent and the modules it loads |
//! | `rootfs.raw` | the root disk |
//!
//! Images are immutable: what is built or imported appears under its name whole, with all its files read-only.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use offshoot_protocol::control::ErrorKind;

use crate::cache::{CacheError, io, publish};
use crate::digest;
use crate::initramfs::InitramfsError;
use crate::kernel::KernelError;
use crate::kernel::bzimage::BzImageError;
use crate::manifest::{FILE_NAME, FORMAT, FileEntry, Manifest, Source};
use crate::rootfs::RootfsError;
use crate::tool::{Tool, ToolError};

mod import;

pub use import::ImportFiles;

pub(crate) const VMLINUX: &str = "vmlinux";
pub(crate) const VMLINUZ: &str = "vmlinuz";
pub(crate) const INITRAMFS: &str = "initramfs.cpio";
pub(crate) const ROOTFS: &str = "rootfs.raw";
/// Largest manifest that is read, bytes.
const MAX_MANIFEST_BYTES: u64 = 1 << 20;

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The kernel could not be had.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The root file system could not be had.
    #[error(transparent)]
    Rootfs(#[from] RootfsError),
    /// The initramfs could not be packed.
    #[error(transparent)]
    Initramfs(#[from] InitramfsError),
    /// The cache or the destination failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A tool failed.
    #[error(transparent)]
    Tool(#[from] ToolError),
    /// A file that belongs to the image is missing or unreadable.
    #[error("could not read {path} of the image in {dir}; build or import the image again")]
    Unreadable {
        /// The image's directory.
        dir: PathBuf,
        /// The file's name.
        path: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The manifest is no manifest.
    #[error("{path} is not an image manifest")]
    Manifest {
        /// The file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// The manifest lacks a file that every image has, or names one that none has.
    #[error("the manifest {path} {problem}")]
    Files {
        /// The manifest.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The manifest is of another version.
    #[error("the manifest {path} has format {format}, this build reads {FORMAT}")]
    Format {
        /// The manifest.
        path: PathBuf,
        /// Its format.
        format: u32,
    },
    /// A file's size is not what the manifest says.
    #[error(
        "{path} has {actual_bytes} bytes, its manifest says {expected_bytes}: it is truncated or was changed"
    )]
    Size {
        /// The file.
        path: PathBuf,
        /// Recorded size.
        expected_bytes: u64,
        /// Size found.
        actual_bytes: u64,
    },
    /// A file's content is not what the manifest says.
    #[error("{path} has digest {actual}, its manifest says {expected}: it was changed")]
    Digest {
        /// The file.
        path: PathBuf,
        /// Recorded digest.
        expected: String,
        /// Digest found.
        actual: String,
    },
    /// A file to import is missing or unreadable.
    #[error("could not read the {what} {path}")]
    ImportRead {
        /// Kernel, initramfs or root disk.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A file to import is not what it should be.
    #[error("the {what} {path} {problem}")]
    ImportContent {
        /// Kernel, initramfs or root disk.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: &'static str,
    },
    /// A bzImage to import does not yield its ELF kernel.
    #[error("could not extract the ELF kernel from {path}")]
    ImportKernel {
        /// The file.
        path: PathBuf,
        /// Why.
        source: BzImageError,
    },
    /// Something is there already.
    #[error("{path} exists already")]
    Exists {
        /// The destination.
        path: PathBuf,
    },
}

impl ImageError {
    /// Who must act.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Rootfs(RootfsError::PackageName { .. } | RootfsError::DiskSize { .. })
            | Self::Rootfs(RootfsError::TooSmall { .. })
            | Self::Initramfs(InitramfsError::NotProgram { .. } | InitramfsError::Dynamic { .. })
            | Self::ImportRead { .. }
            | Self::ImportContent { .. }
            | Self::ImportKernel { .. } => ErrorKind::Caller,
            Self::Exists { .. } => ErrorKind::State,
            Self::Format { .. } => ErrorKind::Unsupported,
            Self::Unreadable { .. }
            | Self::Manifest { .. }
            | Self::Files { .. }
            | Self::Size { .. }
            | Self::Digest { .. } => ErrorKind::Corrupt,
            Self::Kernel(_) | Self::Rootfs(_) | Self::Initramfs(_) | Self::Cache(_) | Self::Tool(_) => {
                ErrorKind::Host
            }
        }
    }
}

/// A guest kernel, initramfs and root disk, not yet booted.
#[derive(Debug, Clone)]
pub struct Image {
    dir: PathBuf,
    manifest: Manifest,
}

impl Image {
    /// The image in `dir`; its files are there, readable and as long as the manifest says.
    ///
    /// Contents are not read: that would cost a second each time. [`Image::verify`] reads them.
    ///
    /// # Errors
    /// Fails on a manifest that is missing, of another format or not whole, and names the file that is missing,
    /// unreadable, truncated or grown.
    pub fn open(dir: &Path) -> Result<Self, ImageError> {
        let manifest = read_manifest(dir)?;
        for (name, entry) in &manifest.files {
            let path = dir.join(name);
            let metadata = File::open(&path).and_then(|file| file.metadata());
            let actual_bytes = metadata.map_err(unreadable(dir, name))?.len();
            if actual_bytes != entry.size_bytes {
                return Err(ImageError::Size { path, expected_bytes: entry.size_bytes, actual_bytes });
            }
        }
        Ok(Self { dir: dir.to_owned(), manifest })
    }

    /// Reads every file and compares its digest with the manifest's. Cost: about a second for each GiB stored.
    ///
    /// # Errors
    /// Names the first file that is unreadable or was changed.
    pub fn verify(&self) -> Result<(), ImageError> {
        for (name, entry) in &self.manifest.files {
            let path = self.dir.join(name);
            let actual = digest::of_file(&path).map_err(unreadable(&self.dir, name))?;
            if actual != entry.sha256 {
                return Err(ImageError::Digest { path, expected: entry.sha256.clone(), actual });
            }
        }
        Ok(())
    }

    /// Makes the same image in `dest`, which must not exist, sharing the files where the file system can.
    ///
    /// # Errors
    /// Fails where `dest` exists or a file can be neither linked nor copied; nothing is left then.
    pub fn copy_to(&self, dest: &Path) -> Result<Self, ImageError> {
        let staging = stage(dest)?;
        let names = self.manifest.files.keys().map(String::as_str);
        for name in names.chain([FILE_NAME]) {
            place(&self.dir.join(name), &staging.path().join(name))?;
        }
        publish(staging, dest)?;
        Self::open(dest)
    }

    /// Where the image is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What the image says of itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The kernel as an ELF file; the quickest to boot.
    pub fn vmlinux(&self) -> PathBuf {
        self.dir.join(VMLINUX)
    }

    /// The kernel as a bzImage, where there is one.
    pub fn vmlinuz(&self) -> Option<PathBuf> {
        self.manifest.files.contains_key(VMLINUZ).then(|| self.dir.join(VMLINUZ))
    }

    /// The initramfs.
    pub fn initramfs(&self) -> PathBuf {
        self.dir.join(INITRAMFS)
    }

    /// The root disk, raw.
    pub fn rootfs(&self) -> PathBuf {
        self.dir.join(ROOTFS)
    }
}

fn read_manifest(dir: &Path) -> Result<Manifest, ImageError> {
    let path = dir.join(FILE_NAME);
    let mut text = Vec::new();
    File::open(&path)
        .and_then(|file| file.take(MAX_MANIFEST_BYTES).read_to_end(&mut text))
        .map_err(unreadable(dir, FILE_NAME))?;
    // The format is looked at alone first: a newer manifest may be shaped otherwise.
    #[derive(serde::Deserialize)]
    struct Head {
        format: u32,
    }
    let not_manifest = |source| ImageError::Manifest { path: path.clone(), source };
    let Head { format } = serde_json::from_slice(&text).map_err(not_manifest)?;
    if format != FORMAT {
        return Err(ImageError::Format { path, format });
    }
    let manifest: Manifest = serde_json::from_slice(&text).map_err(not_manifest)?;
    if let Some(name) =
        [VMLINUX, INITRAMFS, ROOTFS].into_iter().find(|name| !manifest.files.contains_key(*name))
    {
        return Err(ImageError::Files { path, problem: format!("names no {name}") });
    }
    let known = [VMLINUX, VMLINUZ, INITRAMFS, ROOTFS];
    if let Some(name) = manifest.files.keys().find(|name| !known.contains(&name.as_str())) {
        return Err(ImageError::Files {
            path,
            problem: format!("names {name:?}, which is no file of an image"),
        });
    }
    Ok(manifest)
}

fn unreadable<'a>(dir: &'a Path, name: &'a str) -> impl Fn(std::io::Error) -> ImageError + 'a {
    move |source| ImageError::Unreadable { dir: dir.to_owned(), path: name.to_owned(), source }
}

/// A directory beside `dest`, which must not exist.
pub(crate) fn stage(dest: &Path) -> Result<tempfile::TempDir, ImageError> {
    if dest.exists() {
        return Err(ImageError::Exists { path: dest.to_owned() });
    }
    let parent = dest.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let staging = tempfile::Builder::new().prefix(".image-").tempdir_in(parent);
    Ok(staging.map_err(io("create a directory in", parent))?)
}

/// Puts the immutable file `from` at `to`: a second name where the file system can, else a copy.
pub(crate) fn place(from: &Path, to: &Path) -> Result<(), ImageError> {
    match fs::hard_link(from, to) {
        Ok(()) => Ok(()),
        Err(_) => copy(from, to),
    }
}

/// Copies a file, keeping its holes.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<(), ImageError> {
    let mut tool = Tool::new("cp", "coreutils");
    tool.command().args(["--sparse=always", "--reflink=auto", "--"]).arg(from).arg(to);
    tool.output()?;
    Ok(())
}

/// Writes the manifest of the files in `dir` and makes all of them read-only.
pub(crate) fn seal(dir: &Path, kernel_version: Option<String>, source: Source) -> Result<(), ImageError> {
    let mut files = std::collections::BTreeMap::new();
    let read_only = |path: &Path| {
        fs::set_permissions(path, fs::Permissions::from_mode(0o444)).map_err(io("set permissions of", path))
    };
    for name in [VMLINUX, VMLINUZ, INITRAMFS, ROOTFS] {
        let path = dir.join(name);
        if !path.exists() {
            continue;
        }
        let size_bytes = fs::metadata(&path).map_err(io("read", &path))?.len();
        let sha256 = digest::of_file(&path).map_err(io("read", &path))?;
        read_only(&path)?;
        files.insert(name.to_owned(), FileEntry { size_bytes, sha256 });
    }
    let disk_bytes = files.get(ROOTFS).map_or(0, |entry| entry.size_bytes);
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let manifest = Manifest {
        format: FORMAT,
        created_unix_s: since_epoch.as_secs(),
        kernel_version,
        disk_mib: u32::try_from(disk_bytes.div_ceil(1 << 20)).unwrap_or(u32::MAX),
        source,
        files,
    };
    let path = dir.join(FILE_NAME);
    let json = serde_json::to_vec_pretty(&manifest).expect("a manifest is plain data");
    fs::write(&path, json).map_err(io("write", &path))?;
    read_only(&path)?;
    Ok(())
}

#[cfg(test)]
mod tests;
