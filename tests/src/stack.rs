//! A daemon of its own and the `offshoot` command, as a user has them.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::Value;

/// How long the daemon may take to answer its first call.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long the daemon may take to end all sandboxes and itself.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// A running daemon with a state folder of its own.
pub struct Stack {
    daemon: Child,
    bin_dir: PathBuf,
    state: PathBuf,
}

/// What one `offshoot` command gave.
#[derive(Debug)]
pub struct Outcome {
    /// Exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// What the interpreter made of some code.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Evaluated {
    /// Text of the value.
    pub value: Option<String>,
    /// What was printed.
    pub stdout: String,
    /// What went to standard error.
    pub stderr: String,
    /// Class and text of the exception.
    pub error: Option<String>,
}

impl Stack {
    /// Starts `offshootd` from `bin_dir` with its state in `state`, and registers the image in folder `image` as `name`.
    ///
    /// # Errors
    /// The daemon does not come up; what it said is in the error.
    pub fn start(bin_dir: &Path, state: &Path, images: &[(&str, &Path)]) -> anyhow::Result<Self> {
        let folder = state.join("state/images");
        std::fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        for (name, image) in images {
            let link = folder.join(name);
            if !link.exists() {
                std::os::unix::fs::symlink(image, &link)
                    .with_context(|| format!("link {}", link.display()))?;
            }
        }
        let log = std::fs::File::create(state.join("daemon.log")).context("create the daemon's log")?;
        let daemon = Command::new(bin_dir.join("offshootd"))
            .arg("--socket")
            .arg(state.join("d.sock"))
            .arg("--state-dir")
            .arg(state.join("state"))
            .arg("--run-dir")
            .arg(state.join("run"))
            .arg("--cache-dir")
            .arg(state.join("cache"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .with_context(|| format!("start {}", bin_dir.join("offshootd").display()))?;
        let mut stack = Self { daemon, bin_dir: bin_dir.to_owned(), state: state.to_owned() };
        stack.wait_until_up()?;
        Ok(stack)
    }

    fn wait_until_up(&mut self) -> anyhow::Result<()> {
        let start = Instant::now();
        loop {
            if self.cli(&["ls"])?.code == Some(0) {
                return Ok(());
            }
            if self.daemon.try_wait()?.is_some() || start.elapsed() > START_LIMIT {
                bail!("the daemon does not answer; it said:\n{}", self.daemon_log());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// What the daemon wrote to its log.
    pub fn daemon_log(&self) -> String {
        std::fs::read_to_string(self.state.join("daemon.log")).unwrap_or_default()
    }

    /// The daemon's folder for what runs.
    pub fn run_dir(&self) -> PathBuf {
        self.state.join("run")
    }

    /// The daemon's process id.
    pub fn daemon_pid(&self) -> u32 {
        self.daemon.id()
    }

    /// `offshoot` with its socket set.
    pub fn command(&self) -> Command {
        let mut command = Command::new(self.bin_dir.join("offshoot"));
        command.arg("--socket").arg(self.state.join("d.sock"));
        command
    }

    /// Runs `offshoot` with these arguments.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn cli(&self, arguments: &[&str]) -> anyhow::Result<Outcome> {
        let output =
            self.command().args(arguments).stdin(Stdio::null()).output().context("start offshoot")?;
        Ok(Outcome::from(output))
    }

    /// Runs `offshoot --json` and parses the last line of its output.
    ///
    /// # Errors
    /// It fails; the error has what it said.
    pub fn json(&self, arguments: &[&str]) -> anyhow::Result<Value> {
        let outcome = self.cli(&[&["--json", "--quiet"], arguments].concat())?;
        if outcome.code != Some(0) {
            bail!("offshoot {} ended with {:?}: {}", arguments.join(" "), outcome.code, outcome.stderr);
        }
        let line = outcome.stdout.lines().last().unwrap_or_default();
        serde_json::from_str(line)
            .with_context(|| format!("offshoot {} printed {line:?}", arguments.join(" ")))
    }

    /// Runs Python in a sandbox's warm interpreter.
    ///
    /// # Errors
    /// The command could not do it; an exception of the code is no error here.
    pub fn evaluate(&self, sandbox: &str, code: &str) -> anyhow::Result<Evaluated> {
        let outcome = self.cli(&["--json", "--quiet", "run", sandbox, "-c", code])?;
        if !matches!(outcome.code, Some(0 | 1)) {
            bail!("run in {sandbox} ended with {:?}: {}", outcome.code, outcome.stderr);
        }
        let mut evaluated = Evaluated::default();
        for line in outcome.stdout.lines() {
            let event: Value = serde_json::from_str(line).with_context(|| format!("run printed {line:?}"))?;
            let text = |field: &str| event[field].as_str().unwrap_or_default().to_owned();
            match event["type"].as_str() {
                Some("stdout") => evaluated.stdout.push_str(&text("text")),
                Some("stderr") => evaluated.stderr.push_str(&text("text")),
                Some("result") => evaluated.value = Some(text("text")),
                Some("error") => evaluated.error = Some(format!("{}: {}", text("name"), text("value"))),
                _ => {}
            }
        }
        Ok(evaluated)
    }

    /// The value of a Python expression, which is JSON text.
    ///
    /// # Errors
    /// The code raises, or its value is not JSON.
    pub fn value(&self, sandbox: &str, code: &str) -> anyhow::Result<Value> {
        let evaluated = self.evaluate(sandbox, code)?;
        let Some(text) = &evaluated.value else { bail!("{code:?} in {sandbox} gave {evaluated:?}") };
        serde_json::from_str(text).with_context(|| format!("{code:?} in {sandbox} gave {text:?}"))
    }

    /// Builds a template.
    ///
    /// # Errors
    /// What the command says.
    pub fn build_template(
        &self,
        name: &str,
        image: &str,
        warm: &str,
        flags: &[&str],
    ) -> anyhow::Result<Value> {
        let file = self.state.join(format!("{name}.py"));
        std::fs::write(&file, warm).context("write the warm-up")?;
        let file = file.display().to_string();
        let arguments = [&["template", "build", name, "--image", image, "--warm", &file], flags].concat();
        // The last line of long work is `{"type":"result","value":…}`.
        Ok(self.json(&arguments)?["value"].take())
    }

    /// Clones a template; the ids, in order.
    ///
    /// # Errors
    /// One of them failed.
    pub fn create(&self, template: &str, count: usize) -> anyhow::Result<Vec<Value>> {
        outcomes(&self.json(&["create", template, "-n", &count.to_string()])?)
    }

    /// Forks a sandbox; the children in order, and what was timed.
    ///
    /// # Errors
    /// One of them failed.
    pub fn fork(&self, sandbox: &str, count: usize) -> anyhow::Result<(Vec<Value>, Value)> {
        let answer = self.json(&["fork", sandbox, "-n", &count.to_string()])?;
        Ok((outcomes(&answer)?, answer["times"].clone()))
    }

    /// Ends the daemon as a service manager does, and waits until it is gone.
    ///
    /// # Errors
    /// It does not end in time.
    pub fn stop(mut self) -> anyhow::Result<()> {
        self.terminate()
    }

    fn terminate(&mut self) -> anyhow::Result<()> {
        if self.daemon.try_wait()?.is_some() {
            return Ok(());
        }
        let pid = rustix::process::Pid::from_child(&self.daemon);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let start = Instant::now();
        while self.daemon.try_wait()?.is_none() {
            if start.elapsed() > STOP_LIMIT {
                self.daemon.kill()?;
                self.daemon.wait()?;
                bail!(
                    "the daemon did not end within {} s; it said:\n{}",
                    STOP_LIMIT.as_secs(),
                    self.daemon_log()
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        if let Err(error) = self.terminate() {
            eprintln!("{error:#}");
        }
    }
}

impl From<Output> for Outcome {
    fn from(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Self { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}

/// The sandboxes of a create or fork, all of which must have succeeded.
fn outcomes(answer: &Value) -> anyhow::Result<Vec<Value>> {
    let results = answer["results"].as_array().with_context(|| format!("no results in {answer}"))?;
    results
        .iter()
        .map(|result| match &result["ok"] {
            Value::Null => bail!("a sandbox failed: {result}"),
            sandbox => Ok(sandbox.clone()),
        })
        .collect()
}

/// The id of a sandbox.
pub fn id(sandbox: &Value) -> String {
    sandbox["id"].as_str().unwrap_or_default().to_owned()
}
