//! Progress of long work, and its cancellation.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// One step of long work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// Short fixed name of the step.
    pub step: &'static str,
    /// What is being done.
    pub message: String,
    /// Steps done and steps in all, where they are counted.
    pub done_of: Option<(u64, u64)>,
}

/// Asks long work to stop; what it has made so far is removed. Clones share the request.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Asks the work to stop.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether it has been asked to.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}
