//! `offshootd`: serves Offshoot's HTTP API on a Unix socket.
//!
//! The library `offshoot-host` does the work; this binary holds policy: paths, flags, who may connect, signals. See
//! `docs/api.md` for the API. On `SIGTERM` or `SIGINT` every sandbox ends; nothing is left.

mod api;
mod listener;
mod plan;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use offshoot_host::Host;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use plan::{Flags, Plan};

/// For requests that are being answered when the daemon ends.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    let flags = Flags::parse();
    match run(flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("offshootd: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(flags: Flags) -> anyhow::Result<()> {
    let plan = Plan::resolve(flags)?;
    let filter =
        EnvFilter::try_new(&plan.log).with_context(|| format!("--log {:?} is no filter", plan.log))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .context("become the reaper of all sandboxes")?;
    raise_descriptor_limit();
    let lock = listener::lock_run_dir(&plan.host.run_dir)?;
    // Before there are threads: it changes the umask for a moment.
    let listener = listener::bind(&plan.socket)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.context("start the async runtime")?;
    let listener = {
        let _guard = runtime.enter();
        tokio::net::UnixListener::from_std(listener).context("watch the socket")?
    };
    let host = Host::start(plan.host.clone())?;
    let served = runtime.block_on(serve(listener, Arc::clone(&host)));
    tracing::info!("ending all sandboxes");
    let quiet = host.shutdown();
    // The socket is ours as long as the lock is held.
    let _ = std::fs::remove_file(&plan.socket);
    runtime.shutdown_timeout(LAST_ANSWERS);
    drop(lock);
    anyhow::ensure!(quiet, "some sandboxes did not end in time; the kernel ends them with this process");
    served
}

async fn serve(listener: tokio::net::UnixListener, host: Arc<Host>) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("watch SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("watch SIGINT")?;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), "ready");
    let router = api::router(host);
    tokio::select! {
        served = axum::serve(listener, router) => served.context("serve the API"),
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    }
}

/// Each sandbox costs two descriptors here, and up to five while it is forked.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, wanted) {
        tracing::warn!(%error, "cannot raise the limit of open files; many sandboxes will not fit");
    }
}
