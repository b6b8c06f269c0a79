//! Where things are: the checkout, what is built, the cache.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Directories that every command works with, all absolute.
#[derive(Debug, Clone)]
pub struct Workspace {
    /// The checkout.
    pub root: PathBuf,
    /// Cargo's target directory.
    pub target: PathBuf,
    /// What takes long to make and is kept between checkouts: `$OFFSHOOT_CACHE`, else `~/.cache/offshoot`.
    pub cache: PathBuf,
}

impl Workspace {
    /// Finds the directories from the environment that cargo gives its programs.
    pub fn locate() -> Result<Self> {
        let manifest =
            std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let root = Path::new(&manifest)
            .parent()
            .context("the xtask crate has no parent directory")?
            .canonicalize()?;
        let target = match std::env::var_os("CARGO_TARGET_DIR") {
            Some(dir) => std::path::absolute(dir)?,
            None => root.join("target"),
        };
        let cache = match (std::env::var_os("OFFSHOOT_CACHE"), std::env::var_os("HOME")) {
            (Some(dir), _) => std::path::absolute(dir)?,
            (None, Some(home)) => Path::new(&home).join(".cache/offshoot"),
            (None, None) => {
                anyhow::bail!("neither OFFSHOOT_CACHE nor HOME is set; set one to say where the cache is")
            }
        };
        Ok(Self { root, target, cache })
    }

    /// A release binary of the workspace.
    pub fn binary(&self, name: &str) -> PathBuf {
        self.bin_dir().join(name)
    }

    /// Where release binaries are.
    pub fn bin_dir(&self) -> PathBuf {
        self.target.join("release")
    }

    /// The statically linked agent.
    pub fn agent(&self) -> PathBuf {
        self.target.join("agent/x86_64-unknown-linux-gnu/release/offshoot-agent")
    }

    /// The default image, as a link into the cache.
    pub fn image_link(&self) -> PathBuf {
        self.target.join("image")
    }

    /// The image cache.
    pub fn image_cache(&self) -> offshoot_image::Cache {
        offshoot_image::Cache::new(&self.cache)
    }
}
