//! The microVM: boots a guest, runs it, and forks it.
//!
//! One process is one VM. The half of it that `fork(2)` clones (memory, device models, settings) is
//! [`vmm`]'s `Machine`; the half that belongs to a process (KVM VM, threads, descriptors) is made anew in each child.
//! The process is driven over a control socket (`offshoot_protocol::control`) and does nothing of its own accord.
//!
//! It refuses to open a network connection, to start a program, or to write anywhere but to the descriptors it was
//! given. Invariants:
//! * A fork is taken only while every vCPU is parked at [`gate::Gate`] and no device work is in flight.
//! * A child keeps no descriptor of its parent's but the sealed layers, the read-only disk base and `/dev/kvm`.
//! * Whatever fails in a fork, the parent's vCPUs are let go again.
//!
//! Start with [`vmm`].

pub mod arch;
pub mod bus;
pub mod control;
pub mod devices;
pub mod gate;
pub mod kvm;
pub mod notice;
pub mod process;
pub mod vcpu;
pub mod vmm;
