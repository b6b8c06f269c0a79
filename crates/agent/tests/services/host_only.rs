//! Identity, warm-up and shutdown. On a machine that is not its own, the agent leaves kernel state alone.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::support::{Agent, one, text, within};

fn identity(generation: u64, entropy: u8) -> Value {
    json!({
        "op": "identity", "sandbox_id": format!("i{generation}"), "entropy_base64": STANDARD.encode([entropy; 64]),
        "wall_clock_ns": 1, "hostname": format!("host{generation}"), "generation": generation,
        "machine_id": format!("{generation:032x}"), "env": {"GENERATION": generation.to_string()},
    })
}

#[tokio::test]
async fn an_identity_reaches_files_processes_and_hooks() {
    let agent = Agent::start().await;
    assert_eq!(agent.host(json!({"op": "ping"})).await["reply"], "pong");
    let hooks = agent.path().join("root/etc/offshoot/on-fork.d");
    std::fs::create_dir_all(&hooks).unwrap();
    let seen = agent.path().join("seen");
    let script = |text: &str| format!("#!/bin/sh\n{text}\n");
    for (name, mode, content) in [
        (
            "10-tell",
            0o755,
            script(&format!("echo $OFFSHOOT_GENERATION $E2B_SANDBOX_ID > {}", seen.display())),
        ),
        ("20-fail", 0o755, script("echo reason >&2; exit 4")),
        ("30-not-executable", 0o644, script("exit 5")),
    ] {
        std::fs::write(hooks.join(name), content).unwrap();
        std::fs::set_permissions(hooks.join(name), std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let reply = agent.host(identity(7, 1)).await;
    assert_eq!(
        (reply["reply"].as_str(), reply["generation"].as_u64()),
        (Some("identity_applied"), Some(7)),
        "{reply}"
    );
    assert_eq!(reply["failed_hooks"], json!(["20-fail: exit status 4: reason"]));
    let read = |path: &str| std::fs::read_to_string(agent.path().join(path)).unwrap();
    assert_eq!(read("root/etc/hostname"), "host7\n");
    assert_eq!(read("root/etc/machine-id"), format!("{:032x}\n", 7));
    assert_eq!(read("run/generation"), "7\n");
    assert_eq!(read("seen"), "7 i7\n");
    let outcome = agent.shell("echo $E2B_SANDBOX_ID $GENERATION").await.outcome().await;
    assert_eq!(outcome.stdout_text(), "i7 7\n");
    let lines = agent.run_code("import os\nos.environ['E2B_SANDBOX_ID'], os.environ['GENERATION']").await;
    assert_eq!(one(&lines, "result")["text"], "('i7', '7')");
}

#[tokio::test]
async fn a_hook_that_hangs_is_killed_and_named() {
    let agent = Agent::start().await;
    let hooks = agent.path().join("root/etc/offshoot/on-fork.d");
    std::fs::create_dir_all(&hooks).unwrap();
    std::fs::write(hooks.join("hang"), "#!/bin/sh\nsleep 300\n").unwrap();
    std::fs::set_permissions(hooks.join("hang"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let reply = agent.host(identity(1, 1)).await;
    assert_eq!(reply["failed_hooks"], json!(["hang: was killed: not done after 5 s"]));
}

#[tokio::test]
async fn a_wrong_identity_fails_closed() {
    let agent = Agent::start().await;
    let mut wrong = identity(3, 1);
    wrong["machine_id"] = "short".into();
    let reply = agent.host(wrong).await;
    assert_eq!(reply["reply"], "failed");
    assert!(reply["message"].as_str().unwrap().contains("machine_id 'short'"), "{reply}");
    assert!(!agent.path().join("run/generation").exists());
    assert_eq!(agent.host(json!({"op": "no such"})).await["reply"], "failed");
}

#[tokio::test]
async fn interpreters_are_seeded_anew_idle_or_busy() {
    let agent = Agent::start().await;
    let draw = "random.seed(1)\nrandom.random()";
    let lines = agent.run_code(&format!("import random\n{draw}")).await;
    let unseeded = one(&lines, "result")["text"].clone();
    let mut drawn = vec![];
    for entropy in [1, 2] {
        agent.run_code("random.seed(1)").await;
        agent.host(identity(1, entropy)).await;
        drawn.push(one(&agent.run_code("random.random()").await, "result")["text"].clone());
    }
    assert!(drawn[0] != drawn[1] && !drawn.contains(&unseeded), "{drawn:?} {unseeded}");

    let file = agent.path().join("go");
    let code = format!(
        "import os, time\nrandom.seed(1)\nprint('seeded', flush=True)\nwhile not os.path.exists('{}'): time.sleep(0.01)\nrandom.random()",
        file.display()
    );
    let mut lines = agent.execute(json!({ "code": code })).await;
    lines.wait_for("stdout").await;
    assert_eq!(agent.host(identity(2, 3)).await["reply"], "identity_applied");
    std::fs::write(&file, "").unwrap();
    assert_ne!(lines.wait_for("result").await["text"], unseeded, "running code draws from the new seed");
}

#[tokio::test]
async fn a_warm_up_leaves_its_names() {
    let agent = Agent::start().await;
    agent.run_code("stale = 1").await;
    let source = "import sys\nprint('warming')\nprint('note', file=sys.stderr)\nbig = list(range(1000))";
    let warm = |source: &str, limit: u64| json!({"op": "warm", "source": source, "file_name": "warm.py", "timeout_ms": limit});
    let reply = agent.host(warm(source, 20_000)).await;
    assert_eq!(reply, json!({"reply": "warmed", "stdout": "warming\n", "stderr": "note\n"}));
    let lines = agent.run_code("sum(big), 'stale' in globals(), __name__").await;
    assert_eq!(one(&lines, "number_of_executions")["execution_count"], 1, "a warm-up is no execution");
    assert_eq!(
        (one(&lines, "result")["text"].as_str(), text(&lines, "stderr").as_str()),
        (Some("(499500, False, '__main__')"), "")
    );
    let reply = agent.host(warm("def f():\n    raise ValueError('cold')\nf()", 20_000)).await;
    let message = reply["message"].as_str().unwrap();
    assert!(message.contains("ValueError: cold") && message.contains("warm.py\", line 2"), "{message}");
    let reply = agent.host(warm("import time\ntime.sleep(300)", 300)).await;
    assert!(reply["message"].as_str().unwrap().contains("time limit of 300 ms"), "{reply}");
}

#[tokio::test]
async fn shutdown_answers_before_the_end() {
    let agent = Agent::start().await;
    let mut events = agent.shell("sleep 300").await;
    let pid = events.pid().await;
    assert_eq!(agent.host(json!({"op": "shutdown"})).await["reply"], "shutting_down");
    within("everything has ended", async {
        while crate::support::alive(&pid.to_string()) || crate::support::alive(&agent.pid().to_string()) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}
