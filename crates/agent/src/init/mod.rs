//! What PID 1 does before it serves: from the initramfs to the root file system of the image.
//!
//! ```text
//! initramfs: mount proc, sys, dev -> load modules -> wait for the root device -> mount it
//!   -> move the mounts into it, empty the initramfs, switch -> mount the rest -> limit the disk -> lo, host name
//! ```
//!
//! Without `offshoot.root=` on the kernel's command line it stays in the initramfs.

use std::io;
use std::path::{Path, PathBuf};

use crate::console;
use crate::sys;

mod cmdline;
mod modules;
mod mounts;
mod overlay_limit;
mod root;

use cmdline::Cmdline;

/// Why the guest cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// An essential file system.
    #[error("could not mount {kind} on {target}")]
    Mount {
        /// File system type.
        kind: String,
        /// Where.
        target: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The disk or its driver is missing.
    #[error("the root device {device} did not appear within {seconds} s: is its driver among the modules?")]
    NoRootDevice {
        /// Device named on the command line.
        device: PathBuf,
        /// The deadline.
        seconds: u64,
    },
    /// A step of switching to the root file system.
    #[error("could not switch to the root file system: {step}")]
    Switch {
        /// Which step.
        step: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A number that is none.
    #[error("kernel command line: {name}={value} is not understood")]
    Cmdline {
        /// Parameter.
        name: &'static str,
        /// Its value.
        value: String,
    },
}

/// Where modules to load are listed.
const MODULE_LIST: &str = "/modules/order";

/// Brings the guest up to where services can start.
///
/// # Errors
/// Where the guest has no usable root file system.
pub fn bring_up() -> Result<(), InitError> {
    mounts::mount_early()?;
    for failure in modules::load_listed(Path::new(MODULE_LIST)) {
        console::say(&failure);
    }
    let text = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let cmdline = Cmdline::parse(&text)?;
    if let Some(device) = &cmdline.root {
        root::wait_for(device)?;
        root::mount(device, &cmdline.root_fs_type)?;
        root::switch()?;
    }
    for failure in mounts::mount_late() {
        console::say(&failure);
    }
    if let (Some(device), Some(limit_mib)) = (&cmdline.root, cmdline.overlay_limit_mib)
        && let Err(error) = overlay_limit::apply(device, limit_mib)
    {
        console::say(&format!("the disk is not limited to {limit_mib} MiB of writes: {error}"));
    }
    if let Err(error) = sys::bring_up_loopback() {
        console::say(&format!("the interface lo could not be brought up: {error}"));
    }
    set_hostname();
    raise_descriptor_limit();
    Ok(())
}

fn set_hostname() {
    let name = std::fs::read_to_string("/etc/hostname").unwrap_or_default();
    let name = Some(name.trim()).filter(|name| !name.is_empty()).unwrap_or("offshoot");
    if let Err(error) = rustix::system::sethostname(name.as_bytes()) {
        console::say(&format!("the host name '{name}' could not be set: {error}"));
    }
}

/// The kernel gives its first process 1024 descriptors; commands inherit what is set here.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let limit = Rlimit { current: Some(65_536), maximum: Some(524_288) };
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        console::say(&format!("the limit of open files could not be raised: {error}"));
    }
}
