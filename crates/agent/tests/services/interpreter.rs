//! The warm interpreter.

use std::time::{Duration, Instant};

use http::{Request, StatusCode};
use http_body_util::Full;
use serde_json::{Value, json};

use crate::support::{Agent, one, resident_bytes, text, within};

#[tokio::test]
async fn value_output_and_error_come_apart() {
    let agent = Agent::start().await;
    let lines =
        agent.run_code("import sys\nprint('out')\nprint('err', file=sys.stderr)\nx = 41\nx + 1").await;
    assert_eq!(lines[0], json!({"type": "number_of_executions", "execution_count": 1}));
    assert_eq!((text(&lines, "stdout"), text(&lines, "stderr")), ("out\n".into(), "err\n".into()));
    assert_eq!(
        *one(&lines, "result"),
        json!({"type": "result", "is_main_result": true, "text": "42", "json": 42})
    );
    let lines = agent.run_code("def f():\n    return 1 / 0\nf()").await;
    let error = one(&lines, "error");
    assert_eq!(
        (error["name"].as_str(), error["value"].as_str()),
        (Some("ZeroDivisionError"), Some("division by zero"))
    );
    let traceback = error["traceback"].as_str().unwrap();
    assert!(traceback.contains("return 1 / 0") && traceback.contains("<cell 2>\", line 2"), "{traceback}");
    assert!(
        !traceback.contains("offshoot_driver"),
        "the driver's own frames are not the user's: {traceback}"
    );
    let lines = agent.run_code("x").await;
    assert_eq!(one(&lines, "result")["text"], "41", "names outlive an execution");
}

#[tokio::test]
async fn values_are_text_and_where_plain_json() {
    let agent = Agent::start().await;
    for (code, text, json) in [
        ("'a\"b'", "a\"b", json!("a\"b")),
        ("{'a': [1, 2.5, None, True]}", "{'a': [1, 2.5, None, True]}", json!({"a": [1, 2.5, null, true]})),
        ("2**70", "1180591620717411303424", Value::Null),
        ("float('nan')", "nan", Value::Null),
        ("{1: 2}", "{1: 2}", Value::Null),
        ("'\\ud800'", "\\ud800", Value::Null),
        ("object", "<class 'object'>", Value::Null),
        ("import asyncio\nawait asyncio.sleep(0, 'slept')", "slept", json!("slept")),
    ] {
        let lines = agent.run_code(code).await;
        let result = one(&lines, "result");
        assert_eq!((result["text"].as_str(), &result["json"]), (Some(text), &json), "{code}");
    }
    for nothing in ["None", "x = 1", "", "5;"] {
        assert!(agent.run_code(nothing).await.iter().all(|line| line["type"] != "result"), "{nothing}");
    }
    let lines = agent.run_code("raise ValueError('\\ud800')").await;
    assert_eq!(one(&lines, "error")["value"], "\\ud800");
    let lines = agent.run_code("this is no python").await;
    assert_eq!(one(&lines, "error")["name"], "SyntaxError");
}

#[tokio::test]
async fn output_of_subprocesses_is_captured_before_the_end() {
    let agent = Agent::start().await;
    let code = "import os, subprocess, sys\nfor i in range(50):\n    sys.stdout.write(f'p{i} ')\n    sys.stdout.flush()\n    \
                subprocess.run(['echo', '-n', f's{i} '])\nos.write(2, 'ü€'.encode())\n'value'";
    for _ in 0..3 {
        let lines = agent.run_code(code).await;
        let expected: String = (0..50).map(|i| format!("p{i} s{i} ")).collect();
        assert_eq!((text(&lines, "stdout"), text(&lines, "stderr")), (expected, "ü€".into()));
        let kinds: Vec<_> = lines.iter().map(|line| line["type"].as_str().unwrap()).collect();
        assert_eq!(kinds[kinds.len() - 2..], ["result", "end_of_execution"]);
    }
}

#[tokio::test]
async fn big_output_with_a_slow_reader_holds_no_memory_and_loses_nothing() {
    const FLOOD_BYTES: usize = 32 * 1024 * 1024;
    let agent = Agent::start().await;
    agent.run_code("1").await;
    let before = resident_bytes(agent.pid());
    let code = format!(
        "import sys\nfor _ in range({FLOOD_BYTES} // 1024): sys.stdout.write('x' * 1023 + '\\n')\n'done'"
    );
    let mut lines = agent.execute(json!({ "code": code })).await;
    lines.wait_for("stdout").await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let grown = resident_bytes(agent.pid()).saturating_sub(before);
    assert!(grown < 4 << 20, "the agent grew by {grown} bytes");
    let mut total = 0;
    while let Some(line) = lines.next().await {
        if line["type"] == "result" {
            break;
        }
        total += line["text"].as_str().unwrap().len();
    }
    assert!(total > FLOOD_BYTES - (1 << 20), "only {total} bytes after the first event");
}

#[tokio::test]
async fn a_time_limit_interrupts_and_names_survive() {
    let agent = Agent::start().await;
    let begin = Instant::now();
    let body = json!({"code": "kept = 1\nimport time\nprint('begun')\ntime.sleep(300)", "timeout_ms": 500});
    let lines = agent.execute(body).await.all().await;
    assert!(begin.elapsed() < Duration::from_secs(20));
    assert_eq!(text(&lines, "stdout"), "begun\n");
    let error = one(&lines, "error");
    assert_eq!(error["name"], "KeyboardInterrupt");
    assert_eq!(error["value"], "interrupted: the time limit of 500 ms was over");
    assert_eq!(one(&agent.run_code("kept").await, "result")["text"], "1");
}

#[tokio::test]
async fn code_that_does_not_yield_is_killed_and_the_next_is_told() {
    let agent = Agent::start().await;
    let stubborn = "import time\nwhile True:\n    try:\n        time.sleep(300)\n    except KeyboardInterrupt:\n        pass";
    let lines = agent.execute(json!({"code": stubborn, "timeout_ms": 300})).await.all().await;
    assert_eq!(one(&lines, "error")["name"], "InterpreterKilled");
    let lines = agent.run_code("1").await;
    assert!(text(&lines, "stderr").contains("did not yield"), "{lines:?}");
    assert_eq!(one(&lines, "result")["text"], "1");
    assert_eq!(text(&agent.run_code("2").await, "stderr"), "", "told once");
}

#[tokio::test]
async fn a_client_that_leaves_interrupts_its_code() {
    let agent = Agent::start().await;
    let code = "interrupted = False\nimport time\ntry:\n    print('begun', flush=True)\n    time.sleep(300)\nexcept KeyboardInterrupt:\n    interrupted = True";
    let mut lines = agent.execute(json!({ "code": code })).await;
    lines.wait_for("stdout").await;
    drop(lines);
    assert_eq!(one(&agent.run_code("interrupted").await, "result")["text"], "True");
}

#[tokio::test]
async fn exits_are_survived_where_they_can_be() {
    let agent = Agent::start().await;
    let lines = agent.run_code("kept = 1\nimport sys\nsys.exit(3)").await;
    assert_eq!(
        (&one(&lines, "error")["name"], &one(&lines, "error")["value"]),
        (&json!("SystemExit"), &json!("3"))
    );
    assert_eq!(one(&agent.run_code("kept").await, "result")["text"], "1");
    let lines = agent.run_code("import os\nif os.fork() == 0:\n    raise SystemExit\nos.wait()[1]").await;
    assert_eq!(one(&lines, "result")["text"], "0", "a forked child does not answer for its parent");
    let lines = agent.run_code("print('last words')\nos._exit(9)").await;
    assert_eq!(text(&lines, "stdout"), "last words\n");
    assert_eq!(one(&lines, "error")["value"], "the interpreter ended (exit status 9)");
    let lines = agent.run_code("'kept' in globals()").await;
    assert!(text(&lines, "stderr").contains("exit status 9"), "{lines:?}");
    assert_eq!(one(&lines, "result")["text"], "False");
}

#[tokio::test]
async fn variables_of_an_execution_end_with_it() {
    let agent = Agent::start().await;
    let read = "import os\nos.environ.get('ONCE')";
    let lines = agent.execute(json!({"code": read, "env_vars": {"ONCE": "yes"}})).await.all().await;
    assert_eq!(one(&lines, "result")["text"], "yes");
    assert!(agent.run_code(read).await.iter().all(|line| line["type"] != "result"));
}

#[tokio::test]
async fn code_of_one_context_runs_one_after_the_other() {
    let agent = Agent::start().await;
    let code = "import time\ncount = globals().get('count', 0)\nseen = count\ntime.sleep(0.05)\ncount = seen + 1\ncount";
    let mut answers = Vec::new();
    for _ in 0..5 {
        answers.push(agent.execute(json!({ "code": code })).await);
    }
    for (index, answer) in answers.into_iter().enumerate() {
        assert_eq!(one(&answer.all().await, "result")["json"], index + 1);
    }
}

async fn contexts(agent: &Agent, method: &str, path: &str, body: Value) -> (StatusCode, String) {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let request =
        Request::builder().method(method).uri(path).header("host", "x").body(Full::from(body)).unwrap();
    let (status, _, body) = agent.call(49999, request).await;
    (status, String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test]
async fn contexts_are_apart_and_can_be_restarted_and_deleted() {
    let agent = Agent::start().await;
    assert_eq!(contexts(&agent, "GET", "/health", Value::Null).await, (StatusCode::OK, "\"OK\"".into()));
    let (status, body) = contexts(&agent, "POST", "/contexts", json!({"cwd": "/tmp"})).await;
    assert_eq!(status, StatusCode::OK, "{body}");
    let id = serde_json::from_str::<Value>(&body).unwrap()["id"].as_str().unwrap().to_owned();
    agent.run_code("here = 'default'").await;
    let run = |code: &str| agent.execute(json!({"code": code, "context_id": id}));
    let lines = run("import os\n'here' in globals(), os.getcwd()").await.all().await;
    assert_eq!(one(&lines, "result")["text"], "(False, '/tmp')");
    let mut endless = run("print('begun')\nwhile True: pass").await;
    endless.wait_for("stdout").await;
    assert_eq!(
        contexts(&agent, "POST", &format!("/contexts/{id}/restart"), Value::Null).await.0,
        StatusCode::NO_CONTENT
    );
    assert_eq!(endless.wait_for("error").await["name"], "InterpreterRestarted");
    let lines = run("'os' in globals()").await.all().await;
    assert_eq!(
        (one(&lines, "result")["text"].as_str(), text(&lines, "stderr").as_str()),
        (Some("False"), "")
    );
    assert_eq!(
        contexts(&agent, "DELETE", &format!("/contexts/{id}"), Value::Null).await.0,
        StatusCode::NO_CONTENT
    );
    let gone = contexts(&agent, "POST", "/execute", json!({"code": "1", "context_id": id})).await;
    assert_eq!(gone, (StatusCode::NOT_FOUND, format!("Context {id} not found")));
    let both = contexts(
        &agent,
        "POST",
        "/execute",
        json!({"code": "1", "context_id": "default", "language": "python"}),
    );
    assert_eq!(both.await.0, StatusCode::BAD_REQUEST);
    let other = contexts(&agent, "POST", "/execute", json!({"code": "1", "language": "r"})).await;
    assert_eq!(other.0, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn an_image_without_python_says_so() {
    let agent = Agent::start_with(&[("PATH", "/nonexistent")]).await;
    let (status, body) = contexts(&agent, "POST", "/execute", json!({"code": "1"})).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(body.contains("no python3 in this image"), "{body}");
}

#[tokio::test]
async fn output_between_executions_does_not_block_the_interpreter() {
    let agent = Agent::start().await;
    let code = "import sys, threading, time\nflooded = 0\ndef flood():\n    global flooded\n    for _ in range(2000):\n        \
                sys.stdout.write('x' * 1023 + '\\n')\n        flooded += 1\nthread = threading.Timer(0.3, flood)\nthread.start()";
    agent.run_code(code).await;
    within("the thread floods", async {
        while one(&agent.run_code("flooded").await, "result")["text"] != "2000" {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
    .await;
}
