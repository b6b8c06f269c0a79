//! The lab: a Debian machine in QEMU in which `/dev/kvm` is complete, whatever the host can do.
//!
//! The machine is emulated in software with AMD's SVM shown to it. Its kernel is Debian's cloud kernel, its root a
//! cached read-only disk under a layer of memory. The checkout, the target directory and the cache appear in it at their
//! own paths, by virtiofs. One command runs in it; its streams and its exit status come back as if it ran here.
//!
//! ```text
//! prepare assets -> start virtiofsd and QEMU -> (90 s) up -> (--timeout) exited -> end machine
//!                          any step may fail: console's last lines, status 125 (124 when out of time)
//! ```
//!
//! Nothing outlives a run: the processes die with this one, whatever ends it, and sockets and logs are in a temporary
//! directory whose leftovers, should this process be killed, the next run removes.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::workspace::Workspace;

mod assets;
mod console;
mod host;
mod link;
mod machine;
mod plan;
mod run;
mod scratch;
mod terminal;

pub use host::host_runs_linux;
pub use plan::{EnvPair, LabOptions};

/// Exit status where the lab itself failed.
pub const LAB_FAILED: u8 = 125;
/// Exit status where the command did not end in time.
pub const OUT_OF_TIME: u8 = 124;

/// What to run.
#[derive(Debug, Clone)]
pub enum Work {
    /// A command with its arguments.
    Command(Vec<String>),
    /// A shell on this terminal.
    Shell,
}

/// Runs `work` in the lab, or here where the host's own KVM is complete, and returns its exit status.
pub fn run(workspace: &Workspace, options: &LabOptions, work: Work) -> Result<u8> {
    if !options.force_lab && host_runs_linux(workspace) {
        return run_here(options, work);
    }
    let started = Instant::now();
    let assets = assets::prepare(workspace)?;
    let plan = plan::resolve(workspace, options, work, &assets)?;
    if options.verbose {
        eprintln!("lab: assets ready after {:.1} s", started.elapsed().as_secs_f64());
    }
    let code = run::run(&plan)?;
    if options.verbose {
        eprintln!("lab: whole run {:.1} s", started.elapsed().as_secs_f64());
    }
    Ok(code)
}

/// Makes what every lab needs, so that the first use takes no set-up time.
pub fn prepare(workspace: &Workspace) -> Result<()> {
    assets::prepare(workspace).map(|_| ())
}

/// Runs `work` on the host, under the same time limit.
fn run_here(options: &LabOptions, work: Work) -> Result<u8> {
    let argv = match work {
        Work::Command(argv) => argv,
        Work::Shell => {
            bail!("this host's KVM runs Linux, so a lab is not needed; for one all the same: --force-lab")
        }
    };
    let (program, arguments) = argv.split_first().context("no command was given")?;
    let mut child = Command::new(program)
        .args(arguments)
        .envs(options.env.iter().map(|pair| (&pair.name, &pair.value)))
        .spawn()
        .with_context(|| format!("could not start {program}"))?;
    let deadline = Instant::now() + Duration::from_secs(options.timeout);
    loop {
        if let Some(status) = child.try_wait()? {
            use std::os::unix::process::ExitStatusExt;
            let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
            return Ok(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX));
        }
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            eprintln!("lab: {program} did not end in {} s and was killed", options.timeout);
            return Ok(OUT_OF_TIME);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Where the console of a failed run is kept.
fn kept_console(workspace: &Workspace) -> PathBuf {
    workspace.target.join("lab").join(format!("console-{}.log", std::process::id()))
}
