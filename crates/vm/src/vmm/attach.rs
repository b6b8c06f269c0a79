//! The half of a VM that belongs to one process: KVM VM, vCPU threads, control loop.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use kvm_ioctls::{VcpuFd, VmFd};
use rustix::event::epoll;

use super::error::VmmError;
use super::machine::{Machine, Saved, Start};
use crate::arch::x86_64::{boot, cpuid, payload, state};
use crate::bus::lock;
use crate::control::ControlSocket;
use crate::devices::{Descriptors, HostResources, PollHandle};
use crate::gate::Gate;
use crate::kvm::{self, KvmError, KvmIrqs};
use crate::notice::Notice;
use crate::vcpu::{self, Vcpus};

/// Poll data of the control socket.
pub const CONTROL_TOKEN: u64 = u64::MAX;
/// Poll data of the notice that the guest has ended.
pub const NOTICE_TOKEN: u64 = u64::MAX - 1;

/// KVM VM, vCPU threads and control loop of this process.
pub struct Attached {
    /// To the host.
    pub control: Arc<ControlSocket>,
    /// The control loop's epoll instance.
    pub poll: Arc<OwnedFd>,
    /// The KVM VM.
    pub vm: Arc<VmFd>,
    /// Its running vCPUs.
    pub vcpus: Vcpus,
}

/// What a sandbox is given before it starts.
pub struct Endowment {
    /// To the host.
    pub control: Arc<ControlSocket>,
    /// For its devices.
    pub descriptors: Descriptors,
    /// New VM generation id.
    pub vm_generation: [u8; 16],
}

impl Attached {
    /// Makes a KVM VM over the machine's memory, attaches the devices, calls `announce` and lets the vCPUs go.
    ///
    /// Cost: one VM with its interrupt controllers, one vCPU and thread for each of the machine's, one epoll instance.
    ///
    /// # Errors
    /// As [`VmmError`]; no vCPU has run.
    pub fn start(
        machine: &Machine,
        start: &Start,
        mut given: Endowment,
        announce: impl FnOnce(),
    ) -> Result<Self, VmmError> {
        let vm = kvm::create_vm(&machine.kvm, &machine.ram)?;
        let fds = create_vcpus(machine, &vm, start)?;
        let poll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).map_err(VmmError::Loop)?);
        let irqs = Arc::new(KvmIrqs(Arc::clone(&vm)));
        for (index, device) in (0u32..).zip(machine.devices()) {
            let mut host = HostResources {
                irqs: irqs.clone(),
                poll: PollHandle::new(Arc::clone(&poll), index),
                descriptors: &mut given.descriptors,
                vm_generation: given.vm_generation,
            };
            lock(device).attach(&mut host)?;
        }
        let notice = Notice::new().map_err(VmmError::Loop)?;
        let shared = Arc::new(vcpu::Shared {
            gate: Gate::new(fds.len()),
            bus: Arc::clone(&machine.bus),
            traits: Arc::clone(&machine.traits),
            notice,
            control: Arc::clone(&given.control),
            doorbells: machine.doorbells(given.vm_generation),
            exits: AtomicU64::new(0),
        });
        let watch =
            |fd, token| epoll::add(&poll, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN);
        watch(std::os::fd::AsFd::as_fd(&*given.control), CONTROL_TOKEN).map_err(VmmError::Loop)?;
        watch(std::os::fd::AsFd::as_fd(&shared.notice), NOTICE_TOKEN).map_err(VmmError::Loop)?;
        let run_bytes = machine.kvm.get_vcpu_mmap_size().map_err(KvmError::during("size the run page"))?;
        announce();
        let vcpus = Vcpus::spawn(fds, run_bytes, shared)?;
        Ok(Self { control: given.control, poll, vm, vcpus })
    }

    /// Stops the vCPUs and reads all of KVM's state. The caller releases the gate, whatever comes back.
    ///
    /// # Errors
    /// As [`VmmError`].
    pub fn stop_and_save(&self) -> Result<Saved, VmmError> {
        let vcpus = self.vcpus.stop()?;
        Ok(Saved { vm: state::save_vm(&self.vm)?, vcpus })
    }

    /// Gives up ownership without closing anything: in a forked child the threads do not exist and the descriptors
    /// are the parent's; [`crate::process::close_all_except`] closes this process's copies.
    pub fn forget(self) {
        std::mem::forget(self);
    }
}

fn create_vcpus(machine: &Machine, vm: &Arc<VmFd>, start: &Start) -> Result<Vec<VcpuFd>, VmmError> {
    let count = machine.config.vcpus;
    let mut fds = Vec::with_capacity(count.into());
    for index in 0..count {
        fds.push(vm.create_vcpu(index.into()).map_err(KvmError::during("create a vcpu"))?);
    }
    match start {
        Start::Saved(saved) => {
            let plan = state::load_clock(vm, &saved.vm)?;
            for (fd, vcpu) in fds.iter().zip(&saved.vcpus) {
                state::load_vcpu(fd, vcpu, &plan)?;
            }
            state::load_vm(vm, &saved.vm)?;
        }
        Start::Linux(entry) => {
            for (index, fd) in (0..count).zip(&fds) {
                set_cpuid(machine, fd, index)?;
                if index == 0 { boot::configure_bsp(fd, entry)? } else { boot::configure_ap(fd)? }
            }
        }
        Start::Payload => {
            for (index, fd) in (0..count).zip(&fds) {
                set_cpuid(machine, fd, index)?;
                payload::configure_vcpu(fd, index, count, machine.ram.len_bytes())?;
            }
        }
    }
    Ok(fds)
}

fn set_cpuid(machine: &Machine, fd: &VcpuFd, index: u8) -> Result<(), VmmError> {
    let cpuid = cpuid::for_vcpu(&machine.kvm, index, machine.config.vcpus)?;
    Ok(fd.set_cpuid2(&cpuid).map_err(KvmError::during("set the processor's features"))?)
}
