//! Programs of the image that must know of a new identity.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::agent::{Agent, lock};
use crate::pipe::AsyncPipe;
use crate::reaper::Exit;
use crate::spawn::{DEFAULT_PATH, Ends, Launch, Streams};
use crate::users::User;

/// How long each hook may take.
const HOOK_LIMIT: Duration = Duration::from_secs(5);
/// How much of a command's standard error its failure tells, bytes.
const ERROR_BYTES: usize = 512;

/// Runs the executable files of `directory`, in order of their names; answers with those that failed, and why.
pub async fn run(agent: &Agent, directory: &Path) -> Vec<String> {
    let mut failed = Vec::new();
    for hook in executables(directory) {
        let name = hook.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if let Err(reason) = command(agent, hook.into(), Vec::new(), HOOK_LIMIT).await {
            failed.push(format!("{name}: {reason}"));
        }
    }
    failed
}

fn executables(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Vec::new();
    };
    let executable = |path: &PathBuf| {
        fs::metadata(path)
            .is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
    };
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).filter(executable).collect();
    paths.sort();
    paths
}

/// Runs a command of the image as the agent's user, told of the new identity, and kills it with all that it started
/// after `limit`.
///
/// # Errors
/// In words: not started, failed, or out of time.
pub async fn command(
    agent: &Agent,
    program: OsString,
    args: Vec<OsString>,
    limit: Duration,
) -> Result<(), String> {
    let user = agent_user(agent);
    let mut env = lock(&agent.globals).environment();
    env.insert("OFFSHOOT_GENERATION".to_owned(), lock(&agent.globals).generation.to_string());
    env.insert("HOME".to_owned(), user.home.to_string_lossy().into_owned());
    env.entry("PATH".to_owned()).or_insert_with(|| DEFAULT_PATH.to_owned());
    let launch = Launch {
        program,
        args,
        env: env.into_iter().collect(),
        cwd: "/".into(),
        user,
        streams: Streams::Output,
        extra_fds: Vec::new(),
    };
    let spawned = agent.spawner.spawn(launch).map_err(|error| format!("could not be started: {error}"))?;
    let Ends::Pipes { stdout, stderr, .. } = spawned.ends else {
        return Err("was given a terminal".to_owned());
    };
    let readers = AsyncPipe::new(stdout).and_then(|stdout| Ok((stdout, AsyncPipe::new(stderr)?)));
    let (stdout, stderr) = readers.map_err(|error| format!("its output could not be read: {error}"))?;
    let mut said = Vec::new();
    let ended = async {
        let mut exit = spawned.exit;
        let mut open = (true, true);
        loop {
            tokio::select! {
                // What it left running may hold the pipes: its own end is what counts.
                exit = &mut exit => return exit.ok(),
                chunk = stdout.read_chunk(ERROR_BYTES), if open.0 => open.0 = chunk.is_ok_and(|chunk| !chunk.is_empty()),
                chunk = stderr.read_chunk(ERROR_BYTES), if open.1 => {
                    let chunk = chunk.unwrap_or_default();
                    open.1 = !chunk.is_empty();
                    said.extend_from_slice(&chunk[..chunk.len().min(ERROR_BYTES - said.len())]);
                }
            }
        }
    };
    let exit = tokio::time::timeout(limit, ended).await;
    let mut left = ERROR_BYTES - said.len();
    while left > 0
        && let Some(chunk) = stderr.read_now(left)
    {
        left -= chunk.len();
        said.extend_from_slice(&chunk);
    }
    let said = String::from_utf8_lossy(&said);
    let said = if said.trim().is_empty() { String::new() } else { format!(": {}", said.trim()) };
    match exit {
        Ok(Some(Exit::Code(0))) => Ok(()),
        Ok(Some(Exit::Code(code))) => Err(format!("exit status {code}{said}")),
        Ok(Some(Exit::Signal { number, .. })) => Err(format!("killed by signal {number}{said}")),
        Ok(None) => Err("its exit status is not known".to_owned()),
        Err(_) => {
            spawned.target.kill_tree();
            Err(format!("was killed: not done after {} s{said}", limit.as_secs()))
        }
    }
}

fn agent_user(agent: &Agent) -> User {
    let own = agent.accounts.root().or_else(|_| agent.accounts.find(None));
    own.unwrap_or_else(|_| User {
        name: "root".into(),
        uid: 0,
        gid: 0,
        home: "/root".into(),
        groups: vec![0],
    })
}
