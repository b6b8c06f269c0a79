//! Mounts, modules, the change of root, and what a settled machine has.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::mount::{MountFlags, mount, mount_move};
use rustix::process::{Resource, Rlimit, setrlimit};
use xtask::lab_protocol::Job;

/// How long a device may take to appear.
const DEVICE_WAIT: Duration = Duration::from_secs(20);
/// Where the new root is put together.
const NEW: &str = "/new";
/// Descriptors that a process in the lab may have.
const OPEN_FILES: u64 = 65_536;

/// The file systems that everything else needs.
pub fn mount_early() -> Result<()> {
    mount_at("proc", "proc", "/proc", "")?;
    mount_at("sysfs", "sysfs", "/sys", "")?;
    mount_at("devtmpfs", "devtmpfs", "/dev", "mode=0755")
}

/// Loads the modules in `/modules`, in their order.
pub fn load_modules() -> Result<()> {
    let order = fs::read_to_string("/modules/order").context("could not read /modules/order")?;
    for path in order.lines() {
        let file = File::open(path).with_context(|| format!("could not open {path}"))?;
        match rustix::system::finit_module(&file, c"", 0) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            // A machine without the device or the feature does without the module; the tests say what they miss.
            Err(errno) => eprintln!("lab-init: {path} was not loaded: {errno}"),
        }
    }
    Ok(())
}

/// Puts the root together (read-only disk, writable memory over it, the shares) and enters it.
pub fn enter_root(job: &Job) -> Result<()> {
    wait_for_device("/dev/vda")?;
    mount_with("/dev/vda", "ext4", "/lower", MountFlags::RDONLY | MountFlags::NOATIME, "")?;
    mount_at("tmpfs", "tmpfs", "/upper", &format!("size={}m", job.tmpfs_mib))?;
    for dir in ["/upper/data", "/upper/work"] {
        make_dir(Path::new(dir))?;
    }
    mount_at("overlay", "overlay", NEW, "lowerdir=/lower,upperdir=/upper/data,workdir=/upper/work")?;
    for share in &job.shares {
        let inside = Path::new(NEW).join(share.path.strip_prefix("/").unwrap_or(&share.path));
        mount_at(&share.tag, "virtiofs", &inside.to_string_lossy(), "")?;
    }
    for dir in ["/proc", "/sys", "/dev"] {
        let inside = format!("{NEW}{dir}");
        make_dir(Path::new(&inside))?;
        mount_move(dir, &inside).with_context(|| format!("could not move {dir} to the new root"))?;
    }
    std::env::set_current_dir(NEW).context("could not enter the new root")?;
    mount_move(".", "/").context("could not move the new root to /")?;
    rustix::process::chroot(".").context("could not change the root")?;
    std::env::set_current_dir("/").context("could not enter /")
}

/// What programs expect of a machine.
pub fn settle(job: &Job) -> Result<()> {
    let size = format!("size={}m", job.tmpfs_mib);
    mount_at("tmpfs", "tmpfs", "/run", "mode=0755")?;
    // A share may lie in /tmp, which must not be hidden then.
    if !job.shares.iter().any(|share| share.path.starts_with("/tmp")) {
        mount_at("tmpfs", "tmpfs", "/tmp", &format!("{size},mode=1777"))?;
    }
    mount_at("tmpfs", "tmpfs", "/dev/shm", &format!("{size},mode=1777"))?;
    mount_at("devpts", "devpts", "/dev/pts", "mode=0620,ptmxmode=0666")?;
    mount_at("cgroup2", "cgroup2", "/sys/fs/cgroup", "")?;
    link("/proc/self/fd", "/dev/fd")?;
    link("/proc/self/fd/0", "/dev/stdin")?;
    link("/proc/self/fd/1", "/dev/stdout")?;
    link("/proc/self/fd/2", "/dev/stderr")?;
    if let Some(version) = job.modules_dir.file_name() {
        make_dir(Path::new("/lib/modules"))?;
        link(&job.modules_dir.to_string_lossy(), &Path::new("/lib/modules").join(version).to_string_lossy())?;
    }
    for device in ["/dev/kvm", "/dev/net/tun", "/dev/vhost-vsock"] {
        match fs::set_permissions(device, fs::Permissions::from_mode(0o666)) {
            Err(error) if error.kind() != ErrorKind::NotFound => eprintln!("lab-init: {device}: {error}"),
            _ => {}
        }
    }
    rustix::system::sethostname(b"lab").context("could not set the host name")?;
    setrlimit(Resource::Nofile, Rlimit { current: Some(OPEN_FILES), maximum: Some(OPEN_FILES) })
        .context("could not raise the limit of open files")?;
    let unlimited = Rlimit { current: None, maximum: None };
    setrlimit(Resource::Nproc, unlimited).context("could not raise the limit of processes")?;
    setrlimit(Resource::Memlock, unlimited).context("could not raise the limit of locked memory")?;
    for (setting, value) in [
        // Many VMMs of many threads each, mapping many pieces.
        ("/proc/sys/vm/max_map_count", "1048576"),
        ("/proc/sys/kernel/pid_max", "131072"),
        ("/proc/sys/kernel/threads-max", "131072"),
    ] {
        fs::write(setting, value).with_context(|| format!("could not set {setting}"))?;
    }
    match std::process::Command::new("/sbin/ip").args(["link", "set", "lo", "up"]).status() {
        Ok(status) if status.success() => Ok(()),
        other => bail!("could not bring up the loopback interface: {other:?}"),
    }
}

fn mount_at(source: &str, kind: &str, target: &str, options: &str) -> Result<()> {
    mount_with(source, kind, target, MountFlags::empty(), options)
}

fn mount_with(source: &str, kind: &str, target: &str, flags: MountFlags, options: &str) -> Result<()> {
    make_dir(Path::new(target))?;
    let data = std::ffi::CString::new(options).context("mount options with a NUL byte")?;
    mount(source, target, kind, flags, data.as_c_str())
        .with_context(|| format!("could not mount {kind} {source} on {target}"))
}

fn make_dir(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("could not create {}", path.display()))
}

fn link(to: &str, at: &str) -> Result<()> {
    match std::os::unix::fs::symlink(to, at) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            Err(error).with_context(|| format!("could not link {at}"))
        }
        _ => Ok(()),
    }
}

fn wait_for_device(path: &str) -> Result<()> {
    let deadline = Instant::now() + DEVICE_WAIT;
    while !fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_block_device()) {
        if Instant::now() >= deadline {
            bail!("{path} did not appear in {} s", DEVICE_WAIT.as_secs());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}
