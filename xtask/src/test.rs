//! `make test`: every check there is, in the order of what they cost.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::build::{self, cargo};
use crate::lab::{self, EnvPair, LabOptions, Work};
use crate::steps::{output, run as run_command, step};
use crate::workspace::Workspace;
use crate::{image, setup, tidy};

/// Seconds one end-to-end test program may take in the lab.
const LIMIT_S: u64 = 1500;

/// Runs everything; stops at the first step that fails.
pub fn run(workspace: &Workspace) -> Result<()> {
    setup::run()?;
    step("formatting", || {
        run_command(cargo(workspace).args(["fmt", "--all", "--check"]))
    })?;
    step("tidy", || tidy::run(workspace))?;
    step("clippy", || {
        let arguments = [
            "clippy",
            "--quiet",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ];
        run_command(cargo(workspace).args(arguments))
    })?;
    // KVM tests with micro-guests are among these; where /dev/kvm does not open they say so and pass.
    step("unit and native KVM tests", || {
        run_command(cargo(workspace).args(["test", "--quiet", "--workspace", "--exclude", "offshoot-tests"]))
    })?;
    build::run(workspace)?;
    let image = image::run(workspace)?;
    let programs = step("build end-to-end tests", || test_programs(workspace))?;
    step("lab", || lab::prepare(workspace))?;
    let mut failed = Vec::new();
    for program in &programs {
        let name = program
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if step(&format!("end-to-end tests {name}"), || {
            end_to_end(workspace, &image, program)
        })
        .is_err()
        {
            failed.push(name);
        }
    }
    if !failed.is_empty() {
        bail!("end-to-end tests failed: {}", failed.join(", "));
    }
    Ok(())
}

/// Builds the end-to-end tests on the host; returns their programs.
fn test_programs(workspace: &Workspace) -> Result<Vec<PathBuf>> {
    let mut command = cargo(workspace);
    command.args([
        "test",
        "--package",
        "offshoot-tests",
        "--no-run",
        "--release",
        "--message-format=json",
    ]);
    let programs = programs_in(&output(command.stdin(Stdio::null()))?)?;
    if programs.is_empty() {
        bail!("cargo named no test program of offshoot-tests");
    }
    Ok(programs)
}

/// The test programs that cargo's messages name.
fn programs_in(messages: &str) -> Result<Vec<PathBuf>> {
    let mut programs = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: serde_json::Value =
            serde_json::from_str(line).context("cargo wrote a line that is no JSON")?;
        if message["profile"]["test"] == true
            && let Some(path) = message["executable"].as_str()
        {
            programs.push(PathBuf::from(path));
        }
    }
    Ok(programs)
}

/// Runs one test program: here where this host's KVM runs Linux, else in a lab of its own.
fn end_to_end(workspace: &Workspace, image: &std::path::Path, program: &std::path::Path) -> Result<()> {
    let image = image.display().to_string();
    let binaries = workspace.bin_dir().display().to_string();
    let code = if lab::host_runs_linux(workspace) {
        let status = Command::new(program)
            .arg("--test-threads=1")
            .env("OFFSHOOT_IMAGE", image)
            .env("OFFSHOOT_BIN_DIR", binaries)
            .status()
            .with_context(|| format!("could not start {}", program.display()))?;
        status.code().unwrap_or(i32::from(u8::MAX))
    } else {
        let env = vec![
            EnvPair::new("OFFSHOOT_IMAGE", image),
            EnvPair::new("OFFSHOOT_BIN_DIR", binaries),
        ];
        let options = LabOptions {
            timeout: LIMIT_S,
            env,
            ..LabOptions::default()
        };
        let argv = vec![program.display().to_string(), "--test-threads=1".to_owned()];
        i32::from(lab::run(workspace, &options, Work::Command(argv))?)
    };
    if code != 0 {
        bail!("{} ended with status {code}", program.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_those_built_for_testing() {
        let messages = r#"{"reason":"compiler-artifact","profile":{"test":false},"executable":"/t/program"}
{"reason":"compiler-artifact","profile":{"test":true},"executable":"/t/fork-1234"}
{"reason":"compiler-artifact","profile":{"test":true},"executable":null}
{"reason":"build-finished","success":true}"#;
        assert_eq!(programs_in(messages).unwrap(), [PathBuf::from("/t/fork-1234")]);
    }
}
