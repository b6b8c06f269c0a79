//! How a guest process ended.

use super::stream::StreamEnd;

/// How a guest process ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// With this status.
    Exited(u8),
    /// By this signal.
    Signalled {
        /// Its number, where its name is known here.
        number: Option<u8>,
        /// As the guest tells it.
        status: String,
    },
}

impl End {
    /// The status a shell would show.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Exited(code) => *code,
            Self::Signalled { number, .. } => 128 + number.unwrap_or(0),
        }
    }
}

impl From<StreamEnd> for End {
    fn from(end: StreamEnd) -> Self {
        let signal = end
            .status
            .strip_prefix("signal: ")
            .or(end.error.as_deref().and_then(|error| error.strip_prefix("signal: ")));
        match signal {
            Some(name) if !end.exited => {
                Self::Signalled { number: signal_number(name), status: end.status.clone() }
            }
            _ => Self::Exited((end.exit_code & 0xff) as u8),
        }
    }
}

/// The number of a signal as a guest names it: a number, `SIGTERM`, or the words of Go's run-time (`terminated`).
fn signal_number(name: &str) -> Option<u8> {
    const NAMES: [(u8, &str, &str); 24] = [
        (1, "HUP", "hangup"),
        (2, "INT", "interrupt"),
        (3, "QUIT", "quit"),
        (4, "ILL", "illegal instruction"),
        (5, "TRAP", "trace/breakpoint trap"),
        (6, "ABRT", "aborted"),
        (7, "BUS", "bus error"),
        (8, "FPE", "floating point exception"),
        (9, "KILL", "killed"),
        (10, "USR1", "user defined signal 1"),
        (11, "SEGV", "segmentation fault"),
        (12, "USR2", "user defined signal 2"),
        (13, "PIPE", "broken pipe"),
        (14, "ALRM", "alarm clock"),
        (15, "TERM", "terminated"),
        (16, "STKFLT", "stack fault"),
        (24, "XCPU", "CPU time limit exceeded"),
        (25, "XFSZ", "file size limit exceeded"),
        (26, "VTALRM", "virtual timer expired"),
        (27, "PROF", "profiling timer expired"),
        (28, "WINCH", "window changed"),
        (29, "IO", "I/O possible"),
        (30, "PWR", "power failure"),
        (31, "SYS", "bad system call"),
    ];
    let name = name.trim_end_matches(" (core dumped)");
    if let Ok(number) = name.trim_start_matches("signal ").parse() {
        return (number <= 64).then_some(number);
    }
    let short = name.strip_prefix("SIG").unwrap_or(name);
    NAMES
        .iter()
        .find(|(_, abbreviation, words)| *abbreviation == short || *words == name)
        .map(|&(number, ..)| number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn end(text: &str) -> End {
        serde_json::from_str::<StreamEnd>(text).unwrap().into()
    }

    #[test]
    fn an_absent_exit_code_is_success() {
        assert_eq!(end(r#"{"exited":true,"status":"exit status 0"}"#), End::Exited(0));
        assert_eq!(end(r#"{"exitCode":3,"exited":true,"status":"exit status 3"}"#), End::Exited(3));
    }

    #[test]
    fn signals_become_128_plus_their_number() {
        let killed = end(r#"{"exitCode":-1,"status":"signal: killed","error":"signal: killed"}"#);
        assert_eq!(killed.exit_code(), 137);
        let forms =
            ["signal: terminated", "signal: SIGTERM", "signal: 15", "signal: terminated (core dumped)"];
        for form in forms {
            assert_eq!(end(&json!({"exitCode": -1, "status": form}).to_string()).exit_code(), 143, "{form}");
        }
        assert_eq!(end(r#"{"exitCode":-1,"status":"signal: novel"}"#).exit_code(), 128);
    }
}
