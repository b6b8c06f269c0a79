//! Source files stay small: their lines without tests are counted.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Lines a source file may have, tests not counted.
const LIMIT_LINES: usize = 400;

/// Checks every Rust file of `files`; `exceptions` has lines of `path lines` with the most each may have.
pub fn check(root: &Path, files: &[PathBuf], exceptions: &str) -> Result<Vec<String>> {
    let mut allowed = BTreeMap::new();
    for line in exceptions.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#')) {
        let (path, lines) = line.split_once(' ').with_context(|| format!("{line:?} is not PATH LINES"))?;
        let lines: usize = lines.trim().parse().with_context(|| format!("{line:?} is not PATH LINES"))?;
        allowed.insert(PathBuf::from(path), lines);
    }
    let mut problems = Vec::new();
    for file in files.iter().filter(|file| is_source(file)) {
        let path = root.join(file);
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("could not read {}", path.display()))?;
        let lines = lines_without_tests(&text);
        let exception = allowed.remove(file);
        let limit = exception.unwrap_or(LIMIT_LINES);
        let file = file.display();
        if lines > limit {
            problems.push(format!("{file} has {lines} lines without tests, {limit} are allowed; split it"));
        } else if exception.is_some() && lines <= LIMIT_LINES {
            problems.push(format!("{file} needs no exception in xtask/src/tidy/long-files.txt any more"));
        }
    }
    problems.extend(
        allowed.keys().map(|path| format!("long-files.txt names {}, which is not there", path.display())),
    );
    Ok(problems)
}

/// A Rust file that is not all tests.
fn is_source(file: &Path) -> bool {
    let tests = file.components().any(|part| matches!(part.as_os_str().to_str(), Some("tests" | "tests.rs")));
    file.extension().is_some_and(|extension| extension == "rs") && !tests
}

/// Lines up to the test module, which comes last in a file.
fn lines_without_tests(text: &str) -> usize {
    text.lines().take_while(|line| *line != "#[cfg(test)]").count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_one(lines: usize, exceptions: &str) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.rs"), "x\n".repeat(lines) + "#[cfg(test)]\n" + &"y\n".repeat(999))
            .unwrap();
        check(dir.path(), &["a.rs".into()], exceptions).unwrap()
    }

    #[test]
    fn tests_do_not_count() {
        assert!(check_one(400, "").is_empty());
        assert_eq!(check_one(401, "").len(), 1);
    }

    #[test]
    fn exceptions_bound_too_and_must_be_needed() {
        assert!(check_one(450, "a.rs 450\n").is_empty());
        assert_eq!(check_one(451, "# why\na.rs 450\n").len(), 1);
        assert!(check_one(10, "a.rs 450\n")[0].contains("no exception"));
        assert!(check_one(10, "gone.rs 450\n")[0].contains("gone.rs"));
    }
}
