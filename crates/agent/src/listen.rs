//! Where the services listen: vsock in a guest, Unix sockets in a directory for tests.

use std::future::poll_fn;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixListener;
use tokio_vsock::{VMADDR_CID_ANY, VMADDR_CID_HOST, VsockAddr, VsockListener};

/// A connection.
pub trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}

impl<Stream: AsyncRead + AsyncWrite + Send + Unpin> Connection for Stream {}

/// Who connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// The host.
    Host,
    /// A process of the guest itself, through vsock loopback: it would get more rights than it has.
    Other,
}

/// Which kind of address the services have.
#[derive(Debug, Clone)]
pub enum Place {
    /// A vsock port each.
    Vsock,
    /// A socket `PORT.sock` each in this directory.
    Unix(PathBuf),
}

/// A listening socket. After a fork it lives on, though every connection is gone.
pub enum Listener {
    /// In a guest.
    Vsock(VsockListener),
    /// On a development machine.
    Unix(UnixListener),
}

/// After a failed `accept` (out of descriptors or memory).
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

impl Place {
    /// Listens on `port`.
    ///
    /// # Errors
    /// Without vsock in the kernel, or where the socket cannot be made.
    pub fn listen(&self, port: u32) -> io::Result<Listener> {
        match self {
            Self::Vsock => VsockListener::bind(VsockAddr::new(VMADDR_CID_ANY, port)).map(Listener::Vsock),
            Self::Unix(directory) => {
                let path = directory.join(format!("{port}.sock"));
                remove_stale(&path)?;
                UnixListener::bind(path).map(Listener::Unix)
            }
        }
    }
}

fn remove_stale(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl Listener {
    /// The next connection. Errors of single connections, and want of descriptors, are waited out.
    pub async fn accept(&self) -> (Box<dyn Connection>, Peer) {
        loop {
            let accepted: io::Result<(Box<dyn Connection>, Peer)> = match self {
                Self::Vsock(listener) => {
                    poll_fn(|context| listener.poll_accept(context)).await.map(|(stream, address)| {
                        let peer = if address.cid() == VMADDR_CID_HOST { Peer::Host } else { Peer::Other };
                        (Box::new(stream) as Box<dyn Connection>, peer)
                    })
                }
                Self::Unix(listener) => listener
                    .accept()
                    .await
                    .map(|(stream, _)| (Box::new(stream) as Box<dyn Connection>, Peer::Host)),
            };
            match accepted {
                Ok(accepted) => return accepted,
                Err(_) => tokio::time::sleep(ACCEPT_RETRY).await,
            }
        }
    }
}
