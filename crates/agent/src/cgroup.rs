//! One cgroup for each started command, so that a kill reaches whatever left the command's session, too.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Where the cgroup2 file system is in a guest.
pub const MOUNT_POINT: &str = "/sys/fs/cgroup";

/// Makes and removes cgroups below one directory.
pub struct Cgroups {
    directory: PathBuf,
    next: AtomicU64,
    /// Cgroups that still had a process when their command was forgotten.
    lingering: Mutex<Vec<PathBuf>>,
}

/// The cgroup of one command. Removed when dropped, or later, once its last process has ended.
pub struct Cgroup {
    path: PathBuf,
    owner: Arc<Cgroups>,
}

impl Cgroups {
    /// The cgroups below `mount_point`, or `None` where the kernel cannot kill a cgroup (before Linux 5.14) or there
    /// is no cgroup2 file system.
    pub fn below(mount_point: &Path) -> Option<Arc<Self>> {
        let directory = mount_point.join("offshoot");
        fs::create_dir_all(&directory).ok()?;
        if !directory.join("cgroup.kill").exists() {
            return None;
        }
        Some(Arc::new(Self { directory, next: AtomicU64::new(1), lingering: Mutex::default() }))
    }

    /// A new cgroup and its `cgroup.procs`, open for writing.
    ///
    /// # Errors
    /// As `mkdir(2)` and `open(2)`.
    pub fn create(self: &Arc<Self>) -> io::Result<(Cgroup, OwnedFd)> {
        self.remove_lingering();
        let path = self.directory.join(self.next.fetch_add(1, Ordering::Relaxed).to_string());
        fs::create_dir(&path)?;
        let cgroup = Cgroup { path, owner: self.clone() };
        let procs = fs::OpenOptions::new().write(true).open(cgroup.path.join("cgroup.procs"))?;
        Ok((cgroup, procs.into()))
    }

    fn remove_lingering(&self) {
        let mut lingering = self.lingering.lock().unwrap_or_else(PoisonError::into_inner);
        lingering.retain(|path| fs::remove_dir(path).is_err() && path.exists());
    }
}

impl Cgroup {
    /// Sends `SIGKILL` to every process in it.
    ///
    /// # Errors
    /// As `write(2)`.
    pub fn kill(&self) -> io::Result<()> {
        fs::write(self.path.join("cgroup.kill"), b"1")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        if fs::remove_dir(&self.path).is_err() {
            let path = std::mem::take(&mut self.path);
            self.owner.lingering.lock().unwrap_or_else(PoisonError::into_inner).push(path);
        }
    }
}
