//! A bound on work in flight.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::clock::Deadline;

/// Counts work in flight; a [`Permit`] is held until the work has ended, not merely been started.
#[derive(Debug)]
pub struct Limit {
    most: usize,
    taken: Mutex<usize>,
    freed: Condvar,
}

/// One piece of work in flight.
#[derive(Debug)]
pub struct Permit(Arc<Limit>);

impl Limit {
    /// At most `most` permits at once.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most: most.max(1), taken: Mutex::new(0), freed: Condvar::new() })
    }

    /// Waits for a permit; `None` when none became free before the deadline.
    pub fn acquire(self: &Arc<Self>, deadline: Deadline) -> Option<Permit> {
        let guard = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let full = |taken: &mut usize| *taken >= self.most;
        let wait = self.freed.wait_timeout_while(guard, deadline.left(), full);
        let (mut taken, wait) = wait.unwrap_or_else(PoisonError::into_inner);
        if wait.timed_out() && *taken >= self.most {
            return None;
        }
        *taken += 1;
        Some(Permit(Arc::clone(self)))
    }

    /// The bound.
    pub fn most(&self) -> usize {
        self.most
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        *self.0.taken.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_permit_is_free_again_only_when_its_work_has_ended() {
        let limit = Limit::new(1);
        let held = limit.acquire(Deadline::after(Duration::ZERO)).unwrap();
        assert!(limit.acquire(Deadline::after(Duration::from_millis(10))).is_none());
        drop(held);
        assert!(limit.acquire(Deadline::after(Duration::ZERO)).is_some());
    }
}
