//! The host's side: the listening socket, and the timer for every deadline of the device.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::SocketFlags;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use crate::devices::PollHandle;

/// Poll token of the listening socket. Connections use their host port, which is never so small.
pub const LISTENER: u32 = 0;
/// Poll token of the timer.
pub const TIMER: u32 = 1;
/// How long no client is accepted after the host has refused a descriptor.
const PAUSE: Duration = Duration::from_millis(100);

/// Descriptors of this process; a forked child is given others. Dropping it closes them and does nothing else: in a
/// child, the epoll instance and every socket are still those of the parent.
pub struct HostSide {
    poll: PollHandle,
    listener: OwnedFd,
    /// Made when the first deadline is set.
    timer: Option<OwnedFd>,
    armed: Option<Instant>,
    paused_until: Option<Instant>,
}

impl HostSide {
    /// Accepts clients of `listener`, a listening Unix stream socket.
    ///
    /// # Errors
    /// What failed, and why.
    pub fn new(poll: PollHandle, listener: OwnedFd) -> Result<Self, (&'static str, Errno)> {
        let flags =
            rustix::fs::fcntl_getfl(&listener).map_err(|errno| ("read the flags of its listener", errno))?;
        rustix::fs::fcntl_setfl(&listener, flags | OFlags::NONBLOCK)
            .map_err(|errno| ("make its listener non-blocking", errno))?;
        poll.add(&listener, LISTENER, EventFlags::IN).map_err(|errno| ("watch its listener", errno))?;
        Ok(Self { poll, listener, timer: None, armed: None, paused_until: None })
    }

    /// The next client, if one waits.
    pub fn accept(&mut self) -> Option<UnixStream> {
        loop {
            match rustix::net::accept_with(&self.listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                Ok(socket) => return Some(UnixStream::from(socket)),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => return None,
                Err(_) => {
                    // No descriptor or no memory: the client stays in the queue, and polling now would only spin.
                    self.pause();
                    return None;
                }
            }
        }
    }

    fn pause(&mut self) {
        if self.paused_until.is_none() && self.poll.remove(&self.listener).is_ok() {
            let until = Instant::now() + PAUSE;
            self.paused_until = Some(until);
            self.wake_at(until);
        }
    }

    /// Watches a client's socket, edge-triggered, under `token`.
    ///
    /// # Errors
    /// As `epoll_ctl(2)`.
    pub fn watch(&self, socket: &UnixStream, token: u32) -> Result<(), Errno> {
        self.poll.add(socket, token, EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET)
    }

    /// Ends the watch of a socket that is about to be closed.
    pub fn unwatch(&self, socket: &UnixStream) {
        // It was added and not removed; nothing can be done about a refusal.
        let _ = self.poll.remove(socket);
    }

    /// Sees to it that [`TIMER`] is reported at `deadline` at the latest.
    pub fn wake_at(&mut self, deadline: Instant) {
        if self.armed.is_some_and(|armed| armed <= deadline) {
            return;
        }
        let wait = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        if self.set_timer(wait).is_ok() {
            self.armed = Some(deadline);
        }
    }

    fn set_timer(&mut self, wait: Duration) -> Result<(), Errno> {
        if self.timer.is_none() {
            let timer =
                timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
            self.poll.add(&timer, TIMER, EventFlags::IN)?;
            self.timer = Some(timer);
        }
        let timer = self.timer.as_ref().expect("made above");
        let once = Itimerspec {
            it_interval: Timespec::default(),
            it_value: Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() },
        };
        timerfd_settime(timer, TimerfdTimerFlags::empty(), &once).map(|_| ())
    }

    /// [`TIMER`] was reported: it must be set anew for deadlines that are still to come.
    pub fn timer_ran(&mut self, now: Instant) {
        let mut count = [0; 8];
        if let Some(timer) = &self.timer {
            // Only empties it; that it ran is known.
            let _ = rustix::io::read(timer, &mut count);
        }
        self.armed = None;
        match self.paused_until {
            Some(until) if until <= now => {
                self.paused_until = None;
                if self.poll.add(&self.listener, LISTENER, EventFlags::IN).is_err() {
                    self.paused_until = Some(now + PAUSE);
                }
            }
            _ => {}
        }
        if let Some(until) = self.paused_until {
            self.wake_at(until);
        }
    }
}
