//! A frozen template: never runs its guest, forks clones of it.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use offshoot_protocol::control::{
    Envelope, Event, ExitReason, ForkTimes, Message, Reply, Request, Role as PublicRole, Status,
};
use rustix::event::{PollFd, PollFlags};

use super::Role;
use super::breed::{self, Bred, Brood};
use super::error::VmmError;
use super::running::{self, Running};
use crate::control::{ControlSocket, SocketError};
use crate::process::{self, ChildSignal, monotonic_ns};

/// One frozen template.
pub struct Zygote {
    brood: Box<Brood>,
    control: ControlSocket,
    children: ChildSignal,
}

impl Zygote {
    /// What remains of a frozen VMM in the child of its fork.
    pub fn adopt(running: Box<Running>, saved: super::machine::Saved, control: OwnedFd) -> Role {
        let machine = running.into_machine_in_child();
        let control = ControlSocket::new(control);
        let mut keep = machine.shared_fds();
        keep.push(control.as_fd().as_raw_fd());
        let prepared = process::close_all_except(&keep)
            .map_err(VmmError::Close)
            .and_then(|()| ChildSignal::new().map_err(VmmError::Loop));
        match prepared {
            Ok(children) => {
                process::name_process("zygote");
                Role::Zygote(Box::new(Self { brood: Box::new(Brood { machine, saved }), control, children }))
            }
            Err(error) => {
                let _ = control.send(&Message::Event(Event::Failed { error: error.to_control() }), &[]);
                Role::Gone
            }
        }
    }

    /// Forks clones as asked until it is stopped or the host is gone.
    pub fn serve(mut self: Box<Self>) -> Role {
        loop {
            let mut polled =
                [PollFd::new(&self.control, PollFlags::IN), PollFd::new(&self.children, PollFlags::IN)];
            match rustix::event::poll(&mut polled, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                // Nothing can be waited for any more; ending is all that is left.
                Err(_) => return Role::Gone,
            }
            let (requested, died) = (!polled[0].revents().is_empty(), !polled[1].revents().is_empty());
            if died {
                self.report_deaths();
            }
            if requested {
                match self.receive() {
                    Next::Again(zygote) => self = zygote,
                    Next::Become(role) => return role,
                }
            }
        }
    }

    fn report_deaths(&mut self) {
        for death in self.children.reap() {
            let event =
                Event::ChildExited { pid: death.pid, exit_status: death.exit_status, signal: death.signal };
            let _ = self.control.send(&Message::Event(event), &[]);
        }
    }

    fn receive(self: Box<Self>) -> Next {
        match self.control.receive() {
            Ok(received) => self.handle(received.envelope),
            Err(error @ (SocketError::Decode { .. } | SocketError::TooLong)) => {
                running::refuse(&self.control, 0, &VmmError::Socket(error));
                Next::Again(self)
            }
            Err(_) => Next::Become(Role::Gone),
        }
    }

    fn handle(self: Box<Self>, Envelope { seq, request }: Envelope) -> Next {
        let request = match request {
            Request::Fork { count } => return self.fork(seq, count),
            Request::Stop => {
                running::answer(&self.control, seq, Reply::Done);
                let _ =
                    self.control.send(&Message::Event(Event::Exited { reason: ExitReason::Stopped }), &[]);
                return Next::Become(Role::Gone);
            }
            Request::Status => {
                running::answer(&self.control, seq, Reply::Status(Box::new(self.status())));
                return Next::Again(self);
            }
            other => other,
        };
        let error = VmmError::Role { role: "a zygote", request: running::request_name(&request) };
        running::refuse(&self.control, seq, &error);
        Next::Again(self)
    }

    fn fork(self: Box<Self>, seq: u64, count: u32) -> Next {
        let start_ns = monotonic_ns();
        let litter = match breed::receive_litter(&self.control, count) {
            Ok(litter) => litter,
            Err(error) => {
                running::refuse(&self.control, seq, &error);
                return Next::Again(self);
            }
        };
        let Self { brood, control, children } = *self;
        let (mut brood, control) = match breed::fork_litter(brood, control, litter) {
            Bred::Parent(brood, control) => (brood, control),
            Bred::Child(role) => {
                // Its descriptor is closed already.
                std::mem::forget(children);
                return Next::Become(role);
            }
        };
        brood.machine.forks += u64::from(count);
        let end_ns = monotonic_ns();
        let times = ForkTimes {
            stop_requested_ns: start_ns,
            state_saved_ns: start_ns,
            forked_ns: end_ns,
            resumed_ns: start_ns,
        };
        running::answer(&control, seq, Reply::Forked(times));
        Next::Again(Box::new(Self { brood, control, children }))
    }

    fn status(&self) -> Status {
        running::status(&self.brood.machine, PublicRole::Zygote, 0)
    }
}

enum Next {
    Again(Box<Zygote>),
    Become(Role),
}
