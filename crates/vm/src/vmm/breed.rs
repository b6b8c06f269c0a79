//! Forking children from a process that never runs its guest.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use offshoot_protocol::control::{CHILD_FDS, ChildSpec, Event, Message, Request};

use super::Role;
use super::attach::{Attached, Endowment};
use super::error::VmmError;
use super::machine::{Machine, Saved, Start, parse_generation};
use super::running::Running;
use crate::control::{ControlSocket, Received};
use crate::devices::Descriptors;
use crate::process::{self, Forked, monotonic_ns};

/// Most children of one fork; bounds what a request makes the VMM hold.
const MAX_CHILDREN: u32 = 4096;

/// One child that is to be forked, with the descriptors made for it.
pub struct Embryo {
    spec: ChildSpec,
    vm_generation: [u8; 16],
    control: OwnedFd,
    vsock: OwnedFd,
    log: OwnedFd,
}

impl Embryo {
    fn new(received: Received, count: u32, index: u32) -> Result<Self, VmmError> {
        let Request::Child(spec) = received.envelope.request else {
            return Err(VmmError::NotAChild { count, index });
        };
        let vm_generation = parse_generation(&spec.vm_generation)?;
        let got = received.fds.len();
        let fds: [OwnedFd; CHILD_FDS] = Vec::from(received.fds)
            .try_into()
            .map_err(|_| VmmError::Descriptors { request: "child", wanted: CHILD_FDS, got })?;
        let [control, vsock, log] = fds;
        Ok(Self { spec, vm_generation, control, vsock, log })
    }

    fn fds(&self) -> [RawFd; CHILD_FDS] {
        [self.control.as_raw_fd(), self.vsock.as_raw_fd(), self.log.as_raw_fd()]
    }
}

/// The children of one fork, in order.
pub type Litter = VecDeque<Embryo>;

/// Reads the `count` announced children. All of them are read even if one is wrong, so that the next request is not
/// taken for one of them.
///
/// # Errors
/// The first child that is wrong.
pub fn receive_litter(control: &ControlSocket, count: u32) -> Result<Litter, VmmError> {
    let mut litter = Litter::new();
    let mut first_error = None;
    for index in 0..count {
        match Embryo::new(control.receive()?, count, index) {
            Ok(embryo) => litter.push_back(embryo),
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    if count == 0 || count > MAX_CHILDREN {
        let range = "1 to 4096";
        return Err(VmmError::OutOfRange { what: "count of children", value: count.into(), range });
    }
    first_error.map_or(Ok(litter), Err)
}

/// A frozen copy of a running VMM, which forks the children while its parent runs on.
pub struct Twin {
    machine: Machine,
    saved: Saved,
    control: ControlSocket,
    litter: Litter,
}

impl Twin {
    /// What remains of a running VMM in the child of its fork.
    pub fn adopt(running: Box<Running>, saved: Saved, control: OwnedFd, litter: Litter) -> Role {
        let machine = running.into_machine_in_child();
        let control = ControlSocket::new(control);
        let mut keep = machine.shared_fds();
        keep.push(control.as_fd().as_raw_fd());
        keep.extend(litter.iter().flat_map(Embryo::fds));
        match process::close_all_except(&keep) {
            Ok(()) => {
                process::name_process("twin");
                Role::Twin(Box::new(Self { machine, saved, control, litter }))
            }
            Err(error) => {
                let error = VmmError::Close(error).to_control();
                for index in (0..).take(litter.len()) {
                    let failed = Event::ChildFailed { index, error: error.clone() };
                    let _ = control.send(&Message::Event(failed), &[]);
                }
                Role::Gone
            }
        }
    }

    /// Forks every child, in order, and ends.
    pub fn breed(self: Box<Self>) -> Role {
        let Self { machine, saved, control, litter } = *self;
        match fork_litter(Box::new(Brood { machine, saved }), control, litter) {
            Bred::Child(role) => role,
            Bred::Parent(..) => Role::Gone,
        }
    }
}

/// What every child of a litter is a copy of.
pub struct Brood {
    /// Memory and devices, detached.
    pub machine: Machine,
    /// State of KVM's half.
    pub saved: Saved,
}

/// On which side of a litter's forks this is.
pub enum Bred {
    /// The parent keeps what it had.
    Parent(Box<Brood>, ControlSocket),
    /// A child.
    Child(Role),
}

/// Forks each child and reports it on `control`. Cost: one `fork`, one `pidfd_open` and one message for each child.
pub fn fork_litter(brood: Box<Brood>, control: ControlSocket, mut litter: Litter) -> Bred {
    let mut index = 0;
    while let Some(embryo) = litter.pop_front() {
        let event = match process::fork() {
            Ok(Forked::Child) => {
                // Inherited owners must not close descriptors that will be closed below, or reused, behind their back.
                std::mem::forget(control);
                std::mem::forget(litter);
                return Bred::Child(Newborn::adopt(brood, embryo));
            }
            Ok(Forked::Parent { pid, pidfd }) => {
                // If the host is gone, the children notice by themselves.
                let _ = control.send(&Message::Event(Event::ChildForked { index, pid }), &[pidfd.as_fd()]);
                index += 1;
                continue;
            }
            Err(error) => Event::ChildFailed { index, error: VmmError::from(error).to_control() },
        };
        let _ = control.send(&Message::Event(event), &[]);
        index += 1;
    }
    Bred::Parent(brood, control)
}

/// A forked child that has no KVM VM yet.
pub struct Newborn {
    machine: Machine,
    saved: Saved,
    given: Endowment,
    forked_ns: u64,
}

impl Newborn {
    fn adopt(brood: Box<Brood>, embryo: Embryo) -> Role {
        let forked_ns = monotonic_ns();
        let Brood { mut machine, saved } = *brood;
        let mut keep = machine.shared_fds();
        keep.extend(embryo.fds());
        let closed = process::close_all_except(&keep);
        let control = Arc::new(ControlSocket::new(embryo.control));
        if let Err(error) = closed {
            return fail(&control, &VmmError::Close(error));
        }
        process::leave_zygote();
        // Whatever it says in distress goes to its own log. If this fails it has no voice, which harms nobody.
        let _ = rustix::stdio::dup2_stderr(&embryo.log);
        process::name_process(&embryo.spec.id);
        machine.config.id = embryo.spec.id;
        machine.config.vm_generation = embryo.spec.vm_generation;
        machine.forks = 0;
        let descriptors = Descriptors { vsock_listener: Some(embryo.vsock), log: Some(embryo.log) };
        let given = Endowment { control, descriptors, vm_generation: embryo.vm_generation };
        Role::Starting(Box::new(Self { machine, saved, given, forked_ns }))
    }

    /// Makes the KVM VM and lets the guest go on.
    pub fn start(self: Box<Self>) -> Role {
        let Self { machine, saved, given, forked_ns } = *self;
        let control = Arc::clone(&given.control);
        let announce = || {
            let started = Event::Started { forked_ns, started_ns: monotonic_ns() };
            // If the host is gone, the control loop notices at once.
            let _ = control.send(&Message::Event(started), &[]);
        };
        match Attached::start(&machine, &Start::Saved(Box::new(saved)), given, announce) {
            Ok(attached) => Role::Running(Box::new(Running::new(machine, attached))),
            Err(error) => fail(&control, &error),
        }
    }
}

fn fail(control: &ControlSocket, error: &VmmError) -> Role {
    let _ = control.send(&Message::Event(Event::Failed { error: error.to_control() }), &[]);
    Role::Gone
}
