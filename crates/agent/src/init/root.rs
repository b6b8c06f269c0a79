//! The root file system of the image.

use std::ffi::CString;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, mount_move};

use super::InitError;

const NEW_ROOT: &str = "/newroot";
const DEVICE_LIMIT: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(10);
/// Mounted already, and wanted in the new root.
const MOVED: &[&str] = &["proc", "sys", "dev"];

/// Waits until the block device `device` is there.
///
/// # Errors
/// After ten seconds.
pub fn wait_for(device: &Path) -> Result<(), InitError> {
    let begin = Instant::now();
    while !fs::metadata(device).is_ok_and(|metadata| metadata.file_type().is_block_device()) {
        if begin.elapsed() > DEVICE_LIMIT {
            let seconds = DEVICE_LIMIT.as_secs();
            return Err(InitError::NoRootDevice { device: device.to_owned(), seconds });
        }
        std::thread::sleep(POLL);
    }
    Ok(())
}

/// Mounts `device` for writing, with discard where file system and device have it: blocks that are freed leave the
/// overlay.
///
/// # Errors
/// As `mount(2)`.
pub fn mount(device: &Path, kind: &str) -> Result<(), InitError> {
    let failed = |source: std::io::Error| InitError::Mount {
        kind: format!("{kind} from {}", device.display()),
        target: "/".into(),
        source,
    };
    fs::create_dir_all(NEW_ROOT).map_err(failed)?;
    let attempt = |options: &str| {
        let options = CString::new(options).expect("mount options hold no zero byte");
        rustix::mount::mount(device, NEW_ROOT, kind, MountFlags::empty(), Some(options.as_c_str()))
    };
    attempt("discard").or_else(|_| attempt("")).map_err(|error| failed(error.into()))
}

/// Moves what is mounted into the new root, frees the initramfs's memory, and makes the new root the root.
///
/// # Errors
/// The step that fails.
pub fn switch() -> Result<(), InitError> {
    let step =
        |step: &'static str| move |error: rustix::io::Errno| InitError::Switch { step, source: error.into() };
    let old_device = fs::metadata("/").map_err(|source| InitError::Switch { step: "stat", source })?.dev();
    for name in MOVED {
        let target = Path::new(NEW_ROOT).join(name);
        if !target.is_dir() {
            fs::create_dir(&target)
                .map_err(|source| InitError::Switch { step: "make mount points", source })?;
        }
        mount_move(Path::new("/").join(name), target).map_err(step("move mounts"))?;
    }
    rustix::process::chdir(NEW_ROOT).map_err(step("enter"))?;
    empty(Path::new("/"), old_device);
    mount_move(".", "/").map_err(step("move the root"))?;
    rustix::process::chroot(".").map_err(step("change root"))?;
    rustix::process::chdir("/").map_err(step("enter"))
}

/// Removes all that is on the file system `device` below `directory`; what cannot be removed costs memory, no more.
fn empty(directory: &Path, device: u64) {
    let Ok(entries) = fs::read_dir(directory) else {
        return;
    };
    for entry in entries.flatten() {
        let path = entry.path();
        let Ok(metadata) = fs::symlink_metadata(&path) else {
            continue;
        };
        if metadata.dev() != device {
            continue;
        }
        if metadata.is_dir() {
            empty(&path, device);
            let _ = fs::remove_dir(&path);
        } else {
            let _ = fs::remove_file(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn emptying_stays_on_its_file_system() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir_all(directory.path().join("a/b")).unwrap();
        fs::write(directory.path().join("a/b/c"), "x").unwrap();
        std::os::unix::fs::symlink("/", directory.path().join("link")).unwrap();
        let device = fs::metadata(directory.path()).unwrap().dev();
        empty(directory.path(), device + 1);
        assert!(directory.path().join("a/b/c").exists());
        empty(directory.path(), device);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        assert!(Path::new("/etc").exists());
    }
}
