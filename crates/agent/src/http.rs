//! HTTP bodies, answers and the connection loop shared by the agent's services.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures_util::stream::{Stream, StreamExt};
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde::Serialize;
use tokio::sync::Semaphore;

use crate::listen::{Listener, Peer};

/// The body of every answer.
pub type Body = UnsyncBoxBody<Bytes, io::Error>;
/// Every answer.
pub type Answer = Response<Body>;

/// Connections of one service at the same time; more wait.
const MAX_CONNECTIONS: usize = 256;
/// Most bytes a connection buffers.
const BUFFER_BYTES: usize = 64 * 1024;

/// A body of known bytes.
pub fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

/// No body.
pub fn empty() -> Body {
    Empty::new().map_err(|never| match never {}).boxed_unsync()
}

/// A body that is sent as it comes.
pub fn streamed(chunks: impl Stream<Item = io::Result<Bytes>> + Send + 'static) -> Body {
    StreamBody::new(chunks.map(|chunk| chunk.map(Frame::data))).boxed_unsync()
}

/// An answer with only a status.
pub fn status(status: StatusCode) -> Answer {
    let mut answer = Response::new(empty());
    *answer.status_mut() = status;
    answer
}

/// An answer of JSON.
pub fn json(status: StatusCode, value: &impl Serialize) -> Answer {
    let text = serde_json::to_vec(value).expect("answers have string keys and finite numbers");
    let mut answer = Response::new(full(text));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}

/// An error as E2B's plain HTTP calls report it: `{"code":STATUS,"message":"..."}`.
pub fn error(status: StatusCode, message: impl Into<String>) -> Answer {
    json(status, &serde_json::json!({ "code": status.as_u16(), "message": message.into() }))
}

/// Why a request's body was not taken.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// Longer than the limit.
    #[error("the request is longer than {limit_bytes} bytes")]
    TooLong {
        /// The limit.
        limit_bytes: usize,
    },
    /// The client went away, or sent broken chunks.
    #[error("the request ended before it was complete")]
    Broken,
}

/// Reads the whole body of a request.
///
/// # Errors
/// Where it is longer than `limit_bytes`, or breaks off.
pub async fn collect(mut body: Incoming, limit_bytes: usize) -> Result<Bytes, BodyError> {
    let mut collected = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| BodyError::Broken)?.into_data() else {
            continue;
        };
        if collected.len() + data.len() > limit_bytes {
            return Err(BodyError::TooLong { limit_bytes });
        }
        collected.extend_from_slice(&data);
    }
    Ok(collected.freeze())
}

/// A value of the query string, decoded.
pub fn query(uri: &http::Uri, name: &str) -> Option<String> {
    form_urlencoded::parse(uri.query()?.as_bytes())
        .find(|(key, _)| key == name)
        .map(|(_, value)| value.into_owned())
}

/// Serves HTTP/1.1 on `listener`, for ever.
pub async fn serve<Handler, Answering>(listener: Listener, handler: Handler)
where
    Handler: Fn(Request<Incoming>) -> Answering + Clone + Send + 'static,
    Answering: Future<Output = Answer> + Send + 'static,
{
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let permit = permits.clone().acquire_owned().await.expect("the semaphore is never closed");
        let (stream, peer) = listener.accept().await;
        if peer == Peer::Other {
            continue;
        }
        let handler = handler.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request| {
                let answering = handler(request);
                async move { Ok::<_, Infallible>(answering.await) }
            });
            // A connection that breaks is a client that left: its body streams are dropped, nothing else.
            let _ = http1::Builder::new()
                .max_buf_size(BUFFER_BYTES)
                .serve_connection(TokioIo::new(stream), service)
                .await;
            drop(permit);
        });
    }
}
