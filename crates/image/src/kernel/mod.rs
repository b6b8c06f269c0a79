//! Debian's cloud kernel, taken from its package.
//!
//! The package is found through the host's apt, so that the kernel follows the host's Debian release and its security
//! updates; nothing is installed. An entry of the cache holds `vmlinuz`, `vmlinux`, `config`, `kernel.json` and
//! `lib/modules/VERSION` with its depmod index.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::cache::{Cache, CacheError, io};
use crate::digest;
use crate::progress::Reporter;
use crate::tool::{Tool, ToolError};

pub mod bzimage;

use bzimage::BzImageError;

/// Debian's package that always depends on the newest cloud kernel.
const META_PACKAGE: &str = "linux-image-cloud-amd64";
/// Changes when an entry's layout or making does.
const RECIPE: u32 = 1;
/// Options without which a kernel cannot run as a guest whose root is ext4.
const NEEDED_BUILT_IN: [&str; 3] = ["CONFIG_EXT4_FS=y", "CONFIG_BLK_DEV_INITRD=y", "CONFIG_DEVTMPFS=y"];

/// Why there is no kernel.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// A tool failed.
    #[error(transparent)]
    Tool(#[from] ToolError),
    /// The cache failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The archive knows no such package.
    #[error("apt knows no {META_PACKAGE}; run: apt-get update (Debian 12 or newer, amd64)")]
    Unresolved,
    /// The package does not hold what it should.
    #[error("package {package} holds no {what}")]
    Incomplete {
        /// The package.
        package: String,
        /// What is missing.
        what: String,
    },
    /// The kernel image cannot be taken apart.
    #[error("could not extract the ELF kernel from {path}")]
    Extract {
        /// The bzImage.
        path: PathBuf,
        /// Why.
        source: BzImageError,
    },
    /// What a cache entry says of itself is unreadable.
    #[error("{path} is not a kernel description; remove its directory to have it made again")]
    Description {
        /// The file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
}

/// A kernel in the cache.
#[derive(Debug, Clone)]
pub struct Kernel {
    dir: PathBuf,
    description: Description,
}

/// `kernel.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Description {
    /// As `uname -r` says.
    version: String,
    /// Debian package and its version.
    package: Package,
}

/// A package and its version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Package {
    name: String,
    version: String,
}

impl Kernel {
    /// The compressed kernel (bzImage).
    pub fn vmlinuz(&self) -> PathBuf {
        self.dir.join("vmlinuz")
    }

    /// The kernel as an ELF file.
    pub fn vmlinux(&self) -> PathBuf {
        self.dir.join("vmlinux")
    }

    /// Its build configuration.
    pub fn config(&self) -> PathBuf {
        self.dir.join("config")
    }

    /// Its modules, with depmod's index.
    pub fn modules_dir(&self) -> PathBuf {
        self.dir.join("lib/modules").join(&self.description.version)
    }

    /// Version as `uname -r` says.
    pub fn version(&self) -> &str {
        &self.description.version
    }
}

/// The newest cloud kernel that the host's apt knows, from `cache` or from its package.
///
/// # Errors
/// Fails where apt knows no kernel (after one `apt-get update`), the package cannot be downloaded, or it lacks a part.
pub fn debian_cloud(cache: &Cache, report: &mut Reporter<'_>) -> Result<Kernel, KernelError> {
    report.say("looking up Debian's cloud kernel");
    let lists = Path::new("/var/lib/apt/lists");
    if let Some(package) = remembered(cache, lists) {
        return from_package(cache, &package, report);
    }
    if let Some(package) = resolve()? {
        match from_package(cache, &package, report) {
            // A package list from before a security update names a file that the archive no longer has.
            Err(KernelError::Tool(ToolError::Failed { program, .. })) if program == "apt-get" => {}
            other => return other.inspect(|_| remember(cache, lists, &package)),
        }
    }
    report.say("updating the package lists");
    let mut update = Tool::new("apt-get", "apt");
    update.command().args(["update", "-qq"]);
    update.output()?;
    let package = resolve()?.ok_or(KernelError::Unresolved)?;
    from_package(cache, &package, report).inspect(|_| remember(cache, lists, &package))
}

/// What apt answered, and from which state of its lists: asking it takes seconds.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    lists_changed_ns: u128,
    package: Package,
}

/// Where the last answer is.
fn answer_file(cache: &Cache) -> PathBuf {
    cache.root().join("kernel/answer.json")
}

/// When the package lists were last changed, nanoseconds since the Unix epoch; files in there are replaced, not written.
fn changed_ns(lists: &Path) -> Option<u128> {
    let changed = fs::metadata(lists).ok()?.modified().ok()?;
    Some(changed.duration_since(std::time::SystemTime::UNIX_EPOCH).ok()?.as_nanos())
}

/// The last answer, if the package lists are still the same and its kernel is there.
fn remembered(cache: &Cache, lists: &Path) -> Option<Package> {
    let answer: Answer = serde_json::from_slice(&fs::read(answer_file(cache)).ok()?).ok()?;
    let fresh = changed_ns(lists) == Some(answer.lists_changed_ns);
    (fresh && cache.place("kernel", &key_of(&answer.package)).is_dir()).then_some(answer.package)
}

/// Keeps an answer. One that cannot be kept costs the next caller seconds, nothing else.
fn remember(cache: &Cache, lists: &Path, package: &Package) {
    let Some(lists_changed_ns) = changed_ns(lists) else {
        return;
    };
    let answer = Answer { lists_changed_ns, package: package.clone() };
    let write = || -> std::io::Result<()> {
        let path = answer_file(cache);
        let file = tempfile::NamedTempFile::new_in(path.parent().unwrap_or(cache.root()))?;
        serde_json::to_writer(&file, &answer)?;
        file.persist(path)?;
        Ok(())
    };
    let _ = write();
}

fn key_of(package: &Package) -> String {
    digest::key_of(&(RECIPE, &package.name, &package.version))
}

/// The package that the meta package stands for now.
fn resolve() -> Result<Option<Package>, KernelError> {
    let Some(meta) = show(META_PACKAGE)? else {
        return Ok(None);
    };
    let name = field(&meta, "Depends").and_then(|depends| depends.split([' ', ',']).next());
    let Some(name) = name else { return Ok(None) };
    let Some(real) = show(name)? else { return Ok(None) };
    let version = field(&real, "Version");
    Ok(version.map(|version| Package { name: name.to_owned(), version: version.to_owned() }))
}

/// apt's newest record of `package`, if it has one.
fn show(package: &str) -> Result<Option<String>, KernelError> {
    let mut tool = Tool::new("apt-cache", "apt").limit(Duration::from_secs(120));
    tool.command().args(["--no-all-versions", "show", package]);
    match tool.output() {
        Ok(text) => Ok(Some(text)),
        Err(ToolError::Failed { .. }) => Ok(None),
        Err(other) => Err(other.into()),
    }
}

/// The value of `name` in a record of `Name: value` lines.
fn field<'a>(record: &'a str, name: &str) -> Option<&'a str> {
    record.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

fn from_package(cache: &Cache, package: &Package, report: &mut Reporter<'_>) -> Result<Kernel, KernelError> {
    let dir = cache.entry("kernel", &key_of(package), |staging| unpack(staging, package, report))?;
    let path = dir.join("kernel.json");
    let text = fs::read(&path).map_err(io("read", &path))?;
    let description =
        serde_json::from_slice(&text).map_err(|source| KernelError::Description { path, source })?;
    Ok(Kernel { dir, description })
}

/// Fills `staging` from the package.
fn unpack(staging: &Path, package: &Package, report: &mut Reporter<'_>) -> Result<(), KernelError> {
    let work = tempfile::tempdir_in(staging).map_err(io("create a directory in", staging))?;
    report.say(&format!("downloading {} {}", package.name, package.version));
    let mut download = Tool::new("apt-get", "apt");
    download.command().current_dir(work.path()).args(["download", "-q"]);
    download.command().arg(format!("{}={}", package.name, package.version));
    download.output()?;

    let incomplete =
        |what: &str| KernelError::Incomplete { package: package.name.clone(), what: what.to_owned() };
    let deb =
        only_child(work.path(), |name| name.ends_with(".deb"))?.ok_or_else(|| incomplete(".deb file"))?;
    report.say(&format!("unpacking {}", package.name));
    let tree = work.path().join("tree");
    let mut extract = Tool::new("dpkg-deb", "dpkg");
    extract.command().arg("-x").args([&deb, &tree]);
    extract.output()?;

    let boot = tree.join("boot");
    let image = only_child(&boot, |name| name.starts_with("vmlinuz-"))?
        .ok_or_else(|| incomplete("boot/vmlinuz-*"))?;
    let version = image
        .file_name()
        .and_then(|name| name.to_str()?.strip_prefix("vmlinuz-"))
        .unwrap_or_default()
        .to_owned();
    let config = boot.join(format!("config-{version}"));
    let text = fs::read_to_string(&config).map_err(io("read", &config))?;
    if let Some(option) = NEEDED_BUILT_IN.into_iter().find(|option| !text.lines().any(|line| line == *option))
    {
        return Err(incomplete(option));
    }

    report.say("extracting vmlinux");
    let elf = bzimage::extract(&fs::read(&image).map_err(io("read", &image))?)
        .map_err(|source| KernelError::Extract { path: image.clone(), source })?;
    let vmlinux = staging.join("vmlinux");
    fs::write(&vmlinux, elf).map_err(io("write", &vmlinux))?;

    for (from, to) in [(image, "vmlinuz"), (config, "config"), (tree.join("lib"), "lib")] {
        let to = staging.join(to);
        fs::rename(&from, &to).map_err(io("move a part of the package to", &to))?;
    }
    let mut depmod = Tool::new("depmod", "kmod");
    depmod.command().arg("-b").arg(staging).arg(&version);
    depmod.output()?;

    let description = Description { version, package: package.clone() };
    let path = staging.join("kernel.json");
    let json = serde_json::to_vec_pretty(&description).expect("a description is plain data");
    fs::write(&path, json).map_err(io("write", &path))?;
    work.close().map_err(io("remove a temporary directory in", staging))?;
    Ok(())
}

/// The entry of `dir` whose name fits, if there is one.
fn only_child(dir: &Path, fits: impl Fn(&str) -> bool) -> Result<Option<PathBuf>, CacheError> {
    if !dir.is_dir() {
        return Ok(None);
    }
    for entry in fs::read_dir(dir).map_err(io("read", dir))? {
        let entry = entry.map_err(io("read", dir))?;
        if entry.file_name().to_str().is_some_and(&fits) {
            return Ok(Some(entry.path()));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_remembered_while_the_lists_and_the_kernel_are_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let (cache, lists) = (Cache::new(dir.path().join("cache")), dir.path().join("lists"));
        fs::create_dir(&lists).unwrap();
        let package = Package { name: "linux".to_owned(), version: "1".to_owned() };
        assert_eq!(remembered(&cache, &lists), None);
        let place = cache.entry::<CacheError>("kernel", &key_of(&package), |_| Ok(())).unwrap();
        remember(&cache, &lists, &package);
        assert_eq!(remembered(&cache, &lists), Some(package.clone()));
        std::thread::sleep(Duration::from_millis(20));
        fs::write(lists.join("new"), "").unwrap();
        assert_eq!(remembered(&cache, &lists), None);
        remember(&cache, &lists, &package);
        fs::remove_dir(place).unwrap();
        assert_eq!(remembered(&cache, &lists), None);
    }

    #[test]
    fn package_records_are_read() {
        let record = "Package: linux-image-cloud-amd64\nVersion: 6.1.176-1\n\
                      Depends: linux-image-6.1.0-50-cloud-amd64 (= 6.1.176-1), other\nDescription: x\n";
        assert_eq!(field(record, "Version"), Some("6.1.176-1"));
        let depends = field(record, "Depends").unwrap();
        assert_eq!(depends.split([' ', ',']).next(), Some("linux-image-6.1.0-50-cloud-amd64"));
        assert_eq!(field(record, "Conflicts"), None);
    }
}
