//! Drives VMM processes that run micro-guests.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use offshoot_bench::micro::{TORN, generation_id};
use offshoot_host::clock::Deadline;
use offshoot_host::control::{EventSink, Events, Notice, Supervisor, event_queue};
use offshoot_host::resources::{SandboxDir, prepare_run_dir};
use offshoot_host::vmm::{ForkOptions, SpawnOptions, Vmm};
use offshoot_protocol::control::{
    BootConfig, BootSource, ChildSpec, ControlError, Event, ForkTimes, PageSize,
};

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// VMM processes, their folders, and what their guests rang.
pub struct Rig {
    supervisor: Arc<Supervisor>,
    sink: Arc<dyn EventSink>,
    events: Events,
    folder: tempfile::TempDir,
    dirs: Vec<SandboxDir>,
    rung: HashMap<u64, HashSet<(u8, u32)>>,
    born: u32,
}

/// A guest and its number.
pub struct Guest {
    /// The VMM process.
    pub vmm: Vmm,
    /// First four bytes of its VM generation id.
    pub number: u32,
}

impl Rig {
    /// No process yet.
    pub fn new() -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("offshoot-test").tempdir()?;
        prepare_run_dir(folder.path())?;
        let (sink, events) = event_queue();
        let supervisor = Supervisor::start()?;
        Ok(Self { supervisor, sink, events, folder, dirs: Vec::new(), rung: HashMap::new(), born: 0x100 })
    }

    /// The scratch folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A VMM process without a guest.
    pub fn spawn(&mut self, id: &str) -> anyhow::Result<(Vmm, offshoot_host::vmm::ChildResources)> {
        let (dir, resources) = SandboxDir::create(self.folder.path(), id)?;
        let program = crate::need::program("offshoot-vmm");
        let options =
            SpawnOptions { program: &program, id, stderr: dir.stderr()?, sink: Arc::clone(&self.sink) };
        let vmm = Vmm::spawn(&self.supervisor, options)?;
        self.dirs.push(dir);
        Ok((vmm, resources))
    }

    /// Boots `code`.
    pub fn boot(&mut self, code: &[u8], memory_mib: u32, vcpus: u8) -> anyhow::Result<Guest> {
        let number = self.next_number();
        let id = format!("root-{number:x}");
        let file = self.folder.path().join(format!("{id}.bin"));
        std::fs::write(&file, code)?;
        let (vmm, resources) = self.spawn(&id)?;
        let config = BootConfig {
            id,
            memory_mib,
            vcpus,
            page_size: PageSize::Thp,
            source: BootSource::Payload { file },
            disk: None,
            vm_generation: generation_id(number),
        };
        vmm.boot(config, resources, self.deadline())?;
        Ok(Guest { vmm, number })
    }

    /// Forks `count` children of `parent`, one result each.
    pub fn try_fork(
        &mut self,
        parent: &Vmm,
        count: usize,
    ) -> anyhow::Result<(Vec<Result<Guest, ControlError>>, ForkTimes)> {
        let mut numbers = Vec::with_capacity(count);
        let mut children = Vec::with_capacity(count);
        for _ in 0..count {
            let number = self.next_number();
            let id = format!("child-{number:x}");
            let (dir, resources) = SandboxDir::create(self.folder.path(), &id)?;
            self.dirs.push(dir);
            children.push((ChildSpec { id, vm_generation: generation_id(number) }, resources));
            numbers.push(number);
        }
        let options = ForkOptions { deadline: self.deadline(), sink: Arc::clone(&self.sink) };
        let outcome = parent.fork(children, &options)?;
        let guests = outcome.children.into_iter().zip(numbers);
        Ok((guests.map(|(vmm, number)| Ok(Guest { vmm: vmm?, number })).collect(), outcome.times))
    }

    /// Forks `count` children of `parent`, all of which must start.
    pub fn fork(&mut self, parent: &Vmm, count: usize) -> anyhow::Result<Vec<Guest>> {
        let (children, _) = self.try_fork(parent, count)?;
        Ok(children.into_iter().collect::<Result<_, _>>()?)
    }

    /// Freezes a guest into a zygote.
    pub fn freeze(&mut self, guest: Guest) -> anyhow::Result<Vmm> {
        Ok(guest.vmm.freeze(Arc::clone(&self.sink), self.deadline())?.0)
    }

    /// Waits until every one of `vcpus` vCPUs of the guest has rung `value`.
    ///
    /// # Errors
    /// Any guest of this rig rang [`TORN`], or the time is over.
    pub fn wait_for(&mut self, guest: &Vmm, vcpus: u8, value: u32) -> anyhow::Result<()> {
        let deadline = self.deadline();
        let key = guest.key();
        loop {
            let rung = self.rung.entry(key).or_default();
            if (0..vcpus).all(|vcpu| rung.contains(&(vcpu, value))) {
                return Ok(());
            }
            match self.events.next(deadline) {
                Some(notice) => self.note(notice)?,
                None => {
                    anyhow::bail!("guest {} rang {:x?}, not {value:x} from {vcpus} vcpus", guest.id(), rung)
                }
            }
        }
    }

    /// Takes in what was rung up to now.
    ///
    /// # Errors
    /// Any guest rang [`TORN`].
    pub fn check_untorn(&mut self) -> anyhow::Result<()> {
        while let Some(notice) = self.events.next(Deadline::after(Duration::from_millis(1))) {
            self.note(notice)?;
        }
        Ok(())
    }

    fn note(&mut self, notice: Notice) -> anyhow::Result<()> {
        if let Notice::Event { key, event: Event::Doorbell { vcpu, value, .. } } = notice {
            anyhow::ensure!(
                value != TORN,
                "vcpu {vcpu} of guest {key} found a page that it had not written so"
            );
            self.rung.entry(key).or_default().insert((vcpu, value));
        }
        Ok(())
    }

    /// Where a sandbox's vsock listens.
    pub fn vsock_path(&self, id: &str) -> std::path::PathBuf {
        self.folder.path().join("sandboxes").join(id).join("vsock.sock")
    }

    /// What a sandbox's guest wrote to its console.
    pub fn console(&self, id: &str) -> String {
        let path = self.folder.path().join("sandboxes").join(id).join("console.log");
        String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
    }

    /// The end of a wait that begins now.
    pub fn deadline(&self) -> Deadline {
        Deadline::after(PATIENCE)
    }

    fn next_number(&mut self) -> u32 {
        self.born += 1;
        self.born
    }
}
