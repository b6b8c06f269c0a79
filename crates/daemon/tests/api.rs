//! The daemon over its socket, with fake VMMs.

#![allow(clippy::unwrap_used, reason = "helpers of tests, where a panic is the report")]

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(20);

/// A daemon with directories of its own.
struct Daemon {
    dir: tempfile::TempDir,
    child: Child,
}

struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// The last line of a long work's answer.
    fn outcome(&self) -> Value {
        serde_json::from_str(self.body.lines().last().expect("a line")).expect("JSON")
    }
}

fn fake_vmm() -> PathBuf {
    let daemon = Path::new(env!("CARGO_BIN_EXE_offshootd"));
    let path = daemon.parent().expect("a directory").join("examples/daemon-fake-vmm");
    assert!(path.exists(), "{} is missing: `cargo build -p offshoot-daemon --examples`", path.display());
    path
}

fn command(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_offshootd"));
    command.arg("--run-dir").arg(dir.join("run")).arg("--state-dir").arg(dir.join("state"));
    command.arg("--vmm").arg(fake_vmm()).args(["--identity-timeout-ms", "3000", "--log", "warn"]);
    command.env_remove("OFFSHOOT_SOCKET").env_remove("OFFSHOOT_LOG");
    command
}

impl Daemon {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self::start_in(dir)
    }

    fn start_in(dir: tempfile::TempDir) -> Self {
        let child = command(dir.path()).spawn().unwrap();
        let daemon = Self { dir, child };
        let until = Instant::now() + PATIENCE;
        while UnixStream::connect(daemon.socket()).is_err() {
            assert!(Instant::now() < until, "the daemon does not answer");
            std::thread::sleep(Duration::from_millis(10));
        }
        daemon
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("run/offshootd.sock")
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    fn call(&self, method: &str, path: &str, body: &str) -> Answer {
        let mut stream = self.connect();
        write!(
            stream,
            "{method} /offshoot/v1{path} HTTP/1.1\r\nHost: x\r\nConnection: close, x-hop\r\nX-Hop: 1\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        answer(stream)
    }

    fn image(&self) {
        let file = |name: &str, bytes: &[u8]| {
            let path = self.dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        let files = json!({ "kernel": "/bin/true", "initramfs": file("i", b"cpio"), "rootfs": file("r", &[0; 4096]) });
        let body = json!({ "name": "base", "source": { "files": files } });
        let answer = self.call("POST", "/images", &body.to_string());
        assert_eq!(answer.outcome()["type"], "result", "{}", answer.body);
    }

    fn template(&self, cmdline: &str) {
        self.image();
        let body = json!({ "name": "t", "image": "base", "cmdline": cmdline,
                           "warm": { "source": "import numpy", "file_name": "w.py" } });
        let answer = self.call("POST", "/templates", &body.to_string());
        assert_eq!(answer.outcome()["type"], "result", "{}", answer.body);
    }

    fn create(&self, count: u32) -> Answer {
        self.call("POST", "/sandboxes", &json!({ "template": "t", "count": count }).to_string())
    }

    fn one(&self) -> String {
        self.create(1).json()["results"][0]["ok"]["id"].as_str().unwrap().to_owned()
    }

    fn terminate(&mut self) -> std::process::ExitStatus {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < until, "the daemon does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.terminate();
        }
    }
}

/// Reads an answer whose connection closes after it.
fn answer(mut stream: UnixStream) -> Answer {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head: {text:?}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let head = head.to_ascii_lowercase();
    let body = if head.contains("transfer-encoding: chunked") { unchunk(body) } else { body.to_owned() };
    Answer { status, head, body }
}

fn unchunk(mut rest: &str) -> String {
    let mut body = String::new();
    while let Some((size, tail)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        body.push_str(&tail[..size]);
        rest = tail.get(size + 2..).unwrap_or("");
    }
    body
}

fn alive(pid: &Value) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// Waits until a process has ended and whoever forked it has noticed.
fn wait_gone(pid: &Value) {
    let until = Instant::now() + PATIENCE;
    while alive(pid) {
        assert!(Instant::now() < until, "process {pid} lives");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn health_and_doctor_answer() {
    let daemon = Daemon::start();
    assert!(daemon.call("GET", "/health", "").json()["pid"].is_u64());
    assert_eq!(daemon.call("GET", "/doctor", "").json()["kvm"], "fake");
}

#[test]
fn wrong_requests_are_answered_in_the_errors_shape() {
    let daemon = Daemon::start();
    let check = |method: &str, path: &str, body: &str, status: u16, code: &str, names: &str| {
        let answer = daemon.call(method, path, body);
        assert_eq!(answer.status, status, "{}", answer.body);
        let error = answer.json();
        assert_eq!(error["code"], code, "{error}");
        assert!(error["message"].as_str().unwrap().contains(names), "{error}");
    };
    check("POST", "/sandboxes", "{\"template\":", 400, "bad_json", "line 1 column");
    check("POST", "/sandboxes", "{\"template\":\"t\",\"colour\":1}", 400, "bad_json", "colour");
    check("POST", "/sandboxes", "{\"template\":\"none\"}", 404, "template_not_found", "none");
    check(
        "POST",
        "/images",
        "{\"name\":\"a\",\"source\":{\"debian\":{\"disk\":1}}}",
        400,
        "bad_json",
        "disk",
    );
    check("GET", "/sandboxes/none", "", 404, "sandbox_not_found", "none");
    check("GET", "/sandboxes/none/logs?tail=3", "", 400, "bad_query", "tail");
    check("DELETE", "/templates/none?force=true", "", 404, "template_not_found", "none");
    check("DELETE", "/images/Bad", "", 400, "bad_name", "Bad");
    check("GET", "/images/none", "", 404, "image_not_found", "none");
    check("GET", "/nowhere", "", 404, "route_not_found", "nowhere");
    check("PUT", "/tree", "", 405, "method_not_allowed", "PUT");
    check("GET", "/sandboxes/none/envd/health", "", 404, "sandbox_not_found", "none");
}

#[test]
fn a_template_is_built_cloned_forked_and_removed() {
    let daemon = Daemon::start();
    daemon.template("");
    let images = daemon.call("GET", "/images", "").json();
    assert_eq!(images["images"][0]["name"], "base");
    assert_eq!(daemon.call("DELETE", "/images/base", "").json()["code"], "image_in_use");
    let created = daemon.create(3);
    assert_eq!(created.status, 200);
    let clone = created.json()["results"][1]["ok"].clone();
    assert_eq!((&clone["state"], &clone["template"]), (&json!("running"), &json!("t")));
    assert!(clone["stop_lines"]["identity_applied_ms"].as_f64().unwrap() > 0.0, "{clone}");
    assert!(clone["memory"]["rss_kib"].as_u64().unwrap() > 0, "{clone}");
    let id = clone["id"].as_str().unwrap();
    let forked = daemon.call("POST", &format!("/sandboxes/{id}/fork"), "{\"count\":2}").json();
    assert!(forked["times"]["pause_ms"].is_f64(), "{forked}");
    assert_eq!(forked["results"][1]["ok"]["parent"], clone["id"]);
    let template = daemon.call("GET", "/templates/t", "").json();
    assert_eq!(template["clones"].as_array().unwrap().len(), 5);
    assert_eq!(template["page_size"], "thp");
    let tree = daemon.call("GET", "/tree", "").json();
    assert_eq!(tree["roots"][0]["children"].as_array().unwrap().len(), 3);
    let logs = daemon.call("GET", &format!("/sandboxes/{id}/logs?tail_bytes=100"), "");
    assert!(logs.head.contains("text/plain"), "{}", logs.head);
    let in_use = daemon.call("DELETE", "/templates/t", "");
    assert_eq!((in_use.status, &in_use.json()["code"]), (409, &json!("template_in_use")));
    assert_eq!(daemon.call("DELETE", &format!("/sandboxes/{id}"), "").status, 204);
    wait_gone(&clone["pid"]);
    assert_eq!(daemon.call("DELETE", "/templates/t?force=true", "").status, 204);
    assert_eq!(daemon.call("GET", "/sandboxes", "").json()["sandboxes"].as_array().unwrap().len(), 4);
}

#[test]
fn partial_failure_is_200_and_total_failure_the_first_errors_status() {
    let daemon = Daemon::start();
    daemon.template("fake.fail_child=0");
    let created = daemon.create(2);
    assert_eq!(created.status, 200);
    assert_eq!(created.json()["results"][0]["error"]["code"], "child_failed");
    assert_eq!(created.json()["results"][1]["ok"]["state"], "running");
    let created = daemon.create(1);
    assert_eq!(created.status, 503);
    assert_eq!(created.json()["results"][0]["error"]["kind"], "host");
}

#[test]
fn a_refused_fork_has_one_error_for_each_child_and_no_times() {
    let daemon = Daemon::start();
    daemon.template("fake.refuse_fork");
    let id = daemon.one();
    let answer = daemon.call("POST", &format!("/sandboxes/{id}/fork"), "{\"count\":2}");
    assert_eq!(answer.status, 503);
    let body = answer.json();
    assert_eq!(body["results"][1]["error"]["code"], "vmm_refused", "{body}");
    assert!(body.get("times").is_none(), "{body}");
    assert_eq!(daemon.call("GET", &format!("/sandboxes/{id}"), "").json()["state"], "running");
}

#[test]
fn a_late_identity_is_an_error_that_says_so() {
    let daemon = Daemon::start();
    daemon.template("fake.mute_child=0");
    let error = daemon.create(1).json()["results"][0]["error"].clone();
    assert_eq!(error["code"], "identity_not_applied");
    assert!(error["message"].as_str().unwrap().contains("was not acknowledged within 3 s"), "{error}");
    assert_eq!(daemon.call("GET", "/sandboxes", "").json()["sandboxes"], json!([]));
}

#[test]
fn progress_comes_line_by_line_and_ends_with_an_error_in_shape() {
    let daemon = Daemon::start();
    daemon.image();
    let body = json!({ "name": "t", "image": "base", "warm": { "source": "raise ValueError()" } });
    let answer = daemon.call("POST", "/templates", &body.to_string());
    assert_eq!(answer.status, 200);
    let first: Value = serde_json::from_str(answer.body.lines().next().unwrap()).unwrap();
    assert_eq!((&first["type"], &first["step"]), (&json!("progress"), &json!("boot")));
    let outcome = answer.outcome();
    assert_eq!(outcome["error"]["code"], "warm_failed", "{outcome}");
    assert!(outcome["error"]["message"].as_str().unwrap().contains("ValueError"), "{outcome}");
}

#[test]
fn a_build_whose_client_goes_away_is_cancelled() {
    let daemon = Daemon::start();
    daemon.image();
    let body =
        json!({ "name": "t", "image": "base", "warm": { "source": "hang" }, "warm_timeout_ms": 600_000 });
    let mut stream = daemon.connect();
    let body = body.to_string();
    write!(
        stream,
        "POST /offshoot/v1/templates HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut lines = BufReader::new(&stream).lines();
    lines.find(|line| line.as_ref().unwrap().contains("\"warm\"")).unwrap().unwrap();
    drop(lines);
    drop(stream);
    let until = Instant::now() + PATIENCE;
    let sandboxes = daemon.dir.path().join("run/sandboxes");
    while std::fs::read_dir(&sandboxes).unwrap().count() > 0 {
        assert!(Instant::now() < until, "the build goes on");
        std::thread::sleep(Duration::from_millis(20));
    }
    let body = json!({ "name": "t", "image": "base" });
    assert_eq!(daemon.call("POST", "/templates", &body.to_string()).outcome()["type"], "result");
}

#[test]
fn the_proxy_forwards_path_and_query_and_keeps_hop_headers() {
    let daemon = Daemon::start();
    daemon.template("");
    let id = daemon.one();
    let answer = daemon.call("GET", &format!("/sandboxes/{id}/envd/files?path=%2Fetc"), "");
    assert_eq!(answer.status, 200);
    assert!(answer.body.starts_with("GET /files?path=%2Fetc HTTP/1.1"), "{}", answer.body);
    assert!(!answer.body.to_ascii_lowercase().contains("x-hop"), "{}", answer.body);
    assert!(answer.head.contains("x-guest: yes") && !answer.head.contains("keep-alive"), "{}", answer.head);
}

#[test]
fn the_proxy_streams_both_ways_at_once() {
    let daemon = Daemon::start();
    daemon.template("");
    let id = daemon.one();
    let mut stream = daemon.connect();
    write!(
        stream,
        "POST /offshoot/v1/sandboxes/{id}/interpreter/echo HTTP/1.1\r\nHost: x\r\n\
         Transfer-Encoding: chunked\r\n\r\n3\r\none\r\n"
    )
    .unwrap();
    let mut seen = String::new();
    let mut block = [0; 1024];
    let mut until = |stream: &mut UnixStream, word: &str| {
        while !seen.contains(word) {
            let read = stream.read(&mut block).unwrap();
            assert!(read > 0, "closed after {seen:?}");
            seen.push_str(std::str::from_utf8(&block[..read]).unwrap());
        }
    };
    // The first part comes back while the request is still being sent.
    until(&mut stream, "one");
    stream.write_all(b"3\r\ntwo\r\n").unwrap();
    until(&mut stream, "two");
    stream.write_all(b"0\r\n\r\n").unwrap();
}

#[test]
fn a_guest_that_closes_early_is_502_and_a_dead_one_409() {
    let daemon = Daemon::start();
    daemon.template("");
    let id = daemon.one();
    let closed = daemon.call("GET", &format!("/sandboxes/{id}/envd/close"), "");
    assert_eq!((closed.status, &closed.json()["kind"]), (502, &json!("state")), "{}", closed.body);
    daemon.call("GET", &format!("/sandboxes/{id}/envd/panic"), "");
    let until = Instant::now() + PATIENCE;
    let dead = loop {
        let sandbox = daemon.call("GET", &format!("/sandboxes/{id}"), "").json();
        if sandbox["state"] == "dead" {
            break sandbox;
        }
        assert!(Instant::now() < until, "{sandbox}");
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(dead["cause"].as_str().unwrap().contains("Kernel panic"), "{dead}");
    let answer = daemon.call("GET", &format!("/sandboxes/{id}/envd/x"), "");
    assert_eq!((answer.status, &answer.json()["code"]), (409, &json!("sandbox_not_running")));
}

#[test]
fn sigterm_leaves_nothing() {
    let mut daemon = Daemon::start();
    daemon.template("");
    let created = daemon.create(3).json();
    let pids: Vec<Value> = (0..3).map(|i| created["results"][i]["ok"]["pid"].clone()).collect();
    assert!(pids.iter().all(alive));
    assert!(daemon.terminate().success());
    pids.iter().for_each(wait_gone);
    assert!(!daemon.socket().exists());
    assert_eq!(std::fs::read_dir(daemon.dir.path().join("run/sandboxes")).unwrap().count(), 0);
}

#[test]
fn a_killed_daemon_takes_its_sandboxes_along_and_the_next_one_starts_clean() {
    let mut daemon = Daemon::start();
    daemon.template("");
    let created = daemon.create(2).json();
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    assert!(daemon.socket().exists());
    wait_gone(&created["results"][0]["ok"]["pid"]);
    let dir = std::mem::replace(&mut daemon.dir, tempfile::tempdir().unwrap());
    let next = Daemon::start_in(dir);
    assert_eq!(next.call("GET", "/sandboxes", "").json()["sandboxes"], json!([]));
    assert_eq!(next.call("GET", "/images/base", "").status, 200);
    assert_eq!(std::fs::read_dir(next.dir.path().join("run/sandboxes")).unwrap().count(), 0);
}

#[test]
fn a_second_daemon_is_refused_and_the_first_lives() {
    let daemon = Daemon::start();
    let second = command(daemon.dir.path()).stderr(Stdio::piped()).output().unwrap();
    assert!(!second.status.success());
    let said = String::from_utf8_lossy(&second.stderr);
    assert!(said.contains("another offshootd runs"), "{said}");
    let mut other = command(&daemon.dir.path().join("other"));
    let second = other.arg("--socket").arg(daemon.socket()).stderr(Stdio::piped()).output().unwrap();
    let said = String::from_utf8_lossy(&second.stderr);
    assert!(!second.status.success() && said.contains("another daemon answers"), "{said}");
    assert_eq!(daemon.call("GET", "/health", "").status, 200);
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(daemon.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}
