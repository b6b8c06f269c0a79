//! Every other command against canned answers.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it says")]

mod support;

use axum::Router;
use axum::routing::{delete, get, post};
use serde_json::{Value, json};
use support::*;

fn event(kind: &str, text: &str) -> Value {
    json!({"type": kind, "text": text, "timestamp": "2026-01-01T00:00:00Z"})
}

fn running(events: &[Value]) -> Fake {
    let events = events.to_vec();
    let execute = move || async move { lines(&events) };
    Fake::start(Router::new().route("/sandboxes/sb/interpreter/execute", post(execute)))
}

#[test]
fn run_keeps_output_errors_and_value_apart() {
    let fake = running(&[
        json!({"type": "number_of_executions", "execution_count": 1}),
        event("stdout", "out"),
        event("stderr", "err\n"),
        json!({"type": "keepalive"}),
        json!({"type": "chart", "of": "a newer agent"}),
        json!({"type": "result", "is_main_result": true, "text": "42", "json": 42}),
        json!({"type": "end_of_execution"}),
    ]);
    let ended = fake.run(&["run", "sb", "-c", "6*7", "--timeout", "3s"]);
    assert_eq!((ended.code, ended.stdout.as_str(), ended.stderr.as_str()), (0, "out\n42\n", "err\n"));
    assert_eq!(fake.requests()[0].json(), json!({"code": "6*7", "timeout_ms": 3000}));
}

#[test]
fn run_fails_with_the_traceback_of_an_exception() {
    let events = [
        json!({"type": "error", "name": "ValueError", "value": "no", "traceback": "Traceback …\nValueError: no\n"}),
        json!({"type": "end_of_execution"}),
    ];
    let fake = running(&events);
    let ended = fake.run_with(&["run", "sb", "-"], b"raise ValueError('no')");
    assert_eq!((ended.code, ended.stdout.as_str()), (1, ""));
    assert_eq!(ended.stderr, "Traceback …\nValueError: no\n");
    assert_eq!(fake.requests()[0].json()["code"], "raise ValueError('no')");

    let ended = fake.run(&["run", "sb", "-c", "x", "--json"]);
    assert_eq!((ended.code, ended.lines()), (1, events.to_vec()));
}

#[test]
fn run_that_breaks_off_is_no_success() {
    let events = [event("stdout", "a\n")];
    let routes = Router::new()
        .route("/sandboxes/sb/interpreter/execute", post(move || async move { lines(&events) }))
        .route("/sandboxes/sb", get(|| async { answer(200, sandbox("sb", "running")) }));
    let ended = Fake::start(routes).run(&["run", "sb", "-c", "x"]);
    assert_eq!((ended.code, ended.stdout.as_str()), (4, "a\n"));
    assert!(ended.stderr.contains("ended before the work did"), "{}", ended.stderr);
}

fn outcomes() -> Value {
    let error =
        json!({"code": "no_memory", "kind": "host", "message": "no memory for sb-2", "hint": "fork fewer"});
    json!({
        "results": [{"ok": sandbox("sb-1", "running")}, {"error": error}, {"ok": sandbox("sb-3", "running")}],
        "times": {"pause_ms": 4.25, "state_save_ms": 1.0, "fork_ms": 2.0},
    })
}

#[test]
fn fork_tells_every_child_in_order() {
    let fake =
        Fake::start(Router::new().route("/sandboxes/sb/fork", post(|| async { answer(200, outcomes()) })));
    let ended = fake.run(&["fork", "sb", "-n", "3", "--env", "A=1"]);
    assert_eq!(ended.code, 6, "the failed child's");
    assert_eq!(ended.stdout, "sb-1\nerror: no memory for sb-2\nsb-3\n");
    assert!(ended.stderr.starts_with("hint: fork fewer\n2 of 3 running after "), "{}", ended.stderr);
    assert!(
        ended.stderr.ends_with("each had its identity within 12.3 ms; parent paused 4.2 ms\n"),
        "{}",
        ended.stderr
    );
    assert_eq!(fake.requests()[0].json(), json!({"count": 3, "env": {"A": "1"}}));

    let quiet = fake.run(&["-q", "fork", "sb", "-n", "3"]);
    assert_eq!((quiet.stdout.lines().count(), quiet.stderr.as_str()), (3, ""));
    let json = fake.run(&["fork", "sb", "-n", "3", "--json"]);
    assert_eq!((json.code, json.json()), (6, outcomes()));
    assert_eq!(json.error()["code"], "no_memory");
}

#[test]
fn create_where_nothing_succeeded_still_tells_each() {
    let error =
        json!({"error": {"code": "no_kvm", "kind": "unsupported", "message": "KVM cannot run Linux here"}});
    let body = json!({"results": [error, error]});
    let fake = Fake::start(Router::new().route("/sandboxes", post(|| async { answer(501, body) })));
    let ended = fake.run(&["create", "py", "-n", "2"]);
    assert_eq!(ended.code, 5);
    assert_eq!(ended.stdout, "error: KVM cannot run Linux here\nerror: KVM cannot run Linux here\n");
}

#[test]
fn create_prints_nothing_but_the_id() {
    let body = json!({"results": [{"ok": sandbox("sb-1", "running")}]});
    let fake = Fake::start(Router::new().route("/sandboxes", post(|| async { answer(200, body) })));
    let ended = fake.run(&["create", "py", "--name", "web"]);
    assert_eq!((ended.code, ended.stdout.as_str()), (0, "sb-1\n"));
    assert_eq!(fake.requests()[0].json(), json!({"template": "py", "count": 1, "name": "web", "env": {}}));
}

fn building(events: Vec<Value>) -> Fake {
    Fake::start(Router::new().route("/templates", post(move || async move { lines(&events) })))
}

fn build(fake: &Fake, more: &[&str]) -> Ended {
    let warm = fake.folder.path().join("warm.py");
    std::fs::write(&warm, "import numpy\n").unwrap();
    let args =
        ["template", "build", "py", "--image", "deb", "--page-size", "4k", "--warm", warm.to_str().unwrap()];
    fake.run(&[&args, more].concat())
}

#[test]
fn template_build_tells_its_steps_and_its_result() {
    let events = vec![
        json!({"type": "progress", "step": "boot", "message": "kernel up"}),
        json!({"type": "progress", "step": "freeze", "message": "", "done": 1, "total": 9}),
        json!({"type": "progress", "step": "freeze", "message": "", "done": 9, "total": 9}),
        json!({"type": "result", "value": {"name": "py", "memory_mib": 512}}),
    ];
    let fake = building(events.clone());
    let ended = build(&fake, &["--warm-timeout", "5s"]);
    assert_eq!((ended.code, ended.stdout.as_str()), (0, "py\n"));
    assert!(ended.stderr.starts_with("boot: kernel up\nfreeze\nmade template py in "), "{}", ended.stderr);
    let body = json!({
        "name": "py", "image": "deb", "memory_mib": 512, "vcpus": 1, "page_size": "small4k",
        "overlay_limit_mib": 1024, "cmdline": "", "warm": {"source": "import numpy\n", "file_name": "warm.py"},
        "warm_timeout_ms": 5000, "boot_timeout_ms": 90000,
    });
    assert_eq!(fake.requests()[0].json(), body);
    let json = build(&fake, &["--json"]);
    assert_eq!((json.code, json.lines(), json.stderr.as_str()), (0, events, ""));
}

#[test]
fn a_failed_warm_up_is_told_with_its_reason() {
    let error = json!({"code": "warm_failed", "kind": "caller", "message": "the warm-up raised ImportError"});
    let events = vec![json!({"type": "progress", "step": "warm"}), json!({"type": "error", "error": error})];
    let ended = build(&building(events.clone()), &[]);
    assert_eq!((ended.code, ended.stdout.as_str()), (3, ""));
    assert_eq!(ended.stderr, "warm\nerror: the warm-up raised ImportError\n");
    let json = build(&building(events.clone()), &["--json"]);
    assert_eq!((json.code, json.lines(), json.error()), (3, events, error));
}

#[test]
fn work_without_a_result_is_no_success() {
    let ended = build(&building(vec![json!({"type": "progress", "step": "boot"})]), &["--quiet"]);
    assert_eq!(ended.code, 8);
    assert!(ended.stderr.contains("ends without a result"), "{}", ended.stderr);
}

#[test]
fn image_build_and_add_say_what_they_need() {
    let result = [json!({"type": "result", "value": {"name": "deb"}})];
    let fake = Fake::start(Router::new().route("/images", post(move || async move { lines(&result) })));
    assert_eq!(
        fake.run(&["image", "build", "deb", "--packages", "python3-numpy,git", "--disk-mib", "512"]).code,
        0
    );
    let debian = json!({"packages": ["python3-numpy", "git"], "disk_mib": 512});
    assert_eq!(fake.requests()[0].json(), json!({"name": "deb", "source": {"debian": debian}}));

    let file = fake.folder.path().join("vmlinux");
    std::fs::write(&file, "k").unwrap();
    let path = file.to_str().unwrap();
    let missing =
        fake.run(&["image", "add", "own", "--kernel", path, "--initramfs", path, "--rootfs", "/nonexistent"]);
    assert_eq!(missing.code, 3);
    assert!(missing.stderr.contains("cannot find the root file system /nonexistent"), "{}", missing.stderr);
}

#[test]
fn no_daemon_says_how_to_start_one() {
    let ended = finish(offshoot(&["--socket", "/nonexistent/d.sock", "ls"]), b"");
    assert_eq!((ended.code, ended.stdout.as_str()), (7, ""));
    let expected = "error: no daemon answers at /nonexistent/d.sock: No such file or directory (os error 2)\n\
                    hint: start it with: offshoot serve\n";
    assert_eq!(ended.stderr, expected);
    let json = finish(offshoot(&["--socket", "/nonexistent/d.sock", "--json", "exec", "sb", "--", "x"]), b"");
    assert_eq!(json.code, 7);
    assert_eq!(json.error()["code"], "daemon_unreachable");
    assert_eq!(json.error()["hint"], "start it with: offshoot serve");
}

#[test]
fn a_daemon_that_hangs_up_is_not_taken_for_an_answer() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("d.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || while listener.accept().is_ok() {});
    let ended = finish(offshoot(&["--socket", socket.to_str().unwrap(), "ls"]), b"");
    assert_eq!(ended.code, 7);
    assert!(ended.stderr.contains("ended during GET /offshoot/v1/sandboxes"), "{}", ended.stderr);
}

#[test]
fn ls_is_a_table_or_the_answer_itself() {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let mut clone = sandbox("sb-1", "running");
    clone["name"] = "web".into();
    clone["created_at"] = json!(now - 600);
    let mut fork = sandbox("sb-22", "dead");
    fork["parent"] = "sb-1".into();
    fork["created_at"] = json!(
        humantime::format_rfc3339_seconds(
            std::time::SystemTime::now() - std::time::Duration::from_secs(7200)
        )
        .to_string()
    );
    let body = json!({"sandboxes": [clone, fork]});
    let same = body.clone();
    let fake = Fake::start(Router::new().route("/sandboxes", get(move || async { answer(200, body) })));
    let expected = "\
ID     NAME  STATE    TEMPLATE  PARENT  AGE  PRIVATE    SHARED     PT
sb-1   web   running  py        -       10m  140.0 KiB  512.0 MiB  36.0 KiB
sb-22  -     dead     py        sb-1    2h   140.0 KiB  512.0 MiB  36.0 KiB
";
    assert_eq!(fake.run(&["ls"]).stdout, expected);
    assert_eq!(fake.run(&["ls", "--json"]).json(), same);
}

#[test]
fn tree_draws_the_lineage() {
    let node = |id: &str, children: Value| json!({"kind": "sandbox", "id": id, "state": "running", "children": children});
    let grandchild = json!([node("sb-3", json!([]))]);
    let children = json!([node("sb-1", json!([node("sb-2", grandchild)])), node("sb-4", json!([]))]);
    let root = json!({"kind": "template", "id": "py", "state": "ready", "children": children});
    let body = json!({"roots": [root, {"kind": "template", "id": "js", "state": "ready", "children": []}]});
    let same = body.clone();
    let fake = Fake::start(Router::new().route("/tree", get(move || async { answer(200, body) })));
    let expected = "\
template py ready
├── sb-1 running
│   └── sb-2 running
│       └── sb-3 running
└── sb-4 running
template js ready
";
    assert_eq!(fake.run(&["tree"]).stdout, expected);
    assert_eq!(fake.run(&["tree", "--json"]).json(), same);
}

#[test]
fn templates_and_images_are_listed_shown_and_removed() {
    let template = json!({"name": "py", "image": "deb", "memory_mib": 512, "vcpus": 2, "page_size": "thp",
        "layer_bytes": 3_145_728, "clones": ["sb-1"], "created_at": null, "memory": {"pss_kib": 2048}});
    let (one, listed) = (template.clone(), json!({"templates": [template]}));
    let in_use = json!({"code": "template_in_use", "kind": "caller", "message": "template py has live clones: sb-1",
        "hint": "remove it all the same with --force"});
    let remove = move |query: axum::extract::RawQuery| async move {
        match query.0.as_deref() {
            Some("force=true") => answer(200, json!({})),
            _ => answer(409, in_use),
        }
    };
    let routes = Router::new()
        .route("/templates", get(move || async { answer(200, listed) }))
        .route("/templates/py", get(move || async { answer(200, one) }).delete(remove))
        .route(
            "/images",
            get(|| async { answer(200, json!({"images": [{"name": "deb", "disk_mib": 2048}]})) }),
        );
    let fake = Fake::start(routes);
    let table = "\
NAME  IMAGE  MEMORY     VCPUS  PAGES  LAYERS   CLONES  AGE
py    deb    512.0 MiB  2      thp    3.0 MiB  1       -
";
    assert_eq!(fake.run(&["template", "ls"]).stdout, table);
    assert_eq!(
        fake.run(&["image", "ls"]).stdout,
        "NAME  KERNEL  DISK     AGE  DIGEST\ndeb   -       2.0 GiB  -    -\n"
    );
    let shown = fake.run(&["template", "show", "py"]).stdout;
    assert!(shown.contains("memory.pss: 2.0 MiB\n") && shown.contains("layer: 3.0 MiB\n"), "{shown}");
    let refused = fake.run(&["template", "rm", "py"]);
    assert_eq!(refused.code, 3);
    assert_eq!(
        refused.stderr,
        "error: template py has live clones: sb-1\nhint: remove it all the same with --force\n"
    );
    assert_eq!(fake.run(&["template", "rm", "py", "--force"]).code, 0);
}

#[test]
fn rm_goes_on_after_a_failure() {
    let gone = || async { axum::http::StatusCode::NO_CONTENT };
    let listed = json!({"sandboxes": [sandbox("a", "running"), sandbox("c", "dead")]});
    let routes = Router::new()
        .route("/sandboxes", get(move || async { answer(200, listed) }))
        .route("/sandboxes/a", delete(gone))
        .route("/sandboxes/b", delete(|| async { not_found("b") }))
        .route("/sandboxes/c", delete(gone));
    let fake = Fake::start(routes);
    let ended = fake.run(&["rm", "a", "b", "c"]);
    assert_eq!((ended.code, ended.stdout.as_str()), (3, "a\nc\n"));
    assert!(ended.stderr.contains("there is no sandbox b"), "{}", ended.stderr);
    let json = fake.run(&["rm", "a", "b", "--json"]);
    assert_eq!(json.json()["results"][1]["error"]["code"], "sandbox_not_found");
    assert_eq!(fake.run(&["rm", "--all"]).stdout, "a\nc\n");
}

#[test]
fn logs_are_the_console_and_follow_until_the_end() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static POLLS: AtomicUsize = AtomicUsize::new(0);
    let console = || async {
        let text = "boot\nlogin\npanic\n";
        let shown = [5, 5, 11, 17];
        text[..shown[POLLS.fetch_add(1, Ordering::SeqCst).min(3)]].to_owned()
    };
    let state = || async {
        answer(200, sandbox("sb", if POLLS.load(Ordering::SeqCst) < 3 { "running" } else { "dead" }))
    };
    let routes = Router::new().route("/sandboxes/sb/logs", get(console)).route("/sandboxes/sb", get(state));
    let fake = Fake::start(routes);
    assert_eq!(fake.run(&["logs", "sb", "--tail-bytes", "9"]).stdout, "boot\n");
    assert!(fake.requests()[0].target.ends_with("/sandboxes/sb/logs?tail_bytes=9"));
    let ended = fake.run(&["logs", "sb", "--follow"]);
    assert_eq!((ended.code, ended.stdout.as_str()), (0, "boot\nlogin\npanic\n"));
}

#[test]
fn doctor_asks_the_daemon_or_the_vmm_itself() {
    let report = json!({"kvm_opens": true, "api_version": 12, "runs_linux": true, "user_mips": 2000.5, "kernel_mips": 900,
        "capabilities": [{"name": "user_memory", "present": true}, {"name": "irqchip", "present": false}],
        "kernel_instructions": [{"name": "wrmsr", "ok": true, "detail": ""}], "novel": 1});
    let body = report.clone();
    let fake = Fake::start(Router::new().route("/doctor", get(move || async { answer(200, body) })));
    let expected = "\
daemon: running
/dev/kvm: opens, API version 12
capabilities: 1 of 2; missing: irqchip
guest user code: 2000.5 MIPS
guest kernel code: 900.0 MIPS
  ok     wrmsr
runs Linux guests: yes
";
    let ended = fake.run(&["doctor"]);
    assert_eq!((ended.code, ended.stdout.as_str()), (0, expected));
    assert_eq!(fake.run(&["doctor", "--json"]).json(), report);

    let folder = tempfile::tempdir().unwrap();
    let binary = copy_of_offshoot(folder.path());
    let ask = |args: &[&str]| {
        let mut command = std::process::Command::new(&binary);
        command.args(args).env("OFFSHOOT_SOCKET", "/nonexistent/d.sock").env("PATH", "/nonexistent");
        finish(command, b"")
    };
    let missing = ask(&["doctor"]);
    assert_eq!(missing.code, 7);
    assert!(
        missing.stderr.contains("offshoot-vmm") && missing.stderr.contains("offshoot serve"),
        "{}",
        missing.stderr
    );
    let vmm = folder.path().join("offshoot-vmm");
    script(
        &vmm,
        r#"test "$1" = --probe && echo '{"kvm_opens":false,"runs_linux":false,"reason":"there is no /dev/kvm"}'"#,
    );
    let ended = ask(&["doctor"]);
    assert_eq!(ended.code, 5);
    assert!(
        ended.stdout.starts_with("daemon: not running; start it with: offshoot serve\n"),
        "{}",
        ended.stdout
    );
    assert!(ended.stdout.ends_with("runs Linux guests: no: there is no /dev/kvm\n"), "{}", ended.stdout);
    script(&vmm, "echo it broke >&2; exit 3");
    let ended = ask(&["doctor"]);
    assert_eq!(ended.code, 8);
    assert!(ended.stderr.contains("it broke"), "{}", ended.stderr);
}

#[test]
fn serve_becomes_the_daemon_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let binary = copy_of_offshoot(folder.path());
    let serve = || {
        let mut command = std::process::Command::new(&binary);
        command.args(["--socket", "/run/x.sock", "serve", "--state-dir", "/s"]).env("PATH", "/nonexistent");
        finish(command, b"")
    };
    assert_eq!(serve().code, 5);
    script(&folder.path().join("offshootd"), r#"echo "$@"; exit 9"#);
    let ended = serve();
    assert_eq!((ended.code, ended.stdout.as_str()), (9, "--socket /run/x.sock --state-dir /s\n"));
}

#[test]
fn a_wrong_command_line_is_told_in_the_form_asked_for() {
    for args in [
        &["exec", "sb"][..],
        &["create", "Bad Name"],
        &["nonsense"],
        &["fork", "sb", "-n", "0"],
        &["run", "sb"],
    ] {
        let ended = finish(offshoot(args), b"");
        assert_eq!((ended.code, ended.stdout.as_str()), (2, ""), "{args:?}");
    }
    let json = finish(offshoot(&["--json", "fork", "sb", "-n", "0"]), b"");
    assert_eq!((json.code, json.error()["kind"].as_str()), (2, Some("usage")));
    assert_eq!(finish(offshoot(&["--help"]), b"").code, 0);
    let script = finish(offshoot(&["completions", "bash"]), b"");
    assert!(script.code == 0 && script.stdout.contains("_offshoot()"));
}

#[test]
fn a_reader_that_goes_away_is_no_panic() {
    let many: Vec<Value> = (0..5000).map(|n| sandbox(&format!("sb-{n}"), "running")).collect();
    let body = json!({"sandboxes": many});
    let fake = Fake::start(Router::new().route("/sandboxes", get(move || async { answer(200, body) })));
    let mut command = fake.command(&["ls"]);
    let mut child =
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let stderr = collect(child.stderr.take().unwrap());
    assert_eq!(wait(&mut child).code(), Some(141));
    assert_eq!(stderr.join().unwrap(), "");
}
