//! One sandbox: what it is, how far it has come, what it owns.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use offshoot_protocol::control::{ExitReason, ForkTimes};
use serde::Serialize;

use crate::accounting::Memory;
use crate::control::End;
use crate::resources::SandboxDir;
use crate::vmm::Vmm;

/// Console lines kept in the cause of a death.
const LAST_LINES: usize = 8;

/// How far a sandbox has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxState {
    /// Forked, but without its own identity yet: answers nothing.
    Starting,
    /// Its agent has acknowledged its identity.
    Running,
    /// Its VMM has ended by itself.
    Dead,
}

/// When a sandbox passed each stop-line, milliseconds since the call for it came in.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct StopLines {
    /// The fork call had returned.
    pub call_returned_ms: f64,
    /// Its vCPUs were let go.
    pub first_instruction_ms: f64,
    /// Its agent's first reply had arrived.
    pub agent_replied_ms: f64,
    /// Its agent had acknowledged its identity.
    pub identity_applied_ms: f64,
}

/// A fork as its parent felt it, milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ForkTimesMs {
    /// How long the parent's vCPUs stood still.
    pub pause_ms: f64,
    /// Stopping the vCPUs and reading their state.
    pub state_save_ms: f64,
    /// The fork itself.
    pub fork_ms: f64,
}

impl From<ForkTimes> for ForkTimesMs {
    fn from(times: ForkTimes) -> Self {
        Self {
            pause_ms: ms(times.pause_ns()),
            state_save_ms: ms(times.state_saved_ns.saturating_sub(times.stop_requested_ns)),
            fork_ms: ms(times.forked_ns.saturating_sub(times.state_saved_ns)),
        }
    }
}

/// Nanoseconds as milliseconds.
#[expect(clippy::cast_precision_loss, reason = "2^53 ns are 104 days")]
pub(super) fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// A sandbox as clients see it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SandboxInfo {
    /// Its id.
    pub id: String,
    /// Its name, if it was given one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// How far it has come.
    pub state: SandboxState,
    /// Why it is dead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// The template it descends from.
    pub template: String,
    /// The sandbox it was forked from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Forks between it and the clone it descends from.
    pub depth: u32,
    /// Clones and forks since the template.
    pub generation: u64,
    /// RFC 3339.
    pub created_at: String,
    /// Process id of its VMM; 0 once that has ended.
    pub pid: u32,
    /// How fast it came up.
    pub stop_lines: StopLines,
    /// Memory of its VMM; absent when that has ended or may not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
}

/// Where a sandbox stands in the lineage.
#[derive(Debug, Clone)]
pub(super) struct Descent {
    pub(super) template: String,
    pub(super) parent: Option<String>,
    pub(super) depth: u32,
    pub(super) generation: u64,
}

pub(super) struct Sandbox {
    pub(super) id: String,
    pub(super) name: Option<String>,
    pub(super) descent: Descent,
    pub(super) created_at: String,
    live: Mutex<Live>,
}

struct Live {
    state: SandboxState,
    cause: Option<String>,
    vmm: Option<Arc<Vmm>>,
    dir: Option<Arc<SandboxDir>>,
    stop_lines: StopLines,
}

impl Sandbox {
    pub(super) fn starting(id: String, name: Option<String>, descent: Descent, dir: SandboxDir) -> Arc<Self> {
        Arc::new(Self {
            id,
            name,
            descent,
            created_at: crate::clock::now_rfc3339(),
            live: Mutex::new(Live {
                state: SandboxState::Starting,
                cause: None,
                vmm: None,
                dir: Some(Arc::new(dir)),
                stop_lines: StopLines::default(),
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn state(&self) -> SandboxState {
        self.lock().state
    }

    pub(super) fn cause(&self) -> Option<String> {
        self.lock().cause.clone()
    }

    /// The VMM, while the sandbox is running.
    pub(super) fn running(&self) -> Option<Arc<Vmm>> {
        let live = self.lock();
        if live.state == SandboxState::Running { live.vmm.clone() } else { None }
    }

    pub(super) fn dir(&self) -> Option<Arc<SandboxDir>> {
        self.lock().dir.clone()
    }

    /// Its VMM runs; the sandbox is still `starting`. `None` if it was given up meanwhile: then the VMM is killed.
    pub(super) fn attach(&self, vmm: Vmm) -> Option<Arc<Vmm>> {
        let mut live = self.lock();
        if live.state != SandboxState::Starting {
            return None;
        }
        let vmm = Arc::new(vmm);
        live.vmm = Some(Arc::clone(&vmm));
        Some(vmm)
    }

    /// Its identity is acknowledged: from now on it answers, unless it was given up meanwhile. A VMM that has ended
    /// makes it dead at once.
    pub(super) fn mark_running(&self, stop_lines: StopLines) -> bool {
        let vmm = {
            let mut live = self.lock();
            if live.state != SandboxState::Starting {
                return false;
            }
            live.state = SandboxState::Running;
            live.stop_lines = stop_lines;
            live.vmm.clone()
        };
        // Its end may have been reported while it was still starting.
        if let Some(end) = vmm.and_then(|vmm| vmm.ended()) {
            self.mark_dead(&end);
        }
        true
    }

    /// Its VMM has ended by itself: what it held is freed, the console stays.
    pub(super) fn mark_dead(&self, end: &End) {
        let mut live = self.lock();
        if live.state != SandboxState::Running {
            return;
        }
        live.state = SandboxState::Dead;
        live.vmm = None;
        let mut cause = end.to_string();
        if let Some(dir) = &live.dir {
            dir.close_vsock();
            if !matches!(end.reason, Some(ExitReason::Stopped | ExitReason::PowerOff)) {
                let words = dir.last_words(LAST_LINES);
                if !words.is_empty() {
                    cause = format!("{cause}; its console ends with:\n{words}");
                }
            }
        }
        tracing::warn!(sandbox = self.id, %end, "a sandbox died");
        live.cause = Some(cause);
    }

    /// Gives up VMM and files. The VMM is killed even if an operation still holds it; that then fails.
    pub(super) fn release(&self) {
        let mut live = self.lock();
        live.state = SandboxState::Dead;
        if let Some(vmm) = live.vmm.take() {
            vmm.kill();
        }
        live.dir = None;
    }

    /// As clients see it. Cost: reads `/proc`, outside the lock.
    pub(super) fn info(&self) -> SandboxInfo {
        let (state, cause, vmm, stop_lines) = {
            let live = self.lock();
            (live.state, live.cause.clone(), live.vmm.clone(), live.stop_lines)
        };
        let memory = vmm.as_deref().and_then(memory_of);
        SandboxInfo {
            id: self.id.clone(),
            name: self.name.clone(),
            state,
            cause,
            template: self.descent.template.clone(),
            parent: self.descent.parent.clone(),
            depth: self.descent.depth,
            generation: self.descent.generation,
            created_at: self.created_at.clone(),
            pid: vmm.and_then(|vmm| vmm.pid()).unwrap_or(0),
            stop_lines,
            memory,
        }
    }
}

/// Memory of a VMM process, if it lives and may be read.
pub(super) fn memory_of(vmm: &Vmm) -> Option<Memory> {
    Memory::of(vmm.pid()?, &*vmm.pidfd()?)
}
