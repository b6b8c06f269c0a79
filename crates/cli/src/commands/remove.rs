//! `rm` of sandboxes, images and templates.

use http::Method;
use serde_json::json;

use super::Context;
use crate::client::WORK_DEADLINE;
use crate::failure::{Failure, Result};
use crate::plan::{RemoveThing, Targets, Things};
use crate::wire::Sandboxes;

/// Removes an image or template.
pub async fn thing(context: &Context, things: Things, thing: &RemoveThing) -> Result<u8> {
    let query = if thing.force { "?force=true" } else { "" };
    let path = format!("/{}/{}{query}", things.path(), thing.name);
    context.client.fetch(Method::DELETE, &path, WORK_DEADLINE).await?;
    if context.ui.is_json() {
        context.ui.json(&json!({"removed": thing.name}))?;
    } else {
        context.ui.line(&thing.name)?;
    }
    Ok(0)
}

/// Ends sandboxes one after the other; one that fails does not keep the rest alive.
pub async fn sandboxes(context: &Context, targets: Targets) -> Result<u8> {
    let ids = match targets {
        Targets::These(ids) => ids,
        Targets::All => {
            let answer: Sandboxes = context.client.get("/sandboxes").await?;
            answer.sandboxes.into_iter().map(|sandbox| sandbox.id).collect()
        }
    };
    let mut exit_code = 0;
    let mut results = Vec::new();
    for id in &ids {
        match context.client.fetch(Method::DELETE, &format!("/sandboxes/{id}"), WORK_DEADLINE).await {
            Ok(_) if context.ui.is_json() => results.push(json!({"ok": {"id": id}})),
            Ok(_) => context.ui.line(id)?,
            Err(Failure::Report(report)) => {
                if exit_code == 0 {
                    exit_code = report.exit_code();
                }
                results.push(json!({"error": *report}));
                context.ui.report(&report);
                if report.kind == crate::failure::Kind::Unreachable {
                    break;
                }
            }
            Err(failure) => return Err(failure),
        }
    }
    if context.ui.is_json() {
        context.ui.json(&json!({"results": results}))?;
    }
    Ok(exit_code)
}
