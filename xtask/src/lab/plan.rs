//! From the command line to everything a run needs to know.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use xtask::lab_protocol::{Job, Share};

use super::assets::Assets;
use super::{Work, kept_console, terminal};
use crate::workspace::Workspace;

/// How a lab shall be.
#[derive(Debug, Clone, clap::Args)]
pub struct LabOptions {
    /// Memory of the lab, MiB; taken from the host as it is used.
    #[arg(long, default_value_t = 10_240)]
    pub memory_mib: u64,
    /// Virtual CPUs of the lab; all are emulated by one thread.
    #[arg(long, default_value_t = 1)]
    pub cpus: u8,
    /// Seconds until the command is ended, the lab's start not counted.
    #[arg(long, default_value_t = 1800)]
    pub timeout: u64,
    /// A variable for the command, NAME=VALUE; may be repeated.
    #[arg(long = "env", value_name = "NAME=VALUE")]
    pub env: Vec<EnvPair>,
    /// A further directory to share with the lab, at the same path; may be repeated.
    #[arg(long = "share", value_name = "DIR")]
    pub shares: Vec<PathBuf>,
    /// Say how long each stage took.
    #[arg(long, short)]
    pub verbose: bool,
    /// Use the lab even where this host's KVM runs Linux.
    #[arg(long)]
    pub force_lab: bool,
    /// Keep the lab's console in this file, whatever happens.
    #[arg(long, value_name = "FILE")]
    pub console: Option<PathBuf>,
}

impl Default for LabOptions {
    fn default() -> Self {
        Self {
            memory_mib: 10_240,
            cpus: 1,
            timeout: 1800,
            env: Vec::new(),
            shares: Vec::new(),
            verbose: true,
            force_lab: false,
            console: None,
        }
    }
}

/// One variable of the environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnvPair {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: String,
}

impl EnvPair {
    /// The variable `name` with `value`.
    pub fn new(name: &str, value: impl Into<String>) -> Self {
        Self { name: name.to_owned(), value: value.into() }
    }
}

impl FromStr for EnvPair {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, value)) if !name.is_empty() => Ok(Self::new(name, value)),
            _ => Err(format!("{text:?} is not NAME=VALUE")),
        }
    }
}

/// Everything one run needs to know.
#[derive(Debug)]
pub struct Plan<'a> {
    /// The lab's parts.
    pub assets: &'a Assets,
    /// What the init in the lab is told.
    pub job: Job,
    /// Memory, MiB.
    pub memory_mib: u64,
    /// Virtual CPUs.
    pub cpus: u8,
    /// Limit of the command.
    pub timeout: Duration,
    /// Say how long each stage took.
    pub verbose: bool,
    /// Where the console is kept if the run fails.
    pub failed_console: PathBuf,
    /// Where the console is kept in any case.
    pub console: Option<PathBuf>,
    /// The share whose files never change, so that the lab may cache them without asking.
    pub immutable: PathBuf,
}

/// Checks the options and completes them.
pub fn resolve<'a>(
    workspace: &Workspace,
    options: &LabOptions,
    work: Work,
    assets: &'a Assets,
) -> Result<Plan<'a>> {
    if !(512..=1 << 20).contains(&options.memory_mib) {
        bail!("a lab of {} MiB is outside 512 to 1048576 MiB", options.memory_mib);
    }
    if !(1..=8).contains(&options.cpus) {
        bail!("a lab of {} CPUs is outside 1 to 8", options.cpus);
    }
    let current = std::env::current_dir().context("could not find the working directory")?;
    let mut wanted = vec![workspace.root.clone(), workspace.target.clone(), workspace.cache.clone()];
    wanted.extend(options.shares.iter().cloned());
    let shares = shares_of(&wanted)?;
    let shared = |path: &Path| shares.iter().any(|share| path.starts_with(&share.path));
    let cwd = if shared(&current) { current } else { workspace.root.clone() };
    let immutable = workspace.cache.canonicalize().context("could not find the cache")?;

    let mut env: BTreeMap<String, String> =
        options.env.iter().map(|pair| (pair.name.clone(), pair.value.clone())).collect();
    env.insert("OFFSHOOT_LAB".to_owned(), "1".to_owned());
    let (argv, size) = match work {
        Work::Command(argv) => (argv, None),
        Work::Shell => (vec!["/bin/bash".to_owned(), "-l".to_owned()], Some(terminal::size()?)),
    };
    if argv.is_empty() {
        bail!("no command was given; say: cargo xtask lab -- COMMAND, or: cargo xtask lab shell");
    }
    let job = Job {
        argv,
        cwd,
        env,
        terminal: size,
        shares,
        modules_dir: assets
            .kernel
            .modules_dir()
            .canonicalize()
            .context("could not find the kernel's modules")?,
        // memfd and tmpfs share the lab's memory; half of it each leaves room to fail in.
        tmpfs_mib: options.memory_mib / 2,
    };
    Ok(Plan {
        assets,
        job,
        memory_mib: options.memory_mib,
        cpus: options.cpus,
        timeout: Duration::from_secs(options.timeout),
        verbose: options.verbose,
        failed_console: kept_console(workspace),
        console: options.console.clone(),
        immutable,
    })
}

/// One share for each directory that is not within another.
fn shares_of(wanted: &[PathBuf]) -> Result<Vec<Share>> {
    let mut paths = Vec::new();
    for path in wanted {
        std::fs::create_dir_all(path).with_context(|| format!("could not create {}", path.display()))?;
        let path = path.canonicalize().with_context(|| format!("could not find {}", path.display()))?;
        let system = ["/dev", "/proc", "/sys", "/run", "/usr", "/etc", "/lib", "/bin"];
        if path == Path::new("/")
            || path == Path::new("/tmp")
            || system.iter().any(|dir| path.starts_with(dir))
        {
            bail!(
                "{} cannot be shared with the lab: it would hide a part of the lab's own system",
                path.display()
            );
        }
        paths.push(path);
    }
    paths.sort();
    let mut kept: Vec<PathBuf> = Vec::new();
    for path in paths {
        if !kept.iter().any(|outer| path.starts_with(outer)) {
            kept.push(path);
        }
    }
    Ok(kept.into_iter().enumerate().map(|(n, path)| Share { tag: format!("share{n}"), path }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_within_another_needs_no_share_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let wanted = [root.join("a"), root.join("a/target"), root.join("ab"), root.join("a")];
        let shares = shares_of(&wanted).unwrap();
        let paths: Vec<_> = shares.iter().map(|share| share.path.clone()).collect();
        assert_eq!(paths, [root.join("a"), root.join("ab")]);
        assert_ne!(shares[0].tag, shares[1].tag);
    }

    #[test]
    fn what_would_hide_the_labs_system_is_not_shared() {
        for path in ["/", "/usr/lib", "/tmp"] {
            assert!(shares_of(&[path.into()]).is_err(), "{path}");
        }
    }

    #[test]
    fn variables_are_names_and_values() {
        assert_eq!("A=b=c".parse(), Ok(EnvPair::new("A", "b=c")));
        assert_eq!("A=".parse(), Ok(EnvPair::new("A", "")));
        assert!("A".parse::<EnvPair>().is_err());
        assert!("=b".parse::<EnvPair>().is_err());
    }
}
