//! Makes an image out of Debian's archive: kernel, initramfs and root file system.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cache::{Cache, io};
use crate::digest;
use crate::image::{self, Image, ImageError};
use crate::initramfs::{self, GUEST_MODULES};
use crate::kernel;
use crate::manifest::Source;
use crate::progress::{Progress, Reporter};
use crate::rootfs::{self, RootfsSpec};

/// Changes when an image is put together differently.
const RECIPE: u32 = 1;
/// What every Debian image has: the warm interpreter, TLS roots, `ps`.
const BASE_PACKAGES: [&str; 3] = ["python3", "ca-certificates", "procps"];

/// What a Debian image shall have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DebianSpec {
    /// Packages beyond the minimal system with Python, TLS roots and procps.
    pub packages: Vec<String>,
    /// Size of the root disk, MiB.
    pub disk_mib: u32,
}

impl Default for DebianSpec {
    /// Python with numpy, on a disk of 2 GiB.
    fn default() -> Self {
        Self { packages: vec!["python3-numpy".to_owned()], disk_mib: 2048 }
    }
}

impl Image {
    /// The Debian image `spec` asks for with the static program `agent` as its init, from `cache` or newly made.
    ///
    /// The image's directory is in the cache: treat it as read-only. `on_progress` hears of each step.
    ///
    /// # Errors
    /// Fails where the kernel, the root file system or the initramfs cannot be made, and on a bad `spec` or agent.
    pub fn build_debian(
        spec: &DebianSpec,
        agent: &Path,
        cache: &Cache,
        on_progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Self, ImageError> {
        let mut report = Reporter::new(4, on_progress);
        report.begin("kernel", "Debian's cloud kernel");
        let kernel = kernel::debian_cloud(cache, &mut report)?;
        report.begin("initramfs", "packing agent and modules");
        let initramfs = initramfs::build(agent, &kernel.modules_dir(), &GUEST_MODULES)?;
        report.begin("rootfs", "Debian's root file system");
        let mut packages: Vec<&str> = BASE_PACKAGES.to_vec();
        packages.extend(spec.packages.iter().map(String::as_str));
        let rootfs = rootfs::debian(&RootfsSpec::bookworm(&packages, spec.disk_mib), cache, &mut report)?;

        report.begin("image", "digesting files");
        let parts: [&Path; 2] = [&kernel.vmlinuz(), &rootfs.disk()];
        let names: Vec<PathBuf> = parts.iter().map(|path| path.to_path_buf()).collect();
        // Entries of the cache never change, so their paths stand for their contents.
        let key = digest::key_of(&(RECIPE, &spec, names, digest::key_of(&initramfs)));
        let dir = cache.entry("image", &key, |staging| {
            let path = staging.join(image::INITRAMFS);
            std::fs::write(&path, &initramfs).map_err(io("write", &path))?;
            image::place(&kernel.vmlinuz(), &staging.join(image::VMLINUZ))?;
            image::place(&kernel.vmlinux(), &staging.join(image::VMLINUX))?;
            image::place(&rootfs.disk(), &staging.join(image::ROOTFS))?;
            let source = Source::Debian(spec.clone());
            image::seal(staging, Some(kernel.version().to_owned()), source)
        })?;
        Self::open(&dir)
    }
}
