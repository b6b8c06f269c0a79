//! Checks of the repository itself: who depends on whom, paths that the docs name, sizes of files.
//!
//! What is allowed is written down in `edges.txt` and `long-files.txt` beside this file.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use crate::build::cargo;
use crate::steps::output;
use crate::workspace::Workspace;

mod docs;
mod edges;
mod sizes;

/// Runs all checks and reports everything they find.
pub fn run(workspace: &Workspace) -> Result<()> {
    let metadata = output(cargo(workspace).args(["metadata", "--no-deps", "--format-version=1", "--quiet"]))?;
    let mut problems = edges::check(&metadata, include_str!("edges.txt"))?;
    let files = files(&workspace.root)?;
    problems.extend(docs::check(&workspace.root, &files)?);
    problems.extend(sizes::check(&workspace.root, &files, include_str!("long-files.txt"))?);
    if problems.is_empty() {
        return Ok(());
    }
    bail!("{} found:\n{}", problems.len(), problems.join("\n"))
}

/// The files that git knows or would add, relative to the checkout.
fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut git = Command::new("git");
    git.current_dir(root).args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let list = output(&mut git)?;
    let paths = list.split('\0').filter(|path| !path.is_empty()).map(PathBuf::from);
    // A file that was removed but not yet committed is still listed.
    Ok(paths.filter(|path| root.join(path).exists()).collect())
}
