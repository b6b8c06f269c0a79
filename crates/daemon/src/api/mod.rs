//! The HTTP API, as `docs/api.md` states it.

mod error;
mod images;
mod long_work;
mod proxy;
mod sandboxes;
mod strict;
mod templates;

use std::sync::Arc;

use axum::extract::State;
use axum::routing::{any, get, post};
use axum::{Json, Router};
use offshoot_host::{Fault, Host, Report};
use serde_json::{Value, json};

use error::ApiError;

/// Longest request body that is not forwarded to a guest, bytes.
const MAX_BODY_BYTES: usize = 8 << 20;

/// The state of every handler.
pub(crate) type Shared = State<Arc<Host>>;

/// All routes.
pub(crate) fn router(host: Arc<Host>) -> Router {
    let api = Router::new()
        .route("/health", get(health))
        .route("/doctor", get(doctor))
        .route("/images", get(images::list).post(images::make))
        .route("/images/{name}", get(images::one).delete(images::remove))
        .route("/templates", get(templates::list).post(templates::build))
        .route("/templates/{name}", get(templates::one).delete(templates::remove))
        .route("/sandboxes", get(sandboxes::list).post(sandboxes::create))
        .route("/sandboxes/{id}", get(sandboxes::one).delete(sandboxes::remove))
        .route("/sandboxes/{id}/fork", post(sandboxes::fork))
        .route("/sandboxes/{id}/logs", get(sandboxes::logs))
        .route("/tree", get(sandboxes::tree));
    let forwarded = Router::new()
        .route("/sandboxes/{id}/envd", any(proxy::envd))
        .route("/sandboxes/{id}/envd/", any(proxy::envd))
        .route("/sandboxes/{id}/envd/{*path}", any(proxy::envd))
        .route("/sandboxes/{id}/interpreter", any(proxy::interpreter))
        .route("/sandboxes/{id}/interpreter/", any(proxy::interpreter))
        .route("/sandboxes/{id}/interpreter/{*path}", any(proxy::interpreter));
    Router::new()
        .nest("/offshoot/v1", api.merge(forwarded))
        .fallback(error::no_route)
        .method_not_allowed_fallback(error::no_method)
        .with_state(host)
}

async fn health() -> Json<Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION"), "pid": std::process::id() }))
}

async fn doctor(State(host): Shared) -> Result<Json<Value>, ApiError> {
    blocking(move || host.probe()).await.map(Json)
}

/// Runs a call of the host on a thread that may block.
pub(crate) async fn blocking<T, F>(
    work: impl FnOnce() -> Result<T, F> + Send + 'static,
) -> Result<T, ApiError>
where
    T: Send + 'static,
    F: Fault + Send + 'static,
{
    match tokio::task::spawn_blocking(work).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(fault)) => Err(ApiError::from(Report::of(&fault))),
        Err(panic) => Err(ApiError::bug(&panic)),
    }
}

/// As [`blocking`], for a call that cannot fail.
pub(crate) async fn blocking_ok<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.map_err(|panic| ApiError::bug(&panic))
}
