//! Runs sandboxes: their VMM processes, templates, clones, forks and lineage.
//!
//! Synchronous: every call returns when it is done, and every wait has a deadline. No HTTP, no async runtime. The one
//! thread of a [`control::Supervisor`] reads all control sockets and pidfds; a process is only ever signalled or reaped
//! through its pidfd.
//!
//! Start reading at [`engine::Host`] for what a daemon does, at [`vmm::Vmm`] for one process (benches use it directly).
//!
//! Invariants:
//! * A sandbox answers nothing before its agent has acknowledged its own identity; one that does not acknowledge ends.
//! * What fails half-way leaves neither process nor file behind, and harms no other sandbox.
//! * Descriptors made for a child are closed here as soon as they are sent; all are close-on-exec.

pub mod accounting;
pub mod agent;
pub mod clock;
pub mod control;
pub mod engine;
pub mod fault;
pub mod ids;
mod limit;
pub mod resources;
pub mod vmm;

pub use engine::{Host, HostConfig};
pub use fault::{Fault, Report};
