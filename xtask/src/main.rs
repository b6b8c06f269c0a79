//! The project's chores: `cargo xtask --help`.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

mod bench;
mod build;
mod demo;
mod image;
mod lab;
mod progress;
mod setup;
mod steps;
mod test;
mod tidy;
mod workspace;

use lab::{LabOptions, Work};
use workspace::Workspace;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "Chores of the Offshoot repository")]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Debug, Subcommand)]
enum Chore {
    /// Install the Debian packages that building, the lab and images need; only what is missing.
    Setup,
    /// Build all programs (release) and the static agent.
    Build,
    /// Build the default guest image into the cache.
    Image,
    /// Run a command (or `shell`) in the lab: a Debian machine whose /dev/kvm is complete.
    #[command(after_help = "Exit status: the command's; 124 out of time; 125 the lab failed.\n\
        Examples:\n  cargo xtask lab -- target/release/offshoot doctor\n  cargo xtask lab shell")]
    Lab {
        #[command(flatten)]
        options: LabOptions,
        /// `shell`, or the command after `--`.
        #[arg(trailing_var_arg = true, required = true, value_name = "COMMAND")]
        command: Vec<String>,
    },
    /// Prepare everything and show the main job; writes target/demo.json.
    Demo,
    /// Measure; writes target/bench/results.json.
    Bench,
    /// Run every check and test there is.
    Test,
    /// Check dependency edges, paths in the docs and file sizes.
    Tidy,
}

fn main() -> ExitCode {
    match run(Arguments::parse().chore) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(chore: Chore) -> Result<u8> {
    let workspace = Workspace::locate()?;
    match chore {
        Chore::Setup => setup::run().map(|()| 0),
        Chore::Build => build::run(&workspace).map(|()| 0),
        Chore::Image => image::run(&workspace).map(|_| 0),
        Chore::Lab { options, command } => {
            let work = if command == ["shell"] { Work::Shell } else { Work::Command(command) };
            lab::run(&workspace, &options, work)
        }
        Chore::Demo => demo::run(&workspace),
        Chore::Bench => bench::run(&workspace).map(|()| 0),
        Chore::Test => test::run(&workspace).map(|()| 0),
        Chore::Tidy => tidy::run(&workspace).map(|()| 0),
    }
}
