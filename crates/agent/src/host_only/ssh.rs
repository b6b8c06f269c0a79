//! SSH host keys: those of the parent must not serve in a clone.
//!
//! The old keys are removed before the identity is acknowledged. Making new ones takes seconds of processor time, so
//! they are made afterwards, in the background, unless a server is running: it would go on with the parent's keys in
//! memory, so then new ones are made, and the server told, before the acknowledgement.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::agent::{Agent, Machine};
use crate::sys;

use super::hooks;

/// How long making one key may take.
const KEY_LIMIT: Duration = Duration::from_secs(60);
const KEY_GENERATOR: &str = "/usr/bin/ssh-keygen";

/// Why host keys could not be replaced.
#[derive(Debug, thiserror::Error)]
pub enum SshError {
    /// An old key stays.
    #[error("could not remove {path}")]
    Remove {
        /// The key.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A running server has no new key.
    #[error("ssh-keygen {reason}")]
    Generate {
        /// Why.
        reason: String,
    },
}

/// Replaces the host keys of `directory`, where there are any.
///
/// # Errors
/// Where an old key stays in use.
pub async fn replace_host_keys(agent: &Agent, directory: &Path) -> Result<(), SshError> {
    let keys = host_keys(directory);
    for key in &keys {
        for path in [key.clone(), key.with_extension("pub")] {
            match fs::remove_file(&path) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(SshError::Remove { path, source });
                }
                _ => {}
            }
        }
    }
    if keys.is_empty() || agent.machine == Machine::Borrowed || !Path::new(KEY_GENERATOR).exists() {
        return Ok(());
    }
    let servers = running_servers();
    if servers.is_empty() {
        generate_later(agent, keys);
        return Ok(());
    }
    for key in keys {
        let arguments = generator_arguments(&key);
        let made = hooks::command(agent, KEY_GENERATOR.into(), arguments, KEY_LIMIT).await;
        made.map_err(|reason| SshError::Generate { reason })?;
    }
    for server in servers {
        // A server that ended meanwhile has nothing to read.
        let _ = sys::send_signal(server, libc::SIGHUP);
    }
    Ok(())
}

fn host_keys(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Vec::new();
    };
    let is_key = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("ssh_host_") && name.ends_with("_key")
    };
    entries.flatten().map(|entry| entry.path()).filter(is_key).collect()
}

/// `ssh_host_TYPE_key`: TYPE names the kind.
fn generator_arguments(key: &Path) -> Vec<OsString> {
    let name = key.file_name().unwrap_or_default().to_string_lossy();
    let kind = name.trim_start_matches("ssh_host_").trim_end_matches("_key").to_owned();
    let mut arguments: Vec<OsString> = ["-q", "-N", "", "-t"].map(OsString::from).into();
    arguments.extend([kind.into(), "-f".into(), key.as_os_str().to_owned()]);
    arguments
}

fn generate_later(agent: &Agent, keys: Vec<PathBuf>) {
    let Some(agent) = agent.myself.upgrade() else {
        return;
    };
    tokio::spawn(async move {
        for key in keys {
            let arguments = generator_arguments(&key);
            if let Err(reason) = hooks::command(&agent, KEY_GENERATOR.into(), arguments, KEY_LIMIT).await {
                crate::console::say(&format!("{}: ssh-keygen {reason}", key.display()));
            }
        }
    });
}

/// Process ids of SSH servers, those of sessions included (which end at the signal; their connections are gone anyway).
fn running_servers() -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_server =
        |pid: &i32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "sshd");
    pids.filter(is_server).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_keys_name_tells_its_kind() {
        let arguments = generator_arguments(Path::new("/etc/ssh/ssh_host_ed25519_key"));
        assert_eq!(arguments, ["-q", "-N", "", "-t", "ed25519", "-f", "/etc/ssh/ssh_host_ed25519_key"]);
    }
}
