//! Forwards requests to a guest's services over its hybrid vsock, streamed both ways.
//!
//! One connection for each request: the guest sees the end of a client as the end of its connection. Nothing is
//! buffered and no time limit runs once the guest has accepted.

use std::path::Path as FilePath;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{OriginalUri, Path, Request, State};
use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use axum::http::uri::PathAndQuery;
use axum::http::{Uri, Version};
use axum::response::Response;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use offshoot_protocol::control::ErrorKind;
use offshoot_protocol::ports;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::error::ApiError;
use super::{Shared, blocking};

/// For the guest to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest answer to `CONNECT`, bytes.
const MAX_CONNECT_BYTES: usize = 64;
/// Segments of `/offshoot/v1/sandboxes/{id}/{service}`.
const OWN_SEGMENTS: usize = 5;
/// Headers that concern one connection alone (RFC 9110, section 7.6.1), less `Connection` itself.
const HOP_BY_HOP: [HeaderName; 7] = [
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

pub(crate) async fn envd(
    State(host): Shared,
    Path(params): Path<Vec<(String, String)>>,
    OriginalUri(uri): OriginalUri,
    request: Request,
) -> Result<Response, ApiError> {
    forward(State(host), params, &uri, request, ports::ENVD).await
}

pub(crate) async fn interpreter(
    State(host): Shared,
    Path(params): Path<Vec<(String, String)>>,
    OriginalUri(uri): OriginalUri,
    request: Request,
) -> Result<Response, ApiError> {
    forward(State(host), params, &uri, request, ports::INTERPRETER).await
}

async fn forward(
    State(host): Shared,
    params: Vec<(String, String)>,
    uri: &Uri,
    mut request: Request,
    port: u32,
) -> Result<Response, ApiError> {
    let id = params.into_iter().find(|(name, _)| name == "id").map(|(_, id)| id).unwrap_or_default();
    let of = id.clone();
    let vsock = blocking(move || host.vsock_path(&of)).await?;
    let stream = match tokio::time::timeout(CONNECT_TIMEOUT, connect(&vsock, port)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return Err(refused(&id, port, &error)),
        Err(_) => return Err(refused(&id, port, &std::io::ErrorKind::TimedOut.into())),
    };
    *request.uri_mut() = guest_uri(uri).ok_or_else(|| {
        ApiError::new(ErrorKind::Caller, "bad_path", format!("{} cannot be forwarded", uri.path()))
    })?;
    *request.version_mut() = Version::HTTP_11;
    remove_hop_by_hop(request.headers_mut());
    request.headers_mut().insert(header::HOST, HeaderValue::from_static("sandbox"));
    let closed = |error: hyper::Error| {
        let message = format!("sandbox {id} closed the connection before it answered: {error}");
        ApiError::new(ErrorKind::State, "guest_connection_closed", message)
            .hint("`offshoot logs` shows whether the guest is in trouble")
    };
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(closed)?;
    // Runs until the answer's body ends or is dropped.
    tokio::spawn(connection);
    let mut response = sender.send_request(request).await.map_err(closed)?;
    remove_hop_by_hop(response.headers_mut());
    Ok(response.map(Body::new))
}

fn refused(id: &str, port: u32, error: &std::io::Error) -> ApiError {
    let message = format!("sandbox {id} accepts no connection on port {port}: {error}");
    ApiError::new(ErrorKind::State, "guest_connection_refused", message)
        .hint("the service may not run in this image; `offshoot logs` shows the guest's console")
}

/// Connects to `port` of the guest.
async fn connect(vsock: &FilePath, port: u32) -> std::io::Result<UnixStream> {
    let mut stream = UnixStream::connect(vsock).await?;
    stream.write_all(format!("CONNECT {port}\n").as_bytes()).await?;
    let mut line = Vec::new();
    // Byte by byte: what follows the line belongs to the service.
    while line.last() != Some(&b'\n') {
        if line.len() > MAX_CONNECT_BYTES {
            return Err(std::io::Error::other("the answer to CONNECT has no end"));
        }
        line.push(stream.read_u8().await?);
    }
    if line.starts_with(b"OK ") { Ok(stream) } else { Err(std::io::ErrorKind::ConnectionRefused.into()) }
}

/// What stands behind `/offshoot/v1/sandboxes/{id}/{service}`, escapes and query as they came.
fn guest_uri(uri: &Uri) -> Option<Uri> {
    let path = uri.path().splitn(OWN_SEGMENTS + 2, '/').nth(OWN_SEGMENTS + 1).unwrap_or("");
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    PathAndQuery::try_from(format!("/{path}{query}")).ok().map(Uri::from)
}

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| HeaderName::from_bytes(name.trim().as_bytes()).ok())
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP).chain([&header::CONNECTION]) {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_sees_its_own_path_with_escapes_and_query() {
        let of = |text: &str| guest_uri(&text.parse().unwrap()).unwrap().to_string();
        assert_eq!(of("/offshoot/v1/sandboxes/x/envd/files?path=%2Fa%20b"), "/files?path=%2Fa%20b");
        assert_eq!(of("/offshoot/v1/sandboxes/x/envd/a/b%2Fc"), "/a/b%2Fc");
        assert_eq!(of("/offshoot/v1/sandboxes/x/envd"), "/");
        assert_eq!(of("/offshoot/v1/sandboxes/x/envd/"), "/");
    }

    #[test]
    fn headers_of_one_hop_stay_there() {
        let mut headers = HeaderMap::new();
        for (name, value) in
            [("connection", "close, x-hop"), ("x-hop", "1"), ("te", "trailers"), ("x-end", "2")]
        {
            headers.insert(name, HeaderValue::from_static(value));
        }
        remove_hop_by_hop(&mut headers);
        assert_eq!(headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["x-end"]);
    }
}
