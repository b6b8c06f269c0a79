//! QEMU and the virtiofs servers of one run.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use offshoot_image::cpio::Cpio;
use offshoot_image::initramfs;
use xtask::lab_protocol::{JOB_FILE, PORTS, STDIN_PORT, Share};

use super::link;
use super::plan::Plan;

/// What the lab's init loads: its devices, KVM, and what tests and sandboxes use early.
const MODULES: [&str; 10] = [
    "virtio_pci",
    "virtio_blk",
    "virtio_console",
    "virtio_rng",
    "virtiofs",
    "overlay",
    "kvm_amd",
    "tun",
    "loop",
    "crc32c_intel",
];
/// Kernel command line. Warnings and worse go to the console; an oops ends the machine; no time is spent on defences
/// against guests that are our own.
const COMMAND_LINE: &str = "console=ttyS0 quiet loglevel=5 oops=panic panic=-1 mitigations=off random.trust_cpu=on \
                            cgroup_no_v1=all no_timer_check tsc=reliable";
/// Without XSAVE: the emulated SVM does not intercept XSETBV, so a guest of the lab's would lose its vector state.
const CPU: &str = "max,-xsave,+svm,+npt";
/// How long a virtiofs server may take to listen.
const SERVER_WAIT: Duration = Duration::from_secs(10);

/// A process that is killed and reaped when dropped, and that the kernel kills when this process dies.
#[derive(Debug)]
struct Guarded {
    child: Child,
}

impl Guarded {
    fn spawn(program: &Path, log: &Path, arguments: &[String]) -> Result<Self> {
        let output = File::create(log).with_context(|| format!("could not create {}", log.display()))?;
        // setpriv(1) has the kernel kill the program when the thread that started it dies: this one, main.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--"])
            .arg(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            // A terminal's ^C is for this process, which ends the others in order.
            .process_group(0)
            .spawn()
            .with_context(|| format!("could not start {}", program.display()))?;
        Ok(Self { child })
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // Both fail only for a process that has ended and been reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The running lab.
#[derive(Debug)]
pub struct Machine {
    // Dropped first: the servers end by themselves when QEMU does.
    qemu: Guarded,
    _servers: Vec<Guarded>,
}

impl Machine {
    /// Starts the servers, then QEMU, with everything temporary in `dir` and the console in `console`.
    pub fn start(plan: &Plan<'_>, dir: &Path, console: &Path) -> Result<Self> {
        let mut servers = Vec::new();
        for share in &plan.job.shares {
            servers.push(serve(plan, share, dir)?);
        }
        let initrd = dir.join("initramfs.cpio");
        fs::write(&initrd, initramfs(plan)?)
            .with_context(|| format!("could not write {}", initrd.display()))?;
        let qemu = Guarded::spawn(
            &plan.assets.qemu,
            &dir.join("qemu.log"),
            &arguments(plan, dir, &initrd, console),
        )?;
        Ok(Self { qemu, _servers: servers })
    }

    /// How QEMU ended, if it has.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.qemu.child.try_wait().context("could not ask after QEMU")
    }
}

/// Starts the virtiofs server of `share` and waits until it listens.
fn serve(plan: &Plan<'_>, share: &Share, dir: &Path) -> Result<Guarded> {
    let socket = link::socket(dir, &share.tag);
    let log = dir.join(format!("{}.log", share.tag));
    let source = share.path.to_str().filter(|path| !path.contains(','));
    let source =
        source.with_context(|| format!("{} has a comma or other than UTF-8 in it", share.path.display()))?;
    // What never changes needs no asking; elsewhere the host may be building while the lab runs.
    let cache = if plan.immutable.starts_with(&share.path) && share.path == plan.immutable {
        "always"
    } else {
        "auto"
    };
    let arguments = [
        format!("--socket-path={}", socket.display()),
        "-o".to_owned(),
        format!("source={source},cache={cache},sandbox=chroot,xattr"),
    ];
    let mut server = Guarded::spawn(&plan.assets.virtiofsd, &log, &arguments)?;
    let deadline = Instant::now() + SERVER_WAIT;
    while !socket.exists() {
        let ended = server.child.try_wait()?;
        if ended.is_some() || Instant::now() >= deadline {
            let said = fs::read_to_string(&log).unwrap_or_default();
            bail!(
                "virtiofsd for {} did not listen on its socket; it said: {}",
                share.path.display(),
                said.trim()
            );
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(server)
}

fn initramfs(plan: &Plan<'_>) -> Result<Vec<u8>> {
    let mut cpio = Cpio::new();
    for dir in ["dev", "proc", "sys"] {
        cpio.dir(dir, 0o755);
    }
    cpio.char_device("dev/console", 0o600, (5, 1));
    initramfs::add_modules(&mut cpio, &plan.assets.kernel.modules_dir(), &MODULES)?;
    let init = &plan.assets.init;
    let program = fs::read(init).with_context(|| format!("could not read {}", init.display()))?;
    cpio.file("init", 0o755, &program);
    let job = serde_json::to_vec(&plan.job).context("a job is plain data")?;
    cpio.file(JOB_FILE.trim_start_matches('/'), 0o600, &job);
    Ok(cpio.finish())
}

/// The ports a run has: the fourth only where there is a terminal.
pub fn ports(plan: &Plan<'_>) -> Vec<&'static str> {
    PORTS.into_iter().filter(|name| *name != STDIN_PORT || plan.job.terminal.is_some()).collect()
}

fn arguments(plan: &Plan<'_>, dir: &Path, initrd: &Path, console: &Path) -> Vec<String> {
    let mut arguments: Vec<String> = Vec::new();
    let mut add = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
    let memory_mib = plan.memory_mib;
    add("-machine", "q35,memory-backend=mem".to_owned());
    // One thread for all virtual CPUs: with one each, QEMU 7.2 was seen to corrupt memory under fork storms.
    add("-accel", "tcg,thread=single,tb-size=512".to_owned());
    add("-cpu", CPU.to_owned());
    add("-smp", plan.cpus.to_string());
    add("-m", format!("{memory_mib}M"));
    // The virtiofs servers reach into the lab's memory, hence shared.
    add("-object", format!("memory-backend-memfd,id=mem,size={memory_mib}M,share=on"));
    add("-kernel", plan.assets.kernel.vmlinuz().display().to_string());
    add("-initrd", initrd.display().to_string());
    add("-append", COMMAND_LINE.to_owned());
    add(
        "-drive",
        format!(
            "file={},if=none,id=root,format=raw,readonly=on,file.locking=off",
            plan.assets.root.display()
        ),
    );
    add("-device", "virtio-blk-pci,drive=root".to_owned());
    add("-device", "virtio-rng-pci".to_owned());
    add("-device", "virtio-serial-pci".to_owned());
    for (n, name) in ports(plan).into_iter().enumerate() {
        add("-chardev", format!("socket,id=port{n},path={}", link::socket(dir, name).display()));
        add("-device", format!("virtserialport,chardev=port{n},name={name}"));
    }
    for share in &plan.job.shares {
        let tag = &share.tag;
        add("-chardev", format!("socket,id={tag},path={}", link::socket(dir, tag).display()));
        add("-device", format!("vhost-user-fs-pci,chardev={tag},tag={tag},queue-size=1024"));
    }
    add("-serial", format!("file:{}", console.display()));
    add("-display", "none".to_owned());
    add("-monitor", "none".to_owned());
    add("-rtc", "base=utc".to_owned());
    arguments.extend(["-nodefaults", "-no-user-config", "-no-reboot"].map(str::to_owned));
    arguments
}
