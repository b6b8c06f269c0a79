//! This process's terminal, for an interactive lab.

use std::io::IsTerminal;

use anyhow::{Context, Result, bail};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use xtask::lab_protocol::TerminalSize;

/// The size of the terminal on standard input.
pub fn size() -> Result<TerminalSize> {
    let stdin = std::io::stdin();
    if !stdin.is_terminal() {
        bail!(
            "an interactive lab needs a terminal on standard input; for one command: cargo xtask lab -- COMMAND"
        );
    }
    let size = tcgetwinsize(&stdin).context("could not read the terminal's size")?;
    Ok(TerminalSize { rows: size.ws_row, columns: size.ws_col })
}

/// The terminal passing every key on; as it was before once this is dropped.
#[derive(Debug)]
pub struct Raw {
    before: Termios,
}

impl Raw {
    /// Makes the terminal on standard input raw.
    pub fn enter() -> Result<Self> {
        let stdin = std::io::stdin();
        let before = tcgetattr(&stdin).context("could not read the terminal's settings")?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Now, &raw).context("could not make the terminal raw")?;
        Ok(Self { before })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // A terminal that has gone needs no restoring.
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.before);
    }
}
