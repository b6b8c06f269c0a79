//! `make test`: every check there is, in the order of what they cost.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::build::{self, cargo};
use crate::lab::{self, EnvPair, LabOptions, Work};
use crate::steps::{output, run as run_command, step};
use crate::workspace::Workspace;
use crate::{image, setup, tidy};

/// Seconds one end-to-end test program may take in the lab.
const LIMIT_S: u64 = 480;

/// Runs everything; stops at the first step that fails.
pub fn run(workspace: &Workspace) -> Result<()> {
    setup::run()?;
    step("formatting", || run_command(cargo(workspace).args(["fmt", "--all", "--check"])))?;
    step("tidy", || tidy::run(workspace))?;
    step("clippy", || {
        let arguments = ["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"];
        run_command(cargo(workspace).args(arguments))
    })?;
    // KVM tests with micro-guests are among these; where /dev/kvm does not open they say so and pass.
    step("unit and native KVM tests", || {
        run_command(cargo(workspace).args([
            "test",
            "--quiet",
            "--workspace",
            "--exclude",
            "offshoot-tests",
        ]))?;
        let rest = ["test", "--quiet", "--release", "--package", "offshoot-tests", "--lib", "--bins"];
        run_command(cargo(workspace).args(rest))
    })?;
    build::run(workspace)?;
    let image = image::run(workspace)?;
    let programs = step("build end-to-end tests", || test_programs(workspace))?;
    let mut failed = Vec::new();
    let mut check = |title: &str, program: &Path, run: &dyn Fn(&Path) -> Result<()>| {
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if let Err(error) = step(&format!("{title} {name}"), || run(program)) {
            eprintln!("error: {error:#}");
            failed.push(name);
        }
    };
    for program in programs.iter().filter(|program| is_micro(program)) {
        check("native tests with micro-guests", program, &|program| here(workspace, &image, program));
    }
    step("lab", || lab::prepare(workspace))?;
    for program in &programs {
        check("end-to-end tests", program, &|program| end_to_end(workspace, &image, program));
    }
    if !failed.is_empty() {
        bail!("end-to-end tests failed: {}", failed.join(", "));
    }
    Ok(())
}

/// Builds the end-to-end tests on the host; returns their programs.
fn test_programs(workspace: &Workspace) -> Result<Vec<PathBuf>> {
    let mut command = cargo(workspace);
    command.args(["test", "--package", "offshoot-tests", "--no-run", "--release", "--message-format=json"]);
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

/// Whether a test program needs `/dev/kvm` but no Linux guest, so that it runs on the host as well as in the lab.
fn is_micro(program: &Path) -> bool {
    program.file_name().is_some_and(|name| name.to_string_lossy().starts_with("micro_"))
}

/// Runs one test program on the host.
fn here(workspace: &Workspace, image: &Path, program: &Path) -> Result<()> {
    let mut command = Command::new(program);
    command.arg("--test-threads=1").env("OFFSHOOT_IMAGE", image).env("OFFSHOOT_BIN_DIR", workspace.bin_dir());
    run_command(command.stdin(Stdio::null()))
}

/// Runs one test program: here where this host's KVM runs Linux, else in a lab of its own.
fn end_to_end(workspace: &Workspace, image: &Path, program: &Path) -> Result<()> {
    if lab::host_runs_linux(workspace) {
        return here(workspace, image, program);
    }
    let env = vec![
        EnvPair::new("OFFSHOOT_IMAGE", image.display().to_string()),
        EnvPair::new("OFFSHOOT_BIN_DIR", workspace.bin_dir().display().to_string()),
    ];
    let options = LabOptions { timeout: LIMIT_S, env, ..LabOptions::default() };
    let argv = vec![program.display().to_string(), "--test-threads=1".to_owned()];
    let mut code = lab::run(workspace, &options, Work::Command(argv.clone()))?;
    if code == lab::OUT_OF_TIME {
        // Every wait of the tests has a deadline of its own, so it is the emulated machine that stood still
        // (docs/adr/0013-the-lab.md). A test that fails is never run again.
        eprintln!("test: the lab stood still for {LIMIT_S} s; once more, in a new one");
        code = lab::run(workspace, &options, Work::Command(argv))?;
    }
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
