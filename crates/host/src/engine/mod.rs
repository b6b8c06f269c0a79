//! Images, templates, sandboxes and their lineage.
//!
//! ```text
//! image --build--> template (zygote) --create--> sandbox --fork--> sandbox --fork--> ...
//!
//! sandbox:  starting --identity acknowledged--> running --its VMM ends--> dead --remove--> gone
//!               `------ anything fails: gone                `--remove--> gone
//! ```
//!
//! A sandbox that is `starting` answers no request: its identity is still its source's. What fails on the way leaves
//! nothing behind and harms nobody else.

mod births;
mod config;
mod doctor;
mod error;
mod images;
mod progress;
mod sandboxes;
mod state;
mod template_build;
mod templates;
mod tree;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use offshoot_protocol::control::Event;

use crate::clock::Deadline;
use crate::control::{End, EventSink, Supervisor, VmmRef};
use crate::limit::Limit;
use crate::resources::prepare_run_dir;

pub use births::{CreateSpec, ForkSpec, Offspring, called_now};
pub use config::HostConfig;
pub use error::{DoctorError, ImageStoreError, SandboxError, StartError, TemplateError};
pub use images::{ImageInfo, ImageSource};
pub use progress::{Cancel, Progress};
pub use state::{ForkTimesMs, SandboxInfo, SandboxState, StopLines};
pub use template_build::{TemplateSpec, WarmUp};
pub use templates::{BuildTimes, Removal, TemplateInfo};
pub use tree::{Node, NodeKind};

use state::Sandbox;
use templates::Template;

/// Time for processes to end at shutdown.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);

/// The host: owner of every VMM process, one per daemon.
pub struct Host {
    config: HostConfig,
    supervisor: Arc<Supervisor>,
    registry: Mutex<Registry>,
    forks: Arc<Limit>,
    ends: Arc<dyn EventSink>,
    /// Set at shutdown: running builds stop, nothing new begins.
    closing: Cancel,
}

/// What exists. Locked for look-ups and changes only, never while a VMM is waited for.
#[derive(Default)]
struct Registry {
    templates: BTreeMap<String, Arc<Template>>,
    sandboxes: BTreeMap<String, Arc<Sandbox>>,
    /// Names of images and templates being made, and of images being read by a build.
    making_images: BTreeSet<String>,
    making_templates: BTreeMap<String, String>,
}

/// Passes the ends of sandboxes to the thread that may take its time over them.
struct Ends(Sender<(String, u64, End)>);

impl EventSink for Ends {
    fn event(&self, _: VmmRef<'_>, _: Event) {}

    fn ended(&self, from: VmmRef<'_>, end: &End) {
        // Without a receiver the host is gone, and every sandbox with it.
        let _ = self.0.send((from.id.to_owned(), from.key, end.clone()));
    }
}

impl Host {
    /// Starts a host; what an earlier one left in the run directory is removed.
    ///
    /// # Errors
    /// Fails where a directory or thread cannot be made.
    pub fn start(config: HostConfig) -> Result<Arc<Self>, StartError> {
        prepare_run_dir(&config.run_dir)?;
        let images = config.images_dir();
        std::fs::create_dir_all(&images)
            .map_err(|source| StartError::StateDir { path: images.clone(), source })?;
        images::remove_unfinished(&images);
        let supervisor = Supervisor::start().map_err(StartError::Thread)?;
        let (sender, receiver) = channel();
        let host = Arc::new(Self {
            forks: Limit::new(config.max_forks_in_flight),
            config,
            supervisor,
            registry: Mutex::default(),
            ends: Arc::new(Ends(sender)),
            closing: Cancel::default(),
        });
        let weak = Arc::downgrade(&host);
        let thread = std::thread::Builder::new().name("housekeeper".into());
        thread.spawn(move || keep_house(&weak, &receiver)).map_err(StartError::Thread)?;
        Ok(host)
    }

    /// The plan this host runs on.
    pub fn config(&self) -> &HostConfig {
        &self.config
    }

    /// VMM processes and control sockets being watched.
    pub fn watched(&self) -> usize {
        self.supervisor.watched()
    }

    /// Ends every sandbox and zygote and refuses new work. Returns whether all ended in time.
    pub fn shutdown(&self) -> bool {
        self.closing.cancel();
        let (sandboxes, templates) = {
            let mut registry = self.lock();
            (std::mem::take(&mut registry.sandboxes), std::mem::take(&mut registry.templates))
        };
        for sandbox in sandboxes.into_values() {
            sandbox.release();
        }
        // Killed, not only dropped: a fork that waits for one holds it, and then fails.
        templates.values().for_each(|template| template.zygote.kill());
        drop(templates);
        let deadline = Deadline::after(SHUTDOWN_GRACE);
        while self.supervisor.watched() > 0 && !deadline.is_over() {
            std::thread::sleep(Duration::from_millis(10));
        }
        self.supervisor.watched() == 0
    }

    fn lock(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Notes the ends of sandboxes and zygotes until the host is gone.
fn keep_house(host: &Weak<Host>, ends: &Receiver<(String, u64, End)>) {
    while let Ok((id, key, end)) = ends.recv() {
        let Some(host) = host.upgrade() else { return };
        let (sandbox, template) = {
            let registry = host.lock();
            let template = registry.templates.values().find(|template| template.zygote.key() == key);
            (registry.sandboxes.get(&id).cloned(), template.cloned())
        };
        if let Some(sandbox) = sandbox {
            sandbox.mark_dead(&end);
        }
        if let Some(template) = template {
            tracing::error!(template = template.name, %end, "a template's zygote ended");
        }
    }
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host").field("config", &self.config).finish_non_exhaustive()
    }
}
