//! `make bench`: native measurements with micro-guests, wherever `/dev/kvm` opens.

use std::process::Command;

use anyhow::{Result, bail};

use crate::steps::{run as run_command, step};
use crate::workspace::Workspace;
use crate::{build, setup};

/// Builds the bench and runs it on the host.
pub fn run(workspace: &Workspace) -> Result<()> {
    setup::ensure(&setup::BUILD_PACKAGES)?;
    if std::fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
        bail!("/dev/kvm does not open here, and only it gives real times; run this where it does");
    }
    build::run(workspace)?;
    let results = workspace.target.join("bench/results.json");
    step("bench", || {
        std::fs::create_dir_all(workspace.target.join("bench"))?;
        run_command(Command::new(workspace.binary("offshoot-bench")).arg("--out").arg(&results))
    })?;
    eprintln!("bench: figures in {}", results.display());
    Ok(())
}
