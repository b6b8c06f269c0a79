//! Debian root file systems as raw ext4 disks.
//!
//! debootstrap makes the tree, a few trims make it small and free of identity, and `mke2fs -d` packs it without a
//! mount. The disk is sparse and has no journal: its writes land in an overlay in host memory, where a journal would be
//! written twice and replayed never.
//!
//! The cache key is what is asked for, the recipe below, and the date of the Debian release as the host's package lists
//! have it. So a rebuild happens when the question or Debian's point release changes, and finding a disk again needs no
//! network. Which package versions went in is recorded beside the disk, in `packages.txt`.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::cache::{Cache, CacheError, io};
use crate::digest;
use crate::progress::Reporter;
use crate::tool::{Tool, ToolError};

/// Changes when the tree or the disk is made differently.
const RECIPE: u32 = 1;
/// Smallest and largest disk, MiB.
const DISK_MIB: std::ops::RangeInclusive<u32> = 256..=65_536;
/// Part of a disk that file system metadata may take, and then some room to work in.
const HEADROOM_MIB: u64 = 64;
/// What no sandbox reads, relative to the root.
const TRIMMED: [&str; 10] = [
    "var/lib/apt/lists",
    "var/cache/apt",
    "var/cache/debconf",
    "var/log",
    "usr/share/doc",
    "usr/share/man",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/lintian",
    "tmp",
];

/// Why there is no root file system.
#[derive(Debug, thiserror::Error)]
pub enum RootfsError {
    /// A tool failed.
    #[error(transparent)]
    Tool(#[from] ToolError),
    /// The cache failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// debootstrap needs `chroot` and `mknod`.
    #[error(
        "building a root file system with debootstrap needs root; run as root or import a finished image"
    )]
    NotRoot,
    /// A name that could not be a package's.
    #[error("{name:?} is not a Debian package name")]
    PackageName {
        /// The name.
        name: String,
    },
    /// A disk size out of bounds.
    #[error("a disk of {disk_mib} MiB is outside {} to {} MiB", DISK_MIB.start(), DISK_MIB.end())]
    DiskSize {
        /// The size asked for, MiB.
        disk_mib: u32,
    },
    /// The tree does not fit.
    #[error(
        "the packages take {tree_mib} MiB, a disk of {disk_mib} MiB is too small; ask for at least {need_mib} MiB"
    )]
    TooSmall {
        /// Size of the tree, MiB.
        tree_mib: u64,
        /// Size asked for, MiB.
        disk_mib: u32,
        /// What would do, MiB.
        need_mib: u64,
    },
}

/// What a root file system shall have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RootfsSpec {
    /// Debian release, such as `bookworm`.
    pub suite: String,
    /// Debian mirror; `None`: the one debootstrap knows.
    pub mirror: Option<String>,
    /// Packages beyond debootstrap's minimal set.
    pub packages: Vec<String>,
    /// Size of the disk, MiB.
    pub disk_mib: u32,
    /// Host name until the agent sets another.
    pub hostname: String,
    /// An ordinary user (id 1000) to make, with a home directory.
    pub user: Option<String>,
}

impl RootfsSpec {
    /// Debian 12 with `packages`, on a disk of `disk_mib` MiB, with the user `user`.
    pub fn bookworm(packages: &[&str], disk_mib: u32) -> Self {
        Self {
            suite: "bookworm".to_owned(),
            mirror: None,
            packages: packages.iter().map(|&name| name.to_owned()).collect(),
            disk_mib,
            hostname: "sandbox".to_owned(),
            user: Some("user".to_owned()),
        }
    }

    fn check(&self) -> Result<(), RootfsError> {
        let good = |name: &str| {
            let mut bytes = name.bytes();
            bytes.next().is_some_and(|first| first.is_ascii_lowercase() || first.is_ascii_digit())
                && bytes.all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"+-.".contains(&b))
        };
        if let Some(name) = self.packages.iter().find(|name| !good(name)) {
            return Err(RootfsError::PackageName { name: name.clone() });
        }
        if !DISK_MIB.contains(&self.disk_mib) {
            return Err(RootfsError::DiskSize { disk_mib: self.disk_mib });
        }
        Ok(())
    }

    /// The cache key, given the release's date.
    fn key(&self, release_date: &str) -> String {
        let mut sorted = self.clone();
        sorted.packages.sort();
        sorted.packages.dedup();
        digest::key_of(&(RECIPE, sorted, release_date))
    }
}

/// A root file system in the cache.
#[derive(Debug, Clone)]
pub struct Rootfs {
    dir: PathBuf,
}

impl Rootfs {
    /// The raw ext4 disk.
    pub fn disk(&self) -> PathBuf {
        self.dir.join("rootfs.raw")
    }

    /// List of `name version` of each package in it.
    pub fn packages(&self) -> PathBuf {
        self.dir.join("packages.txt")
    }
}

/// The root file system `spec` asks for, from `cache` or newly made.
///
/// # Errors
/// Fails on a bad `spec`, without root, where a tool fails (with its last lines), and where the disk is too small.
pub fn debian(spec: &RootfsSpec, cache: &Cache, report: &mut Reporter<'_>) -> Result<Rootfs, RootfsError> {
    spec.check()?;
    let key = spec.key(&release_date(Path::new("/var/lib/apt/lists"), &spec.suite));
    let dir = cache.entry("rootfs", &key, |staging| build(spec, staging, report))?;
    Ok(Rootfs { dir })
}

/// Date of the release as the host's package lists have it; empty where they do not know the release.
fn release_date(lists: &Path, suite: &str) -> String {
    let suffix = format!("_dists_{suite}_InRelease");
    let Ok(entries) = fs::read_dir(lists) else {
        return String::new();
    };
    let mut dates: Vec<String> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().ends_with(&suffix))
        .filter_map(|entry| fs::read_to_string(entry.path()).ok())
        .filter(|text| text.contains("\nOrigin: Debian\n"))
        .filter_map(|text| text.lines().find_map(|line| line.strip_prefix("Date: ")).map(str::to_owned))
        .collect();
    dates.sort();
    dates.pop().unwrap_or_default()
}

fn build(spec: &RootfsSpec, staging: &Path, report: &mut Reporter<'_>) -> Result<(), RootfsError> {
    if !rustix::process::geteuid().is_root() {
        return Err(RootfsError::NotRoot);
    }
    let work = tempfile::tempdir_in(staging).map_err(io("create a directory in", staging))?;
    let tree = work.path().join("tree");
    bootstrap(spec, &tree, report)?;
    report.say("recording packages");
    let mut query = chroot(&tree);
    query.command().args(["dpkg-query", "-W", "-f", "${Package} ${Version}\n"]);
    let list = staging.join("packages.txt");
    fs::write(&list, query.output()?).map_err(io("write", &list))?;
    configure(spec, &tree, report)?;
    trim(&tree)?;
    pack(spec, &tree, &staging.join("rootfs.raw"), report)?;
    work.close().map_err(io("remove a temporary directory in", staging))?;
    Ok(())
}

fn bootstrap(spec: &RootfsSpec, tree: &Path, report: &mut Reporter<'_>) -> Result<(), RootfsError> {
    let mut tool = Tool::in_mount_namespace("debootstrap", "debootstrap").limit(Duration::from_secs(20 * 60));
    tool.command().arg("--variant=minbase");
    if !spec.packages.is_empty() {
        tool.command().arg(format!("--include={}", spec.packages.join(",")));
    }
    tool.command().arg(&spec.suite).arg(tree).args(&spec.mirror);
    tool.run(&mut |line| report.say(line.strip_prefix("I: ").unwrap_or(line)))?;
    Ok(())
}

/// Gives the tree its user and names, and compiles what Python will import: guests may run at a fraction of the host's
/// speed.
fn configure(spec: &RootfsSpec, tree: &Path, report: &mut Reporter<'_>) -> Result<(), RootfsError> {
    if let Some(user) = &spec.user {
        let mut add = chroot(tree);
        add.command().args(["useradd", "--create-home", "--uid", "1000", "--shell", "/bin/bash", user]);
        add.output()?;
    }
    let files = [
        ("etc/hostname", format!("{}\n", spec.hostname)),
        ("etc/hosts", format!("127.0.0.1 localhost\n127.0.1.1 {}\n::1 localhost\n", spec.hostname)),
        ("etc/fstab", String::new()),
        ("etc/resolv.conf", String::new()),
    ];
    for (name, text) in files {
        let path = tree.join(name);
        fs::write(&path, text).map_err(io("write", &path))?;
    }
    if tree.join("usr/bin/python3").exists() {
        report.say("compiling Python's modules");
        let mut compile = chroot(tree);
        // Debian ships a few modules that are meant for other versions and do not compile; -q says so and status 1
        // follows, hence the shell's "or true".
        let script = "python3 -m compileall -q /usr/lib/python3 /usr/lib/python3.* || true";
        compile.command().args(["sh", "-c", script]);
        compile.output()?;
    }
    Ok(())
}

/// Empties what no sandbox reads and removes what would make clones alike.
fn trim(tree: &Path) -> Result<(), RootfsError> {
    for name in TRIMMED {
        let dir = tree.join(name);
        let Ok(entries) = fs::read_dir(&dir) else { continue };
        for entry in entries {
            let path = entry.map_err(io("read", &dir))?.path();
            let removed = if path.is_dir() && !path.is_symlink() {
                fs::remove_dir_all(&path)
            } else {
                fs::remove_file(&path)
            };
            removed.map_err(io("remove", &path))?;
        }
    }
    // apt wants this one to exist.
    let partial = tree.join("var/cache/apt/archives/partial");
    fs::create_dir_all(&partial).map_err(io("create", &partial))?;
    for name in ["etc/machine-id", "var/lib/dbus/machine-id", "var/lib/systemd/random-seed"] {
        let path = tree.join(name);
        if let Err(source) = fs::remove_file(&path)
            && source.kind() != std::io::ErrorKind::NotFound
        {
            return Err(io("remove", &path)(source).into());
        }
    }
    Ok(())
}

/// Packs the tree into a sparse ext4 disk.
fn pack(spec: &RootfsSpec, tree: &Path, disk: &Path, report: &mut Reporter<'_>) -> Result<(), RootfsError> {
    let tree_mib = stored_bytes(tree)?.div_ceil(1 << 20);
    // ext4 keeps about one part in fifty for inode tables.
    let need_mib = tree_mib + tree_mib / 8 + HEADROOM_MIB;
    if need_mib > u64::from(spec.disk_mib) {
        return Err(RootfsError::TooSmall { tree_mib, disk_mib: spec.disk_mib, need_mib });
    }
    report.say("making the ext4 disk");
    // Nothing in the file system's own data may differ between two builds: uuid and hash seed are fixed, and the
    // inode tables are initialised now, or every clone's kernel would write them.
    let options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard,root_owner=0:0,\
                   hash_seed=6f666673-686f-6f74-8000-000000000001";
    let mut tool = Tool::new("mke2fs", "e2fsprogs");
    tool.command()
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-L", "offshoot"])
        .args(["-O", "^has_journal,^resize_inode", "-U", "6f666673-686f-6f74-8000-000000000000"])
        .args(["-E", options, "-d"])
        .arg(tree)
        .arg(disk)
        .arg(format!("{}M", spec.disk_mib));
    tool.output()?;
    // A layer is never written again.
    fs::set_permissions(disk, fs::Permissions::from_mode(0o444)).map_err(io("set permissions of", disk))?;
    Ok(())
}

/// A command run inside `tree`.
fn chroot(tree: &Path) -> Tool {
    let mut tool = Tool::new("chroot", "coreutils");
    tool.command().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("HOME", "/root").arg(tree);
    tool
}

/// Bytes that the files and directories below `dir` take, in 4 KiB blocks.
fn stored_bytes(dir: &Path) -> Result<u64, CacheError> {
    let mut bytes = 0;
    for entry in fs::read_dir(dir).map_err(io("read", dir))? {
        let path = entry.map_err(io("read", dir))?.path();
        let metadata = fs::symlink_metadata(&path).map_err(io("read", &path))?;
        if metadata.is_dir() {
            bytes += 4096 + stored_bytes(&path)?;
        } else if metadata.is_file() {
            bytes += metadata.size().next_multiple_of(4096) / metadata.nlink().max(1);
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_ignores_order_and_sees_everything_else() {
        let spec = RootfsSpec::bookworm(&["python3", "procps"], 1024);
        let key = spec.key("today");
        assert_eq!(RootfsSpec::bookworm(&["procps", "python3", "procps"], 1024).key("today"), key);
        assert_ne!(RootfsSpec::bookworm(&["procps"], 1024).key("today"), key);
        assert_ne!(RootfsSpec::bookworm(&["python3", "procps"], 1025).key("today"), key);
        assert_ne!(spec.key("tomorrow"), key);
    }

    #[test]
    fn bad_requests_are_named_before_any_work() {
        for name in ["", "-x", "a b", "a,b", "Python", "$(x)"] {
            let error = RootfsSpec::bookworm(&[name], 1024).check().unwrap_err();
            assert!(error.to_string().contains(&format!("{name:?}")), "{error}");
        }
        assert!(RootfsSpec::bookworm(&["libstdc++6", "python3.11"], 1024).check().is_ok());
        assert!(matches!(RootfsSpec::bookworm(&[], 1).check(), Err(RootfsError::DiskSize { disk_mib: 1 })));
    }

    #[test]
    fn the_release_date_is_debians_own() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(release_date(dir.path(), "bookworm"), "");
        let list = "-----BEGIN\n\nOrigin: Debian\nDate: Sat, 17 May 2025\n";
        fs::write(dir.path().join("mirror_debian_dists_bookworm_InRelease"), list).unwrap();
        let other = "-----BEGIN\n\nOrigin: Someone\nDate: Zzz\n";
        fs::write(dir.path().join("else.where_x_dists_bookworm_InRelease"), other).unwrap();
        assert_eq!(release_date(dir.path(), "bookworm"), "Sat, 17 May 2025");
        assert_eq!(release_date(dir.path(), "trixie"), "");
    }

    #[test]
    fn a_tree_that_does_not_fit_says_what_would() {
        let dir = tempfile::tempdir().unwrap();
        fs::File::create(dir.path().join("big")).unwrap().set_len(300 << 20).unwrap();
        let mut ignore = |_: crate::Progress<'_>| {};
        let mut report = Reporter::new(1, &mut ignore);
        let spec = RootfsSpec::bookworm(&[], 256);
        let error = pack(&spec, dir.path(), &dir.path().join("disk"), &mut report).unwrap_err();
        assert!(error.to_string().contains("at least 401 MiB"), "{error}");
    }
}
