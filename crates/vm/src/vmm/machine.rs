//! The half of a VM that `fork(2)` clones: memory, device models, settings. It holds no KVM VM.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex};

use kvm_ioctls::Kvm;
use offshoot_memory::{GuestRam, PageUse, Region};
use offshoot_protocol::control::{BootConfig, BootSource, DiskConfig, PageSize};
use offshoot_protocol::ports::GUEST_CID;

use super::error::VmmError;
use crate::arch::x86_64::acpi::VM_GENERATION_ID;
use crate::arch::x86_64::layout::{GED_GSI, VIRTIO_MMIO_GSI_BASE};
use crate::arch::x86_64::state::{StateTraits, VcpuState, VmState};
use crate::arch::x86_64::{acpi, boot, memory_map, payload};
use crate::bus::{Bus, Shared, lock};
use crate::devices::absent::Absent;
use crate::devices::generation::Generation;
use crate::devices::legacy::LegacyPorts;
use crate::devices::serial::SerialConsole;
use crate::devices::virtio::MmioTransport;
use crate::devices::virtio::blk::{Blk, OverlayDisk};
use crate::devices::virtio::rng::Rng;
use crate::devices::virtio::vsock::Vsock;
use crate::devices::{BusDevice, Device};
use crate::kvm;
use crate::vcpu::Doorbells;

/// State of KVM's half at the instant the vCPUs stopped.
#[derive(Clone)]
pub struct Saved {
    /// Interrupt controllers, timer, clock.
    pub vm: VmState,
    /// vCPUs in order.
    pub vcpus: Vec<VcpuState>,
}

/// How the first instruction is reached.
pub enum Start {
    /// A Linux kernel.
    Linux(boot::Entry),
    /// A micro-guest.
    Payload,
    /// Where another VM stopped.
    Saved(Box<Saved>),
}

/// Memory, device models and settings of one guest.
pub struct Machine {
    /// Settings it was booted with; `id` is this sandbox's own.
    pub config: BootConfig,
    /// `/dev/kvm`: stateless, so it is one of the descriptors children keep.
    pub kvm: Kvm,
    /// What KVM can save.
    pub traits: Arc<StateTraits>,
    /// Forks taken of this machine.
    pub forks: u64,
    /// Ports and MMIO.
    pub bus: Arc<Bus>,
    devices: Vec<Shared<dyn Device>>,
    serial: Shared<SerialConsole>,
    disk: Option<Shared<MmioTransport<Blk>>>,
    vsock: Option<Shared<MmioTransport<Vsock>>>,
    /// Guest memory: last, since devices hold views of it.
    pub ram: GuestRam,
}

impl Machine {
    /// Makes memory and devices and loads the guest.
    ///
    /// # Errors
    /// As [`VmmError`]; nothing is left behind.
    pub fn load(config: BootConfig) -> Result<(Self, Start), VmmError> {
        check_limits(&config)?;
        let kvm = kvm::open()?;
        let traits = Arc::new(StateTraits::probe(&kvm)?);
        let page_use = match config.page_size {
            PageSize::Small4k => PageUse::Sparse,
            PageSize::Thp => PageUse::Huge,
        };
        let ram = GuestRam::anonymous(&memory_map::regions(config.memory_mib), page_use)?;
        let disk = config.disk.as_ref().map(|disk| open_disk(disk, &ram)).transpose()?;
        let linux = matches!(config.source, BootSource::Linux { .. });
        let vsock = linux.then(|| {
            let gsi = VIRTIO_MMIO_GSI_BASE + 1;
            Arc::new(Mutex::new(MmioTransport::new(Vsock::new(GUEST_CID), ram.view().clone(), gsi)))
        });
        let mut mmio: Vec<Shared<dyn BusDevice>> = Vec::new();
        if let Some(vsock) = &vsock {
            // Window 0 is the disk's also in a guest without one, which finds an empty window there.
            mmio.push(match &disk {
                Some(disk) => disk.clone(),
                None => Arc::new(Mutex::new(Absent)),
            });
            mmio.push(vsock.clone());
            let gsi = VIRTIO_MMIO_GSI_BASE + 2;
            mmio.push(Arc::new(Mutex::new(MmioTransport::new(Rng::new(), ram.view().clone(), gsi))));
        }
        let serial = Arc::new(Mutex::new(SerialConsole::new()));
        let start = load_guest(&config, &ram, mmio.len() as u32)?;
        let mut devices: Vec<Shared<dyn Device>> = vec![serial.clone()];
        if linux {
            let generation = Generation::new(ram.view().clone(), VM_GENERATION_ID, GED_GSI);
            devices.push(Arc::new(Mutex::new(generation)));
        }
        for device in &mmio {
            devices.push(device.clone());
        }
        let bus = Arc::new(Bus { mmio, serial: serial.clone(), legacy: LegacyPorts });
        Ok((Self { config, kvm, traits, forks: 0, bus, devices, serial, disk, vsock, ram }, start))
    }

    /// Every device, each of which is attached and detached with the process.
    pub fn devices(&self) -> &[Shared<dyn Device>] {
        &self.devices
    }

    /// Drops what the devices hold of the process and VM they were attached to. First thing in a forked child.
    pub fn detach(&self) {
        for device in self.devices() {
            lock(device).detach();
        }
    }

    /// Numbers of the descriptors a child shares with its parent: the list in ARCHITECTURE.md, "Invariants".
    pub fn shared_fds(&self) -> Vec<RawFd> {
        let mut fds = vec![self.kvm.as_raw_fd()];
        fds.extend(self.ram.regions().iter().filter_map(|(_, region)| layer_fd(region)));
        if let Some(disk) = &self.disk {
            let disk = lock(disk);
            let disk = disk.device().disk();
            fds.push(disk.base_fd().as_raw_fd());
            fds.extend(disk.regions().into_iter().filter_map(layer_fd));
        }
        fds
    }

    /// The block device's overlay, if there is a disk.
    pub fn disk(&self) -> Option<&Shared<MmioTransport<Blk>>> {
        self.disk.as_ref()
    }

    /// The vsock device, if there is one.
    pub fn vsock(&self) -> Option<&Shared<MmioTransport<Vsock>>> {
        self.vsock.as_ref()
    }

    /// Whether the guest may ring the host.
    pub fn doorbells(&self, vm_generation: [u8; 16]) -> Doorbells {
        match self.config.source {
            BootSource::Linux { .. } => Doorbells::Ignored,
            BootSource::Payload { .. } => {
                let [a, b, c, d, ..] = vm_generation;
                Doorbells::Forwarded { generation: u32::from_be_bytes([a, b, c, d]) }
            }
        }
    }

    /// The console.
    pub fn serial(&self) -> &Shared<SerialConsole> {
        &self.serial
    }
}

fn layer_fd(region: &Region) -> Option<RawFd> {
    region.layer().map(|layer| layer.fd().as_raw_fd())
}

fn check_limits(config: &BootConfig) -> Result<(), VmmError> {
    let (memory_range, range) = match config.source {
        BootSource::Linux { .. } => (128..=12288, "128 to 12288"),
        BootSource::Payload { .. } => (16..=12288, "16 to 12288"),
    };
    if !memory_range.contains(&config.memory_mib) {
        return Err(VmmError::OutOfRange { what: "memory_mib", value: config.memory_mib.into(), range });
    }
    if !(1..=8).contains(&config.vcpus) {
        return Err(VmmError::OutOfRange { what: "vcpus", value: config.vcpus.into(), range: "1 to 8" });
    }
    Ok(())
}

/// Reads 32 hexadecimal digits.
pub fn parse_generation(text: &str) -> Result<[u8; 16], VmmError> {
    let bad = || VmmError::Generation { value: text.to_owned() };
    if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(bad());
    }
    let number = u128::from_str_radix(text, 16).map_err(|_| bad())?;
    Ok(number.to_be_bytes())
}

fn open_disk(config: &DiskConfig, ram: &GuestRam) -> Result<Shared<MmioTransport<Blk>>, VmmError> {
    let disk = OverlayDisk::open(config)?;
    Ok(Arc::new(Mutex::new(MmioTransport::new(Blk::new(disk), ram.view().clone(), VIRTIO_MMIO_GSI_BASE))))
}

fn load_guest(config: &BootConfig, ram: &GuestRam, windows: u32) -> Result<Start, VmmError> {
    match &config.source {
        BootSource::Linux { kernel, initramfs, cmdline } => {
            let rsdp = acpi::write_tables(ram.view(), config.vcpus, windows)?;
            let cmdline = linux_cmdline(config, cmdline);
            let linux = boot::LinuxBoot { kernel, initramfs: initramfs.as_deref(), cmdline: &cmdline, rsdp };
            Ok(Start::Linux(boot::load_linux(ram.view(), &linux)?))
        }
        BootSource::Payload { file } => {
            payload::load_file(ram.view(), file, config.vcpus)?;
            Ok(Start::Payload)
        }
    }
}

/// Command line of a Linux guest: a panic resets at once, and the agent is told of the root disk.
fn linux_cmdline(config: &BootConfig, extra: &str) -> String {
    let mut line = String::from(
        "console=ttyS0 8250.nr_uarts=1 reboot=k panic=-1 no_timer_check i8042.noaux i8042.nokbd",
    );
    if let Some(disk) = &config.disk {
        line.push_str(&format!(
            " offshoot.root=/dev/vda offshoot.overlay_limit_mib={}",
            disk.overlay_limit_mib
        ));
    }
    if !extra.is_empty() {
        line.push(' ');
        line.push_str(extra);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generation_id_is_read_as_bytes() {
        assert_eq!(parse_generation("000102030405060708090a0b0c0d0e0f").unwrap()[15], 15);
    }

    #[test]
    fn a_bad_generation_id_is_named() {
        for text in ["", "zz", "+00102030405060708090a0b0c0d0e0f", "000102030405060708090a0b0c0d0e0f0"] {
            assert!(parse_generation(text).unwrap_err().to_string().contains("32 hexadecimal"));
        }
    }
}
