//! The daemon's socket: one daemon for a run directory, and none beside another that lives.

use std::fs::{DirBuilder, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use anyhow::{Context, bail};
use rustix::fs::{FlockOperation, Mode, flock};

/// Makes the run directory (0700) and locks it for the life of the returned file.
///
/// # Errors
/// Fails where another daemon holds it.
pub(crate) fn lock_run_dir(run_dir: &Path) -> anyhow::Result<File> {
    make_dir(run_dir)?;
    let path = run_dir.join("lock");
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = file.with_context(|| format!("open {}", path.display()))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::AGAIN) => bail!(
            "another offshootd runs on {}; stop it, or choose another --run-dir, --state-dir and --socket",
            run_dir.display()
        ),
        Err(errno) => Err(errno).with_context(|| format!("lock {}", path.display())),
    }
}

/// Listens on `socket` (0600 from the beginning, so that nobody else gets in meanwhile), without blocking. A socket that nobody answers is removed first.
///
/// # Errors
/// Fails where another daemon answers, where the path is something else than a socket, and where the host refuses.
pub(crate) fn bind(socket: &Path) -> anyhow::Result<UnixListener> {
    use std::os::unix::fs::FileTypeExt;
    if let Some(parent) = socket.parent() {
        make_dir(parent)?;
    }
    let there = match std::fs::symlink_metadata(socket) {
        Ok(metadata) => Some(metadata),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => return Err(error).with_context(|| format!("look at {}", socket.display())),
    };
    if let Some(metadata) = there {
        if !metadata.file_type().is_socket() {
            bail!("{} is no socket; choose another --socket", socket.display());
        }
        if UnixStream::connect(socket).is_ok() {
            bail!("another daemon answers on {}; stop it, or choose another --socket", socket.display());
        }
        std::fs::remove_file(socket).with_context(|| format!("remove the stale {}", socket.display()))?;
    }
    let before = rustix::process::umask(Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(socket);
    rustix::process::umask(before);
    let listener = listener.with_context(|| format!("listen on {}", socket.display()))?;
    listener.set_nonblocking(true).context("prepare the socket")?;
    Ok(listener)
}

fn make_dir(path: &Path) -> anyhow::Result<()> {
    let made = DirBuilder::new().mode(0o700).recursive(true).create(path);
    made.with_context(|| format!("make the directory {}", path.display()))
}
