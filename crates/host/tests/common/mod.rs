//! A host whose VMMs are fakes (see `examples/fake-vmm`).

#![allow(dead_code, reason = "each test file uses its part")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use offshoot_host::engine::{
    Cancel, CreateSpec, ForkSpec, ImageSource, Offspring, Progress, SandboxInfo, TemplateError, TemplateInfo,
    TemplateSpec, WarmUp,
};
use offshoot_host::{Host, HostConfig};
use offshoot_image::ImportFiles;
use offshoot_protocol::control::PageSize;

pub const PATIENCE: Duration = Duration::from_secs(20);

/// The example `fake-vmm`, which `cargo test` builds beside the tests.
pub fn fake_vmm() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let path = test.parent().and_then(Path::parent).expect("tests are in deps/").join("examples/fake-vmm");
    assert!(path.exists(), "{} is missing: `cargo build -p offshoot-host --examples`", path.display());
    path
}

pub struct Bench {
    pub host: Arc<Host>,
    pub dir: tempfile::TempDir,
}

impl Drop for Bench {
    fn drop(&mut self) {
        let quiet = self.host.shutdown();
        assert!(quiet || std::thread::panicking(), "VMMs outlived the host");
    }
}

impl Bench {
    pub fn new() -> Self {
        Self::with(|_| {})
    }

    pub fn with(change: impl FnOnce(&mut HostConfig)) -> Self {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid())).expect("subreaper");
        let dir = tempfile::tempdir().expect("a directory");
        let (run, state) = (dir.path().join("run"), dir.path().join("state"));
        let mut config = HostConfig::new(run, state, fake_vmm(), "/nonexistent/agent".into());
        config.identity_timeout = Duration::from_secs(15);
        change(&mut config);
        let bench = Self { host: Host::start(config).expect("a host"), dir };
        let file = |name: &str, bytes: &[u8]| {
            let path = bench.dir.path().join(name);
            std::fs::write(&path, bytes).expect("a file");
            path
        };
        let files = ImportFiles {
            kernel: "/bin/true".into(),
            initramfs: file("initramfs", b"cpio"),
            rootfs: file("rootfs", &[0; 4096]),
        };
        bench.host.make_image("base", ImageSource::Files(files), &mut |_| {}).expect("an image");
        bench
    }

    pub fn spec(name: &str, cmdline: &str) -> TemplateSpec {
        TemplateSpec {
            name: name.into(),
            image: "base".into(),
            memory_mib: 128,
            vcpus: 1,
            page_size: PageSize::Thp,
            overlay_limit_mib: 64,
            cmdline: cmdline.into(),
            warm: Some(WarmUp { source: "import numpy".into(), file_name: "warm.py".into() }),
            warm_timeout: PATIENCE,
            boot_timeout: PATIENCE,
        }
    }

    pub fn build(&self, spec: TemplateSpec) -> Result<TemplateInfo, TemplateError> {
        self.host.build_template(spec, &Cancel::default(), &mut |_: Progress| {})
    }

    /// A template `t` whose guests were given `cmdline`.
    pub fn template(&self, cmdline: &str) {
        self.build(Self::spec("t", cmdline)).expect("a template");
    }

    pub fn create(&self, count: u32) -> Offspring {
        let spec = CreateSpec { template: "t".into(), count, ..CreateSpec::default() };
        self.host.create(&spec, offshoot_host::engine::called_now()).expect("a create call")
    }

    pub fn one(&self) -> SandboxInfo {
        self.create(1).results.remove(0).expect("a sandbox")
    }

    pub fn fork(&self, parent: &str, count: u32) -> Offspring {
        let spec = ForkSpec { parent: parent.into(), count, ..ForkSpec::default() };
        self.host.fork(&spec, offshoot_host::engine::called_now()).expect("a fork call")
    }

    /// Directories of sandboxes on disk.
    pub fn dirs(&self) -> usize {
        std::fs::read_dir(self.dir.path().join("run/sandboxes")).expect("a directory").count()
    }

    /// One HTTP request to the fake guest, which ends the connection.
    pub fn poke(&self, id: &str, path: &str) {
        use std::io::{Read, Write};
        let vsock = self.host.vsock_path(id).expect("a running sandbox");
        let mut stream = std::os::unix::net::UnixStream::connect(vsock).expect("a VMM that accepts");
        write!(stream, "CONNECT 49983\nGET {path} HTTP/1.1\r\n\r\n").expect("a VMM that reads");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        // Its end may be a reset.
        let _ = stream.read_to_end(&mut Vec::new());
    }
}

/// Waits until `condition` holds.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < until, "never came true: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
