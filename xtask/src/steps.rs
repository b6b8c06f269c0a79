//! Steps that say what they do and how long it took, and commands that say what they were when they fail.

use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};

/// Runs `work` as the step `name`, and says so before and after.
pub fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    eprintln!("==> {name}");
    let started = Instant::now();
    let result = work();
    let verdict = if result.is_ok() { "done" } else { "FAILED" };
    eprintln!("<== {name}: {verdict} in {:.1} s", started.elapsed().as_secs_f64());
    result.with_context(|| name.to_owned())
}

/// Runs `command` with this process's streams; fails unless it succeeds.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("could not start {}", shown(command)))?;
    if !status.success() {
        bail!("{} failed with {status}", shown(command));
    }
    Ok(())
}

/// Runs `command` and returns its standard output; standard error goes to this process's.
pub fn output(command: &mut Command) -> Result<String> {
    command.stderr(std::process::Stdio::inherit());
    let output = command.output().with_context(|| format!("could not start {}", shown(command)))?;
    if !output.status.success() {
        bail!("{} failed with {}", shown(command), output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("{} wrote other than UTF-8", shown(command)))
}

fn shown(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    text
}
