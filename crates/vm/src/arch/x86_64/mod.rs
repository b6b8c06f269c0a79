//! x86-64: address map, boot, ACPI, CPUID, vCPU state.

pub mod layout;
