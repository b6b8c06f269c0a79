//! Upload and download.

use std::os::unix::fs::{MetadataExt, PermissionsExt};

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::Full;
use serde_json::{Value, json};

use crate::support::Agent;

fn encoded(path: &std::path::Path) -> String {
    form_urlencoded::byte_serialize(path.to_str().unwrap().as_bytes()).collect()
}

async fn upload(
    agent: &Agent,
    query: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> (StatusCode, Value) {
    let request = Request::post(format!("/files?{query}")).header("host", "x");
    let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    let (status, _, body) = agent.call(49983, request.body(Full::from(body.into())).unwrap()).await;
    (status, serde_json::from_slice(&body).unwrap())
}

const RAW: &[(&str, &str)] = &[("content-type", "application/octet-stream")];

async fn download(agent: &Agent, path: &std::path::Path, range: &str) -> (StatusCode, HeaderMap, Bytes) {
    let request =
        Request::get(format!("/files?path={}", encoded(path))).header("host", "x").header("range", range);
    agent.call(49983, request.body(Full::default()).unwrap()).await
}

#[tokio::test]
async fn what_goes_up_comes_down() {
    let agent = Agent::start().await;
    let path = agent.path().join("new/dir/a b.bin");
    let content: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    let (status, body) = upload(&agent, &format!("path={}", encoded(&path)), RAW, content.clone()).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(body, json!([{"name": "a b.bin", "path": path, "type": "file"}]));
    let (status, headers, down) = download(&agent, &path, "").await;
    assert_eq!((status, headers["content-length"].to_str().unwrap()), (StatusCode::OK, "3000000"));
    assert_eq!(headers["content-disposition"], "inline; filename=\"a b.bin\"");
    assert!(down == content, "the content differs");
    let (status, headers, part) = download(&agent, &path, "bytes=100000-200000").await;
    assert_eq!(status, StatusCode::PARTIAL_CONTENT);
    assert_eq!(headers["content-range"], "bytes 100000-200000/3000000");
    assert!(part == content[100_000..=200_000], "the part differs");
    let (status, headers, _) = download(&agent, &path, "bytes=3000000-").await;
    assert_eq!(
        (status, headers["content-range"].to_str().unwrap()),
        (StatusCode::RANGE_NOT_SATISFIABLE, "bytes */3000000")
    );
}

#[tokio::test]
async fn an_existing_file_is_replaced_whole_and_keeps_its_mode() {
    let agent = Agent::start().await;
    let path = agent.path().join("script");
    let link = agent.path().join("link");
    std::fs::write(&path, "old").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let inode = std::fs::metadata(&path).unwrap().ino();
    let (status, body) = upload(&agent, &format!("path={}", encoded(&link)), RAW, "new").await;
    assert_eq!(status, StatusCode::OK, "{body}");
    assert!(link.is_symlink());
    let metadata = std::fs::metadata(&path).unwrap();
    assert_eq!((std::fs::read_to_string(&path).unwrap().as_str(), metadata.mode() & 0o777), ("new", 0o755));
    assert_ne!(metadata.ino(), inode, "written beside and renamed");
}

#[tokio::test]
async fn several_files_come_in_one_multipart_body() {
    let agent = Agent::start().await;
    let (one, two) = (agent.path().join("one"), agent.path().join("sub/two"));
    let part = |path: &std::path::Path, content: &str| {
        format!(
            "--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{}\"\r\n\r\n{content}\r\n",
            path.display()
        )
    };
    let body = part(&one, "1") + &part(&two, "22") + "--XX--\r\n";
    let headers = [("content-type", "multipart/form-data; boundary=XX")];
    let (status, answer) = upload(&agent, "", &headers, body.clone()).await;
    assert_eq!((status, answer.as_array().map(Vec::len)), (StatusCode::OK, Some(2)), "{answer}");
    assert_eq!(std::fs::read_to_string(&two).unwrap(), "22");
    let single = agent.path().join("single");
    let (status, answer) = upload(&agent, &format!("path={}", encoded(&single)), &headers, body).await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{answer}");
    let (status, answer) = upload(&agent, "path=x", &headers, "--XX--\r\n").await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{answer}");
}

#[tokio::test]
async fn wrong_uploads_are_refused_and_leave_nothing() {
    let agent = Agent::start().await;
    let directory = agent.path().join("dir");
    std::fs::create_dir(&directory).unwrap();
    let query = format!("path={}", encoded(&directory));
    let (status, body) = upload(&agent, &query, RAW, "x").await;
    assert_eq!((status, body["code"].as_i64()), (StatusCode::BAD_REQUEST, Some(400)));
    let below_file = format!("path={}", encoded(&agent.path().join("49983.sock/x")));
    assert_eq!(upload(&agent, &below_file, RAW, "x").await.0, StatusCode::BAD_REQUEST);
    assert_eq!(upload(&agent, "", RAW, "x").await.0, StatusCode::BAD_REQUEST);
    let gzip = [("content-type", "application/octet-stream"), ("content-encoding", "gzip")];
    let file = format!("path={}", encoded(&directory.join("f")));
    assert_eq!(upload(&agent, &file, &gzip, "x").await.0, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    assert_eq!(
        upload(&agent, &format!("{file}&username=no-such-user"), RAW, "x").await.0,
        StatusCode::UNAUTHORIZED
    );
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0);
}

#[tokio::test]
async fn a_full_disk_is_said_and_the_old_file_stays() {
    let full = std::path::Path::new("/dev/full");
    if !rustix::process::geteuid().is_root() || !full.exists() {
        eprintln!("skipped: only root can mount a small file system");
        return;
    }
    let agent = Agent::start().await;
    let small = agent.path().join("small");
    std::fs::create_dir(&small).unwrap();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=256k", "tmpfs"])
        .arg(&small)
        .status()
        .is_ok_and(|status| status.success());
    if !mounted {
        eprintln!("skipped: this machine does not let a test mount a small file system");
        return;
    }
    let path = small.join("f");
    std::fs::write(&path, "old").unwrap();
    let (status, body) = upload(&agent, &format!("path={}", encoded(&path)), RAW, vec![1; 1 << 20]).await;
    let left: Vec<_> = std::fs::read_dir(&small).unwrap().flatten().map(|entry| entry.file_name()).collect();
    let content = std::fs::read_to_string(&path);
    std::process::Command::new("umount").arg(&small).status().unwrap();
    assert_eq!((status, body["code"].as_i64()), (StatusCode::INSUFFICIENT_STORAGE, Some(507)));
    assert_eq!((content.unwrap().as_str(), left), ("old", vec!["f".into()]));
}

#[tokio::test]
async fn downloads_of_odd_things_have_answers() {
    let agent = Agent::start().await;
    let agent = &agent;
    let get = async |path: &str| download(agent, std::path::Path::new(path), "").await;
    let (status, _, body) = get("/no/such/file").await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    let body: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(body, json!({"code": 404, "message": "path '/no/such/file' does not exist"}));
    assert_eq!(get("/tmp").await.0, StatusCode::BAD_REQUEST);
    assert_eq!(get("/dev/zero").await.0, StatusCode::BAD_REQUEST);
    let (status, _, body) = get("/proc/self/status").await;
    assert_eq!(status, StatusCode::OK);
    assert!(body.starts_with(b"Name:"));
    let empty = agent.path().join("empty");
    std::fs::write(&empty, "").unwrap();
    let (status, headers, _) = download(agent, &empty, "").await;
    assert_eq!((status, headers["content-length"].to_str().unwrap()), (StatusCode::OK, "0"));
}

#[tokio::test]
async fn the_guest_tells_its_health_and_load() {
    let agent = Agent::start().await;
    let (status, headers, _) = agent.get("/health").await;
    assert_eq!((status, headers["cache-control"].to_str().unwrap()), (StatusCode::NO_CONTENT, "no-store"));
    let (_, _, body) = agent.get("/metrics").await;
    let metrics: Value = serde_json::from_slice(&body).unwrap();
    for name in ["ts", "cpu_count", "mem_total", "mem_used", "mem_total_mib", "disk_total", "disk_used"] {
        assert!(metrics[name].as_u64().is_some_and(|value| value > 0), "{name} in {metrics}");
    }
}
