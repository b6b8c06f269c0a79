//! `create` and `fork`: a line for each child, in order.

use std::time::Instant;

use bytes::Bytes;
use http::StatusCode;
use serde_json::Value;

use super::Context;
use crate::client::{self, WORK_DEADLINE};
use crate::failure::Result;
use crate::plan::ForkPlan;
use crate::progress::Progress;
use crate::text;
use crate::wire::{Outcome, Outcomes};

/// Makes sandboxes from a template.
pub async fn create(context: &Context, body: &Value) -> Result<u8> {
    let progress = Progress::steps(context.ui, "creating");
    let began = Instant::now();
    let answer = context.client.post("/sandboxes", body, WORK_DEADLINE).await?;
    drop(progress);
    print(context, "/sandboxes", answer, began)
}

/// Forks a running sandbox.
pub async fn fork(context: &Context, plan: &ForkPlan) -> Result<u8> {
    let path = format!("/sandboxes/{}/fork", plan.sandbox);
    let progress = Progress::steps(context.ui, "forking");
    let began = Instant::now();
    let answer = context.client.post(&path, &plan.body, WORK_DEADLINE).await?;
    drop(progress);
    print(context, &path, answer, began)
}

/// The exit code is the first failed child's.
fn print(context: &Context, path: &str, (status, body): (StatusCode, Bytes), began: Instant) -> Result<u8> {
    let ui = context.ui;
    let outcomes: Outcomes = match serde_json::from_slice(&body) {
        Ok(outcomes) => outcomes,
        Err(_) if !status.is_success() => return Err(client::failure_of_answer(status, &body).into()),
        Err(_) => client::parse(path, &body)?,
    };
    if ui.is_json() {
        ui.json(&client::parse::<Value>(path, &body)?)?;
    }
    let mut exit_code = 0;
    let mut running = 0;
    let mut slowest_ms: f64 = 0.0;
    for outcome in &outcomes.results {
        match outcome {
            Outcome::Ok(sandbox) => {
                running += 1;
                let replied = sandbox.stop_lines.identity_applied_ms.or(sandbox.stop_lines.agent_replied_ms);
                slowest_ms = slowest_ms.max(replied.unwrap_or_default());
                if !ui.is_json() {
                    ui.line(&sandbox.id)?;
                }
            }
            Outcome::Error(report) => {
                if exit_code == 0 {
                    exit_code = report.exit_code();
                }
                if ui.is_json() {
                    ui.report(report);
                } else {
                    ui.line(&format!("error: {}", report.message))?;
                    report.hint.iter().for_each(|hint| ui.note(&format!("hint: {hint}")));
                }
            }
        }
    }
    let mut note = format!(
        "{running} of {} running after {}",
        outcomes.results.len(),
        text::ms(began.elapsed().as_secs_f64() * 1e3)
    );
    if slowest_ms > 0.0 {
        note.push_str(&format!("; each had its identity within {}", text::ms(slowest_ms)));
    }
    if let Some(pause_ms) = outcomes.times.pause_ms {
        note.push_str(&format!("; parent paused {}", text::ms(pause_ms)));
    }
    ui.note(&note);
    Ok(exit_code)
}
