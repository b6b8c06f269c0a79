//! The words that Offshoot's processes say to each other.
//!
//! Only data: no I/O, no policy. [`control`] is what the daemon and a VMM process exchange over a `SOCK_SEQPACKET`
//! socket, [`identity`] what the daemon hands to the agent inside a clone, [`ports`] the fixed numbers of the guest
//! channel, [`interpreter`] the messages of the warm interpreter.

pub mod control;
pub mod identity;
pub mod interpreter;
pub mod ports;
