//! What the supervisor's thread does: reads messages, notices ends, reaps.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use offshoot_protocol::control::{ErrorKind, Event, MAX_MESSAGE_BYTES, Message};
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::process::{WaitId, WaitIdOptions, waitid};

use super::conn::Conn;
use super::socket::{Received, receive};
use super::supervisor::{Shared, Side};
use crate::clock::Deadline;

/// How long a process may live on after its control socket closed.
const CLOSE_GRACE: Duration = Duration::from_secs(3);
/// How long the end of a process waits for the exit status that its zygote reports.
const STATUS_GRACE: Duration = Duration::from_millis(300);
/// Exit reports of one zygote kept until their process' pidfd says the same.
const MAX_EARLY_EXITS: usize = 1024;

/// A process that has ended and whose exit status may still come from the zygote that reaps it.
struct Dying {
    conn: Arc<Conn>,
    pid: u32,
    until: Deadline,
}

/// The thread's own state.
pub(super) struct Watcher {
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
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            buffer: vec![0; MAX_MESSAGE_BYTES + 1],
            dying: Vec::new(),
            early_exits: HashMap::new(),
            unreaped: Vec::new(),
            closing: Vec::new(),
        }
    }

    pub(super) fn run(mut self) {
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
        let next =
            self.dying.iter().map(|dying| dying.until).chain(self.closing.iter().map(|(_, at)| *at)).min()?;
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
            Ok((Message::Event(Event::ChildExited { pid, exit_status, signal }), _)) => {
                self.child_exited(pid, exit_status, signal);
            }
            Ok((message, fds)) => {
                let born = conn.accept(message, fds);
                if let Some((_, pid, _)) = &born {
                    // What is kept under this number was said of an earlier process.
                    self.early_exits.remove(pid);
                }
                if let Some((child, pid, pidfd)) = born
                    && let Err(errno) = self.shared.adopt(&child, pid, pidfd)
                {
                    child.fail(ErrorKind::Host, &format!("cannot watch it: {errno}"));
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
            self.closing.push((Arc::clone(conn), Deadline::after(CLOSE_GRACE)));
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
            self.dying.push(Dying { conn: Arc::clone(conn), pid, until });
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
        self.unreaped.retain(|pidfd| reap(pidfd).is_none() && !is_reaped(pidfd));
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
    match waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
        Ok(Some(status)) => Some((status.exit_status(), status.terminating_signal())),
        // `ECHILD`: the process that forked it reaps it.
        Ok(None) | Err(_) => None,
    }
}

/// Whether somebody has reaped the process: the kernel then shows its pid as -1 (fs/pidfs.c, `pidfd_show_fdinfo`).
fn is_reaped(pidfd: &OwnedFd) -> bool {
    use std::os::fd::AsRawFd;
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()));
    info.map_or(true, |text| text.lines().any(|line| line.split_whitespace().eq(["Pid:", "-1"])))
}

/// Waits until the process has ended, or the deadline.
fn wait_dead(pidfd: &OwnedFd, deadline: Deadline) {
    use rustix::event::{PollFd, PollFlags, poll};
    let timeout = Timespec::try_from(deadline.left()).ok();
    // One interrupted wait at shutdown costs a zombie that the end of this process takes along.
    let _ = poll(&mut [PollFd::new(pidfd, PollFlags::IN)], timeout.as_ref());
}
