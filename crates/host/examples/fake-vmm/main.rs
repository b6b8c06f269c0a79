//! A VMM without a VM: it speaks the control protocol, forks real processes, and plays the agent on the hybrid vsock.
//! The tests of host and daemon start it in place of `offshoot-vmm`.
//!
//! What it is to do wrong stands on the kernel command line and is inherited by clones and forks, as `fake.WORD=INDEX`:
//! `fail_child` (not forked), `dead_child` (ends before it starts), `mute_child` (never acknowledges its identity),
//! `refuse_child` (its agent fails the identity); and `fake.no_agent`, `fake.panic_at_boot`, `fake.refuse_fork`,
//! `fake.refuse_freeze`.
//! A warm-up that begins with `raise`, `hang` or `die` does so.

#![allow(unsafe_code)]

mod guest;
mod wire;

use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use offshoot_protocol::control::{
    BootSource, ControlError, Envelope, ErrorKind, Event, ExitReason, ForkTimes, FrozenInfo, Message, Reply,
    Request, Role, Status,
};
use rustix::process::{WaitOptions, wait};

use guest::{Act, Guest};
use wire::{fork, receive, send};

fn main() {
    let args: Vec<String> = std::env::args().collect();
    match args.get(1).map(String::as_str) {
        Some("--probe") => println!("{{\"kvm\":\"fake\"}}"),
        Some("--control-fd") if args.get(2).is_some_and(|fd| fd == "3") => {
            // SAFETY: descriptor 3 is the control socket by the contract of `--control-fd`, and nothing else owns it.
            let control = unsafe { OwnedFd::from_raw_fd(3) };
            rustix::io::fcntl_setfd(&control, rustix::io::FdFlags::CLOEXEC).expect("a descriptor");
            Fake { control, role: Role::Empty, words: String::new(), index: None, guest: None }.run();
        }
        _ => eprintln!("usage: fake-vmm --control-fd 3"),
    }
}

/// One fake VMM process.
struct Fake {
    control: OwnedFd,
    role: Role,
    words: String,
    index: Option<u32>,
    guest: Option<Guest>,
}

impl Fake {
    fn told(&self, word: &str) -> bool {
        let here = match self.index {
            Some(index) => format!("fake.{word}={index}"),
            None => String::from("\0"),
        };
        let plain = format!("fake.{word}");
        self.words.split_whitespace().any(|told| told == plain || told == here)
    }

    fn run(&mut self) -> ! {
        loop {
            self.wait_ready();
            self.reap();
            if let Some((envelope, fds)) = receive(&self.control, wire::Wait::No) {
                self.serve(envelope, fds);
            }
            self.serve_guest();
        }
    }

    fn wait_ready(&self) {
        let mut fds = vec![self.control.as_fd()];
        fds.extend(self.guest.iter().flat_map(Guest::descriptors));
        wire::wait_readable(&fds);
    }

    fn serve_guest(&mut self) {
        let muted = self.told("mute_child") || self.told("no_agent");
        let refusing = self.told("refuse_child");
        let Some(guest) = &mut self.guest else { return };
        match guest.serve(muted, refusing) {
            Act::GoOn => {}
            Act::Panic => self.panic_guest(),
            Act::Abort => std::process::abort(),
            Act::PowerOff => self.end(ExitReason::PowerOff),
        }
    }

    fn event(&self, event: Event, fd: Option<BorrowedFd<'_>>) {
        send(&self.control, &Message::Event(event), fd);
    }

    fn reply(&self, seq: u64, result: Result<Reply, ControlError>, fd: Option<BorrowedFd<'_>>) {
        send(&self.control, &Message::Reply { seq, result }, fd);
    }

    fn reap(&self) {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            if self.role == Role::Zygote {
                let (exit_status, signal) = (status.exit_status(), status.terminating_signal());
                self.event(
                    Event::ChildExited { pid: pid.as_raw_pid().cast_unsigned(), exit_status, signal },
                    None,
                );
            }
        }
    }

    fn serve(&mut self, envelope: Envelope, mut fds: Vec<OwnedFd>) {
        let seq = envelope.seq;
        match envelope.request {
            Request::Boot(config) => {
                if let BootSource::Linux { cmdline, .. } = &config.source {
                    self.words.clone_from(cmdline);
                }
                let log = fds.pop().expect("a log");
                self.start_guest(fds.pop().expect("a listener"), log);
                self.role = Role::Running;
                self.say("fake guest booted");
                self.reply(seq, Ok(Reply::Done), None);
                if self.told("panic_at_boot") {
                    self.panic_guest();
                }
            }
            Request::Freeze => self.freeze(seq, fds.pop().expect("a control socket")),
            Request::Fork { count } => self.fork(seq, count, fds.pop()),
            Request::Child(_) => panic!("a child that no fork announced"),
            Request::Status => self.reply(seq, Ok(Reply::Status(Box::new(self.status()))), None),
            Request::Pause | Request::Resume => self.reply(seq, Ok(Reply::Done), None),
            Request::Stop => {
                self.reply(seq, Ok(Reply::Done), None);
                self.end(ExitReason::Stopped);
            }
        }
    }

    fn start_guest(&mut self, listener: OwnedFd, log: OwnedFd) {
        self.guest = Some(Guest::new(listener, log));
    }

    fn say(&mut self, line: &str) {
        if let Some(guest) = &mut self.guest {
            guest.say(line);
        }
    }

    fn panic_guest(&mut self) -> ! {
        self.say("Kernel panic - not syncing: fake");
        self.end(ExitReason::Reset)
    }

    fn end(&self, reason: ExitReason) -> ! {
        self.event(Event::Exited { reason }, None);
        std::process::exit(0)
    }

    fn status(&self) -> Status {
        Status {
            role: self.role,
            kvm_exits: 0,
            forks: 0,
            overlay_bytes: 0,
            overlay_limit_bytes: 0,
            overlay_refused_writes: 0,
            log_dropped_bytes: 0,
            vsock_connections: 0,
            memory_bytes: 0,
        }
    }

    fn freeze(&mut self, seq: u64, control: OwnedFd) {
        if self.told("refuse_freeze") {
            let message = "no memory for layers (fake)".into();
            return self.reply(seq, Err(ControlError { kind: ErrorKind::Host, message }), None);
        }
        if let Some((pid, pidfd)) = fork() {
            let info = FrozenInfo { pid, layer_bytes: 4096, freeze_ns: 1 };
            self.reply(seq, Ok(Reply::Frozen(info)), Some(pidfd.as_fd()));
            self.end(ExitReason::Frozen);
        }
        self.guest = None;
        self.control = control;
        self.role = Role::Zygote;
    }

    fn fork(&mut self, seq: u64, count: u32, twin: Option<OwnedFd>) {
        let times = ForkTimes { stop_requested_ns: 1, state_saved_ns: 2, forked_ns: 3, resumed_ns: 4 };
        if self.told("refuse_fork") && self.role != Role::Zygote {
            for _ in 0..count {
                receive(&self.control, wire::Wait::Yes);
            }
            let message = "vCPU 0 did not stop (fake)".into();
            return self.reply(seq, Err(ControlError { kind: ErrorKind::Host, message }), None);
        }
        let Some(twin) = twin else {
            assert_eq!(self.role, Role::Zygote, "a running VMM forks through a twin");
            // Each child as soon as it is announced: both directions are busy at once.
            for index in 0..count {
                let Some((envelope, fds)) = receive(&self.control, wire::Wait::Yes) else {
                    return;
                };
                self.fork_child(index, envelope, fds);
            }
            return self.reply(seq, Ok(Reply::Forked(times)), None);
        };
        let children: Vec<_> = (0..count).filter_map(|_| receive(&self.control, wire::Wait::Yes)).collect();
        if let Some((_, pidfd)) = fork() {
            drop(children);
            return self.reply(seq, Ok(Reply::Forked(times)), Some(pidfd.as_fd()));
        }
        self.control = twin;
        self.guest = None;
        for (index, (envelope, fds)) in (0u32..).zip(children) {
            self.fork_child(index, envelope, fds);
        }
        std::process::exit(0)
    }

    /// Forks one child; only the child goes on in [`Fake::run`].
    fn fork_child(&mut self, index: u32, envelope: Envelope, mut fds: Vec<OwnedFd>) {
        let Request::Child(_) = envelope.request else { panic!("no child where one was announced") };
        self.index = Some(index);
        if self.told("fail_child") {
            let error = ControlError { kind: ErrorKind::Host, message: "no KVM VM to be had (fake)".into() };
            return self.event(Event::ChildFailed { index, error }, None);
        }
        if let Some((pid, pidfd)) = fork() {
            self.event(Event::ChildForked { index, pid }, Some(pidfd.as_fd()));
            return;
        }
        let log = fds.pop().expect("a log");
        let listener = fds.pop().expect("a listener");
        self.control = fds.pop().expect("a control socket");
        self.role = Role::Running;
        if self.told("dead_child") {
            std::process::exit(9);
        }
        self.start_guest(listener, log);
        let now = offshoot_host::clock::monotonic_ns();
        self.event(Event::Started { forked_ns: now, started_ns: now }, None);
        self.run();
    }
}
