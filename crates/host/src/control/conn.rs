//! The host's end of one VMM: its control socket, its pidfd and what has arrived from it.
//!
//! ```text
//!            register            pidfd known          pidfd readable
//!  created ------------> open -------------> alive -----------------> ended
//!                          `--- socket closed, no pidfd: forgotten
//! ```

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use offshoot_protocol::control::{ControlError, Envelope, ErrorKind, Event, Message, Reply, Request};
use rustix::process::{Signal, pidfd_send_signal};

use super::socket::{self, ChannelError};
use super::{End, EventSink, VmmRef};
use crate::clock::Deadline;

/// Times of [`Event::Started`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Started {
    /// When the child began, nanoseconds of `CLOCK_MONOTONIC`.
    pub forked_ns: u64,
    /// When its vCPUs were let go.
    pub started_ns: u64,
}

/// How far the birth of a forked child has come.
#[derive(Debug, Clone)]
pub(crate) enum ForkState {
    Pending,
    Ready,
    Failed(ControlError),
}

/// A reply with its descriptors.
pub(crate) type Answer = (Result<Reply, ControlError>, Vec<OwnedFd>);

#[derive(Default)]
pub(crate) struct ConnState {
    next_seq: u64,
    /// Requests whose reply is awaited, and the replies that have come.
    pending: HashMap<u64, Option<Answer>>,
    pub(super) pid: Option<u32>,
    pub(super) pidfd: Option<Arc<OwnedFd>>,
    pub(super) started: Option<Started>,
    pub(super) failed: Option<ControlError>,
    /// Children of the fork in flight: their `ChildForked` events arrive here.
    pub(super) forking: Vec<Arc<Conn>>,
    pub(super) closed: bool,
    pub(super) end: End,
    pub(super) ended: bool,
    /// Nobody owns this VMM any more: it is killed as soon as it can be named.
    pub(super) abandoned: bool,
    /// A message was half sent: the order of the protocol is lost and every later request is refused.
    broken: bool,
}

pub(crate) struct Conn {
    pub(crate) key: u64,
    pub(crate) id: String,
    pub(super) socket: OwnedFd,
    pub(super) sink: Arc<dyn EventSink>,
    /// Held while messages that belong together are sent.
    sending: Mutex<()>,
    state: Mutex<ConnState>,
    changed: Condvar,
}

impl Conn {
    pub(super) fn new(key: u64, id: String, socket: OwnedFd, sink: Arc<dyn EventSink>) -> Arc<Self> {
        Arc::new(Self {
            key,
            id,
            socket,
            sink,
            sending: Mutex::new(()),
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, ConnState> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(super) fn reference(&self) -> VmmRef<'_> {
        VmmRef { key: self.key, id: &self.id }
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        self.lock().pid
    }

    pub(crate) fn pidfd(&self) -> Option<Arc<OwnedFd>> {
        self.lock().pidfd.clone()
    }

    pub(crate) fn started(&self) -> Option<Started> {
        self.lock().started
    }

    /// How the process ended, once it has.
    pub(crate) fn ended(&self) -> Option<End> {
        let state = self.lock();
        state.ended.then(|| state.end.clone())
    }

    /// Waits for the end of the process; `None` if it still lives at the deadline.
    pub(crate) fn wait_ended(&self, deadline: Deadline) -> Option<End> {
        let state = self.wait_while(deadline, |state| !state.ended);
        state.ended.then(|| state.end.clone())
    }

    fn wait_while(
        &self,
        deadline: Deadline,
        mut condition: impl FnMut(&mut ConnState) -> bool,
    ) -> MutexGuard<'_, ConnState> {
        let guard = self.lock();
        let wait = self.changed.wait_timeout_while(guard, deadline.left(), |state| condition(state));
        wait.unwrap_or_else(std::sync::PoisonError::into_inner).0
    }

    /// Sends one request and waits for its reply.
    pub(crate) fn request(
        &self,
        request: Request,
        fds: &[BorrowedFd<'_>],
        deadline: Deadline,
    ) -> Result<Answer, ChannelError> {
        let seq = self.expect_reply()?;
        let sent = {
            let _sending = self.lock_sending();
            self.send(Envelope { seq, request }, fds, deadline)
        };
        if let Err(error) = sent {
            self.lock().pending.remove(&seq);
            return Err(error);
        }
        self.await_reply(seq, deadline)
    }

    /// Sends a request followed by messages without replies, nothing in between, and waits for the reply.
    ///
    /// `followers` yields each message with its descriptors, which are closed as soon as they are sent.
    /// Cost: one `sendmsg` for each message.
    pub(crate) fn request_with(
        &self,
        request: Request,
        fds: &[BorrowedFd<'_>],
        followers: impl Iterator<Item = (Request, Vec<OwnedFd>)>,
        deadline: Deadline,
    ) -> Result<Answer, ChannelError> {
        let seq = self.expect_reply()?;
        let sent = {
            let _sending = self.lock_sending();
            self.send(Envelope { seq, request }, fds, deadline).and_then(|()| {
                for (request, fds) in followers {
                    let seq = self.take_seq();
                    let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
                    if let Err(error) = self.send(Envelope { seq, request }, &borrowed, deadline) {
                        self.lock().broken = true;
                        return Err(error);
                    }
                }
                Ok(())
            })
        };
        if let Err(error) = sent {
            self.lock().pending.remove(&seq);
            return Err(error);
        }
        self.await_reply(seq, deadline)
    }

    fn lock_sending(&self) -> MutexGuard<'_, ()> {
        self.sending.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn take_seq(&self) -> u64 {
        let mut state = self.lock();
        state.next_seq += 1;
        state.next_seq
    }

    fn expect_reply(&self) -> Result<u64, ChannelError> {
        let mut state = self.lock();
        if state.closed || state.broken || state.abandoned {
            return Err(ChannelError::Closed);
        }
        state.next_seq += 1;
        let seq = state.next_seq;
        state.pending.insert(seq, None);
        Ok(seq)
    }

    fn send(
        &self,
        envelope: Envelope,
        fds: &[BorrowedFd<'_>],
        deadline: Deadline,
    ) -> Result<(), ChannelError> {
        let bytes = serde_json::to_vec(&envelope).map_err(ChannelError::Malformed)?;
        socket::send(self.socket.as_fd(), &bytes, fds, deadline)
    }

    fn await_reply(&self, seq: u64, deadline: Deadline) -> Result<Answer, ChannelError> {
        let waiting = |state: &mut ConnState| !state.closed && matches!(state.pending.get(&seq), Some(None));
        let mut state = self.wait_while(deadline, waiting);
        match state.pending.remove(&seq).flatten() {
            Some(answer) => Ok(answer),
            None if state.closed => Err(ChannelError::Closed),
            None => Err(ChannelError::TimedOut),
        }
    }

    /// Takes one message that arrived. Called by the supervisor; gives back a child whose pidfd is to be watched.
    pub(super) fn accept(&self, message: Message, fds: Vec<OwnedFd>) -> Option<(Arc<Conn>, u32, OwnedFd)> {
        let mut fds = fds.into_iter();
        match message {
            Message::Reply { seq, result } => {
                if let Some(slot) = self.lock().pending.get_mut(&seq) {
                    *slot = Some((result, fds.collect()));
                }
                self.changed.notify_all();
            }
            Message::Event(Event::ChildForked { index, pid }) => {
                let child = self.lock().forking.get(index as usize).cloned();
                match (child, fds.next()) {
                    (Some(child), Some(pidfd)) => return Some((child, pid, pidfd)),
                    // A fork that has been given up: its child is to go.
                    (None, Some(pidfd)) => kill(pidfd.as_fd()),
                    (Some(child), None) => child.fail(ErrorKind::Bug, "the VMM sent no pidfd with a child"),
                    (None, None) => {}
                }
            }
            Message::Event(Event::ChildFailed { index, error }) => {
                let child = self.lock().forking.get(index as usize).cloned();
                if let Some(child) = child {
                    child.fail_with(error);
                }
            }
            Message::Event(event) => self.accept_event(event),
        }
        None
    }

    fn accept_event(&self, event: Event) {
        {
            let mut state = self.lock();
            match &event {
                Event::Started { forked_ns, started_ns } => {
                    state.started = Some(Started { forked_ns: *forked_ns, started_ns: *started_ns });
                }
                Event::Failed { error } => state.failed = Some(error.clone()),
                Event::Exited { reason } => state.end.reason = Some(reason.clone()),
                _ => {}
            }
        }
        if matches!(event, Event::Started { .. } | Event::Failed { .. }) {
            self.changed.notify_all();
        }
        self.sink.event(self.reference(), event);
    }

    pub(super) fn fail(&self, kind: ErrorKind, message: &str) {
        self.fail_with(ControlError { kind, message: message.to_owned() });
    }

    fn fail_with(&self, error: ControlError) {
        self.lock().failed.get_or_insert(error);
        self.changed.notify_all();
    }

    /// The socket is at its end: nobody waits for a reply any longer.
    pub(super) fn mark_closed(&self) {
        let children = {
            let mut state = self.lock();
            state.closed = true;
            std::mem::take(&mut state.forking)
        };
        self.changed.notify_all();
        for child in children {
            if child.lock().pidfd.is_none() {
                child.fail(ErrorKind::Host, "the process that was to fork this child ended before it did");
            }
        }
    }

    /// The process has ended; the sink is told.
    pub(super) fn mark_ended(&self, exit_status: Option<i32>, signal: Option<i32>) {
        let end = {
            let mut state = self.lock();
            state.end.exit_status = exit_status;
            state.end.signal = signal;
            state.closed = true;
            state.ended = true;
            state.end.clone()
        };
        self.changed.notify_all();
        self.sink.ended(self.reference(), &end);
    }

    pub(super) fn wake(&self) {
        self.changed.notify_all();
    }

    /// Sets whose birth events arrive here; empty when the fork is over.
    pub(crate) fn set_forking(&self, children: Vec<Arc<Conn>>) {
        self.lock().forking = children;
    }

    /// Waits until a forked child has started or failed, or the deadline.
    pub(crate) fn wait_born(&self, deadline: Deadline) -> ForkState {
        let pending = |state: &mut ConnState| matches!(birth(state), ForkState::Pending);
        birth(&self.wait_while(deadline, pending))
    }

    /// Sends `SIGKILL` through the pidfd, if the process is known and not reaped yet.
    pub(crate) fn kill(&self) {
        if let Some(pidfd) = self.pidfd() {
            kill(pidfd.as_fd());
        }
    }

    /// Gives the VMM up: closes its control socket and kills it, now or as soon as its pidfd is known.
    pub(crate) fn abandon(&self) {
        self.lock().abandoned = true;
        // Fails only where the peer has already gone.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        self.kill();
    }
}

fn birth(state: &ConnState) -> ForkState {
    if let Some(error) = &state.failed {
        return ForkState::Failed(error.clone());
    }
    match (state.started, state.pidfd.is_some()) {
        (Some(_), true) => ForkState::Ready,
        (None, true) if state.closed || state.ended => {
            let message = format!("the child ended before it started: {}", state.end);
            ForkState::Failed(ControlError { kind: ErrorKind::Host, message })
        }
        _ => ForkState::Pending,
    }
}

/// Sends `SIGKILL`; a process that is already gone is no error.
pub(super) fn kill(pidfd: BorrowedFd<'_>) {
    let _ = pidfd_send_signal(pidfd, Signal::KILL);
}
