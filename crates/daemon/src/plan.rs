//! Flags, and the plan they resolve to.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use offshoot_host::HostConfig;

/// Serves Offshoot's HTTP API on a Unix socket.
#[derive(Debug, clap::Parser)]
#[command(name = "offshootd", version)]
pub(crate) struct Flags {
    /// Where to listen [default: offshootd.sock in the run directory]
    #[arg(long, env = "OFFSHOOT_SOCKET")]
    socket: Option<PathBuf>,
    /// Sockets and logs of running sandboxes; emptied at start
    #[arg(long, default_value = "/run/offshoot")]
    run_dir: PathBuf,
    /// What outlives the daemon: images
    #[arg(long, default_value = "/var/lib/offshoot")]
    state_dir: PathBuf,
    /// Downloads and parts of images [default: cache in the state directory]
    #[arg(long)]
    cache_dir: Option<PathBuf>,
    /// The VMM program [default: offshoot-vmm beside this program]
    #[arg(long)]
    vmm: Option<PathBuf>,
    /// The agent program put into images [default: offshoot-agent beside this program]
    #[arg(long)]
    agent: Option<PathBuf>,
    /// A clone or fork that has not acknowledged its identity after this time is ended
    #[arg(long, default_value_t = 20_000)]
    identity_timeout_ms: u64,
    /// A forked child that has not started after this time is ended (100 ms more for each sibling)
    #[arg(long, default_value_t = 30_000)]
    fork_timeout_ms: u64,
    /// Limit of a template's freeze
    #[arg(long, default_value_t = 120_000)]
    freeze_timeout_ms: u64,
    /// A VMM that has not ended this time after it was asked to is killed
    #[arg(long, default_value_t = 3_000)]
    stop_timeout_ms: u64,
    /// Create and fork calls worked on at the same time; others wait
    #[arg(long, default_value_t = 4)]
    max_forks_in_flight: usize,
    /// Most children of one create or fork call
    #[arg(long, default_value_t = 1000)]
    max_children: u32,
    /// What to log to standard error, as a tracing filter
    #[arg(long, env = "OFFSHOOT_LOG", default_value = "info")]
    log: String,
}

/// What the daemon runs on.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Where to listen.
    pub(crate) socket: PathBuf,
    /// What to log.
    pub(crate) log: String,
    /// The host's plan.
    pub(crate) host: HostConfig,
}

impl Plan {
    /// Makes paths absolute (VMMs get them, too) and finds the programs.
    pub(crate) fn resolve(flags: Flags) -> anyhow::Result<Self> {
        let own = std::env::current_exe().context("find this program's own path")?;
        let beside = |name: &str| own.parent().unwrap_or(Path::new("/")).join(name);
        let absolute = |path: PathBuf| {
            std::path::absolute(&path).with_context(|| format!("make {} absolute", path.display()))
        };
        let run_dir = absolute(flags.run_dir)?;
        let state_dir = absolute(flags.state_dir)?;
        let vmm = absolute(flags.vmm.unwrap_or_else(|| beside("offshoot-vmm")))?;
        let agent = absolute(flags.agent.unwrap_or_else(|| beside("offshoot-agent")))?;
        let socket = absolute(flags.socket.unwrap_or_else(|| run_dir.join("offshootd.sock")))?;
        let mut host = HostConfig::new(run_dir, state_dir, vmm, agent);
        if let Some(cache_dir) = flags.cache_dir {
            host.cache_dir = absolute(cache_dir)?;
        }
        host.identity_timeout = Duration::from_millis(flags.identity_timeout_ms);
        host.fork_timeout = Duration::from_millis(flags.fork_timeout_ms);
        host.freeze_timeout = Duration::from_millis(flags.freeze_timeout_ms);
        host.stop_timeout = Duration::from_millis(flags.stop_timeout_ms);
        host.max_forks_in_flight = flags.max_forks_in_flight;
        host.max_children = flags.max_children;
        Ok(Self { socket, log: flags.log, host })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn defaults_follow_the_run_and_state_directories() {
        let flags = Flags::parse_from(["offshootd", "--run-dir", "/r", "--state-dir", "/s"]);
        let plan = Plan::resolve(flags).unwrap();
        assert_eq!(plan.socket, Path::new("/r/offshootd.sock"));
        assert_eq!(plan.host.cache_dir, Path::new("/s/cache"));
        assert!(plan.host.vmm.ends_with("offshoot-vmm") && plan.host.vmm.is_absolute());
        assert_eq!(plan.host.identity_timeout, Duration::from_secs(20));
    }
}
