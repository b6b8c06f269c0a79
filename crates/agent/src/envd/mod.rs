//! The E2B envd protocol on vsock port 49983. The daemon has authenticated the caller: no token is checked here.

use std::sync::Arc;

use http::header::CACHE_CONTROL;
use http::{HeaderValue, Method, Request, StatusCode};
use hyper::body::Incoming;

use crate::agent::{Agent, lock};
use crate::http::{Answer, error, json, status};

pub mod connect;
pub mod files;
pub mod messages;
pub mod metrics;
pub mod paths;
pub mod process_service;

/// Answers a request.
pub async fn handle(agent: Arc<Agent>, request: Request<Incoming>) -> Answer {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    match (&parts.method, path) {
        (&Method::GET, "/health") => {
            let mut answer = status(StatusCode::NO_CONTENT);
            answer.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
            answer
        }
        (&Method::GET, "/metrics") => json(StatusCode::OK, &agent.metrics.sample()),
        (&Method::GET, "/envs") => json(StatusCode::OK, &lock(&agent.globals).environment()),
        (&Method::GET | &Method::HEAD, "/files") => files::download(&agent, &parts).await,
        (&Method::POST, "/files") => files::upload(&agent, &parts, body).await,
        (&Method::POST, path) => {
            let Some((service, method)) = path.trim_start_matches('/').split_once('/') else {
                return not_found(&Method::POST, path);
            };
            let called = match service {
                "process.Process" => process_service::call(agent, method, parts.headers, body).await,
                _ => None,
            };
            called.unwrap_or_else(|| unknown_call(service, method))
        }
        (method, path) => not_found(method, path),
    }
}

fn unknown_call(service: &str, method: &str) -> Answer {
    if !service.contains('.') {
        return not_found(&Method::POST, &format!("/{service}/{method}"));
    }
    let message = format!("{service}/{method} is not served by this agent");
    connect::unary(Err::<(), _>(connect::ConnectError::new(connect::Code::Unimplemented, message)))
}

fn not_found(method: &Method, path: &str) -> Answer {
    error(StatusCode::NOT_FOUND, format!("{method} {path} is not served here"))
}
