//! What needs a real terminal: `shell`, raw while it runs and as before on every way out, and progress bars.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it says")]

mod support;

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::routing::post;
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use serde_json::{Value, json};
use support::*;
use tokio::sync::mpsc::{self, UnboundedSender};

const SERVICE: &str = "/sandboxes/sb/envd/process.Process";

/// A guest shell that echoes, and ends with status 4 when it reads `q`.
fn guest() -> Fake {
    let output: Arc<Mutex<Option<UnboundedSender<Vec<u8>>>>> = Arc::default();
    let starting = output.clone();
    let start = move || async move {
        let (sender, receiver) = mpsc::unbounded_channel();
        sender.send(started(7)).unwrap();
        sender.send(data("pty", b"$ ")).unwrap();
        *starting.lock().unwrap() = Some(sender);
        streamed(CONNECT, receiver)
    };
    let input = move |body: axum::Json<Value>| async move {
        use base64::Engine;
        let text = body["input"]["pty"].as_str().unwrap();
        let bytes = base64::engine::general_purpose::STANDARD.decode(text).unwrap();
        let sender = output.lock().unwrap().clone().unwrap();
        sender.send(data("pty", &bytes)).unwrap();
        if bytes.contains(&b'q') {
            sender.send(exited(4)).unwrap();
            sender.send(end_stream()).unwrap();
        }
        answer(200, json!({}))
    };
    let fine = || async { answer(200, json!({})) };
    let routes = Router::new()
        .route(&format!("{SERVICE}/Start"), post(start))
        .route(&format!("{SERVICE}/SendInput"), post(input))
        .route(&format!("{SERVICE}/SendSignal"), post(fine))
        .route(&format!("{SERVICE}/Update"), post(fine));
    Fake::start(routes)
}

struct Terminal {
    ours: File,
    theirs: File,
    screen: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    fn open() -> Self {
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&ours).unwrap();
        unlockpt(&ours).unwrap();
        let name = ptsname(&ours, Vec::new()).unwrap();
        let theirs = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let ours = File::from(ours);
        let screen: Arc<Mutex<Vec<u8>>> = Arc::default();
        let (mut reader, shown) = (ours.try_clone().unwrap(), screen.clone());
        std::thread::spawn(move || {
            let mut buffer = [0; 1024];
            while let Ok(count @ 1..) = reader.read(&mut buffer) {
                shown.lock().unwrap().extend_from_slice(&buffer[..count]);
            }
        });
        Self { ours, theirs, screen }
    }

    fn size(&self, cols: u16, rows: u16) {
        tcsetwinsize(&self.ours, Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    }

    fn is_raw(&self) -> bool {
        !tcgetattr(&self.theirs).unwrap().local_modes.contains(LocalModes::ICANON)
    }

    fn shows(&self, text: &str) -> bool {
        String::from_utf8_lossy(&self.screen.lock().unwrap()).contains(text)
    }

    fn spawn(&self, fake: &Fake, args: &[&str]) -> Child {
        let end = || Stdio::from(self.theirs.try_clone().unwrap());
        fake.command(args).stdin(end()).stdout(end()).stderr(end()).env("TERM", "vt100").spawn().unwrap()
    }
}

#[test]
fn keys_and_sizes_reach_the_guest_and_its_status_comes_back() {
    let fake = guest();
    let terminal = Terminal::open();
    terminal.size(100, 30);
    let mut child = terminal.spawn(&fake, &["shell", "sb"]);
    until("a prompt in raw mode", || terminal.shows("$ ") && terminal.is_raw());
    (&terminal.ours).write_all(b"ab\x03").unwrap();
    until("the echo, an interrupt being just a key", || terminal.shows("ab\x03"));
    terminal.size(120, 40);
    kill_process(Pid::from_child(&child), Signal::WINCH).unwrap();
    until("the new size", || {
        let sizes = fake.requests_to("/Update");
        sizes.last().is_some_and(|request| request.json()["pty"]["size"] == json!({"cols": 120, "rows": 40}))
    });
    (&terminal.ours).write_all(b"q").unwrap();
    assert_eq!(wait(&mut child).code(), Some(4));
    assert!(!terminal.is_raw());

    let start = fake.requests_to("/Start")[0].envelope();
    assert_eq!(start["pty"], json!({"size": {"cols": 100, "rows": 30}}));
    assert_eq!(start["process"]["cmd"], "/bin/bash");
    assert_eq!(start["process"]["envs"]["TERM"], "vt100");
}

#[test]
fn termination_gives_the_terminal_back_and_hangs_up_in_the_guest() {
    let fake = guest();
    let terminal = Terminal::open();
    let mut child = terminal.spawn(&fake, &["shell", "sb", "top", "-b"]);
    until("a prompt in raw mode", || terminal.shows("$ ") && terminal.is_raw());
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(wait(&mut child).code(), Some(143));
    assert!(!terminal.is_raw());
    assert_eq!(fake.requests_to("/SendSignal")[0].json()["signal"], "SIGNAL_SIGHUP");
    let process = &fake.requests_to("/Start")[0].envelope()["process"];
    assert_eq!((&process["cmd"], &process["args"]), (&json!("top"), &json!(["-b"])));
}

#[test]
fn a_stream_that_breaks_gives_the_terminal_back() {
    let routes = Router::new()
        .route(&format!("{SERVICE}/Start"), post(|| async { chunks(CONNECT, vec![started(7)]) }))
        .route(&format!("{SERVICE}/Update"), post(|| async { answer(200, json!({})) }))
        .route("/sandboxes/sb", axum::routing::get(|| async { not_found("sb") }));
    let fake = Fake::start(routes);
    let terminal = Terminal::open();
    let mut child = terminal.spawn(&fake, &["shell", "sb"]);
    assert_eq!(wait(&mut child).code(), Some(3));
    assert!(!terminal.is_raw());
    until("the reason", || terminal.shows("error: there is no sandbox sb\r\n"));
}

#[test]
fn without_a_terminal_the_way_out_is_named() {
    let fake = guest();
    let ended = fake.run(&["shell", "sb"]);
    assert_eq!(ended.code, 2);
    assert!(ended.stderr.contains("use exec -i"), "{}", ended.stderr);
}

#[test]
fn bars_are_drawn_on_a_terminal_and_results_stay_apart() {
    let events = [
        json!({"type": "progress", "step": "boot", "message": "kernel up"}),
        json!({"type": "progress", "step": "freeze", "message": "", "done": 1, "total": 2}),
        json!({"type": "result", "value": {"name": "py"}}),
    ];
    let slowly = move || async move {
        let (sender, receiver) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            for event in events {
                tokio::time::sleep(std::time::Duration::from_millis(300)).await;
                sender.send(format!("{event}\n").into_bytes()).unwrap();
            }
        });
        streamed("application/x-ndjson", receiver)
    };
    let routes = Router::new()
        .route("/templates", post(slowly))
        .route("/sandboxes/sb/envd/files", axum::routing::get(|| async { vec![0_u8; 9_000_000] }));
    let fake = Fake::start(routes);
    let terminal = Terminal::open();
    terminal.size(100, 30);
    let run = |args: &[&str]| {
        let stderr = Stdio::from(terminal.theirs.try_clone().unwrap());
        let mut child =
            fake.command(args).env("TERM", "xterm").stdout(Stdio::piped()).stderr(stderr).spawn().unwrap();
        let stdout = collect(child.stdout.take().unwrap());
        assert_eq!(wait(&mut child).code(), Some(0));
        stdout.join().unwrap()
    };
    let warm = fake.folder.path().join("warm.py");
    std::fs::write(&warm, "").unwrap();
    assert_eq!(run(&["template", "build", "py", "--image", "deb", "--warm", warm.to_str().unwrap()]), "py\n");
    until("the step on the terminal", || terminal.shows("boot: kernel up") && terminal.shows("1/2"));
    until("the remark", || terminal.shows("made template py in"));
    assert_eq!(run(&["cp", "sb:/x", "-"]).len(), 9_000_000);
    until("the remark", || terminal.shows("copied 8.6 MiB from sb:/x"));
}
