//! The lab kernel's console: watched for the end of the world, shown when something failed.

use std::fs;
use std::path::{Path, PathBuf};

/// Lines of the console that are shown after the lab failed.
pub const FAILURE_LINES: usize = 40;
/// Lines of the console that are shown after the command failed.
pub const STATUS_LINES: usize = 8;
/// Bytes from the file's end that are looked at.
const TAIL_BYTES: usize = 64 * 1024;
/// What the kernel says when it cannot go on.
const FATAL: [&str; 4] =
    ["Kernel panic - not syncing", "Oops:", "BUG: unable to handle", "general protection fault, maybe"];

/// The console's file.
#[derive(Debug)]
pub struct Console {
    path: PathBuf,
}

impl Console {
    /// The console that QEMU writes to `path`.
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The line that says that the kernel cannot go on, if there is one.
    pub fn fatal_line(&self) -> Option<String> {
        fatal_line(&self.tail())
    }

    /// The last `count` lines, indented.
    pub fn last_lines(&self, count: usize) -> String {
        let tail = self.tail();
        let lines: Vec<&str> = tail.lines().filter(|line| !line.trim().is_empty()).collect();
        let begin = lines.len().saturating_sub(count);
        lines[begin..].iter().map(|line| format!("  | {}", line.trim_end())).collect::<Vec<_>>().join("\n")
    }

    fn tail(&self) -> String {
        let bytes = fs::read(&self.path).unwrap_or_default();
        String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(TAIL_BYTES)..]).into_owned()
    }
}

fn fatal_line(text: &str) -> Option<String> {
    let line = text.lines().find(|line| FATAL.iter().any(|fatal| line.contains(fatal)))?;
    Some(line.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_fatal_line_is_found() {
        let text =
            "[1.0] fine\n[2.0] BUG: unable to handle page fault\r\n[3.0] Kernel panic - not syncing: Fatal\n";
        assert_eq!(fatal_line(text).unwrap(), "[2.0] BUG: unable to handle page fault");
        assert_eq!(fatal_line("all is well\n"), None);
    }

    #[test]
    fn a_missing_console_has_no_lines() {
        let console = Console::new("/no/such/console".into());
        assert_eq!(console.last_lines(9), "");
        assert_eq!(console.fatal_line(), None);
    }
}
