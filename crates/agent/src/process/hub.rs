//! Hands one process's output to everyone who listens.
//!
//! Memory is bounded by [`QUEUE_CHUNKS`] for each listener. Nobody listening: output is dropped, so that the process
//! never waits for a reader that is gone (all are, in a fork's child). One listener: it sets the pace, down to the
//! process's own pipe. Several: the slowest sets the pace for [`STALL_LIMIT`], then it is cut off, and told so.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Notify, mpsc};

use crate::reaper::Exit;

/// Chunks in flight to one listener.
const QUEUE_CHUNKS: usize = 4;
/// How long one of several listeners may hold up the others.
const STALL_LIMIT: Duration = Duration::from_secs(10);

/// Which stream a chunk came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// A terminal.
    Pty,
}

/// What a listener gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Output.
    Data(Stream, Bytes),
    /// The last item: the process has ended and all its output was sent.
    End(End),
}

/// The end of a process. Exit status and time limit are separate facts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    /// Its exit status.
    pub exit: Exit,
    /// It was killed since its time was up.
    pub timed_out: bool,
}

struct Listener {
    id: u64,
    sender: mpsc::Sender<Output>,
}

#[derive(Default)]
struct State {
    listeners: Vec<Listener>,
    next_id: u64,
    end: Option<End>,
}

/// The listeners of one process.
#[derive(Default)]
pub struct Hub {
    state: Mutex<State>,
    changed: Notify,
}

impl Hub {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new listener; it gets what is put out from now on, and the end even if that has passed. A queue that ends
    /// without [`Output::End`] was cut off.
    pub fn listen(&self) -> mpsc::Receiver<Output> {
        let (sender, receiver) = mpsc::channel(QUEUE_CHUNKS);
        let mut state = self.lock();
        match state.end {
            Some(end) => sender.try_send(Output::End(end)).expect("a new queue has room"),
            None => {
                state.next_id += 1;
                let id = state.next_id;
                state.listeners.push(Listener { id, sender });
            }
        }
        drop(state);
        self.changed.notify_waiters();
        receiver
    }

    /// The end, once it has come.
    pub fn end(&self) -> Option<End> {
        self.lock().end
    }

    /// Hands a chunk to every listener; returns when all have it or are gone.
    pub async fn put(&self, stream: Stream, chunk: Bytes) {
        let listeners: Vec<_> =
            self.lock().listeners.iter().map(|listener| (listener.id, listener.sender.clone())).collect();
        for (id, sender) in listeners {
            if !self.deliver(&sender, Output::Data(stream, chunk.clone())).await {
                self.lock().listeners.retain(|listener| listener.id != id);
                self.changed.notify_waiters();
            }
        }
    }

    /// False if the listener is gone or was too slow.
    async fn deliver(&self, sender: &mpsc::Sender<Output>, output: Output) -> bool {
        loop {
            let changed = self.changed.notified();
            let alone = self.lock().listeners.len() <= 1;
            tokio::select! {
                permit = sender.reserve() => {
                    return permit.map(|permit| permit.send(output)).is_ok();
                }
                () = changed => {}
                () = tokio::time::sleep(STALL_LIMIT), if !alone => return false,
            }
        }
    }

    /// Tells every listener of the end, now and later.
    pub fn finish(&self, end: End) {
        let mut state = self.lock();
        state.end = Some(end);
        for listener in state.listeners.drain(..) {
            tokio::spawn(async move {
                // A listener that is gone needs no end.
                let _ = listener.sender.send(Output::End(end)).await;
            });
        }
        drop(state);
        self.changed.notify_waiters();
    }

    /// Resolves at the end.
    pub async fn wait_end(&self) {
        loop {
            let changed = self.changed.notified();
            if self.end().is_some() {
                return;
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: End = End { exit: Exit::Code(0), timed_out: false };

    fn chunk(text: &'static str) -> Output {
        Output::Data(Stream::Stdout, Bytes::from_static(text.as_bytes()))
    }

    #[tokio::test(start_paused = true)]
    async fn output_without_listeners_is_dropped() {
        let hub = Hub::default();
        for _ in 0..1000 {
            hub.put(Stream::Stdout, Bytes::from_static(b"lost")).await;
        }
        let mut listener = hub.listen();
        hub.put(Stream::Stdout, Bytes::from_static(b"kept")).await;
        hub.finish(END);
        assert_eq!(listener.recv().await, Some(chunk("kept")));
        assert_eq!(listener.recv().await, Some(Output::End(END)));
        assert_eq!(listener.recv().await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lone_slow_listener_holds_the_process_back() {
        let hub = Hub::default();
        let _listener = hub.listen();
        let flood = async {
            for _ in 0..100 {
                hub.put(Stream::Stdout, Bytes::from_static(b"x")).await;
            }
        };
        assert!(tokio::time::timeout(Duration::from_secs(3600), flood).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn one_of_several_that_stalls_is_cut_off() {
        let hub = std::sync::Arc::new(Hub::default());
        let mut stalled = hub.listen();
        let mut quick = hub.listen();
        let reader = tokio::spawn(async move {
            let mut chunks = 0;
            while let Some(Output::Data(..)) = quick.recv().await {
                chunks += 1;
            }
            chunks
        });
        for _ in 0..100 {
            hub.put(Stream::Stdout, Bytes::from_static(b"x")).await;
        }
        hub.finish(END);
        assert_eq!(reader.await.unwrap(), 100);
        let mut last = None;
        while let Some(output) = stalled.recv().await {
            last = Some(output);
        }
        assert_eq!(last, Some(chunk("x")), "cut off without an end");
    }

    #[tokio::test(start_paused = true)]
    async fn a_listener_that_leaves_frees_the_process() {
        let hub = std::sync::Arc::new(Hub::default());
        let listener = hub.listen();
        let writer = tokio::spawn({
            let hub = hub.clone();
            async move {
                for _ in 0..100 {
                    hub.put(Stream::Stdout, Bytes::from_static(b"x")).await;
                }
            }
        });
        tokio::time::sleep(Duration::from_secs(60)).await;
        drop(listener);
        tokio::time::timeout(Duration::from_secs(1), writer).await.unwrap().unwrap();
    }
}
