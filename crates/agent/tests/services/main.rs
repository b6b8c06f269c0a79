//! The agent's services over Unix sockets, as a client sees them.

mod files;
mod host_only;
mod interpreter;
mod processes;
mod support;
