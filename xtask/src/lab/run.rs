//! One run, from the first process to the command's exit status.

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGWINCH};
use xtask::lab_protocol::{FromLab, ToLab};

use super::console::{self, Console};
use super::link::{Link, Listeners};
use super::machine::{self, Machine};
use super::plan::Plan;
use super::scratch::Scratch;
use super::{LAB_FAILED, OUT_OF_TIME, terminal};

/// How long the lab may take to come up.
const BOOT_LIMIT: Duration = Duration::from_secs(90);
/// How long the last of the command's output may take.
const DRAIN_LIMIT: Duration = Duration::from_secs(10);
/// How often the state of things is looked at when nothing is said.
const TICK: Duration = Duration::from_millis(50);
/// Ticks between two looks at the console.
const CONSOLE_TICKS: u32 = 20;

/// How a run ended.
enum Ending {
    /// The command ended by itself.
    Exited(u8),
    /// A signal to this process ended everything.
    Signalled(usize),
    /// The lab failed: what happened, and the exit status for it.
    Failed(String, u8),
}

/// Signals that reached this process.
struct Signals {
    ended_by: Arc<AtomicUsize>,
    resized: Arc<AtomicBool>,
}

impl Signals {
    fn watch() -> Result<Self> {
        let signals = Self { ended_by: Arc::default(), resized: Arc::default() };
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            let number = usize::try_from(signal).context("signals are positive")?;
            signal_hook::flag::register_usize(signal, Arc::clone(&signals.ended_by), number)?;
        }
        signal_hook::flag::register(SIGWINCH, Arc::clone(&signals.resized))?;
        Ok(signals)
    }
}

/// Runs the plan; returns the command's exit status, or that of a lab that failed, having said why.
pub fn run(plan: &Plan<'_>) -> Result<u8> {
    let signals = Signals::watch()?;
    let scratch = Scratch::new()?;
    let console = Console::new(scratch.path().join("console.log"));
    let started = Instant::now();
    let ending = drive(plan, &signals, &scratch, &console, started);
    if let Some(path) = &plan.console {
        fs::copy(console.path(), path)
            .with_context(|| format!("could not keep the console in {}", path.display()))?;
    }
    match ending? {
        Ending::Exited(0) => Ok(0),
        Ending::Exited(code) => {
            // A shell's status is that of the last thing somebody typed, and they saw it.
            if plan.job.terminal.is_none() {
                let lines = console.last_lines(console::STATUS_LINES);
                eprintln!(
                    "lab: {} ended with status {code}; the console's last lines:\n{lines}",
                    plan.job.argv[0]
                );
            }
            Ok(code)
        }
        Ending::Signalled(signal) => {
            eprintln!("lab: ended by signal {signal}");
            Ok(u8::try_from(128 + signal).unwrap_or(LAB_FAILED))
        }
        Ending::Failed(what, code) => {
            report_failure(plan, &what, &console, &scratch);
            Ok(code)
        }
    }
}

fn drive(
    plan: &Plan<'_>,
    signals: &Signals,
    scratch: &Scratch,
    console: &Console,
    started: Instant,
) -> Result<Ending> {
    let listeners = Listeners::bind(scratch.path(), &machine::ports(plan))?;
    let raw = plan.job.terminal.map(|_| terminal::Raw::enter()).transpose()?;
    let mut machine = Machine::start(plan, scratch.path(), console.path())?;
    let link = listeners.accept(started + BOOT_LIMIT, || match machine.ended()? {
        Some(status) => bail!(
            "QEMU ended with {status} before it connected: {}",
            fs::read_to_string(scratch.path().join("qemu.log")).unwrap_or_default().trim()
        ),
        None => Ok(()),
    })?;
    let ending = watch(plan, signals, &mut machine, &link, console, started);
    // QEMU ends before the terminal is given back and before anything is printed to it.
    drop(machine);
    drop(raw);
    ending
}

/// Waits for the command's end or the first thing that goes wrong.
fn watch(
    plan: &Plan<'_>,
    signals: &Signals,
    machine: &mut Machine,
    link: &Link,
    console: &Console,
    started: Instant,
) -> Result<Ending> {
    let mut control = link.control()?;
    let mut deadline = started + BOOT_LIMIT;
    let mut up = false;
    let mut ticks = 0;
    loop {
        match link.messages.recv_timeout(TICK) {
            Ok(FromLab::Up { kvm }) => {
                up = true;
                deadline = Instant::now() + plan.timeout;
                if plan.verbose {
                    let has = if kvm { "/dev/kvm opens" } else { "there is NO /dev/kvm" };
                    eprintln!("lab: up after {:.1} s ({has})", started.elapsed().as_secs_f64());
                }
            }
            Ok(FromLab::Exited { code, stdout_bytes, stderr_bytes }) => {
                return Ok(drain(link, code, stdout_bytes, stderr_bytes));
            }
            Ok(FromLab::NotStarted { message }) => return Ok(Ending::Failed(message, LAB_FAILED)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(TICK),
        }
        if let Some(status) = machine.ended()? {
            // A panic ends QEMU too, and says more.
            let what = console.fatal_line().map_or_else(
                || format!("the lab's machine ended ({status}) before the command did"),
                |line| format!("the lab's kernel failed: {line}"),
            );
            return Ok(Ending::Failed(what, LAB_FAILED));
        }
        ticks += 1;
        if ticks % CONSOLE_TICKS == 0
            && let Some(line) = console.fatal_line()
        {
            return Ok(Ending::Failed(format!("the lab's kernel failed: {line}"), LAB_FAILED));
        }
        if Instant::now() >= deadline {
            return Ok(if up {
                let limit = plan.timeout.as_secs();
                Ending::Failed(format!("the command did not end in {limit} s and was ended"), OUT_OF_TIME)
            } else {
                Ending::Failed(format!("the lab was not up after {} s", BOOT_LIMIT.as_secs()), LAB_FAILED)
            });
        }
        let signal = signals.ended_by.load(Ordering::SeqCst);
        if signal != 0 {
            return Ok(Ending::Signalled(signal));
        }
        if signals.resized.swap(false, Ordering::SeqCst) && plan.job.terminal.is_some() {
            resize(&mut control);
        }
    }
}

/// Lets the last of the output arrive.
fn drain(link: &Link, code: u8, stdout_bytes: u64, stderr_bytes: u64) -> Ending {
    let deadline = Instant::now() + DRAIN_LIMIT;
    while !link.has_passed_on(stdout_bytes, stderr_bytes) {
        if Instant::now() >= deadline {
            let what =
                format!("the command ended with status {code}, but the end of its output did not arrive");
            return Ending::Failed(what, LAB_FAILED);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ending::Exited(code)
}

/// Tells the lab the terminal's new size; a lab that is ending need not know.
fn resize(control: &mut UnixStream) {
    if let Ok(size) = terminal::size()
        && let Ok(mut line) = serde_json::to_vec(&ToLab::Resize(size))
    {
        line.push(b'\n');
        let _ = control.write_all(&line);
    }
}

fn report_failure(plan: &Plan<'_>, what: &str, console: &Console, scratch: &Scratch) {
    eprintln!("lab: {what}");
    eprintln!("lab: the console's last lines:\n{}", console.last_lines(console::FAILURE_LINES));
    let said = fs::read_to_string(scratch.path().join("qemu.log")).unwrap_or_default();
    if !said.trim().is_empty() {
        eprintln!("lab: {} said: {}", plan.assets.qemu_version(), said.trim());
    }
    let kept = &plan.failed_console;
    let copied =
        kept.parent().map(fs::create_dir_all).transpose().and_then(|_| fs::copy(console.path(), kept));
    match copied {
        Ok(_) => eprintln!("lab: the whole console: {}", kept.display()),
        Err(error) => eprintln!("lab: could not keep the console in {}: {error}", kept.display()),
    }
}
