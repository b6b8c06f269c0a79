//! The control protocol between the host and one VMM process.
//!
//! Transport: `AF_UNIX` `SOCK_SEQPACKET`; each message is one JSON object of at most [`MAX_MESSAGE_BYTES`], descriptors
//! ride along with `SCM_RIGHTS` in the order each message documents. The host sends [`Request`]s, the VMM sends
//! [`Message`]s: exactly one [`Message::Reply`] for each request, in order, and [`Message::Event`]s at any time.
//!
//! A running VMM and a zygote speak the same protocol; an operation that the process's role does not allow is answered
//! with [`ErrorKind::State`].

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Upper bound of one message, bytes.
pub const MAX_MESSAGE_BYTES: usize = 64 * 1024;
/// Descriptors that accompany [`Request::Boot`] and each [`Request::Child`], in [`ChildFd`] order.
pub const CHILD_FDS: usize = 3;

/// Order of the descriptors that are made for a sandbox before its VMM needs them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChildFd {
    /// The sandbox's control socket (VMM end).
    Control = 0,
    /// Listening Unix stream socket of the hybrid vsock.
    Vsock = 1,
    /// Console log, opened read-write; the VMM bounds its length.
    Log = 2,
}

/// A numbered request.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Envelope {
    /// Echoed in the reply.
    pub seq: u64,
    /// What to do.
    pub request: Request,
}

/// What the host asks of a VMM.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Boots a guest. Descriptors: vsock listener, log ([`ChildFd::Control`] is the socket this arrives on).
    Boot(Box<BootConfig>),
    /// Stops the guest for good, moves its memory into sealed layers and leaves a zygote behind, which serves the
    /// accompanying descriptor (a control socket). The reply is [`Reply::Frozen`] with the zygote's pidfd; then this
    /// process exits. On failure before the guest's memory was touched the guest goes on running.
    Freeze,
    /// Announces `count` [`Request::Child`] messages, which follow at once, each with its own `seq` but without a reply
    /// of its own. Descriptor: a control socket for the twin (running VMM only; a zygote takes none).
    ///
    /// Running VMM: pauses, forks the twin, resumes, replies [`Reply::Forked`] with the twin's pidfd. The twin sends one
    /// [`Event::ChildForked`] or [`Event::ChildFailed`] for each child, in order, on its control socket, and exits.
    /// Zygote: sends the same events on its own control socket, then replies [`Reply::Forked`] without descriptor.
    /// Each child then speaks for itself on its own control socket, beginning with [`Event::Started`] or
    /// [`Event::Failed`].
    Fork {
        /// Number of children that follow.
        count: u32,
    },
    /// One child of the fork announced before. Descriptors: [`CHILD_FDS`], in [`ChildFd`] order.
    Child(ChildSpec),
    /// Memory, counters and role; answered by [`Reply::Status`].
    Status,
    /// Stops the vCPUs until [`Request::Resume`]; nothing is saved.
    Pause,
    /// Lets paused vCPUs go on.
    Resume,
    /// Ends the VMM; answered by [`Reply::Done`], then [`Event::Exited`].
    Stop,
}

/// What differs between the children of one fork.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChildSpec {
    /// Sandbox id; becomes the process title.
    pub id: String,
    /// New VM generation id for the VMGenID device, 32 hexadecimal digits.
    pub vm_generation: String,
}

/// Page size of guest memory; a property of the template that cannot be changed afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PageSize {
    /// 4 KiB pages, transparent huge pages off.
    Small4k,
    /// Transparent huge pages where the host has them.
    #[default]
    Thp,
}

/// How to boot a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootConfig {
    /// Sandbox id; becomes the process title.
    pub id: String,
    /// Guest memory, MiB, 128 to 12288 (a payload may have as little as 16).
    pub memory_mib: u32,
    /// Number of vCPUs, 1 to 8.
    pub vcpus: u8,
    /// Page size of guest memory.
    #[serde(default)]
    pub page_size: PageSize,
    /// What to run.
    pub source: BootSource,
    /// Root disk; absent for a micro-guest.
    #[serde(default)]
    pub disk: Option<DiskConfig>,
    /// VM generation id, 32 hexadecimal digits.
    pub vm_generation: String,
}

/// What a guest starts with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BootSource {
    /// A Linux kernel, ELF vmlinux or bzImage.
    Linux {
        /// Kernel file.
        kernel: PathBuf,
        /// Initramfs file.
        initramfs: Option<PathBuf>,
        /// Appended to the command line that the VMM builds.
        cmdline: String,
    },
    /// A micro-guest: flat code copied to a fixed address and entered in 64-bit user mode with I/O privilege.
    Payload {
        /// File with the code.
        file: PathBuf,
    },
}

/// The root disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskConfig {
    /// Raw image, opened read-only.
    pub base: PathBuf,
    /// Size of the disk the guest sees, MiB, at least the base's; 0: the base's.
    pub size_mib: u32,
    /// Bound of the private overlay held in VMM memory, MiB.
    pub overlay_limit_mib: u32,
}

/// What a VMM sends.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Message {
    /// Answer to the request with this number.
    Reply {
        /// [`Envelope::seq`].
        seq: u64,
        /// The outcome.
        result: Result<Reply, ControlError>,
    },
    /// Something that happened.
    Event(Event),
}

/// The successful outcome of a request.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// Nothing to add.
    Done,
    /// [`Request::Freeze`] succeeded. Descriptor: the zygote's pidfd.
    Frozen(FrozenInfo),
    /// [`Request::Fork`]: all children are on their way. Descriptor: the twin's pidfd, from a running VMM.
    Forked(ForkTimes),
    /// [`Request::Status`].
    Status(Box<Status>),
}

/// What freezing did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrozenInfo {
    /// The zygote's process id, for display.
    pub pid: u32,
    /// Pages stored in the layers (RAM and disk overlay), bytes; zero pages are not stored.
    pub layer_bytes: u64,
    /// Time the guest's vCPUs were stopped until the zygote was ready, nanoseconds.
    pub freeze_ns: u64,
}

/// Times of one fork, nanoseconds of `CLOCK_MONOTONIC`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkTimes {
    /// The vCPUs were asked to stop (zygote: the request was read).
    pub stop_requested_ns: u64,
    /// All vCPUs were parked and their state was read.
    pub state_saved_ns: u64,
    /// `fork(2)` had returned in the parent (zygote: for the last child).
    pub forked_ns: u64,
    /// The parent's vCPUs were released.
    pub resumed_ns: u64,
}

impl ForkTimes {
    /// How long the parent's vCPUs stood still, nanoseconds.
    pub fn pause_ns(&self) -> u64 {
        self.resumed_ns.saturating_sub(self.stop_requested_ns)
    }
}

/// What a VMM process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Waiting for [`Request::Boot`].
    Empty,
    /// Runs a guest.
    Running,
    /// Guest stopped by [`Request::Pause`].
    Paused,
    /// Never runs its guest; forks clones.
    Zygote,
}

/// Counters and role of a VMM process. Memory figures are read by the host from `/proc`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// What the process is.
    pub role: Role,
    /// KVM exits since the VM was made, all vCPUs.
    pub kvm_exits: u64,
    /// Forks taken of this VMM.
    pub forks: u64,
    /// Bytes of the disk overlay in use.
    pub overlay_bytes: u64,
    /// Bound of the disk overlay, bytes.
    pub overlay_limit_bytes: u64,
    /// Guest writes refused because the overlay was full.
    pub overlay_refused_writes: u64,
    /// Bytes of console output dropped to bound the log.
    pub log_dropped_bytes: u64,
    /// Open vsock connections.
    pub vsock_connections: u64,
    /// Guest memory, bytes.
    pub memory_bytes: u64,
}

/// Something that happened in a VMM.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// A child was forked: sent by the twin or zygote. Descriptor: the child's pidfd.
    ChildForked {
        /// Index in the fork's order.
        index: u32,
        /// The child's process id, for display.
        pid: u32,
    },
    /// A child could not be forked: sent by the twin or zygote.
    ChildFailed {
        /// Index in the fork's order.
        index: u32,
        /// Why.
        error: ControlError,
    },
    /// A child of a zygote ended: sent by the zygote, which reaps it.
    ChildExited {
        /// Its process id.
        pid: u32,
        /// Exit status, if it exited.
        exit_status: Option<i32>,
        /// Signal, if one killed it.
        signal: Option<i32>,
    },
    /// First message of a child: its KVM VM is made and its vCPUs were let go.
    Started {
        /// When the child began, nanoseconds of `CLOCK_MONOTONIC`.
        forked_ns: u64,
        /// When its vCPUs were let go.
        started_ns: u64,
    },
    /// First message of a child that could not start; it then exits.
    Failed {
        /// Why.
        error: ControlError,
    },
    /// A micro-guest wrote to [`crate::ports::DOORBELL`].
    Doorbell {
        /// vCPU that wrote.
        vcpu: u8,
        /// What it wrote.
        value: u32,
        /// When the exit was handled, nanoseconds of `CLOCK_MONOTONIC`.
        at_ns: u64,
    },
    /// The VMM is about to end.
    Exited {
        /// Why.
        reason: ExitReason,
    },
}

/// Why a VMM ended by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitReason {
    /// [`Request::Stop`], or the control socket was closed.
    Stopped,
    /// [`Request::Freeze`] succeeded; a zygote has taken over.
    Frozen,
    /// The guest powered off.
    PowerOff,
    /// The guest reset itself; a kernel panic ends so, too.
    Reset,
    /// KVM could not go on; the sandbox is lost.
    Fault(String),
}

/// Who must act on an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The request is wrong.
    #[error("caller")]
    Caller,
    /// Not possible in the present state.
    #[error("state")]
    State,
    /// Data failed a check.
    #[error("corrupt")]
    Corrupt,
    /// This host or build cannot do it.
    #[error("unsupported")]
    Unsupported,
    /// The host refused a resource.
    #[error("host")]
    Host,
    /// A fault of Offshoot.
    #[error("bug")]
    Bug,
}

/// An error that crosses a process boundary: the whole chain as text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct ControlError {
    /// Who must act.
    pub kind: ErrorKind,
    /// What was attempted and why it failed, outermost first.
    pub message: String,
}

impl ControlError {
    /// An error of `kind` with the text of `error` and all its sources, joined by `: `.
    pub fn of(kind: ErrorKind, error: &dyn std::error::Error) -> Self {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(inner) = source {
            message.push_str(": ");
            message.push_str(&inner.to_string());
            source = inner.source();
        }
        Self { kind, message }
    }
}
