//! All connections, and what waits to be sent to the guest.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};

use super::connection::Connection;

/// Host ports count up in this range and are not used again before it is used up, not even in a forked child, which
/// inherits the counter: no packet of a connection from before a fork can be taken for one of a new connection.
const FIRST_HOST_PORT: u32 = 0x4000_0000;
const LAST_HOST_PORT: u32 = 0x7fff_ffff;
/// Most connections, those that are not open yet included.
const MAX_CONNECTIONS: usize = 1024;
/// Most resets that wait for a guest buffer. The guest gets another chance with its next packet.
const MAX_RESETS: usize = 256;

/// Both ports of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    /// The host's port.
    pub host: u32,
    /// The guest's port.
    pub guest: u32,
}

/// All connections by host port, which is also their poll token.
#[derive(Default)]
pub struct Table {
    connections: BTreeMap<u32, Connection>,
    /// Connections with something for the guest, in turn.
    turns: VecDeque<u32>,
    resets: VecDeque<Pair>,
    used_ports: u32,
}

impl Table {
    /// Whether another connection may be made.
    pub fn has_room(&self) -> bool {
        self.connections.len() < MAX_CONNECTIONS
    }

    /// Adds a connection under a host port of its own.
    pub fn insert(&mut self, connection: Connection) -> u32 {
        let span = LAST_HOST_PORT - FIRST_HOST_PORT + 1;
        loop {
            let port = FIRST_HOST_PORT + self.used_ports % span;
            self.used_ports = self.used_ports.wrapping_add(1);
            if let Entry::Vacant(entry) = self.connections.entry(port) {
                entry.insert(connection);
                return port;
            }
        }
    }

    /// The connection on `host_port`.
    pub fn find(&mut self, host_port: u32) -> Option<&mut Connection> {
        self.connections.get_mut(&host_port)
    }

    /// Takes a connection out.
    pub fn remove(&mut self, host_port: u32) -> Option<Connection> {
        self.connections.remove(&host_port)
    }

    /// All connections, by host port.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Connection)> {
        self.connections.iter().map(|(port, connection)| (*port, connection))
    }

    /// Forgets everything but which host ports were used; the connections.
    pub fn take_all(&mut self) -> impl Iterator<Item = Connection> + use<> {
        self.turns = VecDeque::new();
        self.resets = VecDeque::new();
        std::mem::take(&mut self.connections).into_values()
    }

    /// Gives a connection a turn if it has something for the guest and none yet.
    pub fn queue(&mut self, host_port: u32) {
        if let Some(connection) = self.connections.get_mut(&host_port)
            && !connection.queued
            && connection.wants_to_send()
        {
            connection.queued = true;
            self.turns.push_back(host_port);
        }
    }

    /// Whether anything may wait for a guest buffer.
    pub fn has_work(&self) -> bool {
        !self.turns.is_empty() || !self.resets.is_empty()
    }

    /// The connection whose turn it is.
    pub fn next_turn(&mut self) -> Option<u32> {
        loop {
            let port = self.turns.pop_front()?;
            if let Some(connection) = self.connections.get_mut(&port) {
                connection.queued = false;
                return Some(port);
            }
        }
    }

    /// Tells the guest that `pair` is no connection.
    pub fn reset(&mut self, pair: Pair) {
        if self.resets.len() < MAX_RESETS {
            self.resets.push_back(pair);
        }
    }

    /// The next reset to send.
    pub fn next_reset(&mut self) -> Option<Pair> {
        self.resets.pop_front()
    }
}
