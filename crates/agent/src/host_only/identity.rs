//! Making a clone its own machine, step by step. A step that fails ends it: the host then ends the sandbox.
//!
//! Entropy comes first, so that whatever a later step makes is of the new state.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use offshoot_protocol::identity::Identity;
use rustix::time::{ClockId, Timespec, clock_settime};

use crate::agent::{Agent, Machine, lock};
use crate::interpreter::InterpreterError;
use crate::sys;

use super::hooks;
use super::ssh::{self, SshError};

const MIN_ENTROPY_BYTES: usize = 64;
/// Linux's limit of a host name.
const MAX_HOSTNAME_BYTES: usize = 64;
/// `/dev/urandom` takes as much at a time.
const SEED_BYTES: usize = 32;

/// The step that failed.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The request holds something that cannot be a machine's.
    #[error("identity: {what}")]
    Invalid {
        /// What is wrong.
        what: String,
    },
    /// The kernel refused fresh entropy.
    #[error("identity step entropy")]
    Entropy(#[source] io::Error),
    /// The clock could not be set.
    #[error("identity step clock")]
    Clock(#[source] io::Error),
    /// The host name could not be set.
    #[error("identity step hostname")]
    Hostname(#[source] io::Error),
    /// `/etc/machine-id` could not be written.
    #[error("identity step machine-id")]
    MachineId(#[source] io::Error),
    /// SSH host keys could not be replaced.
    #[error("identity step ssh host keys")]
    Ssh(#[source] SshError),
    /// The generation file could not be written.
    #[error("identity step generation")]
    Generation(#[source] io::Error),
    /// An interpreter did not take its seed.
    #[error("identity step interpreter")]
    Interpreter(#[source] InterpreterError),
}

/// What was done.
pub struct Applied {
    /// Echoed.
    pub generation: u64,
    /// Wall clock afterwards.
    pub wall_clock_ns: u64,
    /// Hooks that failed, and why.
    pub failed_hooks: Vec<String>,
}

/// Applies `identity`.
///
/// # Errors
/// The first step that fails; those before it stay done.
pub async fn apply(agent: &Agent, identity: Identity) -> Result<Applied, IdentityError> {
    let entropy = check(&identity)?;
    if agent.machine == Machine::Own {
        credit(&entropy).map_err(IdentityError::Entropy)?;
        set_clock(identity.wall_clock_ns).map_err(IdentityError::Clock)?;
        rustix::system::sethostname(identity.hostname.as_bytes())
            .map_err(|error| IdentityError::Hostname(error.into()))?;
    }
    let etc = agent.dirs.root.join("etc");
    write(&etc.join("hostname"), &identity.hostname).map_err(IdentityError::Hostname)?;
    write(&etc.join("machine-id"), &identity.machine_id).map_err(IdentityError::MachineId)?;
    ssh::replace_host_keys(agent, &etc.join("ssh")).await.map_err(IdentityError::Ssh)?;
    {
        let mut globals = lock(&agent.globals);
        globals.env = identity.env;
        globals.sandbox_id = Some(identity.sandbox_id);
        globals.generation = identity.generation;
    }
    let seed = interpreter_seed(agent, &entropy).map_err(IdentityError::Entropy)?;
    agent.interpreter.reseed(&seed).await.map_err(IdentityError::Interpreter)?;
    write_generation(&agent.dirs.run, identity.generation).map_err(IdentityError::Generation)?;
    let failed_hooks = hooks::run(agent, &etc.join("offshoot/on-fork.d")).await;
    Ok(Applied { generation: identity.generation, wall_clock_ns: wall_clock_ns(), failed_hooks })
}

fn check(identity: &Identity) -> Result<Vec<u8>, IdentityError> {
    let invalid = |what: String| Err(IdentityError::Invalid { what });
    let entropy = STANDARD.decode(&identity.entropy_base64).unwrap_or_default();
    if entropy.len() < MIN_ENTROPY_BYTES {
        return invalid(format!("entropy_base64 must hold at least {MIN_ENTROPY_BYTES} bytes of base64"));
    }
    let name = &identity.hostname;
    let printable = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.');
    if name.is_empty() || name.len() > MAX_HOSTNAME_BYTES || !printable {
        return invalid(format!(
            "hostname '{name}' must be 1 to {MAX_HOSTNAME_BYTES} letters, digits, '-' or '.'"
        ));
    }
    let id = &identity.machine_id;
    if id.len() != 32 || !id.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte)) {
        return invalid(format!("machine_id '{id}' must be 32 lower-case hexadecimal digits"));
    }
    if let Some(name) = identity.env.keys().find(|name| name.is_empty() || name.contains(['=', '\0'])) {
        return invalid(format!("'{name}' cannot be the name of an environment variable"));
    }
    if let Some((name, _)) = identity.env.iter().find(|(_, value)| value.contains('\0')) {
        return invalid(format!("the value of environment variable '{name}' holds a zero byte"));
    }
    Ok(entropy)
}

fn credit(entropy: &[u8]) -> io::Result<()> {
    let device = fs::OpenOptions::new().write(true).open("/dev/urandom")?;
    sys::credit_entropy(device.as_fd(), entropy)
}

fn set_clock(wall_clock_ns: u64) -> io::Result<()> {
    const NS_PER_SECOND: u64 = 1_000_000_000;
    let time = Timespec {
        tv_sec: (wall_clock_ns / NS_PER_SECOND) as i64,
        tv_nsec: (wall_clock_ns % NS_PER_SECOND) as i64,
    };
    Ok(clock_settime(ClockId::Realtime, time)?)
}

fn wall_clock_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// From the kernel, which has just been given fresh entropy; on a borrowed machine, from the request.
fn interpreter_seed(agent: &Agent, entropy: &[u8]) -> io::Result<Vec<u8>> {
    if agent.machine == Machine::Borrowed {
        return Ok(entropy[..SEED_BYTES].to_vec());
    }
    let mut seed = vec![0; SEED_BYTES];
    rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty())?;
    Ok(seed)
}

/// Replaces a file's whole content, with an end of line. In place: `/etc/hostname` may be a mount of its own.
fn write(path: &Path, text: &str) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(path, format!("{text}\n"))
}

/// Replaces the generation file by renaming: a program that watches its directory sees one event and whole content.
fn write_generation(directory: &Path, generation: u64) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let temporary = directory.join(".generation.new");
    fs::write(&temporary, format!("{generation}\n"))?;
    fs::rename(temporary, directory.join("generation"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> Identity {
        Identity {
            sandbox_id: "i1".into(),
            entropy_base64: STANDARD.encode([7; 64]),
            wall_clock_ns: 0,
            hostname: "i1".into(),
            machine_id: "0123456789abcdef0123456789abcdef".into(),
            generation: 1,
            env: [("A".to_owned(), "b".to_owned())].into(),
        }
    }

    #[test]
    fn what_cannot_be_a_machines_is_refused() {
        assert!(check(&identity()).is_ok());
        for wrong in [
            Identity { entropy_base64: STANDARD.encode([7; 63]), ..identity() },
            Identity { entropy_base64: "!".into(), ..identity() },
            Identity { hostname: String::new(), ..identity() },
            Identity { hostname: "a\nb".into(), ..identity() },
            Identity { hostname: "a".repeat(65), ..identity() },
            Identity { machine_id: "0123456789ABCDEF0123456789abcdef".into(), ..identity() },
            Identity { env: [("A=".to_owned(), String::new())].into(), ..identity() },
            Identity { env: [("A".to_owned(), "\0".to_owned())].into(), ..identity() },
        ] {
            assert!(check(&wrong).is_err(), "{wrong:?}");
        }
    }
}
