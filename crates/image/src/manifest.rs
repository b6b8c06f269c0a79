//! `manifest.json`: what an image consists of.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::debian::DebianSpec;
use crate::digest;

/// The format this build writes, and the only one it reads.
pub const FORMAT: u32 = 1;
/// Name of the manifest in an image's directory.
pub const FILE_NAME: &str = "manifest.json";

/// What an image consists of and where it came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// When it was made, seconds since the Unix epoch.
    pub created_unix_s: u64,
    /// The kernel's version as `uname -r` says; absent for an imported kernel that does not tell.
    pub kernel_version: Option<String>,
    /// Size of the root disk, MiB, rounded up.
    pub disk_mib: u32,
    /// Where it came from.
    pub source: Source,
    /// The image's files by name.
    pub files: BTreeMap<String, FileEntry>,
}

/// Where an image came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Made from Debian's archive.
    Debian(DebianSpec),
    /// Made from files that the user had.
    Files,
}

/// One file of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Size, bytes.
    pub size_bytes: u64,
    /// Two-level digest (see [`crate::digest`]), hexadecimal.
    pub sha256: String,
}

impl Manifest {
    /// One digest for the whole image: it says the same for the same files, whenever and wherever they were made.
    pub fn digest(&self) -> String {
        digest::key_of(&self.files)
    }
}
