//! virtio-vsock with the hybrid Unix socket convention, virtio 1.2 section 5.10.
//!
//! A host client connects to the sandbox's Unix socket and writes `CONNECT <port>\n`. Once the guest has accepted it
//! reads `OK <host port>\n`, and bytes flow; else its socket is closed. Connections from the guest are answered with a
//! reset: nothing on the host listens for a guest.
//!
//! After a fork the guest's connections are dead and its listeners live: [`Vsock`] tells the driver that the transport
//! was reset, and holds new clients back until the driver is done with that (see `events`).
//!
//! Sockets never block; a write to a client that is gone relies on `SIGPIPE` being ignored, as Rust's runtime does.

mod client;
mod connection;
mod events;
mod metrics;
mod packet;
mod queue;
mod table;

use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;

pub use metrics::VsockMetrics;

use super::{QueueIo, VirtioDevice, copy_config};
use crate::devices::{AttachError, HostResources};
use client::HostSide;
use connection::{Connection, End, Line, State};
use table::{Pair, Table};

/// Packets to the guest.
const RX_QUEUE: usize = 0;
/// Packets from the guest.
const TX_QUEUE: usize = 1;
/// Events.
const EVENT_QUEUE: usize = 2;
const QUEUE_SIZES: &[u16] = &[128, 128, 16];

/// A client's request line must come within this time.
const LINE_WAIT: Duration = Duration::from_secs(5);
/// The guest must be past a transport reset within this time of the first client held back for it.
const RESET_WAIT: Duration = Duration::from_secs(30);
/// The guest must accept or refuse within this time.
const ANSWER_WAIT: Duration = Duration::from_secs(30);
/// One side may be slow to take the other's last bytes for this long.
const LINGER: Duration = Duration::from_secs(60);
/// Clients accepted in one go, so that a flood of them does not keep the device from its guest.
const ACCEPT_BATCH: usize = 64;

/// The vsock device.
pub struct Vsock {
    guest_cid: u64,
    table: Table,
    /// Connections in [`State::Held`].
    held: Vec<u32>,
    resets: events::Resets,
    host: Option<HostSide>,
    metrics: VsockMetrics,
}

impl Vsock {
    /// A device for a guest with context id `guest_cid`.
    pub fn new(guest_cid: u64) -> Self {
        Self {
            guest_cid,
            table: Table::default(),
            held: Vec::new(),
            resets: events::Resets::default(),
            host: None,
            metrics: VsockMetrics::default(),
        }
    }

    /// Connections that the guest has accepted and that have not ended.
    pub fn connection_count(&self) -> usize {
        self.table.iter().filter(|(_, connection)| connection.state == State::Open).count()
    }

    /// Counters since boot.
    pub fn metrics(&self) -> VsockMetrics {
        self.metrics
    }

    fn accept(&mut self, io: &mut QueueIo<'_>) {
        for _ in 0..ACCEPT_BATCH {
            let Some(host) = &mut self.host else { return };
            let Some(socket) = host.accept() else { return };
            if !io.is_active() || !self.table.has_room() {
                self.metrics.refused += 1;
                continue;
            }
            let deadline = Instant::now() + LINE_WAIT;
            host.wake_at(deadline);
            let port = self.table.insert(Connection::new(socket, deadline));
            let connection = self.table.find(port).expect("inserted just now");
            if host.watch(&connection.socket, port).is_err() {
                self.table.remove(port);
                self.metrics.refused += 1;
                continue;
            }
            // Most clients have written their line by now.
            self.read_line(port);
        }
    }

    fn read_line(&mut self, port: u32) {
        let Some(connection) = self.table.find(port) else {
            return;
        };
        match connection.read_line() {
            Line::Incomplete => {}
            Line::Invalid => self.conclude(port, Err(End::Quiet)),
            Line::Connect(guest_port) => {
                connection.guest_port = guest_port;
                connection.state = State::Held;
                self.held.push(port);
                self.set_deadline(port, RESET_WAIT);
            }
        }
    }

    fn set_deadline(&mut self, port: u32, wait: Duration) {
        let deadline = Instant::now() + wait;
        if let (Some(connection), Some(host)) = (self.table.find(port), &mut self.host) {
            connection.deadline = Some(deadline);
            host.wake_at(deadline);
        }
    }

    /// Asks the guest for the connections that were held back, if it is past its transport resets.
    fn release_held(&mut self, io: &mut QueueIo<'_>) {
        if self.held.is_empty() || !self.resets.are_handled(io) {
            return;
        }
        for port in std::mem::take(&mut self.held) {
            if let Some(connection) = self.table.find(port) {
                connection.state = State::Requesting;
                self.set_deadline(port, ANSWER_WAIT);
                self.table.queue(port);
            }
        }
    }

    fn client_ready(&mut self, port: u32, events: EventFlags) {
        let Some(connection) = self.table.find(port) else {
            return;
        };
        let hung_up = events.intersects(EventFlags::HUP | EventFlags::ERR);
        let outcome = match connection.state {
            State::Reading if !hung_up => return self.read_line(port),
            State::Reading | State::Held | State::Requesting if hung_up => Err(End::Quiet),
            State::Requested if hung_up => Err(End::TellGuest),
            State::Reading | State::Held | State::Requesting | State::Requested => {
                connection.socket_ready(false)
            }
            State::Open | State::Draining => connection.socket_ready(hung_up),
        };
        self.conclude(port, outcome);
    }

    /// Draws the consequences of whatever happened to a connection: ends it, or gives it a turn to send.
    fn conclude(&mut self, port: u32, outcome: Result<(), End>) {
        let Some(connection) = self.table.find(port) else {
            return;
        };
        let Err(end) = outcome.and_then(|()| connection.settle()) else {
            let lingers = connection.host_is_gone() || connection.state == State::Draining;
            if lingers && connection.deadline.is_none() {
                self.set_deadline(port, LINGER);
            }
            return self.table.queue(port);
        };
        let pair = Pair { host: port, guest: connection.guest_port };
        if !matches!(connection.state, State::Open | State::Draining) {
            self.metrics.refused += 1;
        }
        if end != End::Quiet {
            self.table.reset(pair);
        }
        self.metrics.violations += u64::from(end == End::Violation);
        self.drop_connection(port);
    }

    fn drop_connection(&mut self, port: u32) {
        if let (Some(connection), Some(host)) = (self.table.remove(port), &self.host) {
            host.unwatch(&connection.socket);
        }
        self.held.retain(|held| *held != port);
    }

    fn expire(&mut self) {
        let now = Instant::now();
        if let Some(host) = &mut self.host {
            host.timer_ran(now);
        }
        let due = |connection: &Connection| connection.deadline.is_some_and(|deadline| deadline <= now);
        let expired: Vec<_> = self.table.iter().filter(|(_, connection)| due(connection)).collect();
        let expired: Vec<_> = expired.iter().map(|(port, connection)| (*port, connection.state)).collect();
        for (port, state) in expired {
            match state {
                State::Held => {
                    self.metrics.resets_unhandled += 1;
                    self.resets.give_up();
                    self.set_deadline(port, ANSWER_WAIT);
                }
                State::Requested | State::Open => self.conclude(port, Err(End::TellGuest)),
                State::Reading | State::Requesting | State::Draining => self.conclude(port, Err(End::Quiet)),
            }
        }
        let next = self.table.iter().filter_map(|(_, connection)| connection.deadline).min();
        if let (Some(next), Some(host)) = (next, &mut self.host) {
            host.wake_at(next);
        }
    }

    /// Moves every deadline that is set to `deadline`.
    #[cfg(test)]
    fn make_due(&mut self, deadline: Instant) {
        let ports: Vec<_> = self.table.iter().map(|(port, _)| port).collect();
        for port in ports {
            let connection = self.table.find(port).expect("listed just now");
            connection.deadline = connection.deadline.and(Some(deadline));
        }
    }

    /// What every call ends with.
    fn go_on(&mut self, io: &mut QueueIo<'_>) {
        self.resets.deliver(io);
        self.release_held(io);
        self.send_packets(io);
    }
}

impl VirtioDevice for Vsock {
    fn name(&self) -> &'static str {
        "vsock"
    }

    fn device_id(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &'static [u16] {
        QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        copy_config(&self.guest_cid.to_le_bytes(), offset, data);
    }

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    fn activate(&mut self, _features: u64) {}

    fn reset(&mut self) {
        for connection in self.table.take_all() {
            if let Some(host) = &self.host {
                host.unwatch(&connection.socket);
            }
        }
        self.held.clear();
        self.resets = events::Resets::default();
    }

    fn notify(&mut self, queue: usize, io: &mut QueueIo<'_>) {
        if queue == TX_QUEUE {
            self.take_packets(io);
        }
        self.go_on(io);
    }

    fn ready(&mut self, token: u32, events: EventFlags, io: &mut QueueIo<'_>) {
        match token {
            client::LISTENER => self.accept(io),
            client::TIMER => self.expire(),
            port => self.client_ready(port, events),
        }
        self.go_on(io);
    }

    /// Closes this process's copies of all sockets. Nothing is shut down and nothing taken off the epoll instance:
    /// both would reach the parent, whose sockets and epoll instance these are.
    fn detach(&mut self) {
        self.host = None;
        drop(self.table.take_all());
        self.held = Vec::new();
    }

    fn attach(&mut self, host: &mut HostResources<'_>, io: &mut QueueIo<'_>) -> Result<(), AttachError> {
        let missing = AttachError::Missing { device: "vsock", what: "listening socket" };
        let listener = host.descriptors.vsock_listener.take().ok_or(missing)?;
        let side = HostSide::new(host.poll.clone(), listener);
        self.host = Some(side.map_err(|(action, source)| AttachError::Prepare {
            device: "vsock",
            action,
            source,
        })?);
        if io.is_active() {
            self.resets.announce();
            self.resets.deliver(io);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
