//! The transport reset after a fork, virtio 1.2 section 5.10.6.7.
//!
//! ```text
//! quiet ──announce──▶ waiting for a buffer ──deliver──▶ delivered ──driver refilled──▶ quiet
//! ```
//!
//! The driver closes every connection when it handles the event, a new one included. That a used entry was written says
//! nothing about that; but the driver gives the buffer back only afterwards (Linux 6.1
//! `virtio_transport_event_work`: `virtio_vsock_event_handle`, then `virtio_vsock_event_fill_one`, then a notification).
//! So the guest is past the reset once its available index has moved by as many buffers as were used.

use super::EVENT_QUEUE;
use crate::devices::virtio::QueueIo;

/// `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET`, the whole event.
const TRANSPORT_RESET: [u8; 4] = 0u32.to_le_bytes();

/// Where the guest stands with its resets. Part of the model: a second fork may come before the first was handled.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Resets {
    /// A reset waits for an event buffer.
    waiting: bool,
    /// Resets delivered and not known to be handled.
    delivered: u16,
    /// The driver's available index when the first of them was delivered.
    base: u16,
}

impl Resets {
    /// The guest must learn of a reset.
    pub fn announce(&mut self) {
        self.waiting = true;
    }

    /// Puts a waiting reset into an event buffer, if there is one.
    pub fn deliver(&mut self, io: &mut QueueIo<'_>) {
        for _ in 0..io.pending(EVENT_QUEUE) {
            if !self.waiting {
                return;
            }
            let Some(index) = io.avail_index(EVENT_QUEUE) else {
                return;
            };
            let Some(chain) = io.pop(EVENT_QUEUE) else { return };
            let fits = chain.buffers.is_ok_and(|(_, mut writable)| writable.write(&TRANSPORT_RESET));
            io.push(EVENT_QUEUE, chain.head, if fits { TRANSPORT_RESET.len() as u32 } else { 0 });
            if self.delivered == 0 {
                self.base = index;
            }
            // A buffer that was too small comes back, too.
            self.delivered = self.delivered.wrapping_add(1);
            self.waiting = !fits;
        }
    }

    /// Whether the guest is past every reset: a connection made now will live.
    pub fn are_handled(&mut self, io: &mut QueueIo<'_>) -> bool {
        if self.waiting {
            return false;
        }
        if self.delivered == 0 {
            return true;
        }
        let Some(index) = io.avail_index(EVENT_QUEUE) else {
            return false;
        };
        let missing = self.base.wrapping_add(self.delivered).wrapping_sub(index) as i16;
        if missing <= 0 {
            self.delivered = 0;
        }
        self.delivered == 0
    }

    /// The guest had its time: goes on as if it had handled everything.
    pub fn give_up(&mut self) {
        *self = Self::default();
    }
}
