//! `run`: Python in a sandbox's warm interpreter.

use std::time::Duration;

use offshoot_protocol::interpreter::{Event, Execute};
use serde_json::Value;

use super::Context;
use crate::client::{self, Reader};
use crate::failure::{Kind, Report, Result};
use crate::plan::RunPlan;
use crate::process;
use crate::ui::{GuestOutput, Stream};

/// Time for an interrupted interpreter to say so, beyond the code's own.
const GRACE: Duration = Duration::from_secs(30);

/// Runs the code; 1 where an exception ends it.
pub async fn run(context: &Context, plan: &RunPlan) -> Result<u8> {
    let Some(timeout) = plan.timeout else {
        return execute(context, plan).await;
    };
    match tokio::time::timeout(timeout.saturating_add(GRACE), execute(context, plan)).await {
        Ok(result) => result,
        Err(_) => {
            let limit = humantime::format_duration(timeout);
            let message = format!(
                "the code in sandbox {} ran over {limit} and did not heed its interruption",
                plan.sandbox
            );
            let hint = format!("end the sandbox with: offshoot rm {}", plan.sandbox);
            Err(Report::new(Kind::Guest, "interpreter_hangs", message).hint(hint).into())
        }
    }
}

async fn execute(context: &Context, plan: &RunPlan) -> Result<u8> {
    let body = Execute {
        code: plan.code.clone(),
        language: None,
        context_id: None,
        env_vars: None,
        timeout_ms: plan.timeout.map(|timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)),
    };
    let client = &context.client;
    let path = format!("/sandboxes/{}/interpreter/execute", plan.sandbox);
    let alive = || client.check_sandbox(&plan.sandbox);
    let request = client::json_request(&path, &body);
    // Code before ours in the same interpreter may take long: only a dead sandbox ends this wait.
    let response = client::unless_dead(client.send_ok(request, Duration::MAX), alive).await?;
    let mut reader = Reader::new(client, &format!("code in sandbox {}", plan.sandbox), response);
    let mut printer = Printer { output: GuestOutput::new(), at_line_start: true };
    let mut exit_code = 0;
    while let Some(line) = client::unless_dead(reader.line(), alive).await? {
        let value: Value = client::parse(&path, &line)?;
        if context.ui.is_json() {
            printer.output.json(&value).await?;
        }
        // A line of a type that is not known here has nothing for us.
        let Ok(event) = serde_json::from_value::<Event>(value) else {
            continue;
        };
        match &event {
            Event::Error { .. } => exit_code = Kind::Guest.exit_code(),
            Event::EndOfExecution => return Ok(exit_code),
            _ => {}
        }
        if !context.ui.is_json() {
            printer.show(&event).await?;
        }
    }
    Err(process::cut_short(client, &plan.sandbox).await)
}

struct Printer {
    output: GuestOutput,
    at_line_start: bool,
}

impl Printer {
    async fn show(&mut self, event: &Event) -> Result<()> {
        match event {
            Event::Stdout { text, .. } => {
                self.at_line_start = text.ends_with('\n') || (text.is_empty() && self.at_line_start);
                self.output.write(Stream::Stdout, text.as_bytes()).await
            }
            Event::Stderr { text, .. } => self.output.write(Stream::Stderr, text.as_bytes()).await,
            // As Python's own prompt has it, None is not worth a line.
            Event::Result { text, json: None, .. } if text == "None" => Ok(()),
            Event::Result { text, .. } => {
                let lead = if self.at_line_start { "" } else { "\n" };
                self.at_line_start = true;
                self.output.write(Stream::Stdout, format!("{lead}{text}\n").as_bytes()).await
            }
            Event::Error { name, value, traceback } => {
                let text = match traceback.trim_end() {
                    "" => format!("{name}: {value}\n"),
                    traceback => format!("{traceback}\n"),
                };
                self.output.write(Stream::Stderr, text.as_bytes()).await
            }
            Event::NumberOfExecutions { .. } | Event::Keepalive | Event::EndOfExecution => Ok(()),
        }
    }
}
