//! Why a request to a VMM failed.

use offshoot_memory::MemoryError;
use offshoot_protocol::control::{ControlError, ErrorKind};

use crate::arch::x86_64::acpi::AcpiError;
use crate::arch::x86_64::boot::BootError;
use crate::arch::x86_64::cpuid::CpuidError;
use crate::arch::x86_64::payload::PayloadError;
use crate::arch::x86_64::state::StateError;
use crate::control::SocketError;
use crate::devices::AttachError;
use crate::devices::virtio::blk::DiskError;
use crate::gate::StopError;
use crate::kvm::KvmError;
use crate::process::ForkError;
use crate::vcpu::SpawnError;

/// Why a request to a VMM failed.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    /// A number outside its range.
    #[error("{what} is {value}, must be {range}")]
    OutOfRange {
        /// Which setting.
        what: &'static str,
        /// Its value.
        value: u64,
        /// What is allowed.
        range: &'static str,
    },
    /// A VM generation id that is not 32 hexadecimal digits.
    #[error("vm generation id {value:?} is not 32 hexadecimal digits")]
    Generation {
        /// What was given.
        value: String,
    },
    /// The request does not fit what the process is.
    #[error("a vmm that is {role} cannot {request}")]
    Role {
        /// What the process is.
        role: &'static str,
        /// What was asked.
        request: &'static str,
    },
    /// A request came with the wrong descriptors.
    #[error("{request} needs {wanted} descriptors, came with {got}")]
    Descriptors {
        /// Which request.
        request: &'static str,
        /// How many it needs.
        wanted: usize,
        /// How many came.
        got: usize,
    },
    /// A message other than the announced children came.
    #[error("{count} children were announced, but message {index} is not a child")]
    NotAChild {
        /// How many were announced.
        count: u32,
        /// Which message was wrong.
        index: u32,
    },
    /// The watchdog let the guest go on.
    #[error("the fork took longer than {limit_ms} ms; the guest was let go on and the fork abandoned")]
    Watchdog {
        /// The limit.
        limit_ms: u128,
    },
    /// Guest memory.
    #[error("guest memory")]
    Memory(#[from] MemoryError),
    /// KVM.
    #[error("kvm")]
    Kvm(#[from] KvmError),
    /// Loading the guest.
    #[error("boot")]
    Boot(#[from] BootError),
    /// Loading a micro-guest.
    #[error("boot")]
    Payload(#[from] PayloadError),
    /// ACPI tables.
    #[error("boot")]
    Acpi(#[from] AcpiError),
    /// CPUID.
    #[error("processor features")]
    Cpuid(#[from] CpuidError),
    /// Saving or loading state.
    #[error("machine state")]
    State(#[from] StateError),
    /// Stopping vCPUs.
    #[error("stop the guest")]
    Stop(#[from] StopError),
    /// Forking.
    #[error("fork")]
    Fork(#[from] ForkError),
    /// Descriptors.
    #[error("close inherited descriptors")]
    Close(#[source] std::io::Error),
    /// The root disk.
    #[error("root disk")]
    Disk(#[from] DiskError),
    /// A device.
    #[error("attach devices")]
    Attach(#[from] AttachError),
    /// vCPU threads.
    #[error("start vcpus")]
    Spawn(#[from] SpawnError),
    /// Control socket.
    #[error("control socket")]
    Socket(#[from] SocketError),
    /// The control loop's own descriptors.
    #[error("prepare the control loop")]
    Loop(#[source] rustix::io::Errno),
}

impl VmmError {
    /// Who must act.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::OutOfRange { .. } | Self::Generation { .. } | Self::NotAChild { .. } => ErrorKind::Caller,
            Self::Boot(_) | Self::Payload(_) | Self::Disk(_) => ErrorKind::Caller,
            Self::Role { .. } => ErrorKind::State,
            Self::Kvm(_) | Self::Cpuid(_) => ErrorKind::Unsupported,
            Self::Descriptors { .. } | Self::Socket(_) => ErrorKind::Bug,
            Self::Memory(_)
            | Self::Watchdog { .. }
            | Self::Acpi(_)
            | Self::State(_)
            | Self::Stop(_)
            | Self::Fork(_)
            | Self::Close(_)
            | Self::Attach(_)
            | Self::Spawn(_)
            | Self::Loop(_) => ErrorKind::Host,
        }
    }

    /// As it goes to the host.
    pub fn to_control(&self) -> ControlError {
        ControlError::of(self.kind(), self)
    }
}
