//! Access to a device's rings and to the buffers of one request.

use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions, VolatileSlice};

use super::GuestMap;

/// More descriptors than this in one chain are not followed, wherever its indirect table says so.
const MAX_CHAIN_DESCRIPTORS: usize = 1024;

/// Why a descriptor chain cannot be used. The ring itself is sound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ChainFault {
    /// A descriptor points outside guest memory.
    #[error("buffer at {address:#x} of {len:#x} bytes is not guest memory")]
    Address {
        /// Guest-physical address.
        address: u64,
        /// Length, bytes.
        len: u32,
    },
    /// A device-readable descriptor follows a device-writable one.
    #[error("readable descriptor after a writable one")]
    Order,
    /// The chain ends in a descriptor that cannot be read, loops, or is too long.
    #[error("descriptor chain without an end")]
    Endless,
}

/// One request: the head of a descriptor chain and its buffers.
pub struct Chain<'a> {
    /// Index to give back with [`QueueIo::push`].
    pub head: u16,
    /// Device-readable and device-writable buffers.
    pub buffers: Result<(Buffers<'a>, Buffers<'a>), ChainFault>,
}

/// A sequence of guest buffers, consumed from the front.
#[derive(Clone, Default)]
pub struct Buffers<'a> {
    slices: Vec<VolatileSlice<'a>>,
    /// First slice that is not used up.
    next: usize,
    remaining: usize,
}

impl<'a> Buffers<'a> {
    pub(super) fn append(&mut self, slice: VolatileSlice<'a>) {
        self.remaining += slice.len();
        self.slices.push(slice);
    }

    /// Bytes not consumed yet.
    pub fn remaining(&self) -> usize {
        self.remaining
    }

    /// Takes the next contiguous piece, of at most `max` bytes; none when all is consumed or `max` is 0.
    pub fn take(&mut self, max: usize) -> Option<VolatileSlice<'a>> {
        let slice = *self.slices.get(self.next)?;
        let count = slice.len().min(max);
        if count == 0 {
            return None;
        }
        self.remaining -= count;
        if count == slice.len() {
            self.next += 1;
            return Some(slice);
        }
        let (piece, rest) = slice.split_at(count).ok()?;
        self.slices[self.next] = rest;
        Some(piece)
    }

    /// Takes the first `count` bytes off the front; none, and nothing taken, when there are fewer.
    pub fn take_front(&mut self, count: usize) -> Option<Buffers<'a>> {
        let end = self.take_end(self.remaining.checked_sub(count)?)?;
        Some(std::mem::replace(self, end))
    }

    /// Takes the last `count` bytes off the end; none, and nothing taken, when there are fewer.
    pub fn take_end(&mut self, count: usize) -> Option<Buffers<'a>> {
        let front = self.remaining.checked_sub(count)?;
        let mut end = Buffers::default();
        let mut kept = Buffers::default();
        while let Some(piece) = self.take(front - kept.remaining) {
            kept.append(piece);
        }
        while let Some(piece) = self.take(count - end.remaining) {
            end.append(piece);
        }
        *self = kept;
        Some(end)
    }

    /// Copies the next `data.len()` bytes out of the guest; false, with a part consumed, when there are fewer.
    pub fn read(&mut self, mut data: &mut [u8]) -> bool {
        while !data.is_empty() {
            let Some(piece) = self.take(data.len()) else {
                return false;
            };
            let (now, later) = data.split_at_mut(piece.len());
            piece.copy_to(now);
            data = later;
        }
        true
    }

    /// Copies `data` into the guest; false, with a part written, when it does not fit.
    pub fn write(&mut self, mut data: &[u8]) -> bool {
        while !data.is_empty() {
            let Some(piece) = self.take(data.len()) else {
                return false;
            };
            let (now, later) = data.split_at(piece.len());
            piece.copy_from(now);
            data = later;
        }
        true
    }
}

/// What a device's work on its rings came to; the transport turns it into interrupts and status.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    /// Queues with new used entries, one bit each.
    used: u64,
    /// A ring broke its rules; nothing on any ring may be touched until a reset.
    pub broken: bool,
}

/// The rings of one device during one call.
pub struct QueueIo<'a> {
    memory: &'a GuestMap,
    queues: &'a mut [Queue],
    active: bool,
    outcome: Outcome,
}

impl<'a> QueueIo<'a> {
    pub(super) fn new(memory: &'a GuestMap, queues: &'a mut [Queue], active: bool) -> Self {
        Self { memory, queues, active, outcome: Outcome::default() }
    }

    /// Whether the driver runs and no ring is broken; otherwise rings are empty and nothing can be pushed.
    pub fn is_active(&self) -> bool {
        self.active && !self.outcome.broken
    }

    fn queue(&mut self, queue: usize) -> Option<&mut Queue> {
        if !self.is_active() {
            return None;
        }
        self.queues.get_mut(queue).filter(|queue| queue.ready())
    }

    /// Chains the driver has offered on `queue` and that were not popped. A device handles no more than this per call:
    /// what is added later comes with its own notification.
    pub fn pending(&mut self, queue: usize) -> u16 {
        let memory = self.memory;
        let Some(ring) = self.queue(queue) else { return 0 };
        let Ok(index) = ring.avail_idx(memory, Ordering::Acquire) else {
            self.outcome.broken = true;
            return 0;
        };
        let pending = index.0.wrapping_sub(ring.next_avail());
        if pending > ring.size() {
            self.outcome.broken = true;
            return 0;
        }
        pending
    }

    /// The driver's index into the available ring of `queue`.
    pub fn avail_index(&mut self, queue: usize) -> Option<u16> {
        let memory = self.memory;
        let ring = self.queue(queue)?;
        ring.avail_idx(memory, Ordering::Acquire).ok().map(|index| index.0)
    }

    /// Takes the next chain off `queue`.
    pub fn pop(&mut self, queue: usize) -> Option<Chain<'a>> {
        let memory = self.memory;
        let ring = self.queue(queue)?;
        let size = ring.size();
        let chain = match ring.iter(memory) {
            Ok(mut chains) => chains.next()?,
            Err(_) => {
                self.outcome.broken = true;
                return None;
            }
        };
        let head = chain.head_index();
        if head >= size {
            self.outcome.broken = true;
            return None;
        }
        Some(Chain { head, buffers: collect(memory, chain) })
    }

    /// Puts the chain popped last back on `queue`.
    pub fn undo_pop(&mut self, queue: usize) {
        if let Some(ring) = self.queue(queue) {
            ring.go_to_previous_position();
        }
    }

    /// Gives a chain back to the driver with `written` bytes in its writable buffers.
    pub fn push(&mut self, queue: usize, head: u16, written: u32) {
        let memory = self.memory;
        let Some(ring) = self.queue(queue) else { return };
        match ring.add_used(memory, head, written) {
            Ok(()) => self.outcome.used |= 1 << queue,
            Err(_) => self.outcome.broken = true,
        }
    }

    /// Whether the driver wants an interrupt for what was pushed, and whether a ring broke.
    pub(super) fn finish(self) -> (bool, bool) {
        if self.outcome.used == 0 {
            return (false, self.outcome.broken);
        }
        // The driver sets the flag, then looks at the used index; used entries must be visible before the flag is read.
        fence(Ordering::SeqCst);
        let wanted = self.queues.iter().enumerate().any(|(index, ring)| {
            let flags =
                self.memory.load::<u16>(GuestAddress(ring.avail_ring()), Ordering::Relaxed).unwrap_or(0);
            self.outcome.used & (1 << index) != 0
                && u32::from(u16::from_le(flags)) & VRING_AVAIL_F_NO_INTERRUPT == 0
        });
        (wanted, self.outcome.broken)
    }
}

/// Turns a descriptor chain into checked buffers.
fn collect<'a>(
    memory: &'a GuestMap,
    chain: virtio_queue::DescriptorChain<&'a GuestMap>,
) -> Result<(Buffers<'a>, Buffers<'a>), ChainFault> {
    let mut readable = Buffers::default();
    let mut writable = Buffers::default();
    let mut ended = false;
    for descriptor in chain.take(MAX_CHAIN_DESCRIPTORS) {
        ended = !descriptor.has_next();
        let side = if descriptor.is_write_only() { &mut writable } else { &mut readable };
        let len = descriptor.len();
        if len == 0 {
            continue;
        }
        let fault = ChainFault::Address { address: descriptor.addr().0, len };
        let slices =
            memory.get_slices(descriptor.addr(), len as usize, Permissions::ReadWrite).map_err(|_| fault)?;
        for slice in slices {
            side.append(slice.map_err(|_| fault)?);
        }
        if !descriptor.is_write_only() && writable.remaining > 0 {
            return Err(ChainFault::Order);
        }
    }
    if ended { Ok((readable, writable)) } else { Err(ChainFault::Endless) }
}
