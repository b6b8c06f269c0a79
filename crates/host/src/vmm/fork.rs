//! Forking a VMM: announcing the children, and waiting for each to be born.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use offshoot_protocol::control::{ChildSpec, ControlError, ErrorKind, ForkTimes, Reply, Request};

use super::{ChildResources, Kind, Vmm, VmmError};
use crate::clock::{Deadline, monotonic_ns};
use crate::control::{EventSink, ForkState, Ignore, pair};

/// A fork's children, in order, and its times.
#[derive(Debug)]
pub struct ForkOutcome {
    /// One result for each child asked for, in that order.
    pub children: Vec<Result<Vmm, ControlError>>,
    /// What the VMM measured.
    pub times: ForkTimes,
    /// When the VMM's reply had arrived, nanoseconds of `CLOCK_MONOTONIC`.
    pub returned_ns: u64,
}

/// How [`Vmm::fork`] waits and reports.
pub struct ForkOptions {
    /// When children that have not started are given up.
    pub deadline: Deadline,
    /// Takes the children's events.
    pub sink: Arc<dyn EventSink>,
}

impl Vmm {
    /// Forks `children.len()` children at once: from a zygote, or from a running guest through one frozen twin.
    ///
    /// Returns when each child has started or failed, or the deadline has passed; a child that then has not started is
    /// killed. A failed child does not touch its siblings, nor a failed fork this VMM.
    ///
    /// Cost: for each child one `socketpair`, one `sendmsg` and two `epoll_ctl`; its birth is two `recvmsg` on the
    /// supervisor's thread.
    ///
    /// # Errors
    /// Fails as a whole only where the VMM refuses the fork, ends, or does not answer in time.
    pub fn fork(
        &self,
        children: Vec<(ChildSpec, ChildResources)>,
        options: &ForkOptions,
    ) -> Result<ForkOutcome, VmmError> {
        let _one_at_a_time = self.forking.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let count =
            u32::try_from(children.len()).map_err(|_| self.answer("fork", "room for so many children"))?;
        let mut born = Vec::with_capacity(children.len());
        let mut announced = Vec::with_capacity(children.len());
        for (spec, resources) in children {
            let (ours, theirs) = pair().map_err(|errno| self.prepare("fork", errno))?;
            let conn = self.supervisor.register(spec.id.clone(), ours, Arc::clone(&options.sink));
            let conn = conn.map_err(|errno| self.prepare("fork", errno))?;
            born.push(Self::new(conn, &self.supervisor, Kind::Guest));
            announced.push((Request::Child(spec), vec![theirs, resources.vsock, resources.log]));
        }
        let twin = match self.kind {
            Kind::Guest => Some(self.prepare_twin()?),
            Kind::Zygote => None,
        };
        let source = twin.as_ref().map_or(&self.conn, |(twin, _)| &twin.conn);
        source.set_forking(born.iter().map(|vmm| Arc::clone(&vmm.conn)).collect());
        let forked = self.fork_and_wait(count, announced, twin.as_ref(), born, options.deadline);
        source.set_forking(Vec::new());
        forked
    }

    /// A control socket for the twin: its owner, and the end to send.
    fn prepare_twin(&self) -> Result<(Vmm, OwnedFd), VmmError> {
        let (ours, theirs) = pair().map_err(|errno| self.prepare("fork", errno))?;
        let conn = self.supervisor.register(self.conn.id.clone(), ours, Arc::new(Ignore));
        let conn = conn.map_err(|errno| self.prepare("fork", errno))?;
        Ok((Self::new(conn, &self.supervisor, Kind::Zygote), theirs))
    }

    fn fork_and_wait(
        &self,
        count: u32,
        announced: Vec<(Request, Vec<OwnedFd>)>,
        twin: Option<&(Vmm, OwnedFd)>,
        born: Vec<Vmm>,
        deadline: Deadline,
    ) -> Result<ForkOutcome, VmmError> {
        let twin_end: Vec<_> = twin.iter().map(|(_, theirs)| theirs.as_fd()).collect();
        let answer =
            self.conn.request_with(Request::Fork { count }, &twin_end, announced.into_iter(), deadline);
        let returned_ns = monotonic_ns();
        let (reply, fds) = self.outcome("fork", answer)?;
        let Reply::Forked(times) = reply else {
            return Err(self.answer("fork", "its times"));
        };
        if let Some((twin, _)) = twin {
            let pidfd = fds.into_iter().next().ok_or_else(|| self.answer("fork", "the twin's pidfd"))?;
            // The twin is known by its pidfd alone; it ends when its children are forked.
            self.supervisor.adopt(&twin.conn, 0, pidfd).map_err(|errno| self.prepare("fork", errno))?;
        }
        let children = born.into_iter().map(|child| child.await_birth(deadline)).collect();
        Ok(ForkOutcome { children, times, returned_ns })
    }

    fn await_birth(self, deadline: Deadline) -> Result<Self, ControlError> {
        match self.conn.wait_born(deadline) {
            ForkState::Ready => Ok(self),
            ForkState::Failed(error) => Err(error),
            ForkState::Pending => {
                let message = format!("sandbox {} did not start within the deadline", self.conn.id);
                Err(ControlError { kind: ErrorKind::Host, message })
            }
        }
    }
}
