//! What the services share.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::envd::metrics::Metrics;
use crate::interpreter::Interpreter;
use crate::process::table::Table;
use crate::spawn::Spawner;
use crate::users::Accounts;

/// Whether the agent owns the machine it runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Machine {
    /// A guest: clock, host name, entropy and power are the agent's.
    Own,
    /// A development machine: nothing outside the agent's directory is changed.
    Borrowed,
}

/// Where the agent's own files are.
#[derive(Debug, Clone)]
pub struct Dirs {
    /// `/`, or a directory that stands for it.
    pub root: PathBuf,
    /// `/run/offshoot`, or a directory that stands for it.
    pub run: PathBuf,
}

/// What an identity sets for everyone.
#[derive(Debug, Clone, Default)]
pub struct Globals {
    /// Environment of processes started from now on.
    pub env: BTreeMap<String, String>,
    /// The sandbox's id, once the host has told it.
    pub sandbox_id: Option<String>,
    /// Generation along the lineage.
    pub generation: u64,
}

/// The agent.
pub struct Agent {
    /// For work that outlives a request.
    pub myself: Weak<Agent>,
    /// Whether the machine is ours.
    pub machine: Machine,
    /// Own files.
    pub dirs: Dirs,
    /// User accounts.
    pub accounts: Accounts,
    /// Starts commands.
    pub spawner: Arc<Spawner>,
    /// Processes of clients.
    pub processes: Arc<Table>,
    /// Warm interpreters.
    pub interpreter: Interpreter,
    /// Last sample of the machine's load.
    pub metrics: Metrics,
    /// See [`Globals`].
    pub globals: Arc<Mutex<Globals>>,
}

/// Locks the globals; nothing panics while it holds them.
pub fn lock(globals: &Mutex<Globals>) -> MutexGuard<'_, Globals> {
    globals.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Globals {
    /// The set environment, with what tells a program that it is in a sandbox.
    pub fn environment(&self) -> BTreeMap<String, String> {
        let mut env = self.env.clone();
        env.insert("E2B_SANDBOX".to_owned(), "true".to_owned());
        if let Some(id) = &self.sandbox_id {
            env.insert("E2B_SANDBOX_ID".to_owned(), id.clone());
        }
        env
    }
}
