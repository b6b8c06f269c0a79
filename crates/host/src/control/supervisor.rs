//! The one thread that reads control sockets and pidfds.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use offshoot_protocol::control::{Event, MAX_MESSAGE_BYTES, Message};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;
use rustix::process::{WaitId, WaitIdOptions, waitid};

use super::EventSink;
use super::conn::{self, Conn};
use super::socket::{Received, receive};
use crate::clock::Deadline;

/// Token of the wake-up eventfd; connection tokens begin at 2.
const WAKE: u64 = 0;
/// How long a process may live on after its control socket closed.
const CLOSE_GRACE: Duration = Duration::from_secs(3);
/// How long the end of a process waits for the exit status that its zygote reports.
const STATUS_GRACE: Duration = Duration::from_millis(300);
/// Exit reports of one zygote kept until their process' pidfd says the same.
const MAX_EARLY_EXITS: usize = 1024;

/// Watches any number of VMM processes with one thread.
///
/// Dropping it stops the thread; processes it still watches are killed.
pub struct Supervisor {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    epoll: OwnedFd,
    wake: OwnedFd,
    stop: AtomicBool,
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
        epoll::add(
            &epoll,
            &wake,
            epoll::EventData::new_u64(WAKE),
            epoll::EventFlags::IN,
        )?;
        let shared = Arc::new(Shared {
            epoll,
            wake,
            stop: AtomicBool::new(false),
            next_key: AtomicU64::new(1),
            conns: Mutex::default(),
        });
        let watcher = Watcher::new(Arc::clone(&shared));
        let thread = std::thread::Builder::new()
            .name("supervisor".into())
            .spawn(move || watcher.run())?;
        Ok(Arc::new(Self {
            shared,
            thread: Mutex::new(Some(thread)),
        }))
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
        let thread = self
            .thread
            .get_mut()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            // The last handle may be dropped by a sink, on the thread itself.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Socket = 0,
    Process = 1,
}

fn token(key: u64, side: Side) -> u64 {
    (key << 1) | side as u64
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Conn>>> {
        self.conns
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn adopt(&self, conn: &Arc<Conn>, pid: u32, pidfd: OwnedFd) -> Result<(), Errno> {
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

/// A process that has ended and whose exit status may still come from the zygote that reaps it.
struct Dying {
    conn: Arc<Conn>,
    pid: u32,
    until: Deadline,
}

/// The thread's own state.
struct Watcher {
    shared: Arc<Shared>,
    buffer: Vec<u8>,
    dying: Vec<Dying>,
    /// Exit reports that came before the pidfd became readable, by process id.
    early_exits: HashMap<u32, (Option<i32>, Option<i32>)>,
    /// Ended processes that are not ours to reap as long as the process that forked them lives.
    unreaped: Vec<Arc<OwnedFd>>,
    /// Processes that closed their control socket and have to end.
    closing: Vec<(Arc<Conn>, Deadline)>,
}

impl Watcher {
    fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            buffer: vec![0; MAX_MESSAGE_BYTES + 1],
            dying: Vec::new(),
            early_exits: HashMap::new(),
            unreaped: Vec::new(),
            closing: Vec::new(),
        }
    }

    fn run(mut self) {
        let mut ready = Vec::with_capacity(128);
        loop {
            ready.clear();
            let timeout = self.timeout();
            match epoll::wait(
                &self.shared.epoll,
                rustix::buffer::spare_capacity(&mut ready),
                timeout.as_ref(),
            ) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => panic!("epoll_wait on a valid instance answered {errno}"),
            }
            if self.shared.stop.load(Ordering::Acquire) {
                return self.kill_all();
            }
            for event in &ready {
                let data = event.data.u64();
                let conn = self.shared.lock().get(&(data >> 1)).cloned();
                match conn {
                    Some(conn) if data & 1 == Side::Process as u64 => self.process_ended(&conn),
                    Some(conn) => {
                        self.read_one(&conn);
                    }
                    None => {}
                }
            }
            self.expire();
        }
    }

    fn timeout(&self) -> Option<Timespec> {
        let next = self
            .dying
            .iter()
            .map(|dying| dying.until)
            .chain(self.closing.iter().map(|(_, at)| *at))
            .min()?;
        Timespec::try_from(next.left()).ok()
    }

    /// Reads one message; level-triggered, so what remains is reported again. False once there is nothing to read.
    fn read_one(&mut self, conn: &Arc<Conn>) -> bool {
        let received = match receive(&conn.socket, &mut self.buffer) {
            Ok(Received::Empty) => return false,
            Ok(Received::Closed) => {
                self.socket_closed(conn);
                return false;
            }
            Ok(Received::Message(bytes, fds)) => {
                serde_json::from_slice::<Message>(&self.buffer[..bytes]).map(|message| (message, fds))
            }
            Err(error) => {
                tracing::error!(sandbox = conn.id, %error, "unreadable control socket: its VMM is ended");
                self.reject(conn);
                return false;
            }
        };
        match received {
            Ok((
                Message::Event(Event::ChildExited {
                    pid,
                    exit_status,
                    signal,
                }),
                _,
            )) => {
                self.child_exited(pid, exit_status, signal);
            }
            Ok((message, fds)) => {
                if let Some((child, pid, pidfd)) = conn.accept(message, fds)
                    && let Err(errno) = self.shared.adopt(&child, pid, pidfd)
                {
                    child.fail(
                        offshoot_protocol::control::ErrorKind::Host,
                        &format!("cannot watch it: {errno}"),
                    );
                }
            }
            Err(error) => {
                tracing::error!(sandbox = conn.id, %error, "malformed control message: its VMM is ended");
                self.reject(conn);
                return false;
            }
        }
        true
    }

    /// A VMM that breaks the protocol is not trusted with anything further.
    fn reject(&mut self, conn: &Arc<Conn>) {
        conn.kill();
        self.socket_closed(conn);
    }

    fn socket_closed(&mut self, conn: &Arc<Conn>) {
        // Absent if the socket was closed twice over.
        let _ = epoll::delete(&self.shared.epoll, &conn.socket);
        conn.mark_closed();
        let (alive, ended) = {
            let state = conn.lock();
            (state.pidfd.is_some(), state.ended)
        };
        if !alive {
            self.shared.lock().remove(&conn.key);
        } else if !ended {
            self.closing
                .push((Arc::clone(conn), Deadline::after(CLOSE_GRACE)));
        }
    }

    fn process_ended(&mut self, conn: &Arc<Conn>) {
        while self.read_one(conn) {}
        let _ = epoll::delete(&self.shared.epoll, &conn.socket);
        let (pid, pidfd) = {
            let state = conn.lock();
            match (state.pid, state.pidfd.clone()) {
                (Some(pid), Some(pidfd)) => (pid, pidfd),
                _ => return,
            }
        };
        let _ = epoll::delete(&self.shared.epoll, pidfd.as_fd());
        self.shared.lock().remove(&conn.key);
        self.closing.retain(|(closing, _)| closing.key != conn.key);
        conn.mark_closed();
        if let Some((exit_status, signal)) = reap(&pidfd) {
            conn.mark_ended(exit_status, signal);
        } else if let Some((exit_status, signal)) = self.early_exits.remove(&pid) {
            conn.mark_ended(exit_status, signal);
        } else {
            let until = Deadline::after(STATUS_GRACE);
            self.unreaped.push(pidfd);
            self.dying.push(Dying {
                conn: Arc::clone(conn),
                pid,
                until,
            });
        }
        self.sweep();
    }

    /// A zygote reaped one of its children.
    fn child_exited(&mut self, pid: u32, exit_status: Option<i32>, signal: Option<i32>) {
        if let Some(at) = self.dying.iter().position(|dying| dying.pid == pid) {
            self.dying.swap_remove(at).conn.mark_ended(exit_status, signal);
            self.sweep();
            return;
        }
        if self.early_exits.len() >= MAX_EARLY_EXITS {
            self.early_exits.clear();
        }
        self.early_exits.insert(pid, (exit_status, signal));
    }

    /// Forgets the ended processes that somebody has reaped, and reaps those that have become ours because the process
    /// that forked them ended.
    fn sweep(&mut self) {
        self.unreaped
            .retain(|pidfd| reap(pidfd).is_none() && !is_reaped(pidfd));
    }

    fn expire(&mut self) {
        let mut still = Vec::new();
        for dying in std::mem::take(&mut self.dying) {
            let said_why = dying.conn.lock().end.reason.is_some();
            if said_why || dying.until.is_over() {
                dying.conn.mark_ended(None, None);
            } else {
                still.push(dying);
            }
        }
        self.dying.extend(still);
        self.closing.retain(|(conn, until)| {
            if until.is_over() {
                conn.kill();
            }
            !until.is_over()
        });
    }

    fn kill_all(&mut self) {
        let conns: Vec<Arc<Conn>> = self.shared.lock().drain().map(|(_, conn)| conn).collect();
        for conn in conns {
            conn.abandon();
            conn.mark_closed();
            let ended = conn.pidfd().and_then(|pidfd| {
                wait_dead(&pidfd, Deadline::after(CLOSE_GRACE));
                reap(&pidfd)
            });
            let (exit_status, signal) = ended.unwrap_or_default();
            conn.mark_ended(exit_status, signal);
        }
    }
}

/// Exit status or signal of an ended process, if it is ours to reap.
fn reap(pidfd: &OwnedFd) -> Option<(Option<i32>, Option<i32>)> {
    match waitid(
        WaitId::PidFd(pidfd.as_fd()),
        WaitIdOptions::EXITED | WaitIdOptions::NOHANG,
    ) {
        Ok(Some(status)) => Some((status.exit_status(), status.terminating_signal())),
        // `ECHILD`: the process that forked it reaps it.
        Ok(None) | Err(_) => None,
    }
}

/// Whether somebody has reaped the process: the kernel then shows its pid as -1 (fs/pidfs.c, `pidfd_show_fdinfo`).
fn is_reaped(pidfd: &OwnedFd) -> bool {
    use std::os::fd::AsRawFd;
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()));
    info.map_or(true, |text| {
        text.lines()
            .any(|line| line.split_whitespace().eq(["Pid:", "-1"]))
    })
}

impl std::fmt::Debug for Supervisor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Supervisor")
            .field("watched", &self.watched())
            .finish()
    }
}

/// Waits until the process has ended, or the deadline.
fn wait_dead(pidfd: &OwnedFd, deadline: Deadline) {
    use rustix::event::{PollFd, PollFlags, poll};
    let timeout = Timespec::try_from(deadline.left()).ok();
    // One interrupted wait at shutdown costs a zombie that the end of this process takes along.
    let _ = poll(&mut [PollFd::new(pidfd, PollFlags::IN)], timeout.as_ref());
}

/// Whether the process behind `pidfd` still runs (a zombie does not). Cost: one `poll`.
pub(crate) fn is_alive(pidfd: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, poll};
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    matches!(poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&now)), Ok(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

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
        let end = conn
            .wait_ended(Deadline::after(Duration::from_secs(10)))
            .expect("it exits");
        assert_eq!(
            end,
            End {
                reason: None,
                exit_status: Some(7),
                signal: None
            }
        );
        let notice = events.next(Deadline::after(Duration::from_secs(10)));
        assert!(
            matches!(notice, Some(crate::control::Notice::Ended { .. })),
            "{notice:?}"
        );
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
        let error = conn
            .request(offshoot_protocol::control::Request::Status, &[], deadline)
            .unwrap_err();
        assert!(matches!(error, crate::control::ChannelError::Closed), "{error:?}");
    }
}
