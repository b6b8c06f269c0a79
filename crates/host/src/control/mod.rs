//! Control sockets of VMM processes and the thread that watches them.
//!
//! Requests are sent by whoever makes them; everything that arrives (replies, events, ends of processes) is read by the
//! one thread of a [`Supervisor`]. Sender and reader are never the same thread, so a full socket in one direction
//! cannot keep the other from draining.

mod conn;
mod end;
mod events;
mod socket;
mod supervisor;
mod watcher;

pub use conn::Started;
pub(crate) use conn::{Answer, Conn, ForkState};
pub use end::End;
pub use events::{EventSink, Events, Ignore, Notice, VmmRef, event_queue};
pub use socket::ChannelError;
pub(crate) use socket::pair;
pub use supervisor::Supervisor;
pub(crate) use supervisor::is_alive;
