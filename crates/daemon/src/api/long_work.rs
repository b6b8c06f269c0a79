//! Work that reports progress: one JSON object per line, flushed as it happens.

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use offshoot_host::engine::{Cancel, Progress};
use offshoot_host::{Fault, Report};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::error::log;

/// What becomes of the work when the client goes away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WhenAbandoned {
    /// It is cancelled, and what it has made is removed.
    Cancel,
    /// It goes on to its end.
    GoOn,
}

/// Cancels the work when the answer's body is dropped before its end.
struct Reader {
    lines: UnboundedReceiver<Bytes>,
    cancel: Option<Cancel>,
}

impl Drop for Reader {
    fn drop(&mut self) {
        if let Some(cancel) = &self.cancel {
            cancel.cancel();
        }
    }
}

/// Answers with the progress of `work` and its outcome.
///
/// The queue of lines has no bound of its own: it is as long as the work's messages, which are few.
pub(crate) fn answer<T, F>(
    when_abandoned: WhenAbandoned,
    work: impl FnOnce(&Cancel, &mut dyn FnMut(Progress)) -> Result<T, F> + Send + 'static,
) -> Response
where
    T: Serialize,
    F: Fault + Send + 'static,
{
    let (sender, lines) = unbounded_channel();
    let cancel = Cancel::default();
    let of_reader = (when_abandoned == WhenAbandoned::Cancel).then(|| cancel.clone());
    tokio::task::spawn_blocking(move || {
        let mut on_progress = |progress: Progress| send(&sender, &progress_line(progress));
        let outcome = match work(&cancel, &mut on_progress) {
            Ok(value) => json!({ "type": "result", "value": value }),
            Err(fault) => {
                let report = Report::of(&fault);
                log(&report);
                json!({ "type": "error", "error": report })
            }
        };
        send(&sender, &outcome);
    });
    let reader = Reader { lines, cancel: of_reader };
    let stream = futures_util::stream::unfold(reader, |mut reader| async move {
        let line = reader.lines.recv().await?;
        Some((Ok::<Bytes, Infallible>(line), reader))
    });
    let headers = [(CONTENT_TYPE, "application/x-ndjson"), (CACHE_CONTROL, "no-store")];
    (headers, Body::from_stream(stream)).into_response()
}

fn progress_line(progress: Progress) -> Value {
    let mut line = json!({ "type": "progress", "step": progress.step, "message": progress.message });
    if let Some((done, total)) = progress.done_of {
        line["done"] = done.into();
        line["total"] = total.into();
    }
    line
}

fn send(sender: &UnboundedSender<Bytes>, line: &Value) {
    // A client that has gone away hears nothing further.
    let _ = sender.send(Bytes::from(format!("{line}\n")));
}
