//! The barrier at which vCPU threads stop for a fork.
//!
//! ```text
//!            stop()                    last vCPU parks
//!  Running ─────────▶ Stopping ──────────────────────▶ Stopped
//!     ▲                                                   │
//!     └───────────────────── release() ───────────────────┘
//! ```
//!
//! A vCPU parks only after `KVM_RUN` has returned `EINTR`, when every pending port or MMIO access is complete
//! (Documentation/virt/kvm/api.rst, `KVM_RUN`, on `immediate_exit`), and waits in a condition variable, holding no
//! lock; so a process forked while the gate is `Stopped` has all locks free.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::arch::x86_64::state::{StateError, VcpuState};

/// What a vCPU does after [`Gate::park`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Run the guest again.
    Run,
    /// End the thread.
    Exit,
}

/// Why the vCPUs could not be stopped.
#[derive(Debug, thiserror::Error)]
pub enum StopError {
    /// At least one did not park in time.
    #[error("{parked} of {vcpus} vcpus stopped within {waited_ms} ms")]
    Late {
        /// How many had parked.
        parked: usize,
        /// How many there are.
        vcpus: usize,
        /// How long was waited.
        waited_ms: u128,
    },
    /// A vCPU's state could not be read.
    #[error("save the state of vcpu {vcpu}")]
    Save {
        /// Which one.
        vcpu: usize,
        /// Why.
        source: Box<StateError>,
    },
    /// A vCPU has ended; the sandbox is going down.
    #[error("vcpu {vcpu} has ended")]
    Ended {
        /// Which one.
        vcpu: usize,
    },
}

enum Slot {
    Running,
    /// Waiting; the state is taken out once.
    Parked(Option<Result<Box<VcpuState>, StateError>>),
    Ended,
}

struct Inner {
    slots: Vec<Slot>,
    verdict: Option<Verdict>,
    /// Grows with each release, so that a vCPU that is slow to wake does not take a later stop for its own.
    round: u64,
}

/// The barrier of one VM's vCPU threads.
pub struct Gate {
    stop: AtomicBool,
    inner: Mutex<Inner>,
    vcpus_wake: Condvar,
    control_wake: Condvar,
}

impl Gate {
    /// A gate for `vcpus` threads, all taken as running.
    pub fn new(vcpus: usize) -> Self {
        let slots = (0..vcpus).map(|_| Slot::Running).collect();
        Self {
            stop: AtomicBool::new(false),
            inner: Mutex::new(Inner { slots, verdict: None, round: 0 }),
            vcpus_wake: Condvar::new(),
            control_wake: Condvar::new(),
        }
    }

    /// Whether a vCPU must park at its next chance.
    pub fn stop_requested(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Asks every vCPU to park. The caller then kicks them out of `KVM_RUN`.
    pub fn request_stop(&self) {
        self.stop.store(true, Ordering::Release);
        // Under the lock, so that a vCPU that has just found no request in `wait_for_stop` is waiting by now.
        let _inner = self.lock();
        self.vcpus_wake.notify_all();
    }

    /// Called by a vCPU thread whose guest has nothing to do: waits until a stop is requested.
    pub fn wait_for_stop(&self) {
        let mut inner = self.lock();
        while !self.stop_requested() {
            inner = self.vcpus_wake.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until every vCPU has parked and returns their states in order.
    ///
    /// # Errors
    /// As [`StopError`]; the caller must [`Gate::release`] whatever comes back.
    pub fn wait_stopped(&self, limit: Duration) -> Result<Vec<VcpuState>, StopError> {
        let start = Instant::now();
        let mut inner = self.lock();
        loop {
            let parked = inner.slots.iter().filter(|slot| !matches!(slot, Slot::Running)).count();
            if parked == inner.slots.len() {
                return inner
                    .slots
                    .iter_mut()
                    .enumerate()
                    .map(|(vcpu, slot)| take_state(vcpu, slot))
                    .collect();
            }
            let Some(rest) = limit.checked_sub(start.elapsed()).filter(|rest| !rest.is_zero()) else {
                let waited_ms = start.elapsed().as_millis();
                return Err(StopError::Late { parked, vcpus: inner.slots.len(), waited_ms });
            };
            inner = self.control_wake.wait_timeout(inner, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Lets all vCPUs go on, or end.
    pub fn release(&self, verdict: Verdict) {
        let mut inner = self.lock();
        self.stop.store(verdict == Verdict::Exit, Ordering::Release);
        // Threads in `wait_for_stop` must see an exit, too.
        inner.verdict = (verdict == Verdict::Exit).then_some(Verdict::Exit);
        inner.round += 1;
        for slot in &mut inner.slots {
            if matches!(slot, Slot::Parked(_)) {
                *slot = Slot::Running;
            }
        }
        self.vcpus_wake.notify_all();
    }

    /// Called by a vCPU thread with its saved state: waits for the next release.
    pub fn park(&self, vcpu: usize, state: Result<Box<VcpuState>, StateError>) -> Verdict {
        let mut inner = self.lock();
        if let Some(verdict) = inner.verdict {
            return verdict;
        }
        if !self.stop_requested() {
            return Verdict::Run;
        }
        let round = inner.round;
        inner.slots[vcpu] = Slot::Parked(Some(state));
        self.control_wake.notify_all();
        while inner.round == round {
            inner = self.vcpus_wake.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        inner.verdict.unwrap_or(Verdict::Run)
    }

    /// Called by a vCPU thread that ends by itself.
    pub fn ended(&self, vcpu: usize) {
        self.lock().slots[vcpu] = Slot::Ended;
        self.control_wake.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panicking vCPU thread leaves the gate's plain data consistent: every update is a single assignment.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn take_state(vcpu: usize, slot: &mut Slot) -> Result<VcpuState, StopError> {
    match slot {
        Slot::Parked(state) => match state.take() {
            Some(Ok(state)) => Ok(*state),
            Some(Err(source)) => Err(StopError::Save { vcpu, source: Box::new(source) }),
            None => Err(StopError::Ended { vcpu }),
        },
        Slot::Running | Slot::Ended => Err(StopError::Ended { vcpu }),
    }
}
