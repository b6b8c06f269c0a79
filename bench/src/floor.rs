//! Floors: the least that the kernel's own operations take on this host, measured in the same run.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use anyhow::{Context, bail};
use kvm_ioctls::{Kvm, VcpuExit};
use offshoot_memory::{GuestRam, PageUse};
use offshoot_vm::arch::x86_64::{memory_map, payload};
use offshoot_vm::kvm;
use offshoot_vm::process::{self, Forked, monotonic_ns};
use vm_memory::{Bytes, GuestAddress};

use crate::micro;

/// What each child of a floor does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Floor {
    /// Makes a KVM VM with interrupt controllers, timer, one memory slot for each region and one vCPU over the inherited
    /// mapping, and runs the guest to its first exit.
    Kvm,
    /// Reads what the guest would and writes one page.
    Process,
}

/// A frozen template for floors: the same pattern and mapping as Offshoot's, in this process.
pub struct Template {
    kvm: Option<Kvm>,
    ram: GuestRam,
    fill_bytes: u64,
    memory_bytes: u64,
}

impl Template {
    /// Fills `fill_bytes` of a guest of `memory_mib` with the pattern and freezes it.
    ///
    /// # Errors
    /// Memory or KVM is lacking.
    pub fn new(floor: Floor, memory_mib: u32, fill_bytes: u64) -> anyhow::Result<Self> {
        let mut ram = GuestRam::anonymous(&memory_map::regions(memory_mib), PageUse::Huge)?;
        let kvm = match floor {
            Floor::Kvm => Some(kvm::open()?),
            Floor::Process => None,
        };
        payload::load(ram.view(), &micro::floor(fill_bytes)?, 1)?;
        for page in (micro::FILL_BASE..micro::FILL_BASE + fill_bytes).step_by(4096) {
            ram.view().write_obj(page, GuestAddress(page))?;
        }
        let layers = ram.to_layers()?;
        ram.adopt(layers)?;
        let memory_bytes = ram.len_bytes();
        Ok(Self { kvm, ram, fill_bytes, memory_bytes })
    }

    /// Forks `n` children one after the other and waits until all have answered; all are alive until then.
    /// Returns milliseconds.
    ///
    /// # Errors
    /// A child could not be forked, or did not answer.
    pub fn fan_out(&self, n: u32) -> anyhow::Result<f64> {
        let (answers, answer) = pipe()?;
        let (hold, release) = pipe()?;
        let start_ns = monotonic_ns();
        let mut children = Vec::with_capacity(n as usize);
        for _ in 0..n {
            match process::fork()? {
                Forked::Child => {
                    drop(release);
                    let outcome = self.child();
                    let byte = [u8::from(outcome.is_ok())];
                    // If the parent is gone nobody waits.
                    let _ = rustix::io::write(&answer, &byte);
                    if let Err(error) = outcome {
                        eprintln!("floor child: {error:#}");
                    }
                    let _ = rustix::io::read(&hold, &mut [0u8; 1]);
                    std::process::exit(0);
                }
                Forked::Parent { pidfd, .. } => children.push(pidfd),
            }
        }
        drop(answer);
        let mut received = Vec::with_capacity(n as usize);
        std::fs::File::from(answers).take(n.into()).read_to_end(&mut received)?;
        let elapsed_ns = monotonic_ns() - start_ns;
        drop(release);
        for child in children {
            let options = rustix::process::WaitIdOptions::EXITED;
            rustix::process::waitid(
                rustix::process::WaitId::PidFd(std::os::fd::AsFd::as_fd(&child)),
                options,
            )?;
        }
        let right = received.iter().filter(|byte| **byte == 1).count();
        if right != n as usize {
            bail!("{right} of {n} children answered");
        }
        Ok(elapsed_ns as f64 / 1e6)
    }

    fn child(&self) -> anyhow::Result<()> {
        match &self.kvm {
            Some(kvm) => self.run_guest(kvm),
            None => self.touch(),
        }
    }

    fn run_guest(&self, kvm: &Kvm) -> anyhow::Result<()> {
        let vm = kvm::create_vm(kvm, &self.ram)?;
        let mut vcpu = vm.create_vcpu(0)?;
        payload::configure_vcpu(&vcpu, 0, 1, self.memory_bytes)?;
        match vcpu.run()? {
            VcpuExit::IoOut(_, [1, 0, 0, 0]) => {}
            other => bail!("the guest answered {other:?}"),
        }
        // Alive until the parent has all answers, as a clone is.
        std::mem::forget((Arc::clone(&vm), vcpu));
        Ok(())
    }

    fn touch(&self) -> anyhow::Result<()> {
        let stride = micro::check_stride_bytes(self.fill_bytes) as usize;
        for page in (micro::FILL_BASE..micro::FILL_BASE + self.fill_bytes).step_by(stride) {
            let found: u64 = self.ram.view().read_obj(GuestAddress(page))?;
            anyhow::ensure!(found == page, "page {page:#x} holds {found:#x}");
        }
        self.ram.view().write_obj(1u32, GuestAddress(micro::FILL_BASE + 8))?;
        Ok(())
    }
}

fn pipe() -> anyhow::Result<(OwnedFd, OwnedFd)> {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).context("make a pipe")
}
