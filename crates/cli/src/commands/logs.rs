//! `logs`: a guest's console, once or as it grows.

use std::time::Duration;

use bytes::Bytes;
use http::Method;
use serde_json::json;

use super::Context;
use crate::client::LOOKUP_DEADLINE;
use crate::failure::{Failure, Result};
use crate::plan::LogsPlan;
use crate::ui::{GuestOutput, Stream};

const POLL: Duration = Duration::from_millis(400);
/// The most that the daemon gives: while a console log is shorter, growth shows as new bytes at its end.
const FOLLOW_BYTES: u64 = 16 << 20;

/// Prints the console; with `follow` until the sandbox ends.
pub async fn logs(context: &Context, plan: &LogsPlan) -> Result<u8> {
    let mut output = GuestOutput::new();
    if !plan.follow {
        let console = fetch(context, plan, plan.tail_bytes).await?;
        print(context, &mut output, &console).await?;
        return Ok(0);
    }
    let mut seen = fetch(context, plan, FOLLOW_BYTES).await?;
    let tail_bytes = usize::try_from(plan.tail_bytes).unwrap_or(usize::MAX);
    print(context, &mut output, &seen[seen.len().saturating_sub(tail_bytes)..]).await?;
    loop {
        tokio::time::sleep(POLL).await;
        // Asked before the log is read: what a sandbox wrote last is in the log once it counts as dead.
        let ended = ended(context, plan).await?;
        let console = match fetch(context, plan, FOLLOW_BYTES).await {
            Ok(console) => console,
            Err(Failure::Report(report)) if report.code == "sandbox_not_found" => return Ok(0),
            Err(failure) => return Err(failure),
        };
        let fresh = news(&seen, &console);
        if fresh.is_none() {
            context.ui.note("some console output is missing here: the log was cut");
        }
        print(context, &mut output, fresh.unwrap_or(&console)).await?;
        seen = console;
        if ended {
            return Ok(0);
        }
    }
}

async fn fetch(context: &Context, plan: &LogsPlan, tail_bytes: u64) -> Result<Bytes> {
    let path = format!("/sandboxes/{}/logs?tail_bytes={tail_bytes}", plan.sandbox);
    context.client.fetch(Method::GET, &path, LOOKUP_DEADLINE).await
}

async fn ended(context: &Context, plan: &LogsPlan) -> Result<bool> {
    match context.client.check_sandbox(&plan.sandbox).await {
        Ok(()) => Ok(false),
        Err(Failure::Report(report))
            if matches!(report.code.as_str(), "sandbox_dead" | "sandbox_not_found") =>
        {
            Ok(true)
        }
        Err(failure) => Err(failure),
    }
}

async fn print(context: &Context, output: &mut GuestOutput, console: &[u8]) -> Result<()> {
    if console.is_empty() {
        return Ok(());
    }
    if context.ui.is_json() {
        return output.json(&json!({"type": "console", "text": String::from_utf8_lossy(console)})).await;
    }
    output.write(Stream::Stdout, console).await
}

/// What `now` has beyond `before`, both being the end of one growing text; none where they have nothing in common.
fn news<'a>(before: &[u8], now: &'a [u8]) -> Option<&'a [u8]> {
    if let Some(fresh) = now.strip_prefix(before) {
        return Some(fresh);
    }
    // The front was cut off: find the smallest cut after which the rest of `before` is how `now` begins. A line's worth
    // of bytes must agree, lest chance decide.
    let least = before.len().min(64);
    let cuts = 1..=before.len().saturating_sub(least);
    cuts.into_iter().find_map(|cut| now.strip_prefix(&before[cut..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_growth_is_new() {
        assert_eq!(news(b"abc", b"abcdef"), Some(&b"def"[..]));
        assert_eq!(news(b"abc", b"abc"), Some(&b""[..]));
        assert_eq!(news(b"", b"abc"), Some(&b"abc"[..]));
    }

    #[test]
    fn growth_is_found_where_the_front_was_cut() {
        let text: Vec<u8> = (0..200u8).collect();
        assert_eq!(news(&text[..150], &text[50..]), Some(&text[150..]));
        assert_eq!(news(&text[..100], &text[90..]), None, "ten bytes may agree by chance");
        assert_eq!(news(&text[..100], &text[100..]), None);
    }
}
