//! Lets a guest go on when a fork hangs.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::gate::Verdict;
use crate::vcpu;

/// How long a pause may take before the guest is let go on.
pub const LIMIT: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Armed,
    Fired,
    Disarmed,
}

/// A thread that releases the gate once [`LIMIT`] has passed. Its memory is given back when it ends.
pub struct Watchdog {
    phase: Arc<(Mutex<Phase>, Condvar)>,
}

impl Watchdog {
    /// Starts the clock. Call it before the vCPUs stop, so that starting it is not part of the pause.
    ///
    /// # Errors
    /// The system has no thread left.
    pub fn arm(shared: &Arc<vcpu::Shared>) -> std::io::Result<Self> {
        let phase = Arc::new((Mutex::new(Phase::Armed), Condvar::new()));
        let (theirs, shared) = (Arc::clone(&phase), Arc::clone(shared));
        std::thread::Builder::new().name("watchdog".into()).stack_size(64 << 10).spawn(move || {
            let (lock, wake) = &*theirs;
            let guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
            let (mut guard, _) = wake
                .wait_timeout_while(guard, LIMIT, |phase| *phase == Phase::Armed)
                .unwrap_or_else(PoisonError::into_inner);
            if *guard == Phase::Armed {
                *guard = Phase::Fired;
                shared.gate.release(Verdict::Run);
            }
        })?;
        Ok(Self { phase })
    }

    /// Stops the clock. True if it had fired: the guest has been running, so what was forked is torn.
    pub fn disarm(self) -> bool {
        let (lock, wake) = &*self.phase;
        let mut guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let fired = *guard == Phase::Fired;
        *guard = Phase::Disarmed;
        wake.notify_all();
        fired
    }
}
