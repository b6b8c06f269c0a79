//! Paths that the docs name exist.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Where a path in the text must begin to be taken for one of the repository.
const TOP: [&str; 7] = ["crates/", "docs/", "xtask/", "bench/", "tests/", "fuzz/", ".ci/"];

/// Checks every Markdown file of `files`.
pub fn check(root: &Path, files: &[PathBuf]) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for file in files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "md")) {
        let path = root.join(file);
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("could not read {}", path.display()))?;
        for (number, line) in text.lines().enumerate() {
            let here = path.parent().unwrap_or(root);
            let in_code = code_paths(line).filter(|named| !exists(root, named));
            let linked = link_targets(line).filter(|target| !here.join(target).exists());
            for missing in in_code.chain(linked) {
                problems.push(format!("{}:{}: {missing} does not exist", file.display(), number + 1));
            }
        }
    }
    Ok(problems)
}

/// What stands in backticks and looks like a path of the repository.
fn code_paths(line: &str) -> impl Iterator<Item = &str> {
    let spans = line.split('`').skip(1).step_by(2);
    spans
        .filter(|span| TOP.iter().any(|top| span.starts_with(top)))
        .filter(|span| !span.contains(|c: char| c.is_whitespace() || "*<>{}$…".contains(c)))
}

/// Targets of links that are relative paths.
fn link_targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
        .map(|target| target.split('#').next().unwrap_or_default())
        .filter(|target| !target.is_empty() && !target.contains(':'))
}

/// Whether the path exists; a trailing `:line` or `::item` is no part of it.
fn exists(root: &Path, named: &str) -> bool {
    root.join(named.split(':').next().unwrap_or(named)).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_of_the_repository_are_looked_at() {
        let line = "See `crates/vm/src` and `crates/{a,b}`, `docs/<name>.md`, `target/x`, and `cargo test`.";
        assert_eq!(code_paths(line).collect::<Vec<_>>(), ["crates/vm/src"]);
        let line = "[a](docs/a.md#part), [b](https://x.y/z) and [c](#here)";
        assert_eq!(link_targets(line).collect::<Vec<_>>(), ["docs/a.md"]);
    }

    #[test]
    fn missing_paths_are_named_with_their_line() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("docs")).unwrap();
        std::fs::write(dir.path().join("docs/there.md"), "").unwrap();
        let text = "fine: `docs/there.md:3` [x](docs/there.md)\n`docs/gone.md` [y](gone.md)\n";
        std::fs::write(dir.path().join("README.md"), text).unwrap();
        let problems = check(dir.path(), &["README.md".into(), "docs/there.md".into()]).unwrap();
        assert_eq!(
            problems,
            ["README.md:2: docs/gone.md does not exist", "README.md:2: gone.md does not exist"]
        );
    }
}
