//! A run's temporary directory: sockets, console, initramfs.

use std::fs::{self, File};
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

const PREFIX: &str = "offshoot-lab-";
const LOCK: &str = "lock";
/// A socket's path has at most 107 bytes (unix(7)); the longest name in here is shorter than this.
const LONGEST_NAME: usize = 24;

/// A temporary directory that the next run removes if this one cannot.
#[derive(Debug)]
pub struct Scratch {
    dir: TempDir,
    /// Held while the run lives.
    _lock: File,
}

impl Scratch {
    /// A new directory; removes those of runs that were killed.
    pub fn new() -> Result<Self> {
        let parent = std::env::temp_dir();
        remove_abandoned(&parent);
        let dir = tempfile::Builder::new().prefix(PREFIX).tempdir_in(&parent);
        let dir = dir.with_context(|| format!("could not create a directory in {}", parent.display()))?;
        if dir.path().as_os_str().len() + LONGEST_NAME > 107 {
            bail!("{} is too long a path for sockets; set TMPDIR to a shorter one", dir.path().display());
        }
        let lock = File::create(dir.path().join(LOCK)).context("could not create a lock file")?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).context("could not lock a new file")?;
        Ok(Self { dir, _lock: lock })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

/// Removes directories whose run holds no lock any more.
fn remove_abandoned(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        // One without a lock file is being made this instant.
        let Ok(lock) = File::open(entry.path().join(LOCK)) else {
            continue;
        };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            // Somebody else may be removing it too.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_abandoned_directories_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        let make = |name: &str| {
            let dir = parent.path().join(format!("{PREFIX}{name}"));
            fs::create_dir(&dir).unwrap();
            (dir.clone(), File::create(dir.join(LOCK)).unwrap())
        };
        let (alive, lock) = make("alive");
        flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
        let (dead, _) = make("dead");
        let young = parent.path().join(format!("{PREFIX}young"));
        fs::create_dir(&young).unwrap();
        remove_abandoned(parent.path());
        assert!(alive.exists() && young.exists() && !dead.exists());
    }
}
