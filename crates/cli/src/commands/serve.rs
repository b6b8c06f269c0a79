//! `serve`: becomes the daemon.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use crate::failure::{Failure, Kind, Report, Result};

/// Replaces this process by `offshootd`; returns only when that fails.
pub fn serve(socket: &Path, args: &[String]) -> Result<u8> {
    let Some(program) = super::find_program("offshootd") else {
        let message = "offshootd is neither beside this program nor on the path";
        return Err(Report::new(Kind::Unsupported, "offshootd_missing", message)
            .hint("install it beside offshoot, or build it with: cargo build -p offshoot-daemon")
            .into());
    };
    let error = Command::new(&program).arg("--socket").arg(socket).args(args).exec();
    Err(Failure::local(format!("cannot run {}", program.display()), &error))
}
