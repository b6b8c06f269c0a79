//! Runs sandboxes: VMM processes, their templates, clones and forks.

pub mod accounting;
pub mod agent;
pub mod clock;
pub mod control;
pub mod fault;
pub mod ids;
pub mod resources;
pub mod vmm;
