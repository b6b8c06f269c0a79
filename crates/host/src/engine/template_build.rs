//! Builds a template: boot, wait for the agent, warm up, freeze.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use offshoot_protocol::control::{BootConfig, BootSource, DiskConfig, PageSize};

use super::templates::{Template, info};
use super::{BuildTimes, Cancel, Host, Progress, TemplateError, TemplateInfo, state};
use crate::accounting::available_mib;
use crate::agent::{AgentClient, AgentError};
use crate::clock::{Deadline, monotonic_ns};
use crate::control::Ignore;
use crate::ids::{hex_id, is_valid_name, sandbox_id};
use crate::resources::SandboxDir;
use crate::vmm::{SpawnOptions, Vmm, VmmError};

/// How often a wait looks whether the build was cancelled or the guest ended.
const LOOK: Duration = Duration::from_millis(50);
/// Longest single attempt to reach an agent that may not be up yet.
const ATTEMPT: Duration = Duration::from_secs(3);
/// What the agent gets beyond the warm-up's own limit to report that it was reached.
const WARM_GRACE: Duration = Duration::from_secs(10);
/// For the VMM's answer that the guest's vCPUs run.
const BOOT_ANSWER: Duration = Duration::from_secs(30);
/// Console lines in an error.
const LAST_LINES: usize = 15;
/// Longest addition to the kernel's command line, bytes (COMMAND_LINE_SIZE of x86 is 2048, arch/x86/include/asm/setup.h).
const MAX_CMDLINE_BYTES: usize = 1024;
/// Longest warm-up source, bytes.
const MAX_WARM_BYTES: usize = 1 << 20;

/// What a template is built from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateSpec {
    /// Its name.
    pub name: String,
    /// Name of its image.
    pub image: String,
    /// Guest memory, MiB, 128 to 12288.
    pub memory_mib: u32,
    /// Number of vCPUs, 1 to 8.
    pub vcpus: u8,
    /// Page size of guest memory.
    pub page_size: PageSize,
    /// Bound of each sandbox's private disk overlay, MiB.
    pub overlay_limit_mib: u32,
    /// Appended to the kernel's command line.
    pub cmdline: String,
    /// What to run before the freeze.
    pub warm: Option<WarmUp>,
    /// For the warm-up.
    pub warm_timeout: Duration,
    /// From the start of the VMM until the agent answers.
    pub boot_timeout: Duration,
}

/// Python that the warm interpreter runs before a template is frozen; its globals stay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WarmUp {
    /// Source text.
    pub source: String,
    /// File name for tracebacks.
    pub file_name: String,
}

impl TemplateSpec {
    fn check(&self) -> Result<(), TemplateError> {
        let wrong = |setting, problem: String| Err(TemplateError::Setting { setting, problem });
        if !is_valid_name(&self.name) {
            return wrong("name", format!("{:?} is not of the form [a-z0-9][a-z0-9_.-]{{0,62}}", self.name));
        }
        if !(128..=12288).contains(&self.memory_mib) {
            return wrong("memory_mib", format!("{} is not within 128 to 12288", self.memory_mib));
        }
        if !(1..=8).contains(&self.vcpus) {
            return wrong("vcpus", format!("{} is not within 1 to 8", self.vcpus));
        }
        if self.cmdline.len() > MAX_CMDLINE_BYTES || self.cmdline.contains(['\n', '\0']) {
            return wrong("cmdline", format!("is not one line of at most {MAX_CMDLINE_BYTES} bytes"));
        }
        if self.warm.as_ref().is_some_and(|warm| warm.source.len() > MAX_WARM_BYTES) {
            return wrong(
                "warm.source",
                format!("is longer than {MAX_WARM_BYTES} bytes; put data into the image"),
            );
        }
        Ok(())
    }
}

/// A guest that the host cannot hold would be killed half-way, or take others along. A host that does not tell what it
/// has is given the benefit of the doubt.
fn check_memory(spec: &TemplateSpec, available_mib: Option<u64>) -> Result<(), TemplateError> {
    match available_mib {
        Some(available_mib) if available_mib < u64::from(spec.memory_mib) => {
            Err(TemplateError::NotEnoughMemory {
                name: spec.name.clone(),
                needed_mib: spec.memory_mib.into(),
                available_mib,
            })
        }
        _ => Ok(()),
    }
}

/// Keeps the template's name, and its image, while it is built.
struct Making<'a> {
    host: &'a Host,
    name: &'a str,
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        self.host.lock().making_templates.remove(self.name);
    }
}

/// A guest on its way to become a template. Dropped on failure: then VMM and files go.
struct Build<'a> {
    host: &'a Host,
    spec: &'a TemplateSpec,
    cancel: &'a Cancel,
    // Declared before the directory: the VMM is killed first.
    vmm: Vmm,
    dir: SandboxDir,
    began_ns: u64,
}

impl Host {
    /// Builds a template.
    ///
    /// # Errors
    /// Fails on a bad setting, a taken name, an unusable image, a guest that does not come up, a warm-up that fails or
    /// hangs, and when cancelled; nothing is left behind.
    pub fn build_template(
        &self,
        spec: TemplateSpec,
        cancel: &Cancel,
        on_progress: &mut dyn FnMut(Progress),
    ) -> Result<TemplateInfo, TemplateError> {
        spec.check()?;
        let _making = self.reserve(&spec)?;
        check_memory(&spec, available_mib())?;
        let mut step = |step, message: String, done| {
            on_progress(Progress { step, message, done_of: Some((done, 4)) });
        };
        step("boot", format!("booting image {} with {} MiB", spec.image, spec.memory_mib), 0);
        let build = self.begin_build(&spec, cancel)?;
        let version = build.await_agent()?;
        let mut times = BuildTimes { boot_ms: build.elapsed_ms(), ..BuildTimes::default() };
        if let Some(warm) = &spec.warm {
            step("warm", format!("agent {version} is up; running {}", warm.file_name), 1);
            let output = build.warm(warm)?;
            times.warm_ms = build.elapsed_ms() - times.boot_ms;
            if !output.is_empty() {
                step("warm", output, 1);
            }
        }
        step("freeze", "moving memory into layers".to_owned(), 2);
        let before_ms = build.elapsed_ms();
        let (zygote, frozen) = build.freeze()?;
        times.freeze_ms = build.elapsed_ms() - before_ms;
        drop(build);
        let template = Arc::new(Template {
            name: spec.name.clone(),
            created_at: crate::clock::now_rfc3339(),
            zygote,
            frozen,
            times,
            spec: spec.clone(),
        });
        let mut registry = self.lock();
        // Shutdown empties the registry once; what comes later must not outlive it.
        if self.closing.is_cancelled() {
            return Err(TemplateError::Cancelled { name: spec.name.clone() });
        }
        registry.templates.insert(spec.name.clone(), Arc::clone(&template));
        drop(registry);
        step("done", format!("{} bytes in layers", frozen.layer_bytes), 4);
        Ok(info(&template, Vec::new()))
    }

    fn reserve<'a>(&'a self, spec: &'a TemplateSpec) -> Result<Making<'a>, TemplateError> {
        let name = &spec.name;
        let mut registry = self.lock();
        if registry.templates.contains_key(name) || registry.making_templates.contains_key(name) {
            return Err(TemplateError::Exists { name: name.clone() });
        }
        registry.making_templates.insert(name.clone(), spec.image.clone());
        Ok(Making { host: self, name })
    }

    fn begin_build<'a>(
        &'a self,
        spec: &'a TemplateSpec,
        cancel: &'a Cancel,
    ) -> Result<Build<'a>, TemplateError> {
        let name = || spec.name.clone();
        let image = self.open_image(&spec.image);
        let image = image.map_err(|source| TemplateError::Image { name: name(), source })?;
        let resources = |source| TemplateError::Resources { name: name(), source };
        let id = sandbox_id();
        let (dir, fds) = SandboxDir::create(&self.config.run_dir, &id).map_err(resources)?;
        let began_ns = monotonic_ns();
        let stderr = dir.stderr().map_err(resources)?;
        let options = SpawnOptions { program: &self.config.vmm, id: &id, stderr, sink: Arc::new(Ignore) };
        let vmm = Vmm::spawn(&self.supervisor, options);
        let vmm = vmm.map_err(|source| TemplateError::Vmm {
            name: name(),
            console: String::new(),
            source: Box::new(source),
        })?;
        let build = Build { host: self, spec, cancel, vmm, dir, began_ns };
        let config = BootConfig {
            id,
            memory_mib: spec.memory_mib,
            vcpus: spec.vcpus,
            page_size: spec.page_size,
            source: BootSource::Linux {
                kernel: image.vmlinux(),
                initramfs: Some(image.initramfs()),
                cmdline: spec.cmdline.clone(),
            },
            disk: Some(DiskConfig {
                base: image.rootfs(),
                size_mib: 0,
                overlay_limit_mib: spec.overlay_limit_mib,
            }),
            vm_generation: hex_id(),
        };
        let deadline = Deadline::after(spec.boot_timeout.min(BOOT_ANSWER));
        let booted = build.watched("boot", || build.vmm.boot(config, fds, deadline))?;
        booted.map_err(|source| build.vmm_error("boot", source))?;
        Ok(build)
    }
}

impl Build<'_> {
    fn elapsed_ms(&self) -> f64 {
        state::ms(monotonic_ns() - self.began_ns)
    }

    fn console(&self) -> String {
        self.dir.last_words(LAST_LINES)
    }

    fn vmm_error(&self, step: &'static str, source: VmmError) -> TemplateError {
        match self.check(step) {
            Err(error) => error,
            Ok(()) => TemplateError::Vmm {
                name: self.spec.name.clone(),
                console: self.console(),
                source: Box::new(source),
            },
        }
    }

    /// Whether the build may go on.
    fn check(&self, step: &'static str) -> Result<(), TemplateError> {
        let name = self.spec.name.clone();
        if self.cancel.is_cancelled() || self.host.closing.is_cancelled() {
            return Err(TemplateError::Cancelled { name });
        }
        match self.vmm.ended() {
            Some(end) => {
                Err(TemplateError::GuestEnded { name, step, end: end.to_string(), console: self.console() })
            }
            None => Ok(()),
        }
    }

    /// Runs `work` on a thread of its own and kills the VMM, on which it waits, when the build is cancelled.
    fn watched<T: Send>(
        &self,
        step: &'static str,
        work: impl FnOnce() -> T + Send,
    ) -> Result<T, TemplateError> {
        std::thread::scope(|scope| {
            // Tells by its end alone, so that a panic is noticed, too.
            let (working, ended) = channel::<()>();
            let worker = scope.spawn(move || {
                let _working = working;
                work()
            });
            while ended.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                if self.cancel.is_cancelled() || self.host.closing.is_cancelled() {
                    self.vmm.kill();
                }
            }
            let done = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            if self.cancel.is_cancelled() || self.host.closing.is_cancelled() {
                self.check(step)?;
            }
            Ok(done)
        })
    }

    fn await_agent(&self) -> Result<String, TemplateError> {
        let spent = Duration::from_nanos(monotonic_ns() - self.began_ns);
        let deadline = Deadline::after(self.spec.boot_timeout.saturating_sub(spent));
        let vsock = self.dir.vsock_path();
        loop {
            let attempt = deadline.at_most(ATTEMPT);
            let pinged = self.watched("boot", || {
                AgentClient::connect(&vsock, attempt).and_then(|mut agent| agent.ping(attempt))
            })?;
            let source = match pinged {
                Ok(version) => return Ok(version),
                Err(source) => source,
            };
            self.check("boot")?;
            if deadline.is_over() {
                let seconds = self.spec.boot_timeout.as_secs();
                let (name, console) = (self.spec.name.clone(), self.console());
                return Err(TemplateError::BootTimeout { name, seconds, console, source });
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Runs the warm-up; what it wrote.
    fn warm(&self, warm: &WarmUp) -> Result<String, TemplateError> {
        let limit = self.spec.warm_timeout;
        let deadline = Deadline::after(limit + WARM_GRACE);
        let vsock = self.dir.vsock_path();
        let warmed = self.watched("warm", || {
            let mut agent = AgentClient::connect(&vsock, deadline)?;
            agent.warm(&warm.source, &warm.file_name, limit, deadline)
        })?;
        match warmed {
            Ok((stdout, stderr)) => Ok([stdout, stderr].concat().trim_end().to_owned()),
            Err(source) => {
                if matches!(source, AgentError::Broken { .. } | AgentError::Refused { .. }) {
                    // A guest that died takes a moment to be noticed.
                    self.vmm.wait_ended(Deadline::after(Duration::from_secs(1)));
                }
                self.check("warm")?;
                Err(TemplateError::Warm { name: self.spec.name.clone(), source })
            }
        }
    }

    fn freeze(&self) -> Result<(Vmm, offshoot_protocol::control::FrozenInfo), TemplateError> {
        let deadline = Deadline::after(self.host.config.freeze_timeout);
        let ends = Arc::clone(&self.host.ends);
        let frozen = self.watched("freeze", || self.vmm.freeze(ends, deadline))?;
        let frozen = frozen.map_err(|source| self.vmm_error("freeze", source))?;
        // The VMM that booted ends by itself; it is killed if it does not.
        self.vmm.wait_ended(Deadline::after(Duration::from_secs(5)));
        // A zygote that does not answer is no template.
        let answered = frozen.0.status(Deadline::after(Duration::from_secs(10)));
        answered.map_err(|source| TemplateError::Vmm {
            name: self.spec.name.clone(),
            console: self.console(),
            source: Box::new(source),
        })?;
        Ok(frozen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_larger_than_the_hosts_memory_is_refused_with_both_figures() {
        let spec = TemplateSpec {
            name: "big".into(),
            image: "debian".into(),
            memory_mib: 4096,
            vcpus: 1,
            page_size: PageSize::Thp,
            overlay_limit_mib: 64,
            cmdline: String::new(),
            warm: None,
            warm_timeout: Duration::ZERO,
            boot_timeout: Duration::ZERO,
        };
        let text = check_memory(&spec, Some(1000)).unwrap_err().to_string();
        assert!(text.contains("4096 MiB") && text.contains("1000 MiB"), "{text}");
        assert!(check_memory(&spec, Some(4096)).is_ok());
        assert!(check_memory(&spec, None).is_ok());
    }
}
