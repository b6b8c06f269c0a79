//! Builds the programs.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::steps::{run as run_command, step};
use crate::workspace::Workspace;

/// The platform that static programs are built for: naming it keeps their flags from build scripts and macros.
const STATIC_TARGET: &str = "x86_64-unknown-linux-gnu";

/// Builds every program of the workspace that runs on the host, and the static agent.
pub fn run(workspace: &Workspace) -> Result<()> {
    step("build programs", || {
        let mut command = cargo(workspace);
        command.args(["build", "--release", "--workspace", "--bins"]);
        for excluded in ["offshoot-agent", "xtask"] {
            command.args(["--exclude", excluded]);
        }
        run_command(&mut command)
    })?;
    step("build the static agent", || {
        let built = agent(workspace)?;
        // Beside the daemon, which looks for it there.
        let beside = workspace.bin_dir().join("offshoot-agent");
        std::fs::copy(&built, &beside)
            .with_context(|| format!("could not copy {} to {}", built.display(), beside.display()))?;
        Ok(())
    })
}

/// Builds the agent and returns where it is.
pub fn agent(workspace: &Workspace) -> Result<PathBuf> {
    let built = static_binary(workspace, "offshoot-agent", "offshoot-agent")?;
    debug_assert_eq!(built, workspace.agent());
    Ok(built)
}

/// Builds `binary` of `package` without any need of shared libraries, and returns where it is.
pub fn static_binary(workspace: &Workspace, package: &str, binary: &str) -> Result<PathBuf> {
    let directory = workspace.target.join("agent");
    let mut command = cargo(workspace);
    command.args(["build", "--release", "--quiet", "--package", package, "--bin", binary]);
    command.args(["--target", STATIC_TARGET, "--target-dir"]).arg(&directory);
    let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    // What is in an initramfs is unpacked into guest memory, debug information too.
    let flags = format!("{flags} -C target-feature=+crt-static -C debuginfo=0 -C strip=symbols");
    command.env("RUSTFLAGS", flags.trim());
    command.env_remove("CARGO_ENCODED_RUSTFLAGS");
    run_command(&mut command)?;
    let built = directory.join(STATIC_TARGET).join("release").join(binary);
    if !built.exists() {
        bail!("cargo built {package} without complaint, but {} is not there", built.display());
    }
    Ok(built)
}

/// Cargo, in the checkout.
pub fn cargo(workspace: &Workspace) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(&workspace.root).env("CARGO_TARGET_DIR", &workspace.target);
    // Cargo gave these to this program about its own package; they are not for what it builds.
    for name in ["CARGO_MANIFEST_DIR", "CARGO_MANIFEST_PATH", "CARGO_PKG_NAME", "CARGO_PKG_VERSION"] {
        command.env_remove(name);
    }
    command
}
