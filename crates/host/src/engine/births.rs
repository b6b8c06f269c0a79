//! Clones and forks: from a source VMM to running sandboxes with identities of their own.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use offshoot_protocol::control::ChildSpec;

use super::state::{Descent, Sandbox, ms};
use super::{ForkTimesMs, Host, SandboxError, SandboxInfo, SandboxState, StopLines};
use crate::agent::{IdentityOf, give_identity};
use crate::clock::{Deadline, monotonic_ns};
use crate::fault::{Fault, Report};
use crate::ids::{hex_id, is_valid_name, sandbox_id};
use crate::resources::SandboxDir;
use crate::vmm::{ChildResources, ForkOptions, ForkOutcome, Vmm, VmmError};

/// Clones to make of a template.
#[derive(Debug, Clone, Default)]
pub struct CreateSpec {
    /// The template.
    pub template: String,
    /// How many, at least 1.
    pub count: u32,
    /// A name for the clone; for one alone.
    pub name: Option<String>,
    /// Environment of the clones' processes from now on.
    pub env: BTreeMap<String, String>,
}

/// Forks to make of a running sandbox.
#[derive(Debug, Clone, Default)]
pub struct ForkSpec {
    /// Id or name of the sandbox.
    pub parent: String,
    /// How many, at least 1.
    pub count: u32,
    /// Environment of the forks' processes from now on; the parent's is not passed on.
    pub env: BTreeMap<String, String>,
}

/// What came of a create or fork call: one result for each child asked for, in order.
#[derive(Debug)]
pub struct Offspring {
    /// The children.
    pub results: Vec<Result<SandboxInfo, SandboxError>>,
    /// The fork as the source felt it; absent where there was none.
    pub times: Option<ForkTimesMs>,
}

/// What all children of one call have in common.
struct Birth<'a> {
    source: &'a Vmm,
    descent: Descent,
    count: u32,
    name: Option<String>,
    env: &'a BTreeMap<String, String>,
    called_ns: u64,
}

type Slot = Option<Result<SandboxInfo, SandboxError>>;

impl Host {
    /// Clones a template. `called_ns` is when the call came in, nanoseconds of `CLOCK_MONOTONIC`.
    ///
    /// # Errors
    /// Fails as a whole on a bad request, an unknown or lost template, and when too many forks are in flight. What
    /// fails for one clone is that clone's result.
    pub fn create(&self, spec: &CreateSpec, called_ns: u64) -> Result<Offspring, SandboxError> {
        self.check_request(spec.count, &spec.env)?;
        let template = self.find_template(&spec.template)?;
        if let Some(end) = template.zygote.ended() {
            return Err(SandboxError::TemplateLost { name: template.name.clone(), end: end.to_string() });
        }
        if let Some(name) = &spec.name {
            self.check_name(name, spec.count)?;
        }
        let descent = Descent { template: template.name.clone(), parent: None, depth: 0, generation: 1 };
        self.give_birth(Birth {
            source: &template.zygote,
            descent,
            count: spec.count,
            name: spec.name.clone(),
            env: &spec.env,
            called_ns,
        })
    }

    /// Forks a running sandbox; it goes on running whatever comes of it.
    ///
    /// # Errors
    /// As [`Host::create`]; and where the sandbox is unknown or not running.
    pub fn fork(&self, spec: &ForkSpec, called_ns: u64) -> Result<Offspring, SandboxError> {
        self.check_request(spec.count, &spec.env)?;
        let parent = self.find_sandbox(&spec.parent)?;
        let vmm = parent.running().ok_or_else(|| not_running(&parent))?;
        let descent = Descent {
            template: parent.descent.template.clone(),
            parent: Some(parent.id.clone()),
            depth: parent.descent.depth + 1,
            generation: parent.descent.generation + 1,
        };
        let birth = Birth { source: &vmm, descent, count: spec.count, name: None, env: &spec.env, called_ns };
        self.give_birth(birth)
    }

    fn check_request(&self, count: u32, env: &BTreeMap<String, String>) -> Result<(), SandboxError> {
        let most = self.config.max_children;
        if !(1..=most).contains(&count) {
            let problem = format!("{count} is not within 1 to {most}");
            return Err(SandboxError::Field { field: "count", problem });
        }
        let bad = |key: &String| key.is_empty() || key.contains(['=', '\0']);
        if let Some(key) =
            env.iter().find(|(key, value)| bad(key) || value.contains('\0')).map(|(key, _)| key)
        {
            let problem = format!("has a variable {key:?} that no process can have");
            return Err(SandboxError::Field { field: "env", problem });
        }
        Ok(())
    }

    fn check_name(&self, name: &str, count: u32) -> Result<(), SandboxError> {
        if count != 1 {
            let problem = format!("{name:?} cannot be given to {count} sandboxes");
            return Err(SandboxError::Field { field: "name", problem });
        }
        if !is_valid_name(name) {
            let problem = format!("{name:?} is not of the form [a-z0-9][a-z0-9_.-]{{0,62}}");
            return Err(SandboxError::Field { field: "name", problem });
        }
        Ok(())
    }

    fn give_birth(&self, birth: Birth<'_>) -> Result<Offspring, SandboxError> {
        let turn = self.config.turn_timeout;
        // Held to the end of this function: until every child is running or gone.
        let _permit = self
            .forks
            .acquire(Deadline::after(turn))
            .ok_or(SandboxError::Busy { most: self.forks.most(), seconds: turn.as_secs() })?;
        let mut slots: Vec<Slot> = (0..birth.count).map(|_| None).collect();
        let (unborn, children) = self.prepare(&birth, &mut slots)?;
        let deadline = Deadline::after(self.config.fork_time(birth.count));
        let options = ForkOptions { deadline, sink: Arc::clone(&self.ends) };
        let forked = birth.source.fork(children, &options);
        let times = forked.as_ref().ok().map(|outcome| outcome.times.into());
        match forked {
            Ok(outcome) => self.bring_up(&birth, outcome, unborn, &mut slots),
            Err(error) => {
                for (index, sandbox) in unborn {
                    self.forget(&sandbox);
                    slots[index] = Some(Err(fork_failed(&sandbox.id, &error)));
                }
            }
        }
        let results = slots.into_iter().map(|slot| slot.expect("every child has come to its end above"));
        Ok(Offspring { results: results.collect(), times })
    }

    /// Makes what each child needs before the fork. One that cannot be prepared is settled here.
    #[expect(clippy::type_complexity, reason = "two lists of the same length that part ways at once")]
    fn prepare(
        &self,
        birth: &Birth<'_>,
        slots: &mut [Slot],
    ) -> Result<(Vec<(usize, Arc<Sandbox>)>, Vec<(ChildSpec, ChildResources)>), SandboxError> {
        let mut unborn = Vec::with_capacity(slots.len());
        let mut children = Vec::with_capacity(slots.len());
        for (index, slot) in slots.iter_mut().enumerate() {
            let id = sandbox_id();
            let (dir, resources) = match SandboxDir::create(&self.config.run_dir, &id) {
                Ok(made) => made,
                Err(source) => {
                    *slot = Some(Err(SandboxError::Resources { id, source }));
                    continue;
                }
            };
            let sandbox = Sandbox::starting(id.clone(), birth.name.clone(), birth.descent.clone(), dir);
            if let Err(error) = self.enter(&sandbox) {
                unborn.iter().for_each(|(_, entered): &(usize, Arc<Sandbox>)| self.forget(entered));
                return Err(error);
            }
            children.push((ChildSpec { id, vm_generation: hex_id() }, resources));
            unborn.push((index, sandbox));
        }
        Ok((unborn, children))
    }

    /// Lists a sandbox, unless its name is taken.
    fn enter(&self, sandbox: &Arc<Sandbox>) -> Result<(), SandboxError> {
        let mut registry = self.lock();
        if self.closing.is_cancelled() {
            return Err(SandboxError::ShuttingDown);
        }
        if let Some(name) = &sandbox.name
            && registry.sandboxes.values().any(|other| other.name.as_ref() == Some(name) || other.id == *name)
        {
            return Err(SandboxError::NameTaken { name: name.clone() });
        }
        registry.sandboxes.insert(sandbox.id.clone(), Arc::clone(sandbox));
        Ok(())
    }

    fn forget(&self, sandbox: &Sandbox) {
        self.lock().sandboxes.remove(&sandbox.id);
        sandbox.release();
    }

    /// Gives the children their identities, several at a time.
    fn bring_up(
        &self,
        birth: &Birth<'_>,
        outcome: ForkOutcome,
        unborn: Vec<(usize, Arc<Sandbox>)>,
        slots: &mut [Slot],
    ) {
        let count = unborn.len();
        let returned_ns = outcome.returned_ns;
        let work: Vec<_> =
            unborn.into_iter().zip(outcome.children).map(|work| Mutex::new(Some(work))).collect();
        let next = AtomicUsize::new(0);
        let done = Mutex::new(Vec::with_capacity(count));
        let worker = || {
            while let Some(item) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
                let item = item.lock().unwrap_or_else(PoisonError::into_inner).take();
                let Some(((index, sandbox), child)) = item else {
                    continue;
                };
                let result = self.raise(birth, returned_ns, &sandbox, child);
                if result.is_err() {
                    self.forget(&sandbox);
                }
                done.lock().unwrap_or_else(PoisonError::into_inner).push((index, result));
            }
        };
        std::thread::scope(|scope| {
            // This thread works, too: with no thread to be had all goes on, one after the other.
            for _ in 1..self.config.identity_threads.min(count) {
                if std::thread::Builder::new().spawn_scoped(scope, worker).is_err() {
                    break;
                }
            }
            worker();
        });
        for (index, result) in done.into_inner().unwrap_or_else(PoisonError::into_inner) {
            slots[index] = Some(result);
        }
    }

    /// One child: from its start to an acknowledged identity. The caller forgets, and so kills, a child that fails.
    fn raise(
        &self,
        birth: &Birth<'_>,
        returned_ns: u64,
        sandbox: &Arc<Sandbox>,
        child: Result<Vmm, offshoot_protocol::control::ControlError>,
    ) -> Result<SandboxInfo, SandboxError> {
        let id = || sandbox.id.clone();
        let vmm = child.map_err(|source| SandboxError::Child { id: id(), source })?;
        // Held by the sandbox from the first, so that a shutdown ends a child whose agent keeps silent.
        let vmm = sandbox.attach(vmm).ok_or(SandboxError::ShuttingDown)?;
        let dir = sandbox.dir().ok_or(SandboxError::ShuttingDown)?;
        let limit = self.config.identity_timeout;
        let of =
            IdentityOf { sandbox_id: &sandbox.id, generation: sandbox.descent.generation, env: birth.env };
        let keep_on = || vmm.ended().is_none() && !self.closing.is_cancelled();
        let given = give_identity(&dir.vsock_path(), &of, Deadline::after(limit), &keep_on);
        let times = given.map_err(|source| match vmm.ended() {
            Some(end) => {
                let message = format!("{end}, before its identity was acknowledged; {}", dir.last_words(5));
                let kind = offshoot_protocol::control::ErrorKind::Host;
                let source = offshoot_protocol::control::ControlError { kind, message };
                SandboxError::Child { id: id(), source }
            }
            None => SandboxError::Identity { id: id(), seconds: limit.as_secs(), source },
        })?;
        for hook in &times.failed_hooks {
            tracing::warn!(sandbox = sandbox.id, hook, "a hook of the guest's on-fork.d failed");
        }
        let since = |ns: u64| ms(ns.saturating_sub(birth.called_ns));
        let stop_lines = StopLines {
            call_returned_ms: since(returned_ns),
            first_instruction_ms: since(vmm.started().map_or(0, |started| started.started_ns)),
            agent_replied_ms: since(times.replied_ns),
            identity_applied_ms: since(times.applied_ns),
        };
        if sandbox.mark_running(stop_lines) { Ok(sandbox.info()) } else { Err(SandboxError::ShuttingDown) }
    }
}

/// Why a sandbox cannot be used now.
pub(super) fn not_running(sandbox: &Sandbox) -> SandboxError {
    let state = match sandbox.state() {
        SandboxState::Starting => "starting",
        SandboxState::Running | SandboxState::Dead => "dead",
    };
    SandboxError::NotRunning { id: sandbox.id.clone(), state, cause: sandbox.cause() }
}

fn fork_failed(id: &str, error: &VmmError) -> SandboxError {
    let message = Report::of(error).message;
    SandboxError::Fork { id: id.to_owned(), kind: error.kind(), code: error.code(), message }
}

/// The time of a call that comes in now.
pub fn called_now() -> u64 {
    monotonic_ns()
}
