//! `offshoot`, the command line over the daemon.
//!
//! It holds no VM logic: every command is one or a few HTTP calls on the daemon's Unix socket (`docs/api.md`), and a
//! sandbox's processes and files are reached through the daemon too. [`args`] is what was typed, [`plan`] what is to
//! be done, [`commands`] does it, [`failure`] turns what went wrong into an exit code. `docs/cli.md` is the manual.
//!
//! Standard output carries results only, standard error everything else; every wait has a deadline or watches that
//! the other side lives.

mod args;
mod client;
mod commands;
mod failure;
mod plan;
mod process;
mod progress;
mod socket;
mod text;
mod ui;
mod wire;

use std::io::Write;

use clap::Parser;

use crate::args::Args;
use crate::failure::{Failure, Kind, Report, Result};
use crate::plan::Plan;
use crate::ui::{Format, Ui};

fn main() {
    // Not by returning: a thread that waits for standard input must not hold up the end.
    std::process::exit(i32::from(run()));
}

fn run() -> u8 {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => return wrong_usage(&error),
    };
    let format = if args.global.json { Format::Json } else { Format::Text };
    let ui = Ui::new(format, args.global.quiet);
    match Plan::of(args).and_then(perform) {
        Ok(code) => code,
        Err(failure) => {
            if let Failure::Report(report) = &failure {
                ui.report(report);
            }
            failure.exit_code()
        }
    }
}

fn perform(plan: Plan) -> Result<u8> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::local("cannot start the input and output loop", &error))?;
    let result = runtime.block_on(commands::perform(plan));
    runtime.shutdown_background();
    result
}

/// Help and version are no failures; what is wrong is told in the form that was asked for.
fn wrong_usage(error: &clap::Error) -> u8 {
    if !error.use_stderr() {
        return match write!(std::io::stdout(), "{}", error.render()).and_then(|()| std::io::stdout().flush())
        {
            Ok(()) => 0,
            Err(error) => Failure::stdout(&error).exit_code(),
        };
    }
    let json = std::env::args_os().take_while(|word| word != "--").any(|word| word == "--json");
    if json {
        let text = error.render().to_string();
        let message = text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned();
        Ui::new(Format::Json, false)
            .report(&Report::new(Kind::Usage, "usage", message).hint("see: offshoot --help"));
    } else {
        let _ = error.print();
    }
    Kind::Usage.exit_code()
}
