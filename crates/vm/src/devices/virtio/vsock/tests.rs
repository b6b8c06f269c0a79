//! The device between a fake guest driver and real Unix sockets.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress};

use super::connection::BUFFER_BYTES;
use super::packet::{HEADER_BYTES, HOST_CID, Header, SHUTDOWN_BOTH, SHUTDOWN_SEND, TYPE_STREAM, op};
use super::*;
use crate::devices::testing::{CountingIrqs, Driver, XorShift};
use crate::devices::{Descriptors, Device};

const CID: u64 = 3;
const NOTHING: [u16; 0] = [];
const PORT: u32 = 49983;
const RX_BYTES: u32 = 44 + 4096;
const RX_BASE: u64 = Driver::<Vsock>::BUFFERS;
const RX_COUNT: u64 = 16;
const EVENT_BASE: u64 = 0x10_0000;
const TX_BASE: u64 = 0x11_0000;
const GUEST_BUFFER: u32 = 256 * 1024;
const WAIT: Duration = Duration::from_secs(10);

/// A guest whose driver is up, and the sandbox's socket.
struct Guest {
    driver: Driver<Vsock>,
    irqs: Arc<CountingIrqs>,
    folder: tempfile::TempDir,
    sockets: usize,
    rx: HashMap<u32, u64>,
    /// Credit the guest gives in each packet it sends.
    buf_alloc: u32,
    fwd_cnt: u32,
}

impl Guest {
    fn new() -> Self {
        let mut guest = Self::without_driver();
        guest.start();
        guest
    }

    fn without_driver() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut descriptors = listener(&folder, 0);
        let (driver, irqs) = Driver::with_descriptors(Vsock::new(CID), &mut descriptors);
        Self { driver, irqs, folder, sockets: 0, rx: HashMap::new(), buf_alloc: GUEST_BUFFER, fwd_cnt: 0 }
    }

    fn start(&mut self) {
        self.driver.start();
        self.rx.clear();
        for index in 0..RX_COUNT {
            self.offer_rx(RX_BASE + index * 0x2000);
        }
        for index in 0..8 {
            self.offer_event(EVENT_BASE + index * 4);
        }
        self.driver.notify(RX_QUEUE as u32);
        self.driver.notify(EVENT_QUEUE as u32);
    }

    fn offer_rx(&mut self, address: u64) {
        let head = self.driver.offer(RX_QUEUE, &[(address, RX_BYTES, true)]);
        self.rx.insert(head.into(), address);
    }

    fn offer_event(&mut self, address: u64) {
        self.driver.memory().write_obj(u32::MAX, GuestAddress(address)).unwrap();
        self.driver.offer(EVENT_QUEUE, &[(address, 4, true)]);
    }

    /// As a forked child: the same memory under another process's resources.
    fn fork(&mut self) {
        self.driver.transport().detach();
        self.sockets += 1;
        self.irqs = Arc::new(CountingIrqs::default());
        let mut descriptors = listener(&self.folder, self.sockets);
        self.driver.attach(self.irqs.clone(), &mut descriptors);
    }

    fn client(&self) -> UnixStream {
        let client = UnixStream::connect(self.folder.path().join(self.sockets.to_string())).unwrap();
        client.set_read_timeout(Some(WAIT)).unwrap();
        client
    }

    fn request(&mut self, line: &str) -> UnixStream {
        let mut client = self.client();
        client.write_all(line.as_bytes()).unwrap();
        self.poll();
        client
    }

    fn poll(&mut self) {
        while self.driver.poll_events(0) > 0 {}
    }

    /// Packets the device has sent, without giving the buffers back.
    fn peek(&mut self) -> Vec<(Header, Vec<u8>, u64)> {
        let used = self.driver.used(RX_QUEUE);
        used.into_iter()
            .map(|(head, len)| {
                let address = self.rx.remove(&head).unwrap();
                let mut raw = [0; HEADER_BYTES];
                self.driver.memory().read_slice(&mut raw, GuestAddress(address)).unwrap();
                let header = Header::decode(&raw);
                assert_eq!(len, HEADER_BYTES as u32 + header.len);
                let mut data = vec![0; header.len as usize];
                self.driver.memory().read_slice(&mut data, GuestAddress(address + 44)).unwrap();
                (header, data, address)
            })
            .collect()
    }

    /// Packets the device has sent.
    fn received(&mut self) -> Vec<(Header, Vec<u8>)> {
        let mut packets = Vec::new();
        loop {
            let some = self.peek();
            if some.is_empty() {
                return packets;
            }
            for (header, data, address) in some {
                packets.push((header, data));
                self.offer_rx(address);
            }
            self.driver.notify(RX_QUEUE as u32);
        }
    }

    fn ops(&mut self) -> Vec<u16> {
        self.received().iter().map(|(header, _)| header.op).collect()
    }

    fn header(&self, host_port: u32, op: u16) -> Header {
        Header {
            src_cid: CID,
            dst_cid: HOST_CID,
            src_port: PORT,
            dst_port: host_port,
            kind: TYPE_STREAM,
            op,
            buf_alloc: self.buf_alloc,
            fwd_cnt: self.fwd_cnt,
            ..Header::default()
        }
    }

    fn send_raw(&mut self, header: &Header, payload: &[u8]) {
        let memory = self.driver.memory().clone();
        memory.write_slice(&header.encode(), GuestAddress(TX_BASE)).unwrap();
        memory.write_slice(payload, GuestAddress(TX_BASE + 0x100)).unwrap();
        // The payload in three pieces, as large ones come.
        let third = (payload.len() / 3) as u32;
        let rest = payload.len() as u32 - 2 * third;
        let data = TX_BASE + 0x100;
        self.driver.offer(
            TX_QUEUE,
            &[
                (TX_BASE, 44, false),
                (data, third, false),
                (data + u64::from(third), third, false),
                (data + 2 * u64::from(third), rest, false),
            ],
        );
        self.driver.notify(TX_QUEUE as u32);
        assert_eq!(self.driver.used(TX_QUEUE).len(), 1);
    }

    fn send(&mut self, host_port: u32, op: u16) {
        self.send_raw(&self.header(host_port, op), &[]);
    }

    fn send_data(&mut self, host_port: u32, data: &[u8]) {
        let header = Header { len: data.len() as u32, ..self.header(host_port, op::DATA) };
        self.send_raw(&header, data);
    }

    fn shut_down(&mut self, host_port: u32, flags: u32) {
        self.send_raw(&Header { flags, ..self.header(host_port, op::SHUTDOWN) }, &[]);
    }

    /// An open connection: the client and its host port.
    fn open(&mut self) -> (UnixStream, u32) {
        let mut client = self.request(&format!("CONNECT {PORT}\n"));
        let packets = self.received();
        assert_eq!(packets.len(), 1);
        let header = packets[0].0;
        assert_eq!((header.op, header.dst_port, header.src_cid), (op::REQUEST, PORT, HOST_CID));
        self.send(header.src_port, op::RESPONSE);
        assert_eq!(line(&mut client), format!("OK {}\n", header.src_port));
        (client, header.src_port)
    }

    /// Handles one transport reset as Linux does: close connections, refill, notify.
    fn handle_reset(&mut self) {
        let used = self.driver.used(EVENT_QUEUE);
        assert_eq!(used.len(), 1, "one event");
        assert_eq!(used[0].1, 4);
        let address = EVENT_BASE + 4 * u64::from(used[0].0 % 8);
        let event: u32 = self.driver.memory().read_obj(GuestAddress(address)).unwrap();
        assert_eq!(event, 0, "transport reset");
        self.refill_events(1);
    }

    fn refill_events(&mut self, count: u64) {
        for index in 0..count {
            self.offer_event(EVENT_BASE + 0x100 + 4 * index);
        }
        self.driver.notify(EVENT_QUEUE as u32);
    }

    fn metrics(&self) -> VsockMetrics {
        self.driver.device().metrics()
    }
}

fn listener(folder: &tempfile::TempDir, number: usize) -> Descriptors {
    let listener = UnixListener::bind(folder.path().join(number.to_string())).unwrap();
    Descriptors { vsock_listener: Some(listener.into()), ..Default::default() }
}

fn line(client: &mut UnixStream) -> String {
    let mut text = String::new();
    while !text.ends_with('\n') {
        let mut byte = [0];
        client.read_exact(&mut byte).unwrap();
        text.push(byte[0].into());
    }
    text
}

/// The client sees its socket closed with nothing more to read.
fn assert_closed(client: &mut UnixStream) {
    let mut rest = Vec::new();
    match client.read_to_end(&mut rest) {
        Ok(_) => assert_eq!(rest, b""),
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
}

#[test]
fn bytes_flow_both_ways() {
    let mut guest = Guest::new();
    let (mut client, port) = guest.open();
    client.write_all(b"hello guest").unwrap();
    guest.poll();
    let packets = guest.received();
    assert_eq!(packets.len(), 1);
    assert_eq!((packets[0].0.op, &packets[0].1[..]), (op::DATA, &b"hello guest"[..]));
    assert_eq!((packets[0].0.buf_alloc, packets[0].0.dst_cid), (BUFFER_BYTES as u32, CID));
    guest.send_data(port, b"hello host\n");
    assert_eq!(line(&mut client), "hello host\n");
    assert_eq!(guest.driver.device().connection_count(), 1);
    let metrics = guest.metrics();
    assert_eq!((metrics.opened, metrics.to_guest_bytes, metrics.to_host_bytes), (1, 11, 11));
}

#[test]
fn data_right_behind_the_request_line_is_not_lost() {
    let mut guest = Guest::new();
    let mut client = guest.request(&format!("CONNECT {PORT}\nearly"));
    let port = guest.received()[0].0.src_port;
    guest.send(port, op::RESPONSE);
    assert_eq!(guest.received()[0].1, b"early");
    assert_eq!(line(&mut client), format!("OK {port}\n"));
}

#[test]
fn request_line_may_come_in_pieces() {
    let mut guest = Guest::new();
    let mut client = guest.request("CONN");
    assert_eq!(guest.ops(), NOTHING);
    client.write_all(b"ECT 7\n").unwrap();
    guest.poll();
    assert_eq!(guest.received()[0].0.dst_port, 7);
}

#[test]
fn wrong_request_lines_close_the_client() {
    let mut guest = Guest::new();
    for text in
        ["GET / HTTP/1.1\r\n", "CONNECT x\n", "\n", "CONNECT 0000000000000000000000049983\n", &"x".repeat(40)]
    {
        let mut client = guest.request(text);
        assert_closed(&mut client);
    }
    drop(guest.client());
    guest.poll();
    assert_eq!(guest.ops(), NOTHING);
    assert_eq!(guest.metrics().refused, 6);
}

#[test]
fn refusal_of_the_guest_closes_the_client() {
    let mut guest = Guest::new();
    let mut client = guest.request("CONNECT 1\n");
    let request = guest.received()[0].0;
    let answer = Header { src_port: 1, ..guest.header(request.src_port, op::RESET) };
    guest.send_raw(&answer, &[]);
    assert_closed(&mut client);
    assert_eq!(guest.ops(), NOTHING);
}

#[test]
fn client_without_a_driver_is_closed_at_once() {
    let mut guest = Guest::without_driver();
    let mut client = guest.request("CONNECT 1\n");
    assert_closed(&mut client);
    assert_eq!(guest.metrics().refused, 1);
}

#[test]
fn connections_from_the_guest_are_refused() {
    let mut guest = Guest::new();
    guest.send(1024, op::REQUEST);
    let packets = guest.received();
    assert_eq!(packets.len(), 1);
    assert_eq!((packets[0].0.op, packets[0].0.src_port, packets[0].0.dst_port), (op::RESET, 1024, PORT));
}

#[test]
fn half_close_leaves_the_other_direction_open() {
    let mut guest = Guest::new();
    let (mut client, port) = guest.open();
    client.write_all(b"last words").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    guest.poll();
    let packets = guest.received();
    assert_eq!(packets[0].1, b"last words");
    assert_eq!((packets[1].0.op, packets[1].0.flags, packets.len()), (op::SHUTDOWN, SHUTDOWN_SEND, 2));
    guest.send_data(port, b"answer\n");
    assert_eq!(line(&mut client), "answer\n");
    guest.shut_down(port, SHUTDOWN_BOTH);
    assert_eq!(guest.ops(), [op::RESET]);
    assert_closed(&mut client);
    assert_eq!(guest.driver.device().connection_count(), 0);
}

#[test]
fn guest_half_close_reaches_the_client() {
    let mut guest = Guest::new();
    let (mut client, port) = guest.open();
    guest.send_data(port, b"all");
    guest.shut_down(port, SHUTDOWN_SEND);
    let mut all = Vec::new();
    client.read_to_end(&mut all).unwrap();
    assert_eq!(all, b"all");
    client.write_all(b"still here").unwrap();
    guest.poll();
    assert_eq!(guest.received()[0].1, b"still here");
    guest.send_data(port, b"too late");
    assert_eq!(guest.ops(), [op::RESET]);
    assert_eq!(guest.metrics().violations, 1);
}

#[test]
fn client_that_goes_away_shuts_the_guest_down() {
    let mut guest = Guest::new();
    let (mut client, port) = guest.open();
    client.write_all(b"bye").unwrap();
    drop(client);
    guest.poll();
    let packets = guest.received();
    assert_eq!(packets[0].1, b"bye");
    assert_eq!((packets[1].0.op, packets[1].0.flags), (op::SHUTDOWN, SHUTDOWN_BOTH));
    guest.send(port, op::RESET);
    assert_eq!(guest.driver.device().connection_count(), 0);
    // To a client that is gone, data is answered by a reset.
    let (client, port) = guest.open();
    drop(client);
    guest.send_data(port, b"anyone?");
    assert!(guest.ops().contains(&op::RESET));
    guest.poll();
    assert_eq!(guest.driver.device().connection_count(), 0);
}

#[test]
fn client_data_waits_for_the_guests_credit() {
    let mut guest = Guest::new();
    guest.buf_alloc = 1000;
    let (mut client, port) = guest.open();
    client.write_all(&[7; 2500]).unwrap();
    guest.poll();
    let sizes =
        |packets: Vec<(Header, Vec<u8>)>| packets.iter().map(|(header, _)| header.len).collect::<Vec<_>>();
    assert_eq!(sizes(guest.received()), [1000]);
    guest.fwd_cnt = 400;
    guest.send(port, op::CREDIT_UPDATE);
    assert_eq!(sizes(guest.received()), [400]);
    guest.buf_alloc = u32::MAX;
    guest.fwd_cnt = 1400;
    guest.send(port, op::CREDIT_UPDATE);
    assert_eq!(sizes(guest.received()), [1100]);
    // Credit that cannot be true gives none.
    (guest.buf_alloc, guest.fwd_cnt) = (10, 5_000_000);
    guest.send(port, op::CREDIT_UPDATE);
    client.write_all(b"x").unwrap();
    guest.poll();
    assert_eq!(sizes(guest.received()), [0u32; 0]);
}

#[test]
fn client_data_waits_for_guest_buffers() {
    let mut guest = Guest::new();
    let (mut client, _) = guest.open();
    let sent: Vec<u8> = (0..200_000u32).map(|index| (index / 3) as u8).collect();
    let mut found = Vec::new();
    let mut written = 0;
    client.set_nonblocking(true).unwrap();
    for _ in 0..10_000 {
        if found.len() == sent.len() {
            break;
        }
        match client.write(&sent[written..]) {
            Ok(count) => written += count,
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
        }
        guest.poll();
        for (_, data, address) in guest.peek() {
            found.extend(data);
            guest.offer_rx(address);
        }
        guest.driver.notify(RX_QUEUE as u32);
    }
    assert!(found == sent);
}

#[test]
fn slow_client_bounds_the_guest_and_loses_nothing() {
    let mut guest = Guest::new();
    let (mut client, port) = guest.open();
    let (mut sent, mut found) = (Vec::<u8>::new(), Vec::<u8>::new());
    let mut acknowledged = 0u32;
    // The guest sends as long as it has credit; the client's kernel buffer and then the device's fill up.
    for round in 0..400u32 {
        let in_flight = (sent.len() as u32).wrapping_sub(acknowledged);
        if in_flight + 8192 > BUFFER_BYTES as u32 {
            break;
        }
        let data: Vec<u8> = (0..8192).map(|index| (round + index / 5) as u8).collect();
        guest.send_data(port, &data);
        sent.extend(&data);
        for (header, _) in guest.received() {
            assert_eq!(header.op, op::CREDIT_UPDATE);
            acknowledged = header.fwd_cnt;
        }
    }
    assert!(sent.len() > BUFFER_BYTES);
    assert_eq!(guest.metrics().violations, 0);
    guest.shut_down(port, SHUTDOWN_BOTH);
    assert_eq!(guest.ops(), NOTHING, "not before everything is out");
    guest.send(port, op::RESET);
    client.set_nonblocking(true).unwrap();
    let mut buffer = [0; 5000];
    for _ in 0..10_000 {
        match client.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => found.extend(&buffer[..count]),
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
        }
        guest.poll();
    }
    assert!(found == sent);
    assert_eq!(guest.ops(), NOTHING);
}

#[test]
fn guest_that_ignores_its_credit_is_cut_off() {
    let mut guest = Guest::new();
    let (client, port) = guest.open();
    let mut rounds = 0;
    while guest.metrics().violations == 0 {
        guest.send_data(port, &[1; 60_000]);
        rounds += 1;
        assert!(rounds < 100);
    }
    assert_eq!(guest.ops().last(), Some(&op::RESET));
    assert_eq!(guest.driver.device().connection_count(), 0);
    drop(client);
}

#[test]
fn credit_request_is_answered() {
    let mut guest = Guest::new();
    let (mut client, port) = guest.open();
    guest.send_data(port, b"12345\n");
    line(&mut client);
    guest.send(port, op::CREDIT_REQUEST);
    let packets = guest.received();
    assert_eq!((packets[0].0.op, packets[0].0.fwd_cnt), (op::CREDIT_UPDATE, 6));
}

/// After a fork the guest once answered new requests on connections of its parent, or had none that worked at all.
#[test]
fn fork_resets_old_connections_and_keeps_listeners() {
    let mut guest = Guest::new();
    let (mut old_client, old_port) = guest.open();
    guest.fork();
    assert_closed(&mut old_client);
    assert_eq!(guest.driver.device().connection_count(), 0);
    assert_eq!(guest.irqs.pulses(), 2, "the event, and what had been pending");

    // The guest still talks on the old connection: nobody is there.
    guest.send_data(old_port, b"parent's business");
    assert_eq!(guest.ops(), [op::RESET]);
    guest.handle_reset();
    let (mut client, port) = guest.open();
    assert_ne!(port, old_port);
    guest.send_data(port, b"child\n");
    assert_eq!(line(&mut client), "child\n");
}

/// A child that took its sockets off the epoll instance it inherited, or shut them down, would do so to its parent.
#[test]
fn detach_does_not_reach_the_parents_sockets() {
    let mut guest = Guest::new();
    let (mut client, port) = guest.open();
    guest.poll();
    // What the parent would hold.
    let poll = guest.driver.poll.clone().unwrap();
    let socket = guest.driver.transport().device_mut().table.find(port).unwrap().socket.try_clone().unwrap();
    guest.fork();
    client.write_all(b"parent").unwrap();
    let mut events = Vec::with_capacity(4);
    let wait = rustix::time::Timespec { tv_sec: 10, tv_nsec: 0 };
    let room = rustix::buffer::spare_capacity(&mut events);
    rustix::event::epoll::wait(poll.epoll_fd(), room, Some(&wait)).unwrap();
    assert_eq!(events.iter().map(|event| event.data.u64() as u32).collect::<Vec<_>>(), [port]);
    (&socket).write_all(b"still there\n").unwrap();
    assert_eq!(line(&mut client), "still there\n");
}

/// The guest closes every connection when it handles the reset; one made before that would be lost.
#[test]
fn new_clients_wait_until_the_guest_is_past_the_reset() {
    let mut guest = Guest::new();
    guest.open();
    guest.fork();
    let mut client = guest.request(&format!("CONNECT {PORT}\n"));
    assert_eq!(guest.ops(), NOTHING, "held back");
    // Neither that the guest has seen the event nor other traffic is proof that it is done with it.
    guest.driver.write(virtio_bindings::virtio_mmio::VIRTIO_MMIO_INTERRUPT_ACK, 1);
    guest.send(1, op::REQUEST);
    guest.driver.notify(EVENT_QUEUE as u32);
    assert_eq!(guest.ops(), [op::RESET], "of the guest's own request");
    guest.handle_reset();
    let request = guest.received();
    assert_eq!(request.iter().map(|(header, _)| header.op).collect::<Vec<_>>(), [op::REQUEST]);
    guest.send(request[0].0.src_port, op::RESPONSE);
    assert!(line(&mut client).starts_with("OK "));
}

#[test]
fn fork_before_the_guest_handled_the_last_reset_waits_for_both() {
    let mut guest = Guest::new();
    guest.fork();
    guest.fork();
    guest.request(&format!("CONNECT {PORT}\n"));
    assert_eq!(guest.driver.used(EVENT_QUEUE).len(), 2);
    guest.refill_events(1);
    assert_eq!(guest.ops(), NOTHING);
    guest.refill_events(1);
    assert_eq!(guest.ops(), [op::REQUEST]);
}

#[test]
fn reset_waits_for_an_event_buffer() {
    let mut guest = Guest::without_driver();
    guest.driver.start();
    guest.fork();
    assert_eq!(guest.irqs.pulses(), 0);
    for index in 0..RX_COUNT {
        guest.offer_rx(RX_BASE + index * 0x2000);
    }
    guest.request(&format!("CONNECT {PORT}\n"));
    assert_eq!(guest.ops(), NOTHING);
    guest.refill_events(8);
    assert_eq!(guest.driver.used(EVENT_QUEUE).len(), 1);
    assert_eq!(guest.ops(), NOTHING);
    guest.refill_events(1);
    assert_eq!(guest.ops(), [op::REQUEST]);
}

#[test]
fn guest_without_a_driver_needs_no_reset() {
    let mut guest = Guest::without_driver();
    guest.fork();
    guest.start();
    guest.open();
    assert_eq!(guest.driver.used(EVENT_QUEUE), vec![]);
}

#[test]
fn driver_reset_forgets_every_connection() {
    let mut guest = Guest::new();
    let (mut client, port) = guest.open();
    guest.start();
    assert_closed(&mut client);
    guest.send_data(port, b"?");
    assert_eq!(guest.ops(), [op::RESET]);
    guest.open();
}

#[test]
fn silent_clients_do_not_hold_the_table() {
    let mut guest = Guest::new();
    let mut clients: Vec<_> = (0..3).map(|_| guest.client()).collect();
    guest.poll();
    let expired = Instant::now() - Duration::from_millis(1);
    guest.driver.transport().device_mut().make_due(expired);
    guest.driver.transport().ready(client::TIMER, EventFlags::IN);
    clients.iter_mut().for_each(assert_closed);
    assert_eq!(guest.metrics().refused, 3);
}

#[test]
fn guest_that_never_answers_is_given_up() {
    let mut guest = Guest::new();
    guest.fork();
    let mut client = guest.request(&format!("CONNECT {PORT}\n"));
    let expired = Instant::now() - Duration::from_millis(1);
    guest.driver.transport().device_mut().make_due(expired);
    guest.driver.transport().ready(client::TIMER, EventFlags::IN);
    assert_eq!(guest.ops(), [op::REQUEST], "reset not handled in time: try anyway");
    assert_eq!(guest.metrics().resets_unhandled, 1);
    guest.driver.transport().device_mut().make_due(expired);
    guest.driver.transport().ready(client::TIMER, EventFlags::IN);
    assert_eq!(guest.ops(), [op::RESET]);
    assert_closed(&mut client);
}

#[test]
fn timer_fires_by_itself() {
    let mut guest = Guest::new();
    let _silent = guest.client();
    guest.poll();
    let soon = Instant::now() + Duration::from_millis(20);
    let device = guest.driver.transport().device_mut();
    device.make_due(soon);
    device.host.as_mut().unwrap().wake_at(soon);
    assert_eq!(guest.driver.poll_events(10_000), 1);
    assert_eq!(guest.metrics().refused, 1);
}

#[test]
fn table_is_bounded() {
    let mut guest = Guest::new();
    let clients: Vec<_> = (0..1100)
        .map(|_| {
            let client = guest.client();
            guest.poll();
            client
        })
        .collect();
    assert_eq!(guest.metrics().refused, 1100 - 1024);
    drop(clients);
    guest.poll();
    assert_eq!(guest.driver.device().table.iter().count(), 0);
    guest.open();
}

#[test]
fn packets_that_are_none_are_dropped_or_reset() {
    let mut guest = Guest::new();
    let (_client, port) = guest.open();
    let good = guest.header(port, op::CREDIT_UPDATE);
    for wrong in [
        Header { src_cid: 4, ..good },
        Header { dst_cid: 1, ..good },
        Header { dst_cid: CID, ..good },
        Header { src_cid: HOST_CID, ..good },
    ] {
        guest.send_raw(&wrong, &[]);
    }
    assert_eq!(guest.metrics().malformed_packets, 4);
    assert_eq!(guest.ops(), NOTHING);
    for wrong in [
        Header { src_port: PORT + 1, ..good },
        Header { dst_port: port + 1, ..good },
        Header { dst_port: client::LISTENER, ..good },
        Header { kind: 2, src_port: 9, ..good },
    ] {
        guest.send_raw(&wrong, &[]);
        assert_eq!(guest.ops(), [op::RESET]);
    }
    assert_eq!(guest.driver.device().connection_count(), 1);
    for wrong in [
        Header { op: 77, ..good },
        Header { op: op::RESPONSE, ..good },
        Header { op: op::REQUEST, ..good },
        Header { len: 10, op: op::DATA, ..good },
        Header { len: u32::MAX, op: op::DATA, ..good },
        Header { kind: 2, ..good },
    ] {
        let (mut client, port) = guest.open();
        guest.send_raw(&Header { dst_port: port, ..wrong }, &[]);
        assert_eq!(guest.ops(), [op::RESET]);
        assert_closed(&mut client);
    }
    assert_eq!(guest.metrics().violations, 6);
}

#[test]
fn answer_before_the_question_is_for_nobody() {
    let mut guest = Guest::new();
    guest.fork();
    let _client = guest.request(&format!("CONNECT {PORT}\n"));
    let port = guest.driver.device().table.iter().next().unwrap().0;
    guest.send(port, op::RESPONSE);
    assert_eq!(guest.ops(), [op::RESET]);
    guest.handle_reset();
    assert_eq!(guest.ops(), [op::REQUEST]);
}

#[test]
fn receive_buffers_without_room_are_given_back() {
    let mut guest = Guest::without_driver();
    guest.driver.start();
    for (address, len) in [(RX_BASE, 44), (RX_BASE, 10), (u64::MAX - 100, 200)] {
        guest.driver.offer(RX_QUEUE, &[(address, len, true)]);
    }
    let _client = guest.request(&format!("CONNECT {PORT}\n"));
    assert_eq!(guest.driver.used(RX_QUEUE), [(0, 0), (1, 0), (2, 0)]);
    guest.offer_rx(RX_BASE);
    guest.driver.notify(RX_QUEUE as u32);
    assert_eq!(guest.ops(), [op::REQUEST]);
}

#[test]
fn attach_without_a_listener_is_an_error() {
    let mut guest = Guest::new();
    guest.driver.transport().detach();
    let mut descriptors = Descriptors::default();
    let mut host = crate::devices::testing::host(Arc::default(), &mut descriptors);
    let attached = guest.driver.transport().attach(&mut host);
    assert!(matches!(attached, Err(AttachError::Missing { device: "vsock", .. })));
}

/// Rubbish in rings and packets, with clients coming, talking and going and forks in between.
#[test]
fn random_guests_never_break_the_device() {
    let mut guest = Guest::new();
    let mut random = XorShift::new(0x50c4);
    let mut clients: Vec<UnixStream> = Vec::new();
    for round in 0..6000 {
        match random.below(16) {
            0 => guest.driver.start(),
            1 if round % 8 == 0 => guest.fork(),
            2 => {
                let mut client = guest.client();
                client.set_nonblocking(true).unwrap();
                let _ = client.write(b"CONNECT 49983\n");
                clients.push(client);
            }
            3 => {
                if !clients.is_empty() {
                    let index = random.below(clients.len() as u64) as usize;
                    clients.swap_remove(index);
                }
            }
            4 | 5 => {
                for client in &mut clients {
                    let _ = client.write(&[round as u8; 700]);
                    let _ = client.read(&mut [0; 300]);
                }
            }
            6..=8 => {
                let ports: Vec<u32> = guest.driver.device().table.iter().map(|(port, _)| port).collect();
                let port = ports.get(random.below(8) as usize).copied().unwrap_or(random.next() as u32);
                let header = Header {
                    op: random.below(9) as u16,
                    flags: random.below(4) as u32,
                    len: [0, 0, 500, 60_000, random.next() as u32][random.below(5) as usize],
                    buf_alloc: random.next() as u32,
                    fwd_cnt: random.next() as u32,
                    ..guest.header(port, 0)
                };
                let memory = guest.driver.memory().clone();
                memory.write_slice(&header.encode(), GuestAddress(TX_BASE)).unwrap();
                guest.driver.offer(TX_QUEUE, &[(TX_BASE, 44, false), (TX_BASE + 44, 60_000, false)]);
                guest.driver.notify(TX_QUEUE as u32);
            }
            9 => {
                for index in 0..8 {
                    guest.driver.offer(RX_QUEUE, &[(RX_BASE + index * 0x2000, RX_BYTES, true)]);
                }
            }
            10 => {
                guest.driver.offer(EVENT_QUEUE, &[(EVENT_BASE, 4, true)]);
            }
            11 => guest.driver.scribble(&mut random),
            other => guest.driver.notify(other as u32 % 3),
        }
        guest.poll();
    }
    drop(clients);
    guest.start();
    guest.poll();
    guest.open();
}
