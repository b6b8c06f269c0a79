//! The one thread that reads control sockets and pidfds.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;

use super::EventSink;
use super::conn::{self, Conn};
use super::watcher::Watcher;

/// Token of the wake-up eventfd; connection tokens begin at 2.
const WAKE: u64 = 0;

/// Watches any number of VMM processes with one thread.
///
/// Dropping it stops the thread; processes it still watches are killed.
pub struct Supervisor {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

pub(super) struct Shared {
    pub(super) epoll: OwnedFd,
    wake: OwnedFd,
    pub(super) stop: AtomicBool,
    next_key: AtomicU64,
    conns: Mutex<HashMap<u64, Arc<Conn>>>,
}

impl Supervisor {
    /// Starts the thread.
    ///
    /// # Errors
    /// Fails where the host refuses an epoll instance, an eventfd or a thread.
    pub fn start() -> std::io::Result<Arc<Self>> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        let shared = Arc::new(Shared {
            epoll,
            wake,
            stop: AtomicBool::new(false),
            next_key: AtomicU64::new(1),
            conns: Mutex::default(),
        });
        let watcher = Watcher::new(Arc::clone(&shared));
        let thread = std::thread::Builder::new().name("supervisor".into()).spawn(move || watcher.run())?;
        Ok(Arc::new(Self { shared, thread: Mutex::new(Some(thread)) }))
    }

    /// Number of VMM processes and sockets being watched.
    pub fn watched(&self) -> usize {
        self.shared.lock().len()
    }

    /// Begins to read `socket`. Cost: one `epoll_ctl`.
    pub(crate) fn register(
        &self,
        id: String,
        socket: OwnedFd,
        sink: Arc<dyn EventSink>,
    ) -> Result<Arc<Conn>, Errno> {
        let key = self.shared.next_key.fetch_add(1, Ordering::Relaxed);
        let conn = Conn::new(key, id, socket, sink);
        self.shared.lock().insert(key, Arc::clone(&conn));
        let token = epoll::EventData::new_u64(token(key, Side::Socket));
        let added = epoll::add(&self.shared.epoll, &conn.socket, token, epoll::EventFlags::IN);
        if let Err(errno) = added {
            self.shared.lock().remove(&key);
            return Err(errno);
        }
        Ok(conn)
    }

    /// Begins to watch the process behind `conn`. Cost: one `epoll_ctl`.
    pub(crate) fn adopt(&self, conn: &Arc<Conn>, pid: u32, pidfd: OwnedFd) -> Result<(), Errno> {
        self.shared.adopt(conn, pid, pidfd)
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // An eventfd counter at its limit is readable already.
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
        let thread = self.thread.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // The last handle may be dropped by a sink, on the thread itself.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Socket = 0,
    Process = 1,
}

fn token(key: u64, side: Side) -> u64 {
    (key << 1) | side as u64
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Conn>>> {
        self.conns.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(super) fn adopt(&self, conn: &Arc<Conn>, pid: u32, pidfd: OwnedFd) -> Result<(), Errno> {
        let pidfd = Arc::new(pidfd);
        let abandoned = {
            let mut state = conn.lock();
            state.pid = Some(pid);
            state.pidfd = Some(Arc::clone(&pidfd));
            state.abandoned
        };
        self.lock().insert(conn.key, Arc::clone(conn));
        let data = epoll::EventData::new_u64(token(conn.key, Side::Process));
        let added = epoll::add(&self.epoll, pidfd.as_fd(), data, epoll::EventFlags::IN);
        if abandoned || added.is_err() {
            conn::kill(pidfd.as_fd());
        }
        conn.wake();
        added
    }
}

impl std::fmt::Debug for Supervisor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Supervisor").field("watched", &self.watched()).finish()
    }
}

/// Whether the process behind `pidfd` still runs (a zombie does not). Cost: one `poll`.
pub(crate) fn is_alive(pidfd: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, poll};
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&now)), Ok(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::time::Duration;

    use crate::clock::Deadline;

    use crate::control::{End, event_queue, pair};

    #[test]
    #[expect(clippy::zombie_processes, reason = "the supervisor reaps it")]
    fn the_end_of_a_process_is_reaped_and_told() {
        let supervisor = Supervisor::start().unwrap();
        let (sink, events) = event_queue();
        let (ours, _theirs) = pair().unwrap();
        let conn = supervisor.register("x".into(), ours, sink).unwrap();
        let child = Command::new("/bin/sh").args(["-c", "exit 7"]).spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        supervisor.adopt(&conn, child.id(), pidfd).unwrap();
        let end = conn.wait_ended(Deadline::after(Duration::from_secs(10))).expect("it exits");
        assert_eq!(end, End { reason: None, exit_status: Some(7), signal: None });
        let notice = events.next(Deadline::after(Duration::from_secs(10)));
        assert!(matches!(notice, Some(crate::control::Notice::Ended { .. })), "{notice:?}");
        assert_eq!(supervisor.watched(), 0);
    }

    #[test]
    fn a_peer_that_sends_no_json_is_given_up() {
        let supervisor = Supervisor::start().unwrap();
        let (sink, _events) = event_queue();
        let (ours, theirs) = pair().unwrap();
        let conn = supervisor.register("x".into(), ours, sink).unwrap();
        let deadline = Deadline::after(Duration::from_secs(10));
        super::super::socket::send(theirs.as_fd(), b"{]", &[], deadline).unwrap();
        let error = conn.request(offshoot_protocol::control::Request::Status, &[], deadline).unwrap_err();
        assert!(matches!(error, crate::control::ChannelError::Closed), "{error:?}");
    }
}
