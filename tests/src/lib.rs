//! Tests of the whole: real VMM processes, with micro-guests wherever `/dev/kvm` opens and with Linux guests where KVM
//! can run them.
//!
//! What is here serves the tests in `tests/`: a [`micro::Rig`] drives VMM processes without a daemon.

pub mod descriptors;
pub mod linux;
pub mod micro;
pub mod need;
pub mod stack;
