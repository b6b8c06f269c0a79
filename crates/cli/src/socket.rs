//! A connection on which an answer is heard even by who is still talking.
//!
//! A server may refuse a large upload at its first bytes, answer and close. What is written after that fails, and an
//! HTTP client gives up there, though the answer (a full disk, say) already waits to be read. So a write to a closed
//! connection counts as done here, and reading decides: it gives the answer, or the end of the stream, which is the
//! failure.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

/// A connection to the daemon.
pub struct Socket {
    stream: TokioIo<UnixStream>,
}

impl Socket {
    /// A connection over `stream`.
    pub fn new(stream: UnixStream) -> Self {
        Self { stream: TokioIo::new(stream) }
    }
}

impl Read for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.stream).poll_read(cx, buf) {
            // The kernel's word for a peer that closed with our bytes unread, said once the answer is read.
            Poll::Ready(Err(error)) if is_closed(&error) => Poll::Ready(Ok(())),
            other => other,
        }
    }
}

impl Write for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match Pin::new(&mut self.stream).poll_write(cx, bytes) {
            Poll::Ready(Err(error)) if is_closed(&error) => Poll::Ready(Ok(bytes.len())),
            other => other,
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

fn is_closed(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}
