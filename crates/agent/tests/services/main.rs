//! The agent's services over Unix sockets, as a client sees them.

// Clippy knows test functions, but not the functions that they share.
#![allow(clippy::unwrap_used)]

mod files;
mod host_only;
mod interpreter;
mod processes;
mod support;
