//! `make demo`: everything prepared, then the main job.

use std::process::Command;

use anyhow::{Context, Result};

use crate::lab::{self, LabOptions, Work};
use crate::steps::step;
use crate::workspace::Workspace;
use crate::{build, image, setup};

/// Seconds the demo may take in the lab.
const LIMIT_S: u64 = 1200;

/// Prepares what is missing, runs the demo, and returns its exit status.
pub fn run(workspace: &Workspace) -> Result<u8> {
    setup::run()?;
    build::run(workspace)?;
    let image = image::run(workspace)?;
    let output = workspace.target.join("demo.json");
    let state = tempfile::Builder::new().prefix("offshoot-demo-").tempdir()?;
    let path = |path: &std::path::Path| path.display().to_string();
    let mut argv = vec![path(&workspace.binary("offshoot-demo"))];
    argv.extend(["--image".to_owned(), path(&image)]);
    argv.extend(["--bin-dir".to_owned(), path(&workspace.bin_dir())]);
    argv.extend(["--output".to_owned(), path(&output)]);

    let code = if lab::host_runs_linux(workspace) {
        argv.extend(["--state".to_owned(), path(state.path())]);
        step("demo", || {
            let (program, arguments) = argv.split_first().context("the demo has a program")?;
            let status =
                Command::new(program).args(arguments).status().context("could not start the demo")?;
            Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX))
        })?
    } else {
        eprintln!(
            "demo: this host's KVM cannot run Linux, so the demo runs in the lab (an emulated Debian machine)."
        );
        step("lab", || lab::prepare(workspace))?;
        argv.extend(["--state".to_owned(), "/tmp/offshoot-demo".to_owned()]);
        let options = LabOptions { timeout: LIMIT_S, ..LabOptions::default() };
        step("demo in the lab", || lab::run(workspace, &options, Work::Command(argv)))?
    };
    if code == 0 {
        eprintln!("demo: figures in {}", output.display());
    }
    Ok(code)
}
