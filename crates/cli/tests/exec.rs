//! `exec`: streams apart as they arrive, the guest's status, signals, input.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it says")]

mod support;

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::sync::Arc;

use axum::Router;
use axum::routing::{get, post};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use support::*;
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio::sync::{Mutex, Notify};

const START: &str = "/sandboxes/sb/envd/process.Process/Start";

fn starting(ready: Vec<Vec<u8>>) -> Router {
    Router::new().route(START, post(move || async move { chunks(CONNECT, ready) }))
}

/// A guest process whose end the test's other calls decide.
#[derive(Clone, Default)]
struct Guest {
    output: Arc<Mutex<Option<UnboundedSender<Vec<u8>>>>>,
}

impl Guest {
    async fn send(&self, messages: Vec<Vec<u8>>) {
        let output = self.output.lock().await.clone();
        for message in messages {
            // The client may have gone; that is its right.
            let _ = output.as_ref().unwrap().send(message);
        }
    }

    fn route(&self, first: Vec<Vec<u8>>) -> Router {
        let guest = self.clone();
        let start = move || async move {
            let (sender, receiver) = mpsc::unbounded_channel();
            *guest.output.lock().await = Some(sender);
            guest.send(first).await;
            streamed(CONNECT, receiver)
        };
        Router::new().route(START, post(start))
    }
}

#[test]
fn streams_are_apart_and_the_status_is_passed_on() {
    let ready = vec![started(7), data("stdout", b"out\n"), data("stderr", b"err\n"), exited(3), end_stream()];
    let fake = Fake::start(starting(ready));
    let ended = fake.run(&[
        "exec",
        "sb",
        "--user",
        "root",
        "--cwd",
        "/srv",
        "--env",
        "A=b=c",
        "--timeout",
        "1500ms",
        "--",
        "sh",
        "-c",
        "x",
    ]);
    assert_eq!((ended.code, ended.stdout.as_str(), ended.stderr.as_str()), (3, "out\n", "err\n"));

    let request = &fake.requests()[0];
    let process = json!({"cmd": "sh", "args": ["-c", "x"], "envs": {"A": "b=c"}, "cwd": "/srv"});
    assert_eq!(request.envelope(), json!({"process": process, "stdin": false}));
    assert_eq!(request.header("content-type"), Some(CONNECT));
    assert_eq!(request.header("connect-protocol-version"), Some("1"));
    assert_eq!(request.header("connect-timeout-ms"), Some("1500"));
    assert_eq!(request.header("authorization"), Some("Basic cm9vdDo="), "root:");
}

#[test]
fn output_is_shown_as_it_arrives() {
    let guest = Guest::default();
    let go = Arc::new(Notify::new());
    let (first, waiting) = (guest.clone(), go.clone());
    let routes = guest.route(vec![started(7), data("stdout", b"first\n")]).layer(axum::middleware::from_fn(
        move |request, next: axum::middleware::Next| {
            let (first, waiting) = (first.clone(), waiting.clone());
            async move {
                let response = next.run(request).await;
                tokio::spawn(async move {
                    waiting.notified().await;
                    first.send(vec![data("stdout", b"second\n"), exited(0), end_stream()]).await;
                });
                response
            }
        },
    ));
    let fake = Fake::start(routes);
    let mut child = fake.command(&["exec", "sb", "--", "x"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let (line_sender, line) = std::sync::mpsc::channel();
    let reading = std::thread::spawn(move || {
        let mut first = String::new();
        stdout.read_line(&mut first).unwrap();
        line_sender.send(first).unwrap();
        let mut rest = String::new();
        stdout.read_to_string(&mut rest).unwrap();
        rest
    });
    assert_eq!(line.recv_timeout(DEADLINE).unwrap(), "first\n", "while the command still runs");
    go.notify_one();
    assert_eq!(wait(&mut child).code(), Some(0));
    assert_eq!(reading.join().unwrap(), "second\n");
}

#[test]
fn a_killed_command_shows_128_plus_its_signal() {
    let fake = Fake::start(starting(vec![started(7), signalled("killed"), end_stream()]));
    assert_eq!(fake.run(&["exec", "sb", "--", "x"]).code, 137);
}

#[test]
fn bytes_that_are_not_text_pass_unchanged() {
    let bytes: Vec<u8> = (0..=255).cycle().take(300_000).collect();
    let fake = Fake::start(starting(vec![started(7), data("stdout", &bytes), exited(0), end_stream()]));
    let output = fake.command(&["exec", "sb", "--", "x"]).output().unwrap();
    assert!(output.stdout == bytes);
}

#[test]
fn a_timed_out_command_is_told_apart() {
    let killed =
        vec![started(7), signalled("killed"), end_stream_error("deadline_exceeded", "process 7 was killed")];
    let without_end = vec![started(7), end_stream_error("deadline_exceeded", "process 7 was killed")];
    for ready in [killed, without_end] {
        let fake = Fake::start(starting(ready));
        let ended = fake.run(&["exec", "sb", "--timeout", "2s", "--", "sleep", "9"]);
        assert_eq!(ended.code, 124);
        assert!(ended.stderr.contains("did not end within 2s and was killed"), "{}", ended.stderr);
    }
}

#[test]
fn a_command_that_does_not_start_says_why() {
    let error = end_stream_error("invalid_argument", "error starting process 'nope': no such file");
    let fake = Fake::start(starting(vec![error]));
    let ended = fake.run(&["exec", "sb", "--", "nope"]);
    assert_eq!(ended.code, 3);
    assert!(ended.stderr.contains("error starting process 'nope': no such file"), "{}", ended.stderr);
}

#[test]
fn an_unknown_sandbox_is_named_with_the_way_out() {
    let fake = Fake::start(Router::new().route(START, post(|| async { not_found("sb") })));
    let ended = fake.run(&["exec", "sb", "--", "x"]);
    assert_eq!((ended.code, ended.stdout.as_str()), (3, ""));
    assert_eq!(ended.stderr, "error: there is no sandbox sb\nhint: list them with: offshoot ls\n");
}

#[test]
fn a_sandbox_that_dies_under_the_command_is_no_success() {
    let mut dead = sandbox("sb", "dead");
    dead["cause"] = "the guest reset itself".into();
    let routes = starting(vec![started(7), data("stdout", b"so far")])
        .route("/sandboxes/sb", get(|| async { answer(200, dead) }));
    let ended = Fake::start(routes).run(&["exec", "sb", "--", "x"]);
    assert_eq!((ended.code, ended.stdout.as_str()), (4, "so far"));
    assert!(ended.stderr.contains("sandbox sb has died: the guest reset itself"), "{}", ended.stderr);
}

#[test]
fn json_is_an_object_for_each_event() {
    let (first, second) = "é".as_bytes().split_at(1);
    let ready = vec![
        started(7),
        data("stdout", first),
        data("stderr", b"\xff"),
        data("stdout", second),
        exited(5),
        end_stream(),
    ];
    let ended = Fake::start(starting(ready)).run(&["--json", "exec", "sb", "--", "x"]);
    let expected = [
        json!({"type": "start", "pid": 7}),
        json!({"type": "stderr", "base64": "/w=="}),
        json!({"type": "stdout", "text": "é"}),
        json!({"type": "exit", "exit_code": 5}),
    ];
    assert_eq!((ended.code, ended.lines()), (5, expected.to_vec()));
}

#[test]
fn standard_input_reaches_the_guest_and_ends_there() {
    let guest = Guest::default();
    let closing = guest.clone();
    let close = move || async move {
        closing.send(vec![exited(0), end_stream()]).await;
        answer(200, json!({}))
    };
    let routes = guest
        .route(vec![started(7)])
        .route("/sandboxes/sb/envd/process.Process/SendInput", post(|| async { answer(200, json!({})) }))
        .route("/sandboxes/sb/envd/process.Process/CloseStdin", post(close));
    let fake = Fake::start(routes);
    let input: Vec<u8> = (0..200_000u32).map(|n| (n % 251) as u8).collect();
    let ended = fake.run_with(&["exec", "-i", "sb", "--", "cat"], &input);
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));

    assert_eq!(fake.requests_to("/Start")[0].envelope()["stdin"], true);
    let mut sent = Vec::new();
    for request in fake.requests_to("/SendInput") {
        let message = request.json();
        assert_eq!(message["process"], json!({"pid": 7}));
        sent.extend(decode(&message["input"]["stdin"]));
    }
    assert!(sent == input, "{} of {} bytes", sent.len(), input.len());
    assert_eq!(fake.requests_to("/CloseStdin")[0].json(), json!({"process": {"pid": 7}}));
}

fn decode(text: &Value) -> Vec<u8> {
    use base64::Engine;
    base64::engine::general_purpose::STANDARD.decode(text.as_str().unwrap()).unwrap()
}

/// As the agent answers: only termination and kill are in the protocol.
fn with_signals(routes: Router, guest: &Guest) -> Router {
    let guest = guest.clone();
    let signal = move |body: axum::Json<Value>| async move {
        match body["signal"].as_str() {
            Some("SIGNAL_SIGTERM") => guest.send(vec![signalled("terminated"), end_stream()]).await,
            Some("SIGNAL_SIGKILL") => guest.send(vec![signalled("killed"), end_stream()]).await,
            _ => {
                return answer(400, json!({"code": "invalid_argument", "message": "cannot be sent"}));
            }
        }
        answer(200, json!({}))
    };
    routes.route("/sandboxes/sb/envd/process.Process/SendSignal", post(signal))
}

fn signal_once_started(signal: Signal) -> (i32, Vec<Value>) {
    let guest = Guest::default();
    let fake = Fake::start(with_signals(guest.route(vec![started(7), data("stdout", b"up\n")]), &guest));
    let mut child = fake.command(&["exec", "sb", "--", "x"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    kill_process(Pid::from_child(&child), signal).unwrap();
    let code = wait(&mut child).code().unwrap();
    let sent =
        fake.requests_to("/SendSignal").iter().map(|request| request.json()["signal"].clone()).collect();
    (code, sent)
}

#[test]
fn an_interrupt_becomes_what_the_guest_understands() {
    let (code, sent) = signal_once_started(Signal::INT);
    assert_eq!((code, sent), (143, vec![json!("SIGNAL_SIGINT"), json!("SIGNAL_SIGTERM")]));
}

#[test]
fn termination_is_forwarded() {
    let (code, sent) = signal_once_started(Signal::TERM);
    assert_eq!((code, sent), (143, vec![json!("SIGNAL_SIGTERM")]));
}

#[test]
fn a_reader_that_goes_away_ends_the_command_without_a_panic() {
    let guest = Guest::default();
    let endless = guest.clone();
    let routes = with_signals(guest.route(vec![started(7), data("stdout", b"y\n")]), &guest);
    let fake = Fake::start(routes);
    let mut child = fake
        .command(&["exec", "sb", "--", "yes"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let stderr = collect(child.stderr.take().unwrap());
    let mut line = [0; 2];
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut line).unwrap();
    drop(stdout);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(endless.send(vec![data("stdout", b"y\n")]));
    assert_eq!(wait(&mut child).code(), Some(141));
    assert_eq!(stderr.join().unwrap(), "");
    assert!(!fake.requests_to("/SendSignal").is_empty(), "the command does not run on unseen");
}

#[test]
fn a_torn_message_is_not_taken_for_an_end() {
    let mut torn = started(7);
    torn.extend_from_slice(&data("stdout", b"whole")[..9]);
    let ended = Fake::start(starting(vec![torn])).run(&["exec", "sb", "--", "x"]);
    assert_eq!(ended.code, 8);
    assert!(ended.stderr.contains("ends in the middle of a message"), "{}", ended.stderr);
}
