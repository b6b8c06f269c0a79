//! x86-64: address map, boot, ACPI, CPUID, vCPU state.
//!
//! Start-up of a Linux guest: [`memory_map::regions`] → [`acpi::write_tables`] → [`boot::load_linux`] → for each vCPU
//! `KVM_SET_CPUID2` with [`cpuid::for_vcpu`] → [`boot::configure_bsp`] for vCPU 0, [`boot::configure_ap`] for the others.
//! Of a micro-guest: [`memory_map::regions`] → [`payload::load`] → for each vCPU CPUID, [`payload::configure_vcpu`].
//! Of a forked child: [`state::load_clock`] → [`state::load_vcpu`] for each vCPU → [`state::load_vm`].

pub mod acpi;
pub mod boot;
pub mod cpuid;
pub mod layout;
pub mod memory_map;
pub mod paging;
pub mod payload;
pub mod probe;
pub mod segments;
pub mod state;
#[cfg(test)]
mod testing;
