//! Whether the lab is needed at all.

use std::process::{Command, Stdio};

use crate::workspace::Workspace;

/// Whether this host's own KVM can run a Linux guest, as the VMM's probe measures it. Without a built VMM: no.
pub fn host_runs_linux(workspace: &Workspace) -> bool {
    let probe = workspace.binary("offshoot-vmm");
    if !probe.exists() {
        return false;
    }
    let Ok(output) = Command::new(probe).arg("--probe").stdin(Stdio::null()).stderr(Stdio::null()).output()
    else {
        return false;
    };
    says_yes(&output.stdout)
}

fn says_yes(report: &[u8]) -> bool {
    let report: serde_json::Value = serde_json::from_slice(report).unwrap_or_default();
    report.get("runs_linux").and_then(serde_json::Value::as_bool).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::says_yes;

    #[test]
    fn only_a_clear_yes_counts() {
        assert!(says_yes(br#"{"runs_linux":true,"other":1}"#));
        for report in [&b""[..], b"{}", b"{\"runs_linux\":false}", b"{\"runs_linux\":\"true\"}", b"panic"] {
            assert!(!says_yes(report));
        }
    }
}
