//! The host-only port: identity, warm-up, shutdown. One JSON object in, one out, each on a line.
//!
//! The host sends nothing to the other ports of a clone before [`HostReply::IdentityApplied`], so the agent keeps no
//! gate of its own; should the identity fail, the host ends the sandbox.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use offshoot_protocol::identity::{HostReply, HostRequest};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};

use crate::agent::Agent;
use crate::listen::{Connection, Listener, Peer};

mod hooks;
mod identity;
mod shutdown;
mod ssh;

/// Longest request: a warm-up's source, mostly.
const MAX_REQUEST_BYTES: u64 = 16 * 1024 * 1024;

/// Serves the port, for ever.
pub async fn serve(agent: Arc<Agent>, listener: Listener) {
    loop {
        let (connection, peer) = listener.accept().await;
        if peer != Peer::Host {
            continue;
        }
        let agent = agent.clone();
        tokio::spawn(async move {
            // A host that went away asks again on a new connection.
            let _ = converse(&agent, connection).await;
        });
    }
}

async fn converse(agent: &Agent, connection: Box<dyn Connection>) -> io::Result<()> {
    let mut connection = BufReader::new(connection);
    loop {
        let mut line = Vec::new();
        (&mut connection).take(MAX_REQUEST_BYTES).read_until(b'\n', &mut line).await?;
        if line.is_empty() {
            return Ok(());
        }
        let request = if line.ends_with(b"\n") {
            serde_json::from_slice(&line).map_err(|error| format!("the request is not understood: {error}"))
        } else {
            Err(format!(
                "the request ended, or was longer than {MAX_REQUEST_BYTES} bytes, without an end of line"
            ))
        };
        let reply = match request {
            Ok(request) => answer(agent, request).await,
            Err(message) => HostReply::Failed { message },
        };
        let mut text = serde_json::to_vec(&reply).map_err(io::Error::other)?;
        text.push(b'\n');
        connection.write_all(&text).await?;
        connection.flush().await?;
        if matches!(reply, HostReply::ShuttingDown) {
            shutdown::power_off(agent).await;
            return Ok(());
        }
        if !line.ends_with(b"\n") {
            return Ok(());
        }
    }
}

async fn answer(agent: &Agent, request: HostRequest) -> HostReply {
    match request {
        HostRequest::Ping => HostReply::Pong { version: env!("CARGO_PKG_VERSION").to_owned() },
        HostRequest::Shutdown => HostReply::ShuttingDown,
        HostRequest::Identity(identity) => match identity::apply(agent, identity).await {
            Ok(applied) => HostReply::IdentityApplied {
                generation: applied.generation,
                wall_clock_ns: applied.wall_clock_ns,
                failed_hooks: applied.failed_hooks,
            },
            Err(error) => HostReply::Failed { message: chain(&error) },
        },
        HostRequest::Warm { source, file_name, timeout_ms } => {
            match agent.interpreter.warm(source, file_name, Duration::from_millis(timeout_ms)).await {
                Ok(output) => HostReply::Warmed { stdout: output.stdout, stderr: output.stderr },
                Err(error) => HostReply::Failed { message: chain(&error) },
            }
        }
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        source = inner.source();
    }
    text
}
