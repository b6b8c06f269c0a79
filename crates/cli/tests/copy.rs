//! `cp`: both ways, and what must not be left behind.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it says")]

mod support;

use axum::Router;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::json;
use support::*;

const FILES: &str = "/sandboxes/sb/envd/files";

fn taking() -> Fake {
    let taken = || async { answer(200, json!([{"name": "f", "path": "/tmp/f", "type": "file"}])) };
    Fake::start(Router::new().route(FILES, post(taken)))
}

fn content() -> Vec<u8> {
    (0..3_000_000u32).map(|n| (n % 253) as u8).collect()
}

#[test]
fn a_file_goes_in_whole() {
    let fake = taking();
    let file = fake.folder.path().join("a b.bin");
    std::fs::write(&file, content()).unwrap();
    let ended = fake.run(&["cp", file.to_str().unwrap(), "sb:/tmp/x & y/", "--user", "root"]);
    assert_eq!((ended.code, ended.stdout.as_str()), (0, ""));
    assert!(ended.stderr.starts_with("copied 2.9 MiB from "), "{}", ended.stderr);
    let request = &fake.requests()[0];
    let query = "?path=%2Ftmp%2Fx%20%26%20y%2Fa%20b%2Ebin&username=root";
    assert!(request.target.ends_with(query), "{}", request.target);
    assert_eq!(request.header("content-length"), Some("3000000"));
    assert_eq!(request.header("content-type"), Some("application/octet-stream"));
    assert!(request.body == content());
}

#[test]
fn standard_input_goes_in() {
    let fake = taking();
    let ended = fake.run_with(&["cp", "-", "sb:notes.txt", "--json"], b"hello");
    assert_eq!(ended.code, 0);
    assert_eq!(
        (ended.json()["bytes"].as_u64(), ended.json()["to"].as_str()),
        (Some(5), Some("sb:notes.txt"))
    );
    assert_eq!(&fake.requests()[0].body[..], b"hello");
}

#[test]
fn what_cannot_go_in_is_named() {
    let fake = taking();
    let missing = fake.run(&["cp", "/nonexistent/file", "sb:/x"]);
    assert_eq!(missing.code, 3);
    assert!(missing.stderr.contains("/nonexistent/file"), "{}", missing.stderr);
    let folder = fake.run(&["cp", fake.folder.path().to_str().unwrap(), "sb:/x"]);
    assert_eq!(folder.code, 3);
    assert!(
        folder.stderr.contains("is a directory") && folder.stderr.contains("hint: tar -C "),
        "{}",
        folder.stderr
    );
    assert!(fake.requests().is_empty());
}

#[test]
fn a_full_guest_disk_is_the_failure_though_most_is_not_sent() {
    let full = || async { answer(507, json!({"code": 507, "message": "no space for '/x'"})) };
    let fake = Fake::start_unrecorded(Router::new().route(FILES, post(full)));
    let file = fake.folder.path().join("large");
    std::fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    for _ in 0..10 {
        let ended = fake.run(&["cp", file.to_str().unwrap(), "sb:/x"]);
        assert_eq!((ended.code, ended.stderr.as_str()), (6, "error: no space for '/x'\n"));
    }
}

fn giving(response: impl Fn() -> Response + Clone + Send + Sync + 'static) -> Fake {
    Fake::start(Router::new().route(FILES, get(move || async move { response() })))
}

#[test]
fn a_file_comes_out_whole() {
    let fake = giving(|| content().into_response());
    let target = fake.folder.path().join("out");
    std::fs::create_dir(&target).unwrap();
    let ended = fake.run(&["cp", "sb:/var/log/x.bin", target.to_str().unwrap()]);
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert!(std::fs::read(target.join("x.bin")).unwrap() == content());
    let output = fake.command(&["cp", "sb:/var/log/x.bin", "-"]).output().unwrap();
    assert!(output.status.success() && output.stdout == content());
}

#[test]
fn a_copy_that_breaks_off_leaves_the_old_file() {
    let torn = || {
        let stream = futures_util::stream::iter([Ok("half"), Err(std::io::Error::other("gone"))]);
        Body::from_stream(stream).into_response()
    };
    let fake = giving(torn);
    let folder = fake.folder.path().join("out");
    std::fs::create_dir(&folder).unwrap();
    let target = folder.join("x");
    std::fs::write(&target, "old").unwrap();
    let ended = fake.run(&["cp", "sb:/x", target.to_str().unwrap()]);
    assert_eq!(ended.code, 7, "{}", ended.stderr);
    assert_eq!(std::fs::read(&target).unwrap(), b"old");
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "no temporary file stays");
}

#[test]
fn a_missing_guest_file_creates_none_here() {
    let fake = giving(|| answer(404, json!({"code": 404, "message": "path '/x' does not exist"})));
    let target = fake.folder.path().join("x");
    let ended = fake.run(&["cp", "sb:/x", target.to_str().unwrap()]);
    assert_eq!((ended.code, ended.stderr.as_str()), (3, "error: path '/x' does not exist\n"));
    assert!(!target.exists());
}

#[test]
fn a_mode_that_was_chosen_here_stays() {
    use std::os::unix::fs::PermissionsExt;
    let fake = giving(|| "new".into_response());
    let target = fake.folder.path().join("secret");
    std::fs::write(&target, "old").unwrap();
    std::fs::set_permissions(&target, std::fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(fake.run(&["cp", "sb:/x", target.to_str().unwrap()]).code, 0);
    assert_eq!(std::fs::read(&target).unwrap(), b"new");
    assert_eq!(std::fs::metadata(&target).unwrap().permissions().mode() & 0o777, 0o600);
}
