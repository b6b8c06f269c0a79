//! The lab's init: makes a Debian machine out of an initramfs, runs one command, tells how it ended.
//!
//! It is a static program and goes on running while it changes its root. Whatever fails is printed to the console, and
//! the machine ends, which the host sees.

mod ports;
mod session;
mod system;

use anyhow::{Context, Result};
use xtask::lab_protocol::{JOB_FILE, Job};

fn main() {
    if std::process::id() != 1 {
        eprintln!("lab-init: this is the lab's init; it is run by: cargo xtask lab");
        std::process::exit(2);
    }
    if let Err(error) = live() {
        eprintln!("lab-init: {error:#}");
    }
    // Whatever is still buffered goes out; then the machine ends (QEMU runs with -no-reboot).
    rustix::fs::sync();
    let error = rustix::system::reboot(rustix::system::RebootCommand::Restart);
    eprintln!("lab-init: could not end the machine: {error:?}");
    loop {
        std::thread::park();
    }
}

fn live() -> Result<()> {
    system::mount_early()?;
    let text = std::fs::read(JOB_FILE).with_context(|| format!("could not read {JOB_FILE}"))?;
    let job: Job = serde_json::from_slice(&text).with_context(|| format!("{JOB_FILE} is no job"))?;
    system::load_modules()?;
    system::enter_root(&job)?;
    system::settle(&job)?;
    session::run(&job)
}
