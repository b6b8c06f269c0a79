//! `image build`, `image add`, `template build`: long work that tells its progress.

use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use super::Context;
use crate::client::{self, LOOKUP_DEADLINE, Reader};
use crate::failure::{Failure, Kind, Report, Result};
use crate::progress::Progress;
use crate::text;
use crate::wire::{NewTemplate, Work};

/// Longest that an image's build may say nothing: an installation of large packages.
const IMAGE_SILENCE: Duration = Duration::from_secs(3600);
/// Longest that freezing, beyond boot and warm-up, may say nothing.
const FREEZE_SILENCE: Duration = Duration::from_secs(300);

/// Makes an image.
pub async fn image(context: &Context, body: &Value) -> Result<u8> {
    let name = body["name"].as_str().unwrap_or_default();
    make(context, "/images", &format!("image {name}"), body, IMAGE_SILENCE).await
}

/// Makes a template.
pub async fn template(context: &Context, body: &NewTemplate) -> Result<u8> {
    let guest = Duration::from_millis(body.boot_timeout_ms.saturating_add(body.warm_timeout_ms));
    let silence = guest.saturating_add(FREEZE_SILENCE);
    make(context, "/templates", &format!("template {}", body.name), body, silence).await
}

async fn make(
    context: &Context,
    path: &str,
    what: &str,
    body: &impl Serialize,
    silence: Duration,
) -> Result<u8> {
    let ui = context.ui;
    let began = Instant::now();
    let response =
        context.client.send_ok(client::json_request(path, body), LOOKUP_DEADLINE.max(silence)).await?;
    let mut reader = Reader::new(&context.client, &format!("making {what}"), response);
    let mut progress = Progress::steps(ui, &format!("making {what}"));
    loop {
        let line = client::unless_dead(reader.line(), || context.client.check_daemon());
        let line = match tokio::time::timeout(silence, line).await {
            Ok(line) => line?,
            Err(_) => {
                let message = format!("no progress on {what} for {} s", silence.as_secs());
                return Err(Report::new(Kind::Unreachable, "no_progress", message).into());
            }
        };
        let Some(line) = line else {
            return Err(Failure::protocol(format!("the daemon's answer about {what} ends without a result")));
        };
        if ui.is_json() {
            ui.json(&client::parse::<Value>(path, &line)?)?;
        }
        match client::parse(path, &line)? {
            Work::Progress { step, message, done, total } => progress.step(&step, &message, done, total),
            Work::Unknown => {}
            Work::Error { error } => return Err(error.into()),
            Work::Result { value } => {
                drop(progress);
                let name = value["name"].as_str().unwrap_or_default();
                if !ui.is_json() {
                    ui.line(name)?;
                }
                ui.note(&format!("made {what} in {}", text::ms(began.elapsed().as_secs_f64() * 1e3)));
                return Ok(0);
            }
        }
    }
}
