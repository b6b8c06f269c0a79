//! `doctor`: what this host can do. The daemon is asked; where none runs, `offshoot-vmm --probe` is.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use http::Method;
use serde::Deserialize;
use serde_json::Value;
use tokio::process::Command;

use super::Context;
use crate::client;
use crate::failure::{Failure, Kind, Report, Result};
use crate::text;

const PROBE_DEADLINE: Duration = Duration::from_secs(120);

#[derive(Default, Deserialize)]
#[serde(default)]
struct Probe {
    kvm_opens: bool,
    api_version: Option<i64>,
    error: Option<String>,
    capabilities: Vec<Capability>,
    user_mips: Option<f64>,
    kernel_mips: Option<f64>,
    kernel_instructions: Vec<Instruction>,
    runs_linux: bool,
    reason: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Capability {
    name: String,
    present: bool,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Instruction {
    name: String,
    ok: bool,
    detail: Option<String>,
}

/// Prints the report; 0 where Linux guests run, 5 where they do not.
pub async fn doctor(context: &Context) -> Result<u8> {
    let (value, daemon) = match context.client.fetch(Method::GET, "/doctor", PROBE_DEADLINE).await {
        Ok(body) => (client::parse::<Value>("/doctor", &body)?, "running"),
        Err(failure) if super::is_unreachable(&failure) => {
            (probe(failure).await?, "not running; start it with: offshoot serve")
        }
        Err(failure) => return Err(failure),
    };
    let report: Probe = serde_json::from_value(value.clone())
        .map_err(|error| Failure::protocol(format!("the probe's report is not as expected: {error}")))?;
    if context.ui.is_json() {
        context.ui.json(&value)?;
    } else {
        context.ui.line(&render(&report, daemon))?;
    }
    Ok(if report.runs_linux { 0 } else { Kind::Unsupported.exit_code() })
}

async fn probe(unreachable: Failure) -> Result<Value> {
    let Some(program) = super::find_program("offshoot-vmm") else {
        let Failure::Report(report) = unreachable else {
            return Err(unreachable);
        };
        let message =
            format!("{}; and offshoot-vmm, which could be asked instead, is not installed", report.message);
        return Err(Report { message, ..*report }.into());
    };
    run_probe(&program).await
}

async fn run_probe(program: &Path) -> Result<Value> {
    let shown = program.display();
    let failed = |message| Report::new(Kind::Bug, "probe_failed", message);
    let mut command = Command::new(program);
    command.arg("--probe").stdin(Stdio::null()).kill_on_drop(true);
    let output = match tokio::time::timeout(PROBE_DEADLINE, command.output()).await {
        Ok(output) => output.map_err(|error| Failure::local(format!("cannot run {shown}"), &error))?,
        Err(_) => {
            let message = format!("{shown} --probe did not end within {} s", PROBE_DEADLINE.as_secs());
            return Err(failed(message).into());
        }
    };
    serde_json::from_slice(&output.stdout).map_err(|error| {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let message =
            format!("{shown} --probe ended with {} and no report: {error}\n{}", output.status, stderr.trim());
        failed(message.trim_end().to_owned()).into()
    })
}

fn render(report: &Probe, daemon: &str) -> String {
    let mut lines = vec![format!("daemon: {daemon}")];
    lines.push(match (report.kvm_opens, report.api_version) {
        (true, Some(version)) => format!("/dev/kvm: opens, API version {version}"),
        (true, None) => "/dev/kvm: opens".into(),
        (false, _) => "/dev/kvm: does not open".into(),
    });
    lines.extend(report.error.iter().map(|error| format!("error: {error}")));
    let missing: Vec<&str> =
        report.capabilities.iter().filter(|one| !one.present).map(|one| one.name.as_str()).collect();
    if !report.capabilities.is_empty() {
        let present = report.capabilities.len() - missing.len();
        let gone =
            if missing.is_empty() { String::new() } else { format!("; missing: {}", missing.join(", ")) };
        lines.push(format!("capabilities: {present} of {}{gone}", report.capabilities.len()));
    }
    let speed =
        |mips: Option<f64>| mips.map_or_else(|| text::UNKNOWN.into(), |mips| format!("{mips:.1} MIPS"));
    lines.push(format!("guest user code: {}", speed(report.user_mips)));
    lines.push(format!("guest kernel code: {}", speed(report.kernel_mips)));
    for one in &report.kernel_instructions {
        let detail = one.detail.as_deref().filter(|detail| !detail.is_empty());
        let detail = detail.map(|detail| format!(" ({detail})")).unwrap_or_default();
        lines.push(format!("  {} {}{detail}", if one.ok { "ok    " } else { "FAILED" }, one.name));
    }
    let reason = report.reason.as_deref().filter(|reason| !reason.is_empty());
    let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
    lines.push(format!("runs Linux guests: {}{reason}", if report.runs_linux { "yes" } else { "no" }));
    lines.join("\n")
}
