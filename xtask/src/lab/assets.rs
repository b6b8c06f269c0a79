//! What every lab is made of: kernel, root disk, init.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use offshoot_image::Reporter;
use offshoot_image::kernel::{self, Kernel};
use offshoot_image::rootfs::{self, RootfsSpec};

use crate::workspace::Workspace;
use crate::{build, progress, setup};

/// What the lab has beyond a minimal Debian.
const PACKAGES: [&str; 10] = [
    "ca-certificates",
    "curl",
    "e2fsprogs",
    "iproute2",
    "kmod",
    "nftables",
    "procps",
    "psmisc",
    "strace",
    "util-linux",
];
/// Size of the lab's root disk, MiB; what is written at run time goes to memory.
const DISK_MIB: u32 = 1024;
const QEMU: &str = "/usr/bin/qemu-system-x86_64";
const VIRTIOFSD: &str = "/usr/lib/qemu/virtiofsd";

/// The parts of a lab.
#[derive(Debug)]
pub struct Assets {
    /// Debian's cloud kernel.
    pub kernel: Kernel,
    /// The root disk, read-only.
    pub root: PathBuf,
    /// The static init.
    pub init: PathBuf,
    /// QEMU.
    pub qemu: PathBuf,
    /// The virtiofs server.
    pub virtiofsd: PathBuf,
}

/// Finds or makes the parts; installs Debian packages that are missing.
pub fn prepare(workspace: &Workspace) -> Result<Assets> {
    setup::ensure(&setup::LAB_PACKAGES)?;
    let cache = workspace.image_cache();
    let mut show = progress::shower();
    let mut shown = false;
    let mut callback = |progress: offshoot_image::Progress<'_>| {
        // The look-up alone is no news.
        if progress.message.starts_with("looking") || progress.message == "ready" {
            return;
        }
        shown = true;
        show(progress);
    };
    let mut report = Reporter::new(2, &mut callback);
    report.begin("lab kernel", "ready");
    let kernel = kernel::debian_cloud(&cache, &mut report).context("could not get the lab's kernel")?;
    report.begin("lab root", "ready");
    let spec =
        RootfsSpec { hostname: "lab".to_owned(), user: None, ..RootfsSpec::bookworm(&PACKAGES, DISK_MIB) };
    let root = rootfs::debian(&spec, &cache, &mut report).context("could not make the lab's root disk")?;
    if shown {
        progress::end();
    }
    let init = build::static_binary(workspace, "xtask", "lab-init")?;
    Ok(Assets { kernel, root: root.disk(), init, qemu: QEMU.into(), virtiofsd: VIRTIOFSD.into() })
}

impl Assets {
    /// The first line of QEMU's version, for reports.
    pub fn qemu_version(&self) -> String {
        let output = Command::new(&self.qemu).arg("--version").output();
        let text =
            output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
        text.lines().next().unwrap_or("QEMU of unknown version").to_owned()
    }
}
