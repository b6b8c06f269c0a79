//! What a sandbox owns on the host's file system while it lives: `<run_dir>/sandboxes/<id>/`.
//!
//! | file | what |
//! |---|---|
//! | `vsock.sock` | listening Unix socket of the hybrid vsock |
//! | `console.log` | the guest's console, bounded by the VMM |
//! | `vmm.stderr` | what the VMM program printed; only for a VMM started by exec |
//!
//! A [`SandboxDir`] removes all of it when dropped, whatever way the sandbox ends.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use offshoot_protocol::control::ErrorKind;

use crate::fault::{Fault, of_io};
use crate::vmm::ChildResources;

/// Longest path of a Unix socket: `sun_path` less the final zero byte (unix(7)).
const MAX_SOCKET_PATH_BYTES: usize = 107;
const VSOCK: &str = "vsock.sock";
const CONSOLE: &str = "console.log";
const STDERR: &str = "vmm.stderr";

/// Why a sandbox's files could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ResourceError {
    /// The socket's path does not fit into a socket address.
    #[error("socket path {} has {} bytes, more than {MAX_SOCKET_PATH_BYTES}", path.display(), path.as_os_str().len())]
    PathTooLong {
        /// The path.
        path: PathBuf,
    },
    /// A file or directory could not be made.
    #[error("make {what} {}", path.display())]
    Make {
        /// What.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

impl Fault for ResourceError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::PathTooLong { .. } => ErrorKind::Host,
            Self::Make { source, .. } => of_io(source).0,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            Self::PathTooLong { .. } => "run_dir_too_long",
            Self::Make { source, .. } => of_io(source).1,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::PathTooLong { .. } => Some("start offshootd with a shorter --run-dir".into()),
            Self::Make { .. } => None,
        }
    }
}

/// The directory of one sandbox; removed with all it holds when dropped.
#[derive(Debug)]
pub struct SandboxDir {
    path: PathBuf,
}

impl SandboxDir {
    /// Makes `<run_dir>/sandboxes/<id>` (0700), its listening socket and its log.
    ///
    /// Cost: one `mkdir`, `socket`, `bind`, `listen` and `open`.
    ///
    /// # Errors
    /// Fails where the path is too long for a socket or the host refuses; nothing is left behind.
    pub fn create(run_dir: &Path, id: &str) -> Result<(Self, ChildResources), ResourceError> {
        let path = run_dir.join("sandboxes").join(id);
        let socket = path.join(VSOCK);
        if socket.as_os_str().len() > MAX_SOCKET_PATH_BYTES {
            return Err(ResourceError::PathTooLong { path: socket });
        }
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.map_err(|source| ResourceError::Make { what: "directory", path: path.clone(), source })?;
        let dir = Self { path };
        let listener = UnixListener::bind(&socket);
        let listener =
            listener.map_err(|source| ResourceError::Make { what: "socket", path: socket, source })?;
        let log = dir.open(CONSOLE, false)?;
        Ok((dir, ChildResources { vsock: listener.into(), log: log.into() }))
    }

    /// A new file for what the VMM program prints.
    ///
    /// # Errors
    /// Fails where the host refuses.
    pub fn stderr(&self) -> Result<OwnedFd, ResourceError> {
        self.open(STDERR, true).map(OwnedFd::from)
    }

    /// The console is not opened for appending: the VMM writes at offsets of its own to bound the file.
    fn open(&self, name: &str, append: bool) -> Result<File, ResourceError> {
        let path = self.path.join(name);
        let mut options = OpenOptions::new();
        options.read(true).write(true).append(append).create_new(true).mode(0o600);
        let file = options.open(&path);
        file.map_err(|source| ResourceError::Make { what: "file", path, source })
    }

    /// Where the sandbox's hybrid vsock listens.
    pub fn vsock_path(&self) -> PathBuf {
        self.path.join(VSOCK)
    }

    /// Removes the socket alone: nothing answers there any more, but the console stays readable.
    pub fn close_vsock(&self) {
        // Absent where the sandbox's end was noticed twice.
        let _ = fs::remove_file(self.vsock_path());
    }

    /// The last `max_bytes` of the console.
    ///
    /// # Errors
    /// Fails where the log cannot be read.
    pub fn console_tail(&self, max_bytes: u64) -> io::Result<Vec<u8>> {
        tail(&self.path.join(CONSOLE), max_bytes)
    }

    /// The last `count` lines with text of console and VMM output, for an error message.
    pub fn last_words(&self, count: usize) -> String {
        let read = |name| tail(&self.path.join(name), 4096).unwrap_or_default();
        let mut lines = last_lines(&read(CONSOLE), count);
        lines.extend(last_lines(&read(STDERR), count));
        lines.join("\n")
    }
}

impl Drop for SandboxDir {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove a sandbox's directory");
        }
    }
}

fn tail(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(max_bytes)))?;
    let mut bytes = Vec::new();
    file.take(max_bytes).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The last lines that hold text; what a terminal would act on is left out.
fn last_lines(bytes: &[u8], count: usize) -> Vec<String> {
    let text = String::from_utf8_lossy(bytes);
    let clean = |line: &str| line.chars().filter(|c| !c.is_control()).take(300).collect::<String>();
    let mut lines: Vec<String> =
        text.lines().rev().map(clean).filter(|line| !line.trim().is_empty()).take(count).collect();
    lines.reverse();
    lines
}

/// Makes `<run_dir>/sandboxes` (0700) and removes what a daemon that has gone left there.
///
/// To be called by the only daemon of `run_dir`: the sandboxes of an earlier one ended when their control sockets
/// closed.
///
/// # Errors
/// Fails where the host refuses.
pub fn prepare_run_dir(run_dir: &Path) -> Result<(), ResourceError> {
    let path = run_dir.join("sandboxes");
    let make = |source| ResourceError::Make { what: "directory", path: path.clone(), source };
    DirBuilder::new().mode(0o700).recursive(true).create(&path).map_err(make)?;
    for entry in fs::read_dir(&path).map_err(make)? {
        let stale = entry.map_err(make)?.path();
        tracing::info!(path = %stale.display(), "removing what an earlier daemon left");
        let removed = if stale.is_dir() { fs::remove_dir_all(&stale) } else { fs::remove_file(&stale) };
        removed.map_err(|source| ResourceError::Make { what: "room for", path: stale, source })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_sandbox_directory_is_private_and_goes_with_its_owner() {
        let run = tempfile::tempdir().unwrap();
        prepare_run_dir(run.path()).unwrap();
        let (dir, _resources) = SandboxDir::create(run.path(), "a").unwrap();
        let path = run.path().join("sandboxes/a");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(dir.vsock_path().exists());
        drop(dir);
        assert!(!path.exists());
    }

    #[test]
    fn leftovers_of_an_earlier_daemon_are_removed() {
        let run = tempfile::tempdir().unwrap();
        prepare_run_dir(run.path()).unwrap();
        let (dir, _resources) = SandboxDir::create(run.path(), "old").unwrap();
        std::mem::forget(dir);
        prepare_run_dir(run.path()).unwrap();
        assert_eq!(fs::read_dir(run.path().join("sandboxes")).unwrap().count(), 0);
    }

    #[test]
    fn a_path_too_long_for_a_socket_is_named_and_leaves_nothing() {
        let run = tempfile::tempdir().unwrap();
        let long = run.path().join("x".repeat(100));
        prepare_run_dir(&long).unwrap();
        let error = SandboxDir::create(&long, "a").unwrap_err();
        assert_eq!(error.code(), "run_dir_too_long");
        assert_eq!(fs::read_dir(long.join("sandboxes")).unwrap().count(), 0);
    }

    #[test]
    fn last_lines_leave_out_control_characters_and_empty_lines() {
        let lines = last_lines(b"one\n\x1b[2Jtwo\r\n\n \nthree\n", 2);
        assert_eq!(lines, ["[2Jtwo", "three"]);
    }
}
