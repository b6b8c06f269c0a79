//! The process service, over the wire.

use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::{Request, StatusCode};
use http_body_util::Full;
use serde_json::{Value, json};

use crate::support::{Agent, alive, envelope, resident_bytes, within};

#[tokio::test]
async fn output_and_exit_come_apart_and_in_order() {
    let agent = Agent::start().await;
    let outcome = agent.shell("echo out; echo err >&2; exit 3").await.outcome().await;
    assert!(outcome.pid > 0);
    assert_eq!(outcome.stdout, b"out\n");
    assert_eq!(outcome.stderr, b"err\n");
    let end = json!({"exitCode": 3, "exited": true, "status": "exit status 3", "error": "exit status 3"});
    assert_eq!(outcome.end, end);
    assert_eq!(outcome.trailer, json!({}));
    let success = agent.shell("true").await.outcome().await;
    assert_eq!(success.end, json!({"exited": true, "status": "exit status 0"}));
}

#[tokio::test]
async fn wrong_requests_are_errors_that_name_the_thing() {
    let agent = Agent::start().await;
    let start = |process: Value| agent.stream("Start", json!({ "process": process }), &[]);
    let error = |outcome: crate::support::Outcome| outcome.trailer["error"].clone();
    let missing = error(start(json!({"cmd": "/no/such/file"})).await.outcome().await);
    assert_eq!(missing["code"], "invalid_argument");
    assert!(missing["message"].as_str().unwrap().contains("/no/such/file"), "{missing}");
    let cwd = error(start(json!({"cmd": "ls", "cwd": "/no/such/dir"})).await.outcome().await);
    assert_eq!(cwd["message"], "cwd '/no/such/dir' does not exist");
    let empty = error(start(json!({})).await.outcome().await);
    assert_eq!(empty["code"], "invalid_argument");
    let user = [("authorization", "Basic bm8tc3VjaC11c2VyOg==")];
    let user = agent.stream("Start", json!({"process": {"cmd": "ls"}}), &user).await.outcome().await;
    assert_eq!(error(user)["code"], "unauthenticated");
    let (status, body) =
        agent.unary("SendSignal", json!({"process": {"pid": 999_999_999}, "signal": 9})).await;
    assert_eq!((status, body["code"].as_str()), (StatusCode::NOT_FOUND, Some("not_found")));
    let (status, body) = agent.unary("NoSuchCall", json!({})).await;
    assert_eq!((status, body["code"].as_str()), (StatusCode::NOT_IMPLEMENTED, Some("unimplemented")));
    let (status, _, _) = agent.get("/init").await;
    assert_eq!(status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_time_limit_kills_grandchildren_too() {
    let agent = Agent::start().await;
    let begin = Instant::now();
    let script = "sleep 300 & echo $!; (sleep 301 & echo $!; wait) & set -m; sleep 302 & echo $!; wait";
    let process = json!({"process": {"cmd": "/bin/bash", "args": ["-c", script]}, "stdin": false});
    let outcome = agent.stream("Start", process, &[("connect-timeout-ms", "1000")]).await.outcome().await;
    assert!(begin.elapsed() >= Duration::from_secs(1));
    assert_eq!(outcome.trailer["error"]["code"], "deadline_exceeded", "{outcome:?}");
    let pids: Vec<String> = outcome.stdout_text().lines().map(str::to_owned).collect();
    assert_eq!(pids.len(), 3);
    within("grandchildren are gone", async {
        while pids.iter().any(|pid| alive(pid)) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    let late = agent.stream("Connect", json!({"process": {"pid": outcome.pid}}), &[]).await.outcome().await;
    assert_eq!(late.end, json!({"exitCode": -1, "status": "signal: killed", "error": "signal: killed"}));
}

#[tokio::test]
async fn signals_end_and_kill() {
    let agent = Agent::start().await;
    let mut events =
        agent.shell("trap 'echo caught; exit 7' TERM; echo ready; while :; do sleep 0.05; done").await;
    let pid = events.pid().await;
    events.wait_for("ready").await;
    let signal = |signal: &str| json!({"process": {"pid": pid}, "signal": signal});
    let (status, _) = agent.unary("SendSignal", signal("SIGNAL_SIGTERM")).await;
    assert_eq!(status, StatusCode::OK);
    let outcome = events.outcome().await;
    assert_eq!(outcome.stdout_text(), "caught\n");
    assert_eq!(outcome.end["exitCode"], 7);
    let (status, body) = agent.unary("SendSignal", signal("SIGNAL_SIGKILL")).await;
    assert_eq!(status, StatusCode::NOT_FOUND, "{body}");

    let mut events = agent.shell("sleep 300 | sleep 301").await;
    let pid = events.pid().await;
    agent.unary("SendSignal", json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})).await;
    assert_eq!(events.outcome().await.end["status"], "signal: killed");
}

#[tokio::test]
async fn input_arrives_and_its_end_too() {
    let agent = Agent::start().await;
    let mut events = agent.shell_with_input("cat; echo done").await;
    let pid = events.pid().await;
    let input = |text: &str| json!({"process": {"pid": pid}, "input": {"stdin": STANDARD.encode(text)}});
    assert_eq!(agent.unary("SendInput", input("one\n")).await, (StatusCode::OK, json!({})));
    events.wait_for("one\n").await;
    let messages = [
        json!({"start": {"process": {"pid": pid}}}),
        json!({"data": {"input": {"stdin": STANDARD.encode("two\n")}}}),
        json!({"keepalive": {}}),
        json!({"data": {"input": {"stdin": STANDARD.encode("three\n")}}}),
    ];
    let body: Vec<u8> = messages.iter().flat_map(|message| envelope(message).to_vec()).collect();
    let request = Request::post("/process.Process/StreamInput")
        .header("host", "x")
        .header("content-type", "application/connect+json")
        .body(Full::from(body))
        .unwrap();
    let (status, _, body) = agent.call(49983, request).await;
    assert_eq!((status, &body[..]), (StatusCode::OK, &b"\0\0\0\0\x02{}\x02\0\0\0\x02{}"[..]));
    events.wait_for("three\n").await;
    let (status, body) =
        agent.unary("SendInput", json!({"process": {"pid": pid}, "input": {"pty": "eA=="}})).await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{body}");
    assert_eq!(agent.unary("CloseStdin", json!({"process": {"pid": pid}})).await.0, StatusCode::OK);
    let (status, _) = agent.unary("SendInput", input("late")).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert_eq!(events.outcome().await.stdout_text(), "done\n");
}

#[tokio::test]
async fn a_terminal_echoes_resizes_and_hangs_up() {
    let agent = Agent::start().await;
    let start = json!({
        "process": {"cmd": "/bin/sh", "args": ["-c", "tty; stty size; read line; stty size; echo got $line"]},
        "pty": {"size": {"cols": 90, "rows": 30}},
    });
    let mut events = agent.stream("Start", start, &[]).await;
    let pid = events.pid().await;
    events.wait_for("30 90\r\n").await;
    let size = json!({"process": {"pid": pid}, "pty": {"size": {"cols": 100, "rows": 40}}});
    assert_eq!(agent.unary("Update", size).await.0, StatusCode::OK);
    let input = json!({"process": {"pid": pid}, "input": {"pty": STANDARD.encode("words\n")}});
    assert_eq!(agent.unary("SendInput", input).await.0, StatusCode::OK);
    let outcome = events.outcome().await;
    let shown = String::from_utf8_lossy(&outcome.pty).into_owned();
    assert!(shown.contains("40 100\r\n") && shown.contains("got words\r\n"), "{shown}");
    assert_eq!(outcome.end["status"], "exit status 0");
}

#[tokio::test]
async fn control_c_reaches_the_terminals_foreground() {
    let agent = Agent::start().await;
    let start = json!({
        "process": {"cmd": "/bin/sh", "args": ["-c", "trap 'echo caught; exit 4' INT; echo ready; while :; do sleep 0.05; done"]},
        "pty": {},
    });
    let mut events = agent.stream("Start", start, &[]).await;
    let pid = events.pid().await;
    events.wait_for("ready").await;
    agent
        .unary("SendInput", json!({"process": {"pid": pid}, "input": {"pty": STANDARD.encode("\x03")}}))
        .await;
    assert_eq!(events.outcome().await.end["exitCode"], 4);
}

#[tokio::test]
async fn processes_are_listed_by_tag_and_joined() {
    let agent = Agent::start().await;
    assert_eq!(agent.unary("List", json!({})).await, (StatusCode::OK, json!({})));
    let start = json!({
        "process": {"cmd": "/bin/sh", "args": ["-c", "read line; echo $line; echo $X"], "envs": {"X": "y"}},
        "tag": "mine",
    });
    let mut first = agent.stream("Start", start, &[]).await;
    let pid = first.pid().await;
    let (_, listed) = agent.unary("List", json!({})).await;
    assert_eq!(listed["processes"][0]["tag"], "mine");
    assert_eq!(listed["processes"][0]["config"]["envs"], json!({"X": "y"}));
    let mut second = agent.stream("Connect", json!({"process": {"tag": "mine"}}), &[]).await;
    assert_eq!(second.pid().await, pid);
    let input = json!({"process": {"tag": "mine"}, "input": {"stdin": STANDARD.encode("hello\n")}});
    agent.unary("SendInput", input).await;
    assert_eq!(first.outcome().await.stdout_text(), "hello\ny\n");
    assert_eq!(second.outcome().await.stdout_text(), "hello\ny\n");
    let late = agent.stream("Connect", json!({"process": {"pid": pid}}), &[]).await.outcome().await;
    assert_eq!((late.pid, late.end["exited"].as_bool(), late.stdout.len()), (pid, Some(true), 0));
    assert_eq!(agent.unary("List", json!({})).await.1, json!({}));
}

#[tokio::test]
async fn a_client_that_leaves_does_not_end_the_process() {
    let agent = Agent::start().await;
    let file = agent.path().join("made");
    let script = format!("yes | head -c 10000000; sleep 0.2; echo x > {}", file.display());
    let mut events = agent.shell(&script).await;
    events.pid().await;
    drop(events);
    within("the process goes on", async {
        while !file.exists() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_flood_with_a_slow_reader_holds_no_memory_and_loses_nothing() {
    const FLOOD_BYTES: usize = 64 * 1024 * 1024;
    let agent = Agent::start().await;
    let mut events = agent.shell(&format!("head -c {FLOOD_BYTES} /dev/zero; echo end >&2")).await;
    events.pid().await;
    let before = resident_bytes(agent.pid());
    tokio::time::sleep(Duration::from_millis(700)).await;
    let grown = resident_bytes(agent.pid()).saturating_sub(before);
    assert!(grown < 4 << 20, "the agent grew by {grown} bytes");
    let outcome = events.outcome().await;
    assert_eq!((outcome.stdout.len(), &outcome.stderr[..]), (FLOOD_BYTES, &b"end\n"[..]));
}

#[tokio::test]
async fn an_idle_stream_is_kept_alive() {
    let agent = Agent::start().await;
    let start = json!({"process": {"cmd": "sleep", "args": ["1.5"]}});
    let mut events = agent.stream("Start", start, &[("keepalive-ping-interval", "1")]).await;
    events.pid().await;
    let (_, message) = events.next().await.unwrap();
    assert_eq!(message, json!({"event": {"keepalive": {}}}));
}

#[tokio::test]
async fn commands_get_their_environment_and_directory() {
    let agent = Agent::start().await;
    let start = json!({
        "process": {"cmd": "sh", "args": ["-c", "pwd; echo $A; echo $E2B_SANDBOX; env"], "cwd": "/tmp", "envs": {"A": "b"}},
    });
    let outcome = agent.stream("Start", start, &[]).await.outcome().await;
    let text = outcome.stdout_text();
    assert!(text.starts_with("/tmp\nb\ntrue\n"), "{text}");
    for name in ["PATH=", "HOME=", "USER=", "LOGNAME="] {
        assert!(text.lines().any(|line| line.starts_with(name)), "{name} is missing: {text}");
    }
    assert!(!text.contains("CARGO"), "the agent's own environment must not leak");
}

#[tokio::test]
async fn orphans_are_reaped_and_statuses_are_not_stolen() {
    let agent = Agent::start().await;
    let mut running = Vec::new();
    for code in 0..20 {
        running.push((code, agent.shell(&format!("(sleep 0.0{code} &) ; (true &); exit {code}")).await));
    }
    for (code, events) in running {
        let outcome = events.outcome().await;
        assert_eq!(outcome.end["exitCode"].as_i64().unwrap_or(0), code);
    }
    within("orphans are reaped", async {
        let children = format!("/proc/{0}/task/{0}/children", agent.pid());
        while !std::fs::read_to_string(&children).unwrap().trim().is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn root_can_become_another_user() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can become another user");
        return;
    }
    let agent = Agent::start().await;
    let start = json!({"process": {"cmd": "id", "args": ["-u"], "cwd": "/"}});
    // The base64 of "nobody:".
    let outcome =
        agent.stream("Start", start, &[("authorization", "Basic bm9ib2R5Og==")]).await.outcome().await;
    assert_eq!(outcome.stdout_text(), "65534\n");
}
