//! The processes clients know of: the living, and for a while the ended.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::Process;

/// How long an ended process can still be asked for its end.
const RETAINED: Duration = Duration::from_secs(30);

/// Processes by process id.
#[derive(Default)]
pub struct Table {
    processes: Mutex<BTreeMap<i32, Arc<Process>>>,
}

/// How a client names a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selector {
    /// By process id.
    Pid(i32),
    /// By the name given at its start; the youngest of several.
    Tag(String),
}

impl std::fmt::Display for Selector {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Pid(pid) => write!(formatter, "process with pid {pid}"),
            Self::Tag(tag) => write!(formatter, "process with tag '{tag}'"),
        }
    }
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<i32, Arc<Process>>> {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers `process` until a while after its end.
    pub fn insert(self: &Arc<Self>, process: Arc<Process>) {
        self.lock().insert(process.pid(), process.clone());
        let table = self.clone();
        tokio::spawn(async move {
            process.wait_end().await;
            tokio::time::sleep(RETAINED).await;
            let mut processes = table.lock();
            if processes.get(&process.pid()).is_some_and(|known| Arc::ptr_eq(known, &process)) {
                processes.remove(&process.pid());
            }
        });
    }

    /// The process a client names.
    pub fn find(&self, selector: &Selector) -> Option<Arc<Process>> {
        let processes = self.lock();
        match selector {
            Selector::Pid(pid) => processes.get(pid).cloned(),
            Selector::Tag(tag) => {
                let tagged =
                    || processes.values().filter(|process| process.description.tag.as_ref() == Some(tag));
                tagged().find(|process| process.end().is_none()).or_else(|| tagged().next_back()).cloned()
            }
        }
    }

    /// The living.
    pub fn living(&self) -> Vec<Arc<Process>> {
        self.lock().values().filter(|process| process.end().is_none()).cloned().collect()
    }
}
