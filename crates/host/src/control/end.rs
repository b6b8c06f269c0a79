//! How a VMM process ended.

use std::fmt;

use offshoot_protocol::control::ExitReason;

/// Everything known about the end of a VMM process. Which of the three are known depends on who could reap it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct End {
    /// What it said before it ended.
    pub reason: Option<ExitReason>,
    /// Its exit status.
    pub exit_status: Option<i32>,
    /// The signal that killed it.
    pub signal: Option<i32>,
}

impl End {
    /// A short stable word for the kind of end.
    pub fn word(&self) -> &'static str {
        match (&self.reason, self.signal) {
            (Some(ExitReason::Stopped), _) => "stopped",
            (Some(ExitReason::Frozen), _) => "frozen",
            (Some(ExitReason::PowerOff), _) => "power_off",
            (Some(ExitReason::Reset), _) => "reset",
            (Some(ExitReason::Fault(_)), _) => "fault",
            (None, Some(_)) => "signal",
            (None, None) => "exit",
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.reason {
            Some(ExitReason::Stopped) => return f.write_str("stopped"),
            Some(ExitReason::Frozen) => return f.write_str("frozen into a template"),
            Some(ExitReason::PowerOff) => return f.write_str("the guest powered off"),
            Some(ExitReason::Reset) => {
                return f.write_str("the guest reset itself (a kernel panic ends so, too)");
            }
            Some(ExitReason::Fault(why)) => return write!(f, "the VMM could not go on: {why}"),
            None => {}
        }
        match (self.signal, self.exit_status) {
            (Some(signal), _) => write!(f, "the VMM was killed by signal {signal}"),
            (None, Some(status)) => write!(f, "the VMM exited with status {status} without saying why"),
            (None, None) => f.write_str("the VMM ended without saying why"),
        }
    }
}
