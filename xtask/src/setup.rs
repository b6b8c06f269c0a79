//! Debian packages: installs what is missing, and nothing else.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::steps;

/// What the lab needs: QEMU and virtiofsd (in qemu-system-common), and what makes disks and kernels.
pub const LAB_PACKAGES: [&str; 7] = [
    "qemu-system-x86",
    "qemu-system-common",
    "debootstrap",
    "e2fsprogs",
    "kmod",
    "util-linux",
    "ca-certificates",
];
/// What guest images need.
pub const IMAGE_PACKAGES: [&str; 5] = ["debootstrap", "e2fsprogs", "kmod", "util-linux", "ca-certificates"];
/// What compiling needs beside the Rust toolchain.
pub const BUILD_PACKAGES: [&str; 3] = ["gcc", "git", "libc6-dev"];

/// Installs all of them.
pub fn run() -> Result<()> {
    let mut all: Vec<&str> = Vec::new();
    for list in [&LAB_PACKAGES[..], &IMAGE_PACKAGES, &BUILD_PACKAGES] {
        all.extend(list.iter().filter(|name| !all.contains(name)).collect::<Vec<_>>());
    }
    ensure(&all)?;
    eprintln!("setup: all Debian packages are there");
    Ok(())
}

/// Installs those of `packages` that are missing.
pub fn ensure(packages: &[&str]) -> Result<()> {
    require_debian()?;
    let missing = missing(packages)?;
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    if !rustix::process::geteuid().is_root() {
        bail!("these Debian packages are missing: {list}; as root: apt-get update && apt-get install {list}");
    }
    steps::step(&format!("install {list}"), || {
        apt(&["update", "-qq"])?;
        let mut arguments = vec!["install", "-y", "-qq", "--no-install-recommends"];
        arguments.extend(&missing);
        apt(&arguments)
    })
}

fn require_debian() -> Result<()> {
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    if !is_debian(&release) || !Path::new("/usr/bin/apt-get").exists() {
        bail!("this needs Debian (12 or newer) and its apt-get; /etc/os-release names another system");
    }
    if std::env::consts::ARCH != "x86_64" {
        bail!("this needs an x86-64 machine, this one is {}", std::env::consts::ARCH);
    }
    Ok(())
}

fn is_debian(os_release: &str) -> bool {
    os_release.lines().any(|line| matches!(line.trim(), "ID=debian" | "ID=\"debian\""))
}

/// Those of `packages` that are not installed.
fn missing<'a>(packages: &[&'a str]) -> Result<Vec<&'a str>> {
    let output = Command::new("dpkg-query")
        .args(["-W", "-f", "${Package} ${db:Status-Status}\n"])
        .args(packages)
        // It complains of each package it never heard of; those are missing, and that is all.
        .stderr(Stdio::null())
        .output()
        .context("could not start dpkg-query")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let installed = |name: &str| text.lines().any(|line| line == format!("{name} installed"));
    Ok(packages.iter().copied().filter(|name| !installed(name)).collect())
}

fn apt(arguments: &[&str]) -> Result<()> {
    let mut command = Command::new("apt-get");
    command.args(["-o", "DPkg::Lock::Timeout=300"]).args(arguments);
    command.env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null());
    // What apt says is no result of a chore.
    command.stdout(std::io::stderr());
    steps::run(&mut command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_debian_itself_is_debian() {
        assert!(is_debian("NAME=x\nID=debian\n"));
        assert!(!is_debian("ID=ubuntu\nID_LIKE=debian\n"));
        assert!(!is_debian(""));
    }
}
