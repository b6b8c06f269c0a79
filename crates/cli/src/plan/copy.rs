//! Which end of a copy is where.

use std::path::PathBuf;

use crate::failure::{Failure, Result};
use crate::ui::Format;

/// A file to copy.
#[derive(Debug)]
pub struct CopyPlan {
    /// The guest's end.
    pub guest: GuestPath,
    /// This end.
    pub local: LocalEnd,
    /// Which way.
    pub direction: Direction,
    /// Guest user.
    pub user: Option<String>,
}

/// A path in a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestPath {
    /// Sandbox.
    pub sandbox: String,
    /// Path in it, relative to the user's home unless absolute.
    pub path: String,
}

/// The end of a copy on this side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LocalEnd {
    /// A file.
    File(PathBuf),
    /// Standard input or output.
    Standard,
}

/// Which way a copy goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Into the sandbox.
    Upload,
    /// Out of the sandbox.
    Download,
}

/// What `cp FROM TO` asks for.
pub fn copy(from: &str, to: &str, user: Option<String>, format: Format) -> Result<CopyPlan> {
    match (guest_path(from)?, guest_path(to)?) {
        (Some(guest), None) => {
            let local = local_end(to)?;
            if local == LocalEnd::Standard && format == Format::Json {
                return Err(Failure::usage("cp to standard output leaves no place for --json"));
            }
            Ok(CopyPlan { guest, local, direction: Direction::Download, user })
        }
        (None, Some(mut guest)) => {
            let local = local_end(from)?;
            if guest.path.ends_with('/') {
                guest.path.push_str(&name_in_directory(&local)?);
            }
            Ok(CopyPlan { guest, local, direction: Direction::Upload, user })
        }
        (Some(_), Some(_)) => {
            Err(Failure::usage("cp goes into or out of a sandbox, not from one to another"))
        }
        (None, None) => {
            let message =
                format!("neither {from} nor {to} is in a sandbox; write SANDBOX:PATH for one of them");
            Err(Failure::usage(message))
        }
    }
}

/// `SANDBOX:PATH`; a local path that looks so is written with `./` in front.
fn guest_path(text: &str) -> Result<Option<GuestPath>> {
    let Some((sandbox, path)) = text.split_once(':') else {
        return Ok(None);
    };
    if crate::args::name(sandbox).is_err() || sandbox.starts_with('.') {
        return Ok(None);
    }
    if path.is_empty() {
        return Err(Failure::usage(format!("{text} names no path in the sandbox")));
    }
    Ok(Some(GuestPath { sandbox: sandbox.to_owned(), path: path.to_owned() }))
}

fn local_end(text: &str) -> Result<LocalEnd> {
    match text {
        "" => Err(Failure::usage("an empty path names no file")),
        "-" => Ok(LocalEnd::Standard),
        path => Ok(LocalEnd::File(path.into())),
    }
}

fn name_in_directory(local: &LocalEnd) -> Result<String> {
    let name = match local {
        LocalEnd::File(path) => path.file_name().and_then(|name| name.to_str()),
        LocalEnd::Standard => None,
    };
    let name =
        name.ok_or_else(|| Failure::usage("give the file's name in the sandbox, not only its directory"))?;
    Ok(name.to_owned())
}
