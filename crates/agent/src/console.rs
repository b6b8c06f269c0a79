//! Lines on the guest's console.

use std::io::Write;

/// Writes one line to the console; a console that does not take it is no reason to stop.
pub fn say(line: &str) {
    let _ = std::io::stderr().write_all(format!("offshoot-agent: {line}\n").as_bytes());
}

/// Writes the line that the host waits for: every service listens.
pub fn say_ready() {
    let _ = std::io::stderr().write_all(b"offshoot-agent ready\n");
}
