//! vCPU threads.
#![allow(unsafe_code)]

use std::os::unix::thread::JoinHandleExt;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvm_ioctls::{VcpuExit, VcpuFd};
use offshoot_protocol::control::{Event, ExitReason};
use offshoot_protocol::ports::{DOORBELL, GENERATION};

use crate::arch::x86_64::state::{self, StateTraits, VcpuState};
use crate::bus::Bus;
use crate::control::ControlSocket;
use crate::devices::legacy::MachineEvent;
use crate::gate::{Gate, StopError, Verdict};
use crate::notice::Notice;
use crate::process::monotonic_ns;

/// Stack of a vCPU thread, bytes; only what is touched is private memory.
const STACK_BYTES: usize = 512 << 10;
/// How long vCPUs may take to park. They park within microseconds unless the host stalls.
const STOP_LIMIT: Duration = Duration::from_secs(2);

/// What the vCPU threads of one VM share.
pub struct Shared {
    /// Barrier for forks.
    pub gate: Gate,
    /// Devices.
    pub bus: Arc<Bus>,
    /// Which state exists.
    pub traits: Arc<StateTraits>,
    /// Where the end of the guest is reported.
    pub notice: Notice,
    /// For doorbells.
    pub control: Arc<ControlSocket>,
    /// Whether the guest may ring.
    pub doorbells: Doorbells,
    /// Exits of all vCPUs.
    pub exits: AtomicU64,
}

/// Whether the guest may ring the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doorbells {
    /// A micro-guest: each write to the doorbell port is an event, each read gives this number.
    Forwarded {
        /// First four bytes of the VM generation id.
        generation: u32,
    },
    /// A Linux guest has no use for them.
    Ignored,
}

impl Shared {
    fn generation(&self) -> u32 {
        match self.doorbells {
            Doorbells::Forwarded { generation } => generation,
            Doorbells::Ignored => 0,
        }
    }
}

/// The vCPU threads of one VM.
pub struct Vcpus {
    shared: Arc<Shared>,
    threads: Vec<VcpuThread>,
}

struct VcpuThread {
    handle: JoinHandle<VcpuFd>,
    immediate_exit: ImmediateExit,
}

/// `kvm_run.immediate_exit` of a vCPU, set from the control thread.
#[derive(Clone, Copy)]
struct ImmediateExit(*mut u8);

// SAFETY: the byte is only accessed atomically, and the mapping it is in lives until the thread is joined, since the
// thread hands its `VcpuFd` back through its result.
unsafe impl Send for ImmediateExit {}

impl ImmediateExit {
    fn set(self, value: u8) {
        // SAFETY: the pointer is to a byte of the live `kvm_run` mapping (see `Send`); the kernel reads it as a byte.
        let byte = unsafe { AtomicU8::from_ptr(self.0) };
        byte.store(value, Ordering::Release);
    }
}

/// Why vCPU threads could not be started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The system refused a thread.
    #[error("start the thread of vcpu {vcpu}; the host may be out of process ids or memory")]
    Thread {
        /// Which one.
        vcpu: usize,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The vCPU's shared page could not be kept out of forked children.
    #[error("keep the run page of vcpu {vcpu} out of forks")]
    DontFork {
        /// Which one.
        vcpu: usize,
        /// The system's answer.
        source: std::io::Error,
    },
}

impl Vcpus {
    /// Starts one thread for each vCPU; they run the guest at once.
    ///
    /// # Errors
    /// As [`SpawnError`]; threads started before have ended.
    pub fn spawn(fds: Vec<VcpuFd>, run_bytes: usize, shared: Arc<Shared>) -> Result<Self, SpawnError> {
        install_kick_handler();
        let mut vcpus = Self { shared, threads: Vec::with_capacity(fds.len()) };
        for (vcpu, mut fd) in fds.into_iter().enumerate() {
            let run: *mut kvm_bindings::kvm_run = fd.get_kvm_run();
            keep_out_of_forks(run.cast(), run_bytes)
                .map_err(|source| SpawnError::DontFork { vcpu, source })?;
            // SAFETY: `run` points to the live `kvm_run` mapping of `fd`.
            let immediate_exit = ImmediateExit(unsafe { &raw mut (*run).immediate_exit });
            let shared = Arc::clone(&vcpus.shared);
            let handle = std::thread::Builder::new()
                .name(format!("vcpu{vcpu}"))
                .stack_size(STACK_BYTES)
                .spawn(move || Runner { vcpu, fd, immediate_exit, shared, generation_read: false }.run())
                .map_err(|source| SpawnError::Thread { vcpu, source })?;
            vcpus.threads.push(VcpuThread { handle, immediate_exit });
        }
        Ok(vcpus)
    }

    /// What the threads share.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Stops all vCPUs and returns their states. The caller releases the gate, whatever comes back.
    ///
    /// # Errors
    /// As [`StopError`].
    pub fn stop(&self) -> Result<Vec<VcpuState>, StopError> {
        self.shared.gate.request_stop();
        self.kick();
        self.shared.gate.wait_stopped(STOP_LIMIT)
    }

    fn kick(&self) {
        for thread in &self.threads {
            thread.immediate_exit.set(1);
            // SAFETY: the thread has not been joined, so its pthread handle is valid; the signal's handler does nothing.
            unsafe { libc::pthread_kill(thread.handle.as_pthread_t(), kick_signal()) };
        }
    }

    /// Ends all threads and waits for them, at most a bounded time.
    pub fn shut_down(self) {
        self.shared.gate.release(Verdict::Exit);
        let deadline = Instant::now() + STOP_LIMIT;
        while self.threads.iter().any(|thread| !thread.handle.is_finished()) && Instant::now() < deadline {
            self.kick();
            std::thread::sleep(Duration::from_micros(200));
        }
        for thread in self.threads {
            if thread.handle.is_finished() {
                // A thread that panicked has nothing to hand back.
                let _ = thread.handle.join();
            }
        }
    }
}

/// Body of one vCPU thread.
struct Runner {
    vcpu: usize,
    fd: VcpuFd,
    immediate_exit: ImmediateExit,
    shared: Arc<Shared>,
    /// A micro-guest has read its generation in this VM.
    generation_read: bool,
}

impl Runner {
    fn run(mut self) -> VcpuFd {
        while let Some(reason) = self.step() {
            match reason {
                Step::Again => {}
                Step::End(reason) => {
                    self.shared.gate.ended(self.vcpu);
                    self.shared.notice.end(reason);
                    break;
                }
            }
        }
        self.fd
    }

    /// Enters the guest once. `None`: the thread is to end.
    fn step(&mut self) -> Option<Step> {
        let exit = self.fd.run();
        let exits = self.shared.exits.fetch_add(1, Ordering::Relaxed);
        match exit {
            Ok(VcpuExit::IoIn(port @ (DOORBELL | GENERATION), data))
                if self.shared.doorbells != Doorbells::Ignored =>
            {
                let generation = self.shared.generation();
                if port == DOORBELL && std::mem::replace(&mut self.generation_read, true) {
                    self.shared.gate.wait_for_stop();
                }
                for (byte, part) in data.iter_mut().zip(generation.to_le_bytes()) {
                    *byte = part;
                }
                Some(Step::Again)
            }
            Ok(exit) => Some(handle_exit(self.vcpu, exit, exits, &self.shared)),
            Err(error) if error.errno() == libc::EINTR => self.interrupted(),
            // The boot processor has not started this one yet.
            Err(error) if error.errno() == libc::EAGAIN => Some(Step::Again),
            Err(error) => {
                Some(Step::End(ExitReason::Fault(format!("kvm could not run vcpu {}: {error}", self.vcpu))))
            }
        }
    }

    fn interrupted(&mut self) -> Option<Step> {
        // Cleared before the check: a stop that is requested after it sets the byte again.
        self.immediate_exit.set(0);
        if !self.shared.gate.stop_requested() {
            return Some(Step::Again);
        }
        let state = state::save_vcpu(&self.fd, &self.shared.traits).map(Box::new);
        match self.shared.gate.park(self.vcpu, state) {
            Verdict::Run => Some(Step::Again),
            Verdict::Exit => None,
        }
    }
}

enum Step {
    Again,
    End(ExitReason),
}

fn handle_exit(vcpu: usize, exit: VcpuExit<'_>, exits: u64, shared: &Shared) -> Step {
    match exit {
        VcpuExit::IoIn(port, data) => shared.bus.port_read(port, data),
        VcpuExit::IoOut(port, data) => {
            if let Some(event) = shared.bus.port_write(port, data) {
                return machine_event(vcpu, event, shared);
            }
        }
        VcpuExit::MmioRead(address, data) => shared.bus.mmio_read(address, data),
        VcpuExit::MmioWrite(address, data) => shared.bus.mmio_write(address, data),
        VcpuExit::Intr | VcpuExit::IrqWindowOpen | VcpuExit::Hlt => {}
        VcpuExit::Shutdown => return Step::End(ExitReason::Reset),
        VcpuExit::FailEntry(reason, _) => {
            return fault(vcpu, exits, &format!("hardware refused to enter the guest, reason {reason:#x}"));
        }
        VcpuExit::InternalError => return fault(vcpu, exits, "kvm could not emulate a guest instruction"),
        VcpuExit::MemoryFault { gpa, size, .. } => {
            return fault(vcpu, exits, &format!("kvm could not map guest memory at {gpa:#x}+{size:#x}"));
        }
        other => return fault(vcpu, exits, &format!("unexpected exit {other:?}")),
    }
    Step::Again
}

fn fault(vcpu: usize, exits: u64, what: &str) -> Step {
    Step::End(ExitReason::Fault(format!("vcpu {vcpu} at exit {exits}: {what}")))
}

fn machine_event(vcpu: usize, event: MachineEvent, shared: &Shared) -> Step {
    match event {
        MachineEvent::Doorbell(_) if shared.doorbells == Doorbells::Ignored => Step::Again,
        MachineEvent::Doorbell(value) => {
            let vcpu = u8::try_from(vcpu).expect("at most eight vcpus");
            shared.control.send_or_drop(Event::Doorbell { vcpu, value, at_ns: monotonic_ns() });
            Step::Again
        }
        MachineEvent::PowerOff => Step::End(ExitReason::PowerOff),
        MachineEvent::Reset => Step::End(ExitReason::Reset),
    }
}

fn kick_signal() -> libc::c_int {
    libc::SIGRTMIN()
}

extern "C" fn on_kick(_signal: libc::c_int) {}

/// Installs a handler that does nothing, so that the signal only interrupts `KVM_RUN`.
fn install_kick_handler() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: an all-zero sigaction is a valid value to fill in.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = on_kick as extern "C" fn(libc::c_int) as usize;
        action.sa_flags = libc::SA_RESTART;
        // SAFETY: the handler touches nothing, and `action` is fully initialised.
        unsafe { libc::sigaction(kick_signal(), &raw const action, std::ptr::null_mut()) };
    });
}

/// A forked child must not inherit a mapping of its parent's vCPU: it would keep the parent's KVM VM alive.
fn keep_out_of_forks(run: *mut u8, run_bytes: usize) -> std::io::Result<()> {
    // SAFETY: the range is the live `kvm_run` mapping; the advice changes nothing in this process.
    let result = unsafe { libc::madvise(run.cast(), run_bytes, libc::MADV_DONTFORK) };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}
