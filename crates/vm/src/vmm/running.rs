//! A VMM that runs a guest: its control loop and what the host may ask of it.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use offshoot_protocol::control::{
    BootConfig, CHILD_FDS, Envelope, ExitReason, ForkTimes, Message, Reply, Request, Role as PublicRole,
    Status,
};
use rustix::event::epoll;

use super::Role;
use super::attach::{Attached, CONTROL_TOKEN, Endowment, NOTICE_TOKEN};
use super::breed::{self, Litter, Twin};
use super::error::VmmError;
use super::freeze;
use super::machine::{Machine, Saved, parse_generation};
use super::watchdog::{self, Watchdog};
use crate::bus::lock;
use crate::control::{ControlSocket, Received, SocketError};
use crate::devices::Descriptors;
use crate::gate::Verdict;
use crate::process::{self, Forked, monotonic_ns};

/// Events taken from epoll at once.
const EVENT_BATCH: usize = 32;

/// A VMM that runs a guest.
pub struct Running {
    machine: Machine,
    attached: Attached,
    /// Set between [`Request::Pause`] and [`Request::Resume`].
    paused: Option<Saved>,
}

/// Serves a VMM that has no guest yet.
pub fn wait_for_boot(control: ControlSocket) -> Result<Role, SocketError> {
    let Received { envelope: Envelope { seq, request }, fds } = match control.receive() {
        Ok(received) => received,
        Err(SocketError::Closed) => return Ok(Role::Gone),
        Err(error @ (SocketError::Decode { .. } | SocketError::TooLong)) => {
            refuse(&control, 0, &VmmError::Socket(error));
            return Ok(Role::Empty(control));
        }
        Err(error) => return Err(error),
    };
    match request {
        Request::Boot(config) => {
            let control = Arc::new(control);
            match boot(*config, fds, &control) {
                Ok(running) => {
                    answer(&control, seq, Reply::Done);
                    Ok(Role::Running(Box::new(running)))
                }
                Err(error) => {
                    refuse(&control, seq, &error);
                    Ok(Role::Gone)
                }
            }
        }
        Request::Stop => {
            answer(&control, seq, Reply::Done);
            Ok(Role::Ended(ExitReason::Stopped, Arc::new(control)))
        }
        Request::Status => {
            let error = VmmError::Role { role: "empty", request: "tell its status; boot it first" };
            refuse(&control, seq, &error);
            Ok(Role::Empty(control))
        }
        other => {
            refuse(&control, seq, &VmmError::Role { role: "empty", request: request_name(&other) });
            Ok(Role::Empty(control))
        }
    }
}

fn boot(
    config: BootConfig,
    fds: VecDeque<OwnedFd>,
    control: &Arc<ControlSocket>,
) -> Result<Running, VmmError> {
    let got = fds.len();
    let [vsock, log]: [OwnedFd; CHILD_FDS - 1] = Vec::from(fds)
        .try_into()
        .map_err(|_| VmmError::Descriptors { request: "boot", wanted: CHILD_FDS - 1, got })?;
    process::reap_automatically();
    process::name_process(&config.id);
    let vm_generation = parse_generation(&config.vm_generation)?;
    let (machine, start) = Machine::load(config)?;
    let descriptors = Descriptors { vsock_listener: Some(vsock), log: Some(log) };
    let given = Endowment { control: Arc::clone(control), descriptors, vm_generation };
    let attached = Attached::start(&machine, &start, given, || ())?;
    Ok(Running::new(machine, attached))
}

impl Running {
    /// A machine whose vCPUs have been let go.
    pub fn new(machine: Machine, attached: Attached) -> Self {
        Self { machine, attached, paused: None }
    }

    /// Memory and devices.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Memory and devices.
    pub fn machine_mut(&mut self) -> &mut Machine {
        &mut self.machine
    }

    /// To the host.
    pub fn control(&self) -> Arc<ControlSocket> {
        Arc::clone(&self.attached.control)
    }

    /// Stops the vCPUs, if they are not stopped already, and tells the state of KVM's half.
    pub fn stop_and_save(&self) -> Result<Saved, VmmError> {
        match &self.paused {
            Some(saved) => Ok(saved.clone()),
            None => self.attached.stop_and_save(),
        }
    }

    /// Undoes [`Running::stop_and_save`].
    pub fn release(&self) {
        if self.paused.is_none() {
            self.attached.vcpus.shared().gate.release(Verdict::Run);
        }
    }

    /// Ends the vCPU threads.
    pub fn shut_down(self) {
        self.attached.vcpus.shut_down();
    }

    /// In a forked child: the half that was cloned, detached; the other half is forgotten.
    pub fn into_machine_in_child(self: Box<Self>) -> Machine {
        let Self { machine, attached, paused: _ } = *self;
        machine.detach();
        attached.forget();
        machine
    }

    /// Handles devices and requests until the guest or the host ends it, or it becomes something else.
    pub fn serve(mut self: Box<Self>) -> Role {
        let mut events = Vec::with_capacity(EVENT_BATCH);
        loop {
            events.clear();
            match epoll::wait(&self.attached.poll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    return self.end(ExitReason::Fault(format!("the control loop cannot wait: {error}")));
                }
            }
            for event in &events {
                let (token, flags) = (event.data.u64(), event.flags);
                match token {
                    NOTICE_TOKEN => {
                        if let Some(reason) = self.attached.vcpus.shared().notice.reason() {
                            return self.end(reason);
                        }
                    }
                    CONTROL_TOKEN => match self.receive() {
                        Next::Again(running) => self = running,
                        Next::Become(role) => return role,
                    },
                    token => self.device_ready(token, flags),
                }
            }
        }
    }

    fn device_ready(&self, token: u64, flags: epoll::EventFlags) {
        let (index, token) = ((token >> 32) as usize, token as u32);
        if let Some(device) = self.machine.devices().get(index) {
            lock(device).ready(token, flags);
        }
    }

    fn end(self: Box<Self>, reason: ExitReason) -> Role {
        let control = self.control();
        let serial = self.machine.serial().clone();
        self.shut_down();
        // A last line without an end is still in the console's buffer.
        lock(&serial).flush();
        Role::Ended(reason, control)
    }

    fn receive(self: Box<Self>) -> Next {
        match self.attached.control.receive() {
            Ok(received) => self.handle(received),
            Err(error @ (SocketError::Decode { .. } | SocketError::TooLong)) => {
                refuse(&self.attached.control, 0, &VmmError::Socket(error));
                Next::Again(self)
            }
            Err(_) => Next::Become(self.end(ExitReason::Stopped)),
        }
    }

    fn handle(
        mut self: Box<Self>,
        Received { envelope: Envelope { seq, request }, mut fds }: Received,
    ) -> Next {
        let control = self.control();
        let outcome = match request {
            Request::Fork { count } => {
                return match fds.pop_front() {
                    Some(twin) => self.fork(seq, count, twin),
                    None => {
                        // The children that follow must be taken off the socket all the same.
                        let _ = breed::receive_litter(&control, count);
                        refuse(&control, seq, &VmmError::Descriptors { request: "fork", wanted: 1, got: 0 });
                        Next::Again(self)
                    }
                };
            }
            Request::Freeze => match fds.pop_front() {
                Some(zygote) => return Next::of(freeze::freeze(self, seq, zygote)),
                None => Err(VmmError::Descriptors { request: "freeze", wanted: 1, got: 0 }),
            },
            Request::Stop => {
                answer(&control, seq, Reply::Done);
                return Next::Become(self.end(ExitReason::Stopped));
            }
            Request::Status => Ok(Reply::Status(Box::new(self.status()))),
            Request::Pause => self.pause().map(|()| Reply::Done),
            Request::Resume => self.resume().map(|()| Reply::Done),
            request @ (Request::Boot(_) | Request::Child(_)) => {
                Err(VmmError::Role { role: "running", request: request_name(&request) })
            }
        };
        match outcome {
            Ok(reply) => answer(&control, seq, reply),
            Err(error) => refuse(&control, seq, &error),
        }
        Next::Again(self)
    }

    fn pause(&mut self) -> Result<(), VmmError> {
        if self.paused.is_some() {
            return Err(VmmError::Role { role: "paused", request: "pause" });
        }
        match self.attached.stop_and_save() {
            Ok(saved) => {
                self.paused = Some(saved);
                Ok(())
            }
            Err(error) => {
                self.release();
                Err(error)
            }
        }
    }

    fn resume(&mut self) -> Result<(), VmmError> {
        if self.paused.take().is_none() {
            return Err(VmmError::Role { role: "running", request: "resume" });
        }
        self.release();
        Ok(())
    }

    /// Forks through one frozen twin. Cost of the pause: stopping and saving each vCPU, one `fork(2)`.
    fn fork(mut self: Box<Self>, seq: u64, count: u32, twin: OwnedFd) -> Next {
        let control = self.control();
        let litter = match breed::receive_litter(&control, count) {
            Ok(litter) => litter,
            Err(error) => {
                refuse(&control, seq, &error);
                return Next::Again(self);
            }
        };
        match self.fork_twin(litter, twin) {
            TwinFork::Child(role) => Next::Become(role),
            TwinFork::Parent(running, Ok((times, pidfd))) => {
                self = running;
                self.machine.forks += 1;
                let message = Message::Reply { seq, result: Ok(Reply::Forked(times)) };
                // If the host is gone, the next read of the control socket says so.
                let _ = control.send(&message, &[std::os::fd::AsFd::as_fd(&pidfd)]);
                Next::Again(self)
            }
            TwinFork::Parent(running, Err(error)) => {
                refuse(&control, seq, &error);
                Next::Again(running)
            }
        }
    }

    fn fork_twin(self: Box<Self>, litter: Litter, twin: OwnedFd) -> TwinFork {
        let watchdog = match Watchdog::arm(self.attached.vcpus.shared()) {
            Ok(watchdog) => watchdog,
            Err(error) => {
                return TwinFork::Parent(self, Err(VmmError::Fork(process::ForkError::Fork(error))));
            }
        };
        let stop_requested_ns = monotonic_ns();
        let saved = self.stop_and_save();
        let state_saved_ns = monotonic_ns();
        let forked = match saved {
            Ok(saved) => match process::fork() {
                Ok(Forked::Child) => {
                    // Its thread does not exist here.
                    std::mem::forget(watchdog);
                    return TwinFork::Child(Twin::adopt(self, saved, twin, litter));
                }
                Ok(Forked::Parent { pidfd, .. }) => Ok(pidfd),
                Err(error) => Err(error.into()),
            },
            Err(error) => Err(error),
        };
        let forked_ns = monotonic_ns();
        self.release();
        let resumed_ns = monotonic_ns();
        let abandoned = watchdog.disarm();
        let outcome = forked.and_then(|pidfd| {
            if abandoned {
                // The guest ran while it was copied: the twin is torn and must not have children. It may have begun
                // to fork some; each of them dies with the control socket that the host closes on this error.
                let _ = rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL);
                return Err(VmmError::Watchdog { limit_ms: watchdog::LIMIT.as_millis() });
            }
            Ok((ForkTimes { stop_requested_ns, state_saved_ns, forked_ns, resumed_ns }, pidfd))
        });
        TwinFork::Parent(self, outcome)
    }

    fn status(&self) -> Status {
        let role = if self.paused.is_some() { PublicRole::Paused } else { PublicRole::Running };
        status(&self.machine, role, self.attached.vcpus.shared().exits.load(Ordering::Relaxed))
    }
}

enum TwinFork {
    Parent(Box<Running>, Result<(ForkTimes, OwnedFd), VmmError>),
    Child(Role),
}

enum Next {
    Again(Box<Running>),
    Become(Role),
}

impl Next {
    fn of(role: Role) -> Self {
        match role {
            Role::Running(running) => Self::Again(running),
            role => Self::Become(role),
        }
    }
}

/// Counters of a machine in any role.
pub fn status(machine: &Machine, role: PublicRole, kvm_exits: u64) -> Status {
    let (overlay_bytes, overlay_limit_bytes, overlay_refused_writes) =
        machine.disk().map_or((0, 0, 0), |disk| {
            let disk = lock(disk);
            let disk = disk.device().disk();
            (disk.overlay_bytes(), disk.overlay_limit_bytes(), disk.refused_writes())
        });
    Status {
        role,
        kvm_exits,
        forks: machine.forks,
        overlay_bytes,
        overlay_limit_bytes,
        overlay_refused_writes,
        log_dropped_bytes: lock(machine.serial()).log().dropped_bytes(),
        vsock_connections: machine.vsock().map_or(0, |vsock| lock(vsock).device().connection_count() as u64),
        memory_bytes: machine.ram.len_bytes(),
    }
}

/// Sends the successful outcome of a request. If the host is gone, the next read says so.
pub fn answer(control: &ControlSocket, seq: u64, reply: Reply) {
    let _ = control.send(&Message::Reply { seq, result: Ok(reply) }, &[]);
}

/// Sends the failure of a request. If the host is gone, the next read says so.
pub fn refuse(control: &ControlSocket, seq: u64, error: &VmmError) {
    let _ = control.send(&Message::Reply { seq, result: Err(error.to_control()) }, &[]);
}

/// How a request is called in an error.
pub fn request_name(request: &Request) -> &'static str {
    match request {
        Request::Boot(_) => "boot a guest",
        Request::Freeze => "freeze",
        Request::Fork { .. } => "fork",
        Request::Child(_) => "take a child that no fork announced",
        Request::Status => "tell its status",
        Request::Pause => "pause",
        Request::Resume => "resume",
        Request::Stop => "stop",
    }
}
