//! Builds a real image: needs root, Debian's archive and a few minutes, hence only on demand:
//! `cargo test -p offshoot-image --test debian -- --ignored`.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;

use offshoot_image::{Cache, DebianSpec, Image};

/// An x86-64 ELF header and nothing else: enough for an initramfs that nobody boots.
fn agent(dir: &Path) -> std::path::PathBuf {
    let mut elf = vec![0u8; 64];
    elf[..4].copy_from_slice(b"\x7fELF");
    elf[18] = 62;
    let path = dir.join("agent");
    std::fs::write(&path, elf).unwrap();
    path
}

fn debugfs(disk: &Path, request: &str) -> String {
    let output = Command::new("debugfs").args(["-R", request]).arg(disk).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
#[ignore = "needs root, Debian's archive and minutes"]
fn a_debian_image_is_whole_and_found_again() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::new(dir.path().join("cache"));
    let agent = agent(dir.path());
    let spec = DebianSpec { packages: Vec::new(), disk_mib: 1024 };
    let mut steps = Vec::new();
    let image =
        Image::build_debian(&spec, &agent, &cache, &mut |progress| steps.push(progress.step)).unwrap();
    steps.dedup();
    assert_eq!(steps, ["kernel", "initramfs", "rootfs", "image"]);
    image.verify().unwrap();
    assert_eq!(image.manifest().disk_mib, 1024);
    assert!(image.vmlinuz().is_some());

    let disk = image.rootfs();
    let check = Command::new("e2fsck").args(["-f", "-n"]).arg(&disk).output().unwrap();
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));
    assert!(debugfs(&disk, "stat /home/user").contains("User:  1000"));
    assert!(debugfs(&disk, "stat /etc/machine-id").contains("File not found"));
    assert!(
        debugfs(&disk, "ls /usr/lib/python3.11/__pycache__").contains("json") || {
            debugfs(&disk, "stat /usr/lib/python3.11/json/__pycache__/decoder.cpython-311.pyc")
                .contains("Inode:")
        }
    );

    let started = std::time::Instant::now();
    let again = Image::build_debian(&spec, &agent, &cache, &mut |_| {}).unwrap();
    assert_eq!(again.dir(), image.dir());
    println!("found again in {:.1} s", started.elapsed().as_secs_f64());

    let unknown = DebianSpec { packages: vec!["no-such-package-anywhere".to_owned()], disk_mib: 1024 };
    let error = Image::build_debian(&unknown, &agent, &cache, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("no-such-package-anywhere"), "{error}");
    let left = std::fs::read_dir(cache.root().join("rootfs")).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().starts_with(".staging")), "{left:?}");
}
