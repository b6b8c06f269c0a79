//! Shows a build's progress on standard error.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use offshoot_image::Progress;

/// Least time between two lines where no terminal shows them in place.
const QUIET: Duration = Duration::from_secs(5);

/// A callback for long builds: one line rewritten in place on a terminal, else a line now and then.
pub fn shower() -> impl FnMut(Progress<'_>) {
    let terminal = std::io::stderr().is_terminal();
    let mut last_step = "";
    let mut last_shown: Option<Instant> = None;
    move |progress| {
        let line =
            format!("[{}/{}] {}: {}", progress.done + 1, progress.total, progress.step, progress.message);
        let mut stderr = std::io::stderr().lock();
        // A progress line that cannot be shown is no reason to stop the work.
        let _ = if terminal {
            let width = rustix::termios::tcgetwinsize(&stderr).map_or(80, |size| usize::from(size.ws_col));
            let end = if progress.step == last_step { "\r\x1b[K" } else { "\n" };
            let begin = if last_step.is_empty() { "" } else { end };
            write!(stderr, "{begin}{}", line.chars().take(width.saturating_sub(1)).collect::<String>())
        } else if progress.step != last_step || last_shown.is_none_or(|at| at.elapsed() >= QUIET) {
            last_shown = Some(Instant::now());
            writeln!(stderr, "    {line}")
        } else {
            Ok(())
        };
        last_step = progress.step;
    }
}

/// Ends a line that [`shower`] left open on a terminal.
pub fn end() {
    if std::io::stderr().is_terminal() {
        eprintln!();
    }
}
