//! `ls` and `show` of images, templates and sandboxes.

use std::time::SystemTime;

use http::Method;
use serde_json::Value;

use super::Context;
use crate::client::{self, LOOKUP_DEADLINE};
use crate::failure::Result;
use crate::plan::Things;
use crate::text::{self, Table, UNKNOWN};
use crate::wire::{Images, Sandboxes, Templates};

/// Prints a table, or the daemon's answer as it is.
pub async fn list(context: &Context, things: Things) -> Result<u8> {
    let path = format!("/{}", things.path());
    let body = context.client.fetch(Method::GET, &path, LOOKUP_DEADLINE).await?;
    if context.ui.is_json() {
        context.ui.json(&client::parse::<Value>(&path, &body)?)?;
        return Ok(0);
    }
    let now = SystemTime::now();
    let table = match things {
        Things::Images => images(&client::parse(&path, &body)?, now),
        Things::Templates => templates(&client::parse(&path, &body)?, now),
        Things::Sandboxes => sandboxes(&client::parse(&path, &body)?, now),
    };
    context.ui.line(&table.render())?;
    Ok(0)
}

/// Prints all that the daemon knows of one thing.
pub async fn show(context: &Context, things: Things, name: &str) -> Result<u8> {
    let value: Value = context.client.get(&format!("/{}/{name}", things.path())).await?;
    if context.ui.is_json() {
        context.ui.json(&value)?;
    } else {
        context.ui.line(&text::fields(&value))?;
    }
    Ok(0)
}

impl Things {
    /// Its place in the API.
    pub fn path(self) -> &'static str {
        match self {
            Self::Images => "images",
            Self::Templates => "templates",
            Self::Sandboxes => "sandboxes",
        }
    }
}

fn images(answer: &Images, now: SystemTime) -> Table {
    let mut table = Table::new(&["NAME", "KERNEL", "DISK", "AGE", "DIGEST"]);
    for image in &answer.images {
        // Enough of the digest to tell images apart; `image show` has all of it.
        let digest = image.digest.as_deref().map(|digest| digest.chars().take(19).collect::<String>());
        table.row(vec![
            image.name.clone(),
            known(image.kernel_version.clone()),
            mib(image.disk_mib),
            text::age(&image.created_at, now),
            known(digest),
        ]);
    }
    table
}

fn templates(answer: &Templates, now: SystemTime) -> Table {
    let mut table = Table::new(&["NAME", "IMAGE", "MEMORY", "VCPUS", "PAGES", "LAYERS", "CLONES", "AGE"]);
    for template in &answer.templates {
        table.row(vec![
            template.name.clone(),
            template.image.clone(),
            mib(template.memory_mib),
            known(template.vcpus.map(|vcpus| vcpus.to_string())),
            known(template.page_size.clone()),
            known(template.layer_bytes.map(text::bytes)),
            template.clones.len().to_string(),
            text::age(&template.created_at, now),
        ]);
    }
    table
}

fn sandboxes(answer: &Sandboxes, now: SystemTime) -> Table {
    let mut table =
        Table::new(&["ID", "NAME", "STATE", "TEMPLATE", "PARENT", "AGE", "PRIVATE", "SHARED", "PT"]);
    for sandbox in &answer.sandboxes {
        table.row(vec![
            sandbox.id.clone(),
            known(sandbox.name.clone()),
            sandbox.state.clone(),
            sandbox.template.clone(),
            known(sandbox.parent.clone()),
            text::age(&sandbox.created_at, now),
            text::kib(sandbox.memory.private_kib),
            text::kib(sandbox.memory.shared_kib),
            text::kib(sandbox.memory.page_table_kib),
        ]);
    }
    table
}

fn known(text: Option<String>) -> String {
    text.unwrap_or_else(|| UNKNOWN.into())
}

fn mib(count: Option<u64>) -> String {
    text::kib(count.map(|count| count.saturating_mul(1024)))
}
