//! `/images`.

use std::path::PathBuf;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use offshoot_host::engine::{ImageInfo, ImageSource};
use offshoot_image::{DebianSpec, ImportFiles};
use serde::Deserialize;
use serde_json::{Value, json};

use super::error::ApiError;
use super::long_work::{WhenAbandoned, answer};
use super::strict::Strict;
use super::{Shared, blocking};

/// Body of `POST /images`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MakeImage {
    name: String,
    source: Source,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Source {
    Debian(Debian),
    Files(Files),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Debian {
    packages: Vec<String>,
    disk_mib: u32,
}

impl Default for Debian {
    fn default() -> Self {
        let DebianSpec { packages, disk_mib } = DebianSpec::default();
        Self { packages, disk_mib }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Files {
    kernel: PathBuf,
    initramfs: PathBuf,
    rootfs: PathBuf,
}

pub(crate) async fn list(State(host): Shared) -> Result<Json<Value>, ApiError> {
    let images = blocking(move || host.images()).await?;
    Ok(Json(json!({ "images": images })))
}

pub(crate) async fn one(State(host): Shared, Path(name): Path<String>) -> Result<Json<ImageInfo>, ApiError> {
    blocking(move || host.image(&name)).await.map(Json)
}

/// Goes on when the client goes away: what is downloaded and unpacked serves the next attempt anyway.
pub(crate) async fn make(State(host): Shared, Strict(request): Strict<MakeImage>) -> Response {
    let source = match request.source {
        Source::Debian(Debian { packages, disk_mib }) => {
            ImageSource::Debian(DebianSpec { packages, disk_mib })
        }
        Source::Files(Files { kernel, initramfs, rootfs }) => {
            ImageSource::Files(ImportFiles { kernel, initramfs, rootfs })
        }
    };
    answer(WhenAbandoned::GoOn, move |_, on_progress| host.make_image(&request.name, source, on_progress))
}

pub(crate) async fn remove(State(host): Shared, Path(name): Path<String>) -> Result<StatusCode, ApiError> {
    blocking(move || host.remove_image(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}
