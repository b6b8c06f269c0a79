//! The kernel's own file systems.

use std::ffi::CString;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};

use super::InitError;

struct Mount {
    kind: &'static str,
    target: &'static str,
    flags: MountFlags,
    options: &'static [&'static str],
}

const NO_EXEC: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);
const NO_SUID: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);

const EARLY: &[Mount] = &[
    Mount { kind: "proc", target: "/proc", flags: NO_EXEC, options: &[""] },
    Mount { kind: "sysfs", target: "/sys", flags: NO_EXEC, options: &[""] },
    Mount { kind: "devtmpfs", target: "/dev", flags: MountFlags::NOSUID, options: &["mode=0755"] },
];

/// Each with its options, the first that the kernel takes. `favordynmods` (Linux 6.0) makes moving a process into a
/// cgroup cheap, which each started command does.
const LATE: &[Mount] = &[
    Mount {
        kind: "devpts",
        target: "/dev/pts",
        flags: MountFlags::NOSUID.union(MountFlags::NOEXEC),
        options: &["gid=5,mode=0620,ptmxmode=0666"],
    },
    Mount { kind: "tmpfs", target: "/dev/shm", flags: NO_SUID, options: &["mode=1777"] },
    Mount { kind: "tmpfs", target: "/run", flags: NO_SUID, options: &["mode=0755"] },
    Mount {
        kind: "cgroup2",
        target: crate::cgroup::MOUNT_POINT,
        flags: NO_EXEC,
        options: &["favordynmods", ""],
    },
];

/// Only where the image has no directory of its own: files there should go to its disk.
const TMP: Mount = Mount { kind: "tmpfs", target: "/tmp", flags: NO_SUID, options: &["mode=1777"] };

/// What udev would link, and shells rely on.
const LINKS: &[(&str, &str)] = &[
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
];

/// Mounts what the initramfs needs.
///
/// # Errors
/// The first that fails.
pub fn mount_early() -> Result<(), InitError> {
    EARLY.iter().try_for_each(mount_one)
}

/// Mounts the rest, in the final root; answers with what failed, in words.
pub fn mount_late() -> Vec<String> {
    let no_tmp = !Path::new(TMP.target).is_dir();
    let mounts = LATE.iter().chain(no_tmp.then_some(&TMP));
    let mut failures: Vec<String> = mounts
        .filter_map(|mount| mount_one(mount).err())
        .map(|error| {
            format!(
                "{error}: {}",
                std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default()
            )
        })
        .collect();
    for (target, link) in LINKS {
        match symlink(target, link) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                failures.push(format!("{link} could not be linked: {error}"));
            }
            _ => {}
        }
    }
    failures
}

fn mount_one(what: &Mount) -> Result<(), InitError> {
    let failed = |source: std::io::Error| InitError::Mount {
        kind: what.kind.to_owned(),
        target: what.target.into(),
        source,
    };
    if !Path::new(what.target).is_dir() {
        fs::create_dir_all(what.target).map_err(failed)?;
        // The umask of PID 1 is the kernel's.
        let _ = fs::set_permissions(what.target, fs::Permissions::from_mode(0o755));
    }
    let mut last = Errno::INVAL;
    for options in what.options {
        let options = CString::new(*options).expect("mount options hold no zero byte");
        match mount(what.kind, what.target, what.kind, what.flags, Some(options.as_c_str())) {
            // The kernel has mounted devtmpfs itself.
            Ok(()) | Err(Errno::BUSY) => return Ok(()),
            Err(error) => last = error,
        }
    }
    Err(failed(last.into()))
}
