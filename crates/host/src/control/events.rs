//! Where the events of VMM processes go.

use std::sync::mpsc::{Receiver, Sender, channel};

use offshoot_protocol::control::Event;

use super::End;
use crate::clock::Deadline;

/// Which VMM an event is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VmmRef<'a> {
    /// Unique within the supervisor, never reused.
    pub key: u64,
    /// Sandbox id.
    pub id: &'a str,
}

/// Takes events. Called on the supervisor's thread: it must neither block nor make requests of a VMM.
pub trait EventSink: Send + Sync {
    /// An event other than those that the fork in flight consumes (`ChildForked`, `ChildFailed`, `ChildExited`).
    fn event(&self, from: VmmRef<'_>, event: Event);
    /// The process has ended. The last call for this VMM.
    fn ended(&self, from: VmmRef<'_>, end: &End);
}

/// Drops every event.
#[derive(Debug, Default)]
pub struct Ignore;

impl EventSink for Ignore {
    fn event(&self, _: VmmRef<'_>, _: Event) {}
    fn ended(&self, _: VmmRef<'_>, _: &End) {}
}

/// One entry of an [`event_queue`].
#[derive(Debug, Clone)]
pub enum Notice {
    /// [`EventSink::event`].
    Event {
        /// [`VmmRef::key`].
        key: u64,
        /// The event.
        event: Event,
    },
    /// [`EventSink::ended`].
    Ended {
        /// [`VmmRef::key`].
        key: u64,
        /// How.
        end: End,
    },
}

/// The receiving end of an [`event_queue`].
#[derive(Debug)]
pub struct Events(Receiver<Notice>);

impl Events {
    /// The next notice; `None` when the deadline passed or no sender is left.
    pub fn next(&self, deadline: Deadline) -> Option<Notice> {
        self.0.recv_timeout(deadline.left()).ok()
    }
}

struct Queue(Sender<Notice>);

impl EventSink for Queue {
    fn event(&self, from: VmmRef<'_>, event: Event) {
        // A receiver that is gone wants no events.
        let _ = self.0.send(Notice::Event { key: from.key, event });
    }

    fn ended(&self, from: VmmRef<'_>, end: &End) {
        let _ = self.0.send(Notice::Ended { key: from.key, end: end.clone() });
    }
}

/// A sink for any number of VMMs whose events one thread collects. The queue is as long as its events are many.
pub fn event_queue() -> (std::sync::Arc<dyn EventSink>, Events) {
    let (sender, receiver) = channel();
    (std::sync::Arc::new(Queue(sender)), Events(receiver))
}
