//! The fake guest: an agent and an HTTP server behind the hybrid vsock.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

use offshoot_protocol::identity::{HostReply, HostRequest};
use offshoot_protocol::ports;

pub struct Guest {
    listener: UnixListener,
    log: std::fs::File,
    connections: Vec<Connection>,
}

struct Connection {
    stream: UnixStream,
    port: Option<u32>,
    buffer: Vec<u8>,
    /// The head of a request has been answered; what follows is sent back.
    echoing: bool,
}

/// What the guest does to its VMM.
pub enum Act {
    GoOn,
    Panic,
    Abort,
    PowerOff,
}

/// What becomes of a connection.
enum Next {
    Keep,
    Close,
    Do(Act),
}

impl Guest {
    pub fn new(listener: OwnedFd, log: OwnedFd) -> Self {
        let listener = UnixListener::from(listener);
        listener.set_nonblocking(true).expect("a socket");
        Self { listener, log: log.into(), connections: Vec::new() }
    }

    pub fn say(&mut self, line: &str) {
        writeln!(self.log, "{line}").expect("the log takes a line");
    }

    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let streams = self.connections.iter().map(|connection| connection.stream.as_fd());
        std::iter::once(self.listener.as_fd()).chain(streams).collect()
    }

    /// Serves what is ready. A muted agent reads and never answers.
    pub fn serve(&mut self, muted: bool, refusing: bool) -> Act {
        while let Ok((stream, _)) = self.listener.accept() {
            stream.set_nonblocking(true).expect("a socket");
            self.connections.push(Connection { stream, port: None, buffer: Vec::new(), echoing: false });
        }
        let mut kept = Vec::new();
        for mut connection in std::mem::take(&mut self.connections) {
            match connection.serve(muted, refusing) {
                Next::Keep => kept.push(connection),
                Next::Close => {}
                Next::Do(act) => return act,
            }
        }
        self.connections = kept;
        Act::GoOn
    }
}

impl Connection {
    fn serve(&mut self, muted: bool, refusing: bool) -> Next {
        let mut block = [0; 4096];
        loop {
            match self.stream.read(&mut block) {
                Ok(0) => return Next::Close,
                Ok(read) => self.buffer.extend_from_slice(&block[..read]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(_) => return Next::Close,
            }
        }
        if self.port.is_none() {
            let Some(line) = self.line() else {
                return Next::Keep;
            };
            let port = line.strip_prefix("CONNECT ").and_then(|port| port.parse().ok());
            self.port = port;
            if port.is_none() {
                return Next::Close;
            }
            self.write(b"OK 1073741824\n");
        }
        match self.port {
            Some(ports::HOST_ONLY) if muted => Next::Keep,
            Some(ports::HOST_ONLY) => self.serve_host(refusing),
            _ => self.serve_http(),
        }
    }

    fn line(&mut self) -> Option<String> {
        let end = self.buffer.iter().position(|&byte| byte == b'\n')?;
        let line: Vec<u8> = self.buffer.drain(..=end).collect();
        Some(String::from_utf8_lossy(&line).trim_end().to_owned())
    }

    fn write(&mut self, bytes: &[u8]) {
        // Small answers fit into the socket's buffer; a peer that is gone shows at the next read.
        let _ = self.stream.write_all(bytes);
    }

    fn serve_host(&mut self, refusing: bool) -> Next {
        while let Some(line) = self.line() {
            let reply = match serde_json::from_str(&line).expect("the host sends requests") {
                HostRequest::Identity(_) if refusing => {
                    HostReply::Failed { message: "no entropy credited (fake)".into() }
                }
                HostRequest::Identity(identity) => HostReply::IdentityApplied {
                    generation: identity.generation,
                    wall_clock_ns: identity.wall_clock_ns,
                    failed_hooks: Vec::new(),
                },
                HostRequest::Shutdown => return Next::Do(Act::PowerOff),
                HostRequest::Ping => HostReply::Pong { version: "fake".into() },
                HostRequest::Warm { source, .. } => match source.get(..4) {
                    Some("rais") => HostReply::Failed { message: "ValueError: raised (fake)".into() },
                    Some("hang") => return Next::Keep,
                    Some("die(") => return Next::Do(Act::Panic),
                    _ => HostReply::Warmed { stdout: "warm\n".into(), stderr: String::new() },
                },
            };
            let mut line = serde_json::to_vec(&reply).expect("a reply is plain data");
            line.push(b'\n');
            self.write(&line);
        }
        Next::Keep
    }

    /// `/echo` answers with the bytes of the request's body as they come; `/hello` with the request's head.
    fn serve_http(&mut self) -> Next {
        if !self.echoing {
            let Some(end) = self.buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") else {
                return Next::Keep;
            };
            let head: Vec<u8> = self.buffer.drain(..end + 4).collect();
            let text = String::from_utf8_lossy(&head).into_owned();
            match text.split(' ').nth(1) {
                Some("/echo") => {
                    self.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n");
                    self.echoing = true;
                }
                Some("/panic") => return Next::Do(Act::Panic),
                Some("/abort") => return Next::Do(Act::Abort),
                Some("/close") => return Next::Close,
                _ => {
                    let length = text.len();
                    let answer = format!(
                        "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nKeep-Alive: timeout=5\r\nX-Guest: yes\r\n\r\n{text}"
                    );
                    self.write(answer.as_bytes());
                    return Next::Keep;
                }
            }
        }
        let body = std::mem::take(&mut self.buffer);
        self.write(&body);
        if body.ends_with(b"0\r\n\r\n") { Next::Close } else { Next::Keep }
    }
}
