//! The microVM: KVM, boot, vCPUs, devices, fork.

pub mod arch;
pub mod devices;
