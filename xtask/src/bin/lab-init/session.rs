//! Runs the job's command: its streams to the ports, its end to the host. Reaps everything else.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{WaitOptions, WaitStatus};
use rustix::pty::OpenptFlags;
use rustix::termios::{Winsize, tcsetwinsize};
use xtask::lab_protocol::{
    CONTROL_PORT, FromLab, Job, STDERR_PORT, STDIN_PORT, STDOUT_PORT, TerminalSize, ToLab,
};

use crate::ports;

/// How long processes that outlive the command may keep its output open.
const DRAIN: Duration = Duration::from_secs(2);
/// Bytes copied at a time.
const CHUNK_BYTES: usize = 32 * 1024;
/// Environment of every command; the job's comes on top.
const ENVIRONMENT: [(&str, &str); 5] = [
    ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
    ("HOME", "/root"),
    ("USER", "root"),
    ("LANG", "C.UTF-8"),
    ("TERM", "xterm"),
];

/// One stream on its way to a port.
struct Copy {
    bytes: Arc<AtomicU64>,
    ended: Arc<AtomicBool>,
}

/// Runs the command to its end and tells the host, which then ends the machine.
pub fn run(job: &Job) -> Result<()> {
    let mut control = ports::open(CONTROL_PORT)?;
    let kvm = File::options().read(true).write(true).open("/dev/kvm").is_ok();
    send(&mut control, &FromLab::Up { kvm })?;
    let (pid, copies) = match start(job, &control) {
        Ok(started) => started,
        Err(error) => {
            send(&mut control, &FromLab::NotStarted { message: format!("{error:#}") })?;
            return wait_for_the_end();
        }
    };
    let code = reap_until(pid)?;
    let deadline = Instant::now() + DRAIN;
    while Instant::now() < deadline && !copies.iter().all(|copy| copy.ended.load(Ordering::SeqCst)) {
        std::thread::sleep(Duration::from_millis(5));
    }
    rustix::fs::sync();
    let [stdout_bytes, stderr_bytes] =
        [0, 1].map(|n| copies.get(n).map_or(0, |copy: &Copy| copy.bytes.load(Ordering::SeqCst)));
    send(&mut control, &FromLab::Exited { code, stdout_bytes, stderr_bytes })?;
    wait_for_the_end()
}

/// The host ends the machine once it has everything. If it does not, something is wrong with it, and the machine ends
/// by itself.
fn wait_for_the_end() -> Result<()> {
    std::thread::sleep(Duration::from_secs(30));
    Ok(())
}

fn send(control: &mut File, message: &FromLab) -> Result<()> {
    let mut line = serde_json::to_vec(message).context("a message is plain data")?;
    line.push(b'\n');
    control.write_all(&line).context("could not write to the control port")
}

/// Starts the command; returns its process id and its streams.
fn start(job: &Job, control: &File) -> Result<(i32, Vec<Copy>)> {
    let (program, arguments) = job.argv.split_first().context("the job has no command")?;
    let mut command = match job.terminal {
        None => {
            let mut command = Command::new(program);
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            command
        }
        Some(_) => {
            // setsid(1) makes its standard input the controlling terminal.
            let mut command = Command::new("setsid");
            command.args(["--ctty", "--wait", "--"]).arg(program);
            command
        }
    };
    command.args(arguments).env_clear().envs(ENVIRONMENT).envs(&job.env).current_dir(&job.cwd);
    match job.terminal {
        None => start_piped(&mut command, program),
        Some(size) => start_on_terminal(&mut command, size, control),
    }
}

fn start_piped(command: &mut Command, program: &str) -> Result<(i32, Vec<Copy>)> {
    let (stdout, stderr) = (ports::open(STDOUT_PORT)?, ports::open(STDERR_PORT)?);
    let mut child = command.spawn().with_context(|| format!("could not start {program} in the lab"))?;
    let pid = i32::try_from(child.id()).context("process ids are positive")?;
    let mut copies = Vec::new();
    if let Some(from) = child.stdout.take() {
        copies.push(copy(from, stdout));
    }
    if let Some(from) = child.stderr.take() {
        copies.push(copy(from, stderr));
    }
    Ok((pid, copies))
}

fn start_on_terminal(command: &mut Command, size: TerminalSize, control: &File) -> Result<(i32, Vec<Copy>)> {
    let master =
        rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).context("could not open a pty")?;
    rustix::pty::unlockpt(&master).context("could not unlock the pty")?;
    let name = rustix::pty::ptsname(&master, Vec::new()).context("could not name the pty")?;
    let path = name.to_str().context("the pty's name is text")?;
    let slave = File::options()
        .read(true)
        .write(true)
        .open(path)
        .with_context(|| format!("could not open {path}"))?;
    let master = File::from(master);
    resize(&master, size);
    command.stdin(slave.try_clone()?).stdout(slave.try_clone()?).stderr(slave);
    let child = command.spawn().context("could not start setsid in the lab")?;
    let pid = i32::try_from(child.id()).context("process ids are positive")?;
    let (keys, stdout) = (ports::open(STDIN_PORT)?, ports::open(STDOUT_PORT)?);
    copy(keys, master.try_clone()?);
    let sizes = (BufReader::new(control.try_clone()?), master.try_clone()?);
    std::thread::spawn(move || {
        let (lines, terminal) = sizes;
        for line in lines.lines().map_while(Result::ok) {
            if let Ok(ToLab::Resize(size)) = serde_json::from_str(&line) {
                resize(&terminal, size);
            }
        }
    });
    Ok((pid, vec![copy(master, stdout)]))
}

fn resize(terminal: &File, size: TerminalSize) {
    let size = Winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 };
    // A terminal that has gone takes no size; its session is ending.
    let _ = tcsetwinsize(terminal, size);
}

/// Copies `from` to `to` in a thread until either ends.
fn copy(mut from: impl Read + Send + 'static, mut to: File) -> Copy {
    let copy = Copy { bytes: Arc::default(), ended: Arc::default() };
    let (bytes, ended) = (Arc::clone(&copy.bytes), Arc::clone(&copy.ended));
    std::thread::spawn(move || {
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            match from.read(&mut buffer) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                // A pty whose last user has gone answers EIO.
                Ok(0) | Err(_) => break,
                Ok(length) => {
                    if to.write_all(&buffer[..length]).is_err() {
                        break;
                    }
                    bytes.fetch_add(length as u64, Ordering::SeqCst);
                }
            }
        }
        ended.store(true, Ordering::SeqCst);
    });
    copy
}

/// Reaps whatever ends until `pid` does; returns its exit status as a shell would.
fn reap_until(pid: i32) -> Result<u8> {
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((ended, status))) if ended.as_raw_nonzero().get() == pid => return Ok(code_of(status)),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno).context("could not wait for the command"),
        }
    }
}

fn code_of(status: WaitStatus) -> u8 {
    let code = status.exit_status().or_else(|| status.terminating_signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}
