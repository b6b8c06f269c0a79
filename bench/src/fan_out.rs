//! Many clones of one frozen template, until all have answered.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use offshoot_host::accounting::Memory;
use offshoot_host::clock::Deadline;
use offshoot_host::control::Supervisor;
use offshoot_host::control::{EventSink, Events, Notice, event_queue};
use offshoot_host::resources::{SandboxDir, prepare_run_dir};
use offshoot_host::vmm::{ForkOptions, SpawnOptions, Vmm};
use offshoot_protocol::control::{BootConfig, BootSource, ChildSpec, Event, PageSize};
use offshoot_vm::process::monotonic_ns;

use crate::micro;

const PATIENCE: Duration = Duration::from_secs(60);

/// A frozen template of a micro-guest.
pub struct Template {
    zygote: Vmm,
    sink: Arc<dyn EventSink>,
    events: Events,
    run_dir: PathBuf,
    born: u32,
}

/// Clones that are alive.
pub struct Clones {
    /// In order.
    pub vmms: Vec<Vmm>,
    /// Until all had answered, milliseconds.
    pub elapsed_ms: f64,
    _dirs: Vec<SandboxDir>,
}

impl Template {
    /// Boots `code` in a guest of `memory_mib`, waits until it rings `READY`, and freezes it.
    ///
    /// # Errors
    /// What the VMM says, or that the guest did not ring in time.
    pub fn build(
        vmm: &Path,
        run_dir: &Path,
        code: &[u8],
        memory_mib: u32,
        vcpus: u8,
    ) -> anyhow::Result<Self> {
        prepare_run_dir(run_dir)?;
        let supervisor = Supervisor::start()?;
        let (sink, events) = event_queue();
        let file = run_dir.join("payload.bin");
        std::fs::write(&file, code).context("write the payload")?;
        let (dir, resources) = SandboxDir::create(run_dir, "template")?;
        let options =
            SpawnOptions { program: vmm, id: "template", stderr: dir.stderr()?, sink: Arc::clone(&sink) };
        let template = Vmm::spawn(&supervisor, options)?;
        let config = BootConfig {
            id: "template".into(),
            memory_mib,
            vcpus,
            page_size: PageSize::Thp,
            source: BootSource::Payload { file },
            disk: None,
            vm_generation: "ff".repeat(16),
        };
        let deadline = Deadline::after(PATIENCE);
        template.boot(config, resources, deadline)?;
        wait_for_rings(&events, 1, deadline)?;
        let (zygote, _) = template.freeze(Arc::clone(&sink), deadline)?;
        Ok(Self { zygote, sink, events, run_dir: run_dir.to_owned(), born: 0 })
    }

    /// Makes `n` clones and waits until each has answered with its own number.
    ///
    /// # Errors
    /// A clone failed, answered wrongly, or not in time.
    pub fn fan_out(&mut self, n: u32) -> anyhow::Result<Clones> {
        let numbers: Vec<u32> = (0..n).map(|index| 0x1000 + self.born + index).collect();
        self.born += n;
        let start_ns = monotonic_ns();
        let mut dirs = Vec::with_capacity(numbers.len());
        let mut children = Vec::with_capacity(numbers.len());
        for number in &numbers {
            let id = format!("clone-{number:x}");
            let (dir, resources) = SandboxDir::create(&self.run_dir, &id)?;
            dirs.push(dir);
            children.push((ChildSpec { id, vm_generation: micro::generation_id(*number) }, resources));
        }
        let deadline = Deadline::after(PATIENCE);
        let options = ForkOptions { deadline, sink: Arc::clone(&self.sink) };
        let outcome = self.zygote.fork(children, &options)?;
        let vmms = outcome.children.into_iter().collect::<Result<Vec<_>, _>>()?;
        let rung = wait_for_rings(&self.events, numbers.len(), deadline)?;
        let elapsed_ms = (monotonic_ns() - start_ns) as f64 / 1e6;
        let wanted: HashSet<u32> = numbers.into_iter().collect();
        if rung.iter().copied().collect::<HashSet<u32>>() != wanted {
            bail!("clones rang {rung:x?}, not each its own number");
        }
        Ok(Clones { vmms, elapsed_ms, _dirs: dirs })
    }

    /// The zygote.
    pub fn zygote(&self) -> &Vmm {
        &self.zygote
    }
}

impl Clones {
    /// Memory of each, read while all are alive.
    ///
    /// # Errors
    /// One has ended.
    pub fn memory(&self) -> anyhow::Result<Vec<Memory>> {
        self.vmms
            .iter()
            .map(|vmm| {
                let (pid, pidfd) = vmm.pid().zip(vmm.pidfd()).context("a clone has no process")?;
                Memory::of(pid, &pidfd).with_context(|| format!("clone {} has ended", vmm.id()))
            })
            .collect()
    }

    /// Ends all of them and waits until they are gone.
    pub fn end(self) {
        for vmm in &self.vmms {
            vmm.kill();
        }
        for vmm in &self.vmms {
            vmm.wait_ended(Deadline::after(PATIENCE));
        }
    }
}

/// Collects `count` doorbells.
fn wait_for_rings(events: &Events, count: usize, deadline: Deadline) -> anyhow::Result<Vec<u32>> {
    let mut rung = Vec::with_capacity(count);
    while rung.len() < count {
        match events.next(deadline) {
            Some(Notice::Event { event: Event::Doorbell { value: micro::TORN, .. }, .. }) => {
                bail!("a guest found a page that it did not write")
            }
            Some(Notice::Event { event: Event::Doorbell { value, .. }, .. }) => rung.push(value),
            Some(_) => {}
            None => bail!("{} of {count} guests rang in time", rung.len()),
        }
    }
    Ok(rung)
}
