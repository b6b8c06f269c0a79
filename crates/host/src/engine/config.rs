//! The plan a host runs on.

use std::path::PathBuf;
use std::time::Duration;

/// Paths, limits and deadlines of a host.
#[derive(Debug, Clone)]
pub struct HostConfig {
    /// Sockets and logs of running sandboxes; emptied at start.
    pub run_dir: PathBuf,
    /// What outlives the daemon: images.
    pub state_dir: PathBuf,
    /// Downloads and parts of images.
    pub cache_dir: PathBuf,
    /// The program `offshoot-vmm`.
    pub vmm: PathBuf,
    /// The static program `offshoot-agent`, which becomes the init of images built here.
    pub agent: PathBuf,
    /// From a child's start until its agent has acknowledged its identity.
    pub identity_timeout: Duration,
    /// For a fork's children to start; grows by [`HostConfig::fork_timeout_per_child`] for each.
    pub fork_timeout: Duration,
    /// See [`HostConfig::fork_timeout`].
    pub fork_timeout_per_child: Duration,
    /// For a guest's memory to be moved into a template.
    pub freeze_timeout: Duration,
    /// For a VMM to end by itself before it is killed.
    pub stop_timeout: Duration,
    /// How long a fork waits for its turn.
    pub turn_timeout: Duration,
    /// Create and fork calls whose children are not all running or gone yet.
    pub max_forks_in_flight: usize,
    /// Children of one call.
    pub max_children: u32,
    /// Identities of one call that are applied at the same time.
    pub identity_threads: usize,
}

impl HostConfig {
    /// The defaults for these directories and programs.
    pub fn new(run_dir: PathBuf, state_dir: PathBuf, vmm: PathBuf, agent: PathBuf) -> Self {
        Self {
            cache_dir: state_dir.join("cache"),
            run_dir,
            state_dir,
            vmm,
            agent,
            identity_timeout: Duration::from_secs(20),
            fork_timeout: Duration::from_secs(30),
            fork_timeout_per_child: Duration::from_millis(100),
            freeze_timeout: Duration::from_secs(120),
            stop_timeout: Duration::from_secs(3),
            turn_timeout: Duration::from_secs(30),
            max_forks_in_flight: 4,
            max_children: 1000,
            identity_threads: 16,
        }
    }

    /// Where images are kept, one directory each.
    pub fn images_dir(&self) -> PathBuf {
        self.state_dir.join("images")
    }

    pub(super) fn fork_time(&self, children: u32) -> Duration {
        self.fork_timeout + self.fork_timeout_per_child * children
    }
}
