//! `/templates`.

use std::time::Duration;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use offshoot_host::engine::{Removal, TemplateInfo, TemplateSpec, WarmUp};
use offshoot_protocol::control::PageSize;
use serde::Deserialize;
use serde_json::{Value, json};

use super::error::ApiError;
use super::long_work::{WhenAbandoned, answer};
use super::strict::{Strict, StrictQuery};
use super::{Shared, blocking, blocking_ok};

/// Body of `POST /templates`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BuildTemplate {
    name: String,
    image: String,
    #[serde(default = "memory_mib")]
    memory_mib: u32,
    #[serde(default = "vcpus")]
    vcpus: u8,
    #[serde(default)]
    page_size: PageSize,
    #[serde(default = "overlay_limit_mib")]
    overlay_limit_mib: u32,
    #[serde(default)]
    cmdline: String,
    #[serde(default)]
    warm: Option<Warm>,
    #[serde(default = "warm_timeout_ms")]
    warm_timeout_ms: u64,
    #[serde(default = "boot_timeout_ms")]
    boot_timeout_ms: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Warm {
    source: String,
    #[serde(default = "file_name")]
    file_name: String,
}

fn memory_mib() -> u32 {
    512
}

fn vcpus() -> u8 {
    1
}

fn overlay_limit_mib() -> u32 {
    1024
}

fn warm_timeout_ms() -> u64 {
    120_000
}

fn boot_timeout_ms() -> u64 {
    90_000
}

fn file_name() -> String {
    "warm.py".to_owned()
}

/// Query of `DELETE /templates/{name}`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Force {
    #[serde(default)]
    force: bool,
}

pub(crate) async fn list(State(host): Shared) -> Result<Json<Value>, ApiError> {
    let templates = blocking_ok(move || host.templates()).await?;
    Ok(Json(json!({ "templates": templates })))
}

pub(crate) async fn one(
    State(host): Shared,
    Path(name): Path<String>,
) -> Result<Json<TemplateInfo>, ApiError> {
    blocking(move || host.template(&name)).await.map(Json)
}

/// Is cancelled when the client goes away: a guest that nobody waits for is not left running.
pub(crate) async fn build(State(host): Shared, Strict(request): Strict<BuildTemplate>) -> Response {
    let spec = TemplateSpec {
        name: request.name,
        image: request.image,
        memory_mib: request.memory_mib,
        vcpus: request.vcpus,
        page_size: request.page_size,
        overlay_limit_mib: request.overlay_limit_mib,
        cmdline: request.cmdline,
        warm: request.warm.map(|Warm { source, file_name }| WarmUp { source, file_name }),
        warm_timeout: Duration::from_millis(request.warm_timeout_ms),
        boot_timeout: Duration::from_millis(request.boot_timeout_ms),
    };
    answer(WhenAbandoned::Cancel, move |cancel, on_progress| host.build_template(spec, cancel, on_progress))
}

pub(crate) async fn remove(
    State(host): Shared,
    Path(name): Path<String>,
    StrictQuery(Force { force }): StrictQuery<Force>,
) -> Result<StatusCode, ApiError> {
    let removal = if force { Removal::Forced } else { Removal::IfUnused };
    blocking(move || host.remove_template(&name, removal)).await?;
    Ok(StatusCode::NO_CONTENT)
}
