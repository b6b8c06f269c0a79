//! One daemon and one template with a real Linux guest, shared by the tests of a program.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::need;
use crate::stack::{Stack, id};

/// Folder of the guest image.
const IMAGE: &str = "OFFSHOOT_IMAGE";

/// What the shared template runs before it is frozen.
const WARM: &str = r#"
import json, os, random, threading, time
marker = 'warm'
seen = []
ram = 0

def count(path):
    """Counts in RAM, then on disk, past the page cache; for ever."""
    global ram
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DSYNC, 0o666)
    while True:
        ram += 1
        os.pwrite(fd, b'%012d' % ram, 0)
        time.sleep(0.05)
"#;

/// A daemon with the image registered as `debian` and the template `warm`.
pub struct Linux {
    /// The daemon and the command.
    pub stack: Stack,
    _state: tempfile::TempDir,
}

/// The image folder, if this machine can run the tests; else says why the test does nothing.
///
/// # Panics
/// In the lab, where nothing may be skipped.
pub fn image(test: &str) -> Option<PathBuf> {
    match std::env::var_os(IMAGE) {
        Some(image) => Some(PathBuf::from(image)),
        None => {
            assert!(!need::in_lab(), "{IMAGE} is not set in the lab");
            eprintln!("{test} skipped: {IMAGE} is not set; `make test` runs it in the lab");
            None
        }
    }
}

/// The shared daemon, made at the first call, or `None` with a printed reason.
///
/// # Panics
/// The daemon or the template cannot be made.
pub fn shared(test: &str) -> Option<MutexGuard<'static, Linux>> {
    static SHARED: OnceLock<Mutex<Linux>> = OnceLock::new();
    let image = image(test)?;
    let linux =
        SHARED.get_or_init(|| Mutex::new(Linux::start(&image).expect("a daemon with a warm template")));
    Some(linux.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Linux {
    fn start(image: &std::path::Path) -> anyhow::Result<Self> {
        let state = tempfile::Builder::new().prefix("offshoot-e2e").tempdir()?;
        let program = need::program("offshootd");
        let bin_dir = program.parent().expect("a program has a folder");
        let stack = Stack::start(bin_dir, state.path(), &[("debian", image)])?;
        if let Err(error) = stack.build_template("warm", "debian", WARM, &["--memory-mib", "256"]) {
            anyhow::bail!("{error:#}\n{}", stack.daemon_log());
        }
        Ok(Self { stack, _state: state })
    }

    /// One clone of the warm template.
    ///
    /// # Panics
    /// It cannot be made.
    pub fn clone_one(&self) -> String {
        self.clone_of("warm")
    }

    /// One clone of a template.
    ///
    /// # Panics
    /// It cannot be made.
    pub fn clone_of(&self, template: &str) -> String {
        id(&self.stack.create(template, 1).expect("a clone")[0])
    }

    /// Builds a template that is as the warm one but for the flags.
    ///
    /// # Panics
    /// It cannot be built.
    pub fn build_warm(&self, name: &str, flags: &[&str]) {
        self.stack.build_template(name, "debian", WARM, flags).expect("a template");
    }

    /// `count` forks of a sandbox.
    ///
    /// # Panics
    /// One of them failed.
    pub fn forks(&self, sandbox: &str, count: usize) -> Vec<String> {
        self.stack.fork(sandbox, count).expect("forks").0.iter().map(id).collect()
    }

    /// Runs a shell command as root in a sandbox.
    ///
    /// # Panics
    /// The command cannot be started.
    pub fn sh(&self, sandbox: &str, script: &str) -> crate::stack::Outcome {
        let arguments = ["--quiet", "exec", sandbox, "--user", "root", "--", "sh", "-c", script];
        self.stack.cli(&arguments).expect("offshoot runs")
    }

    /// Output of a shell command that must succeed.
    ///
    /// # Panics
    /// It fails.
    pub fn sh_ok(&self, sandbox: &str, script: &str) -> String {
        let outcome = self.sh(sandbox, script);
        assert_eq!(outcome.code, Some(0), "{script:?} in {sandbox}: {outcome:?}");
        outcome.stdout.trim_end().to_owned()
    }

    /// Ends sandboxes; a test leaves none behind.
    ///
    /// # Panics
    /// One cannot be ended.
    pub fn remove(&self, sandboxes: &[String]) {
        for sandbox in sandboxes {
            let outcome = self.stack.cli(&["--quiet", "rm", sandbox]).expect("offshoot runs");
            assert_eq!(outcome.code, Some(0), "rm {sandbox}: {outcome:?}");
        }
    }

    /// Fails the command with this exit code and a message that has all of `words`.
    ///
    /// # Panics
    /// It does otherwise.
    pub fn refused(&self, arguments: &[&str], code: i32, words: &[&str]) {
        let outcome = self.stack.cli(arguments).expect("offshoot runs");
        assert_eq!(outcome.code, Some(code), "{arguments:?}: {outcome:?}");
        for word in words {
            assert!(outcome.stderr.contains(word), "{arguments:?} does not say {word:?}: {outcome:?}");
        }
    }
}
