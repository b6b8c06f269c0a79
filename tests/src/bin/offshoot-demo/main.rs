//! `offshoot-demo`: the main job, end to end, through the daemon and the command as a user has them.
//!
//! Every figure is computed from what the guests answered.

mod report;
mod work;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;

/// Boots, warms, freezes, clones, forks, and checks every answer.
#[derive(Debug, Parser)]
struct Arguments {
    /// Folder of the image to boot.
    #[arg(long)]
    image: PathBuf,
    /// Folder of the programs.
    #[arg(long)]
    bin_dir: PathBuf,
    /// Folder for the daemon's state; removed at the end.
    #[arg(long)]
    state: PathBuf,
    /// Where the figures go.
    #[arg(long)]
    output: PathBuf,
    /// Clones of the template.
    #[arg(long, default_value_t = 20)]
    clones: usize,
    /// Forks of one running clone.
    #[arg(long, default_value_t = 3)]
    forks: usize,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("demo: a check failed; see above");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<bool> {
    std::fs::create_dir_all(&arguments.state)
        .with_context(|| format!("make {}", arguments.state.display()))?;
    let report = work::main_job(arguments)?;
    let json = serde_json::to_vec_pretty(&report)?;
    std::fs::write(&arguments.output, json)
        .with_context(|| format!("write {}", arguments.output.display()))?;
    // What is left in the state folder is of no use to anybody; failing to remove it changes no figure.
    let _ = std::fs::remove_dir_all(&arguments.state);
    report.print();
    Ok(report.all_well())
}
