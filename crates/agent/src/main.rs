//! The guest's first process: brings the machine up, reaps, and serves.
//!
//! Three services, on vsock ports that only the host reaches: E2B's envd protocol ([`envd`]), warm interpreters
//! ([`interpreter`]), and identity and shutdown ([`host_only`]). One thread runs them all; a few more read and write
//! files. Every page the agent touches after a fork is the clone's own, so it holds little and touches little.
//!
//! It authenticates nobody: the daemon has done so, and processes of the guest cannot connect.
//!
//! `--listen-unix DIR` serves on Unix sockets `DIR/PORT.sock` instead, on a machine that is not ours: no mounts, no
//! clock, no host name; what would be changed under `/` is changed under `DIR/root`.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, bail};
use offshoot_protocol::ports;

use crate::agent::{Agent, Dirs, Globals, Machine};
use crate::cgroup::Cgroups;
use crate::envd::metrics::Metrics;
use crate::interpreter::Interpreter;
use crate::listen::Place;
use crate::reaper::Reaper;
use crate::spawn::Spawner;
use crate::users::Accounts;

mod agent;
mod cgroup;
mod clock;
mod console;
mod envd;
mod host_only;
mod http;
mod init;
mod interpreter;
mod kill;
mod listen;
mod pipe;
mod process;
mod reaper;
mod spawn;
mod sys;
mod users;

/// Threads that read and write files.
const FILE_THREADS: usize = 4;
const FILE_THREAD_IDLE: Duration = Duration::from_secs(2);
const THREAD_STACK_BYTES: usize = 256 * 1024;

fn main() -> std::process::ExitCode {
    sys::use_one_allocator_arena();
    match start() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            console::say(&format!("{error:#}"));
            if std::process::id() == 1 {
                give_up();
            }
            std::process::ExitCode::FAILURE
        }
    }
}

/// The end of PID 1 is a kernel panic, whose text would push ours off the console; going down tells the host as well.
fn give_up() {
    if let Err(error) = rustix::system::reboot(rustix::system::RebootCommand::Restart) {
        console::say(&format!("the machine could not be reset: {error}"));
    }
}

fn start() -> anyhow::Result<()> {
    let (place, machine, dirs) = match arguments()? {
        Some(directory) => {
            let dirs = Dirs { root: directory.join("root"), run: directory.join("run") };
            (Place::Unix(directory), Machine::Borrowed, dirs)
        }
        None => {
            init::bring_up().context("the guest could not be brought up")?;
            (Place::Vsock, Machine::Own, Dirs { root: "/".into(), run: "/run/offshoot".into() })
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(FILE_THREADS)
        .thread_keep_alive(FILE_THREAD_IDLE)
        .thread_stack_size(THREAD_STACK_BYTES)
        .build()
        .context("the event loop could not be made")?;
    runtime.block_on(serve(place, machine, dirs))
}

fn arguments() -> anyhow::Result<Option<PathBuf>> {
    // The kernel hands its first process the words of its command line that it does not know.
    if std::process::id() == 1 {
        return Ok(None);
    }
    let mut arguments = std::env::args_os().skip(1);
    match (arguments.next(), arguments.next(), arguments.next()) {
        (Some(flag), Some(directory), None) if flag == "--listen-unix" => {
            let directory = std::path::absolute(&directory).context("--listen-unix DIR")?;
            if !directory.is_dir() {
                bail!("--listen-unix: {} is not a directory", directory.display());
            }
            Ok(Some(directory))
        }
        (Some(flag), None, _) if flag == "--version" => {
            println!("offshoot-agent {}", env!("CARGO_PKG_VERSION"));
            std::process::exit(0);
        }
        _ => bail!(
            "it is a guest's first process; elsewhere use: offshoot-agent --listen-unix DIR | --version"
        ),
    }
}

async fn serve(place: Place, machine: Machine, dirs: Dirs) -> anyhow::Result<()> {
    let agent = build(machine, dirs)?;
    let listen =
        |port: u32| place.listen(port).with_context(|| format!("port {port} could not be listened on"));
    let (envd, interpreter, host_only) =
        (listen(ports::ENVD)?, listen(ports::INTERPRETER)?, listen(ports::HOST_ONLY)?);
    tokio::spawn(http::serve(envd, {
        let agent = agent.clone();
        move |request| envd::handle(agent.clone(), request)
    }));
    tokio::spawn(http::serve(interpreter, {
        let agent = agent.clone();
        move |request| interpreter::http::handle(agent.clone(), request)
    }));
    console::say_ready();
    host_only::serve(agent, host_only).await;
    Ok(())
}

fn build(machine: Machine, dirs: Dirs) -> anyhow::Result<Arc<Agent>> {
    let reaper = Arc::new(Reaper::default());
    reaper.clone().run().context("SIGCHLD could not be handled")?;
    let cgroups = match machine {
        Machine::Own => {
            let cgroups = Cgroups::below(Path::new(cgroup::MOUNT_POINT));
            if cgroups.is_none() {
                console::say(
                    "no cgroup2 with cgroup.kill: a process that leaves its session survives a kill",
                );
            }
            cgroups
        }
        Machine::Borrowed => {
            // As PID 1 would, so that orphans come here to be reaped.
            let me = rustix::process::getpid();
            rustix::process::set_child_subreaper(Some(me)).context("orphans cannot be adopted")?;
            None
        }
    };
    interpreter::driver::install(&dirs.run).with_context(|| {
        format!("the interpreter's driver could not be written to {}", dirs.run.display())
    })?;
    let spawner = Arc::new(Spawner::new(reaper, cgroups));
    let accounts = Accounts::new();
    let globals = Arc::new(Mutex::new(Globals::default()));
    Ok(Arc::new_cyclic(|myself| Agent {
        myself: myself.clone(),
        machine,
        interpreter: Interpreter::new(spawner.clone(), accounts.clone(), globals.clone(), dirs.run.clone()),
        dirs,
        accounts,
        spawner,
        processes: Arc::default(),
        metrics: Metrics::default(),
        globals,
    }))
}
