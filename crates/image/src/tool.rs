//! Running Debian's tools: with a deadline, their output read as it comes and its end kept for the error.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

/// Lines of output kept for an error.
const KEPT_LINES: usize = 20;
/// How long output may still come after the tool itself has ended.
const DRAIN: Duration = Duration::from_secs(2);

/// Why a tool did not do its work.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    /// It is not installed.
    #[error("{program} is not installed; run: apt-get install {package}")]
    Missing {
        /// The program.
        program: String,
        /// Debian package that has it.
        package: String,
    },
    /// It could not be started.
    #[error("could not start {program}")]
    Start {
        /// The program.
        program: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// It ended badly.
    #[error("{program} failed with {status}; its last lines:\n{last_lines}")]
    Failed {
        /// The program.
        program: String,
        /// How it ended.
        status: ExitStatus,
        /// End of its output.
        last_lines: String,
    },
    /// It ran out of time and was killed.
    #[error("{program} did not finish in {limit_s} s and was killed; its last lines:\n{last_lines}")]
    TimedOut {
        /// The program.
        program: String,
        /// The limit, seconds.
        limit_s: u64,
        /// End of its output.
        last_lines: String,
    },
}

/// One run of a tool.
pub struct Tool {
    command: Command,
    program: String,
    package: String,
    limit: Duration,
}

impl Tool {
    /// `program` of Debian's `package`, to be killed after ten minutes.
    pub fn new(program: &str, package: &str) -> Self {
        let mut command = Command::new(program);
        // Tools are to speak English, ask nothing, and write Python's bytecode whatever the caller's shell says.
        command
            .env("LC_ALL", "C.UTF-8")
            .env("DEBIAN_FRONTEND", "noninteractive")
            .env_remove("PYTHONDONTWRITEBYTECODE")
            .env_remove("PYTHONPATH")
            .env_remove("PYTHONHOME")
            .stdin(Stdio::null())
            .process_group(0);
        Self {
            command,
            program: program.to_owned(),
            package: package.to_owned(),
            limit: Duration::from_secs(600),
        }
    }

    /// As [`Tool::new`], in a mount namespace of its own: what it mounts ends with it, even if it is killed.
    pub fn in_mount_namespace(program: &str, package: &str) -> Self {
        let mut tool = Self::new("unshare", "util-linux");
        tool.command.args(["--mount", "--propagation", "private", "--", program]);
        tool.program = program.to_owned();
        tool.package = package.to_owned();
        tool
    }

    /// The command, for arguments, environment and directory.
    pub fn command(&mut self) -> &mut Command {
        &mut self.command
    }

    /// Changes the deadline.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Runs the tool to its end and returns what it wrote to standard output and error, in order of arrival.
    ///
    /// # Errors
    /// Fails as [`ToolError`] says; the tool and all its children in its process group are gone then.
    pub fn output(self) -> Result<String, ToolError> {
        let mut all = String::new();
        self.run(&mut |line| {
            all.push_str(line);
            all.push('\n');
        })?;
        Ok(all)
    }

    /// Runs the tool to its end and hands each line it writes to `on_line`.
    ///
    /// # Errors
    /// As [`Tool::output`].
    pub fn run(mut self, on_line: &mut dyn FnMut(&str)) -> Result<(), ToolError> {
        let deadline = Instant::now() + self.limit;
        let (reader, mut child) = self.start()?;
        // The command holds the write end of the pipe; without this the reader would never see its end.
        drop(self.command);

        let (sender, lines) = mpsc::channel::<String>();
        std::thread::spawn(move || {
            for bytes in BufReader::new(reader).split(b'\n') {
                let Ok(bytes) = bytes else { return };
                if sender.send(String::from_utf8_lossy(&bytes).trim_end().to_owned()).is_err() {
                    return;
                }
            }
        });

        let mut last = VecDeque::new();
        let mut keep = |line: String| {
            on_line(&line);
            if last.len() == KEPT_LINES {
                last.pop_front();
            }
            last.push_back(line);
        };
        let mut ended = None;
        let status = loop {
            match lines.recv_timeout(Duration::from_millis(100)) {
                Ok(line) => keep(line),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(Duration::from_millis(5)),
            }
            if ended.is_none()
                && let Ok(Some(status)) = child.try_wait()
            {
                ended = Some((status, Instant::now() + DRAIN));
            }
            if let Some((status, until)) = ended {
                while let Ok(line) = lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                    keep(line);
                }
                break Some(status);
            }
            if Instant::now() >= deadline {
                break None;
            }
        };
        let last_lines = || last.iter().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n");
        match status {
            Some(status) if status.success() => Ok(()),
            // What unshare(1) and chroot(1) answer when there is no such program.
            Some(status) if status.code() == Some(127) => {
                Err(ToolError::Missing { program: self.program, package: self.package })
            }
            Some(status) => {
                Err(ToolError::Failed { program: self.program, status, last_lines: last_lines() })
            }
            None => {
                kill_group(&mut child);
                Err(ToolError::TimedOut {
                    program: self.program,
                    limit_s: self.limit.as_secs(),
                    last_lines: last_lines(),
                })
            }
        }
    }

    fn start(&mut self) -> Result<(std::io::PipeReader, Child), ToolError> {
        let start = |source: std::io::Error| {
            if source.kind() == std::io::ErrorKind::NotFound {
                ToolError::Missing { program: self.program.clone(), package: self.package.clone() }
            } else {
                ToolError::Start { program: self.program.clone(), source }
            }
        };
        let (reader, writer) = std::io::pipe().map_err(start)?;
        let second = writer.try_clone().map_err(start)?;
        self.command.stdout(writer).stderr(second);
        let child = self.command.spawn().map_err(start)?;
        Ok((reader, child))
    }
}

/// Kills the child's whole process group and reaps the child.
fn kill_group(child: &mut Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // Already gone is as good as killed.
        let _ = kill_process_group(group, Signal::KILL);
    }
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Tool {
        let mut tool = Tool::new("sh", "dash");
        tool.command().args(["-c", script]);
        tool
    }

    #[test]
    fn output_has_both_streams() {
        assert_eq!(shell("echo one; echo two >&2").output().unwrap(), "one\ntwo\n");
    }

    #[test]
    fn failure_carries_status_and_only_the_last_lines() {
        let error = shell("seq 1 100; exit 3").output().unwrap_err().to_string();
        assert!(error.contains("exit status: 3"), "{error}");
        assert!(error.contains("  100") && error.contains("  81\n") && !error.contains("  80\n"), "{error}");
    }

    #[test]
    fn a_hanging_tool_and_its_children_are_killed() {
        let started = Instant::now();
        let error =
            shell("echo begun; sleep 1000 & wait").limit(Duration::from_millis(300)).output().unwrap_err();
        assert!(matches!(error, ToolError::TimedOut { .. }), "{error}");
        assert!(error.to_string().contains("begun"));
        assert!(started.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn a_missing_tool_names_its_package() {
        let error = Tool::new("no-such-tool", "some-package").output().unwrap_err();
        assert_eq!(error.to_string(), "no-such-tool is not installed; run: apt-get install some-package");
        let error = shell("exit 127").output().unwrap_err();
        assert!(matches!(error, ToolError::Missing { .. }), "{error}");
    }

    #[test]
    fn a_child_that_keeps_the_output_open_does_not_hold_up_the_caller() {
        let started = Instant::now();
        shell("sleep 20 & exit 0").output().unwrap();
        assert!(started.elapsed() < Duration::from_secs(10));
    }
}
