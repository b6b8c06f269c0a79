//! `/sandboxes` and `/tree`.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use offshoot_host::Report;
use offshoot_host::engine::{CreateSpec, ForkSpec, Offspring, SandboxInfo, called_now};
use serde::Deserialize;
use serde_json::{Value, json};

use super::error::{ApiError, log, status};
use super::strict::{Strict, StrictQuery};
use super::{Shared, blocking, blocking_ok};

/// Most of a console that one answer holds, bytes.
const MAX_TAIL_BYTES: u64 = 16 << 20;

/// Body of `POST /sandboxes`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Create {
    template: String,
    #[serde(default = "one_child")]
    count: u32,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
}

/// Body of `POST /sandboxes/{id}/fork`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fork {
    #[serde(default = "one_child")]
    count: u32,
    #[serde(default)]
    env: BTreeMap<String, String>,
}

/// Query of `GET /sandboxes/{id}/logs`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tail {
    #[serde(default = "tail_bytes")]
    tail_bytes: u64,
}

fn one_child() -> u32 {
    1
}

fn tail_bytes() -> u64 {
    65_536
}

pub(crate) async fn list(State(host): Shared) -> Result<Json<Value>, ApiError> {
    let sandboxes = blocking_ok(move || host.sandboxes()).await?;
    Ok(Json(json!({ "sandboxes": sandboxes })))
}

pub(crate) async fn one(State(host): Shared, Path(id): Path<String>) -> Result<Json<SandboxInfo>, ApiError> {
    blocking(move || host.sandbox(&id)).await.map(Json)
}

/// Not cancelled when the client goes away: the sandboxes are listed.
pub(crate) async fn create(
    State(host): Shared,
    Strict(request): Strict<Create>,
) -> Result<Response, ApiError> {
    let called_ns = called_now();
    let Create { template, count, name, env } = request;
    let spec = CreateSpec { template, count, name, env };
    let offspring = blocking(move || host.create(&spec, called_ns)).await?;
    let (status, results) = outcomes(&offspring);
    Ok((status, Json(json!({ "results": results }))).into_response())
}

pub(crate) async fn fork(
    State(host): Shared,
    Path(id): Path<String>,
    Strict(request): Strict<Fork>,
) -> Result<Response, ApiError> {
    let called_ns = called_now();
    let spec = ForkSpec { parent: id, count: request.count, env: request.env };
    let offspring = blocking(move || host.fork(&spec, called_ns)).await?;
    let (status, results) = outcomes(&offspring);
    let mut body = json!({ "results": results });
    if let Some(times) = offspring.times {
        body["times"] = json!(times);
    }
    Ok((status, Json(body)).into_response())
}

/// One outcome for each child, in order; 200 if any succeeded, else the first error's status.
fn outcomes(offspring: &Offspring) -> (StatusCode, Vec<Value>) {
    let mut first_error = None;
    let outcome = |result: &Result<SandboxInfo, _>| match result {
        Ok(info) => json!({ "ok": info }),
        Err(error) => {
            let report = Report::of(error);
            log(&report);
            first_error.get_or_insert(status(&report));
            json!({ "error": report })
        }
    };
    let results = offspring.results.iter().map(outcome).collect();
    let any = offspring.results.iter().any(Result::is_ok);
    (first_error.filter(|_| !any).unwrap_or(StatusCode::OK), results)
}

pub(crate) async fn remove(State(host): Shared, Path(id): Path<String>) -> Result<StatusCode, ApiError> {
    blocking(move || host.remove_sandbox(&id)).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(crate) async fn logs(
    State(host): Shared,
    Path(id): Path<String>,
    StrictQuery(Tail { tail_bytes }): StrictQuery<Tail>,
) -> Result<Response, ApiError> {
    let console = blocking(move || host.console(&id, tail_bytes.min(MAX_TAIL_BYTES))).await?;
    Ok(([(CONTENT_TYPE, "text/plain; charset=utf-8")], console).into_response())
}

pub(crate) async fn tree(State(host): Shared) -> Result<Json<Value>, ApiError> {
    let roots = blocking_ok(move || host.tree()).await?;
    Ok(Json(json!({ "roots": roots })))
}
