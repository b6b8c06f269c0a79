//! Freezing: a running VMM becomes a zygote.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use offshoot_memory::Layer;
use offshoot_protocol::control::{ExitReason, FrozenInfo, Message, Reply};

use super::Role;
use super::error::VmmError;
use super::machine::Machine;
use super::running::{Running, refuse};
use super::zygote::Zygote;
use crate::bus::lock;
use crate::process::{self, Forked, monotonic_ns};

/// Layers of everything a machine holds, written but not yet in use.
struct Layers {
    ram: Vec<Layer>,
    disk: Vec<Layer>,
}

impl Layers {
    fn write(machine: &Machine) -> Result<Self, VmmError> {
        let ram = machine.ram.to_layers()?;
        let disk = match machine.disk() {
            None => Vec::new(),
            Some(disk) => {
                let disk = lock(disk);
                let regions = disk.device().disk().regions();
                regions
                    .into_iter()
                    .map(|region| region.to_layer("offshoot-disk"))
                    .collect::<Result<_, _>>()?
            }
        };
        Ok(Self { ram, disk })
    }

    fn stored_bytes(&self) -> u64 {
        self.ram.iter().chain(&self.disk).map(Layer::stored_bytes).sum()
    }

    /// Whatever fails, memory and disk hold what they held before.
    fn adopt(self, machine: &mut Machine) -> Result<(), VmmError> {
        machine.ram.adopt(self.ram)?;
        if let Some(disk) = machine.disk() {
            let mut disk = lock(disk);
            let regions = disk.device_mut().disk_mut().regions_mut();
            for (region, layer) in regions.into_iter().zip(self.disk) {
                region.adopt(Arc::new(layer))?;
            }
        }
        Ok(())
    }
}

/// Stops the guest for good, moves what it holds into sealed layers and leaves a zygote behind. If anything fails
/// before the zygote exists, the guest goes on.
pub fn freeze(mut running: Box<Running>, seq: u64, zygote_control: OwnedFd) -> Role {
    let start_ns = monotonic_ns();
    let saved = match running.stop_and_save() {
        Ok(saved) => saved,
        Err(error) => return give_up(running, seq, &error),
    };
    let stored = Layers::write(running.machine()).and_then(|layers| {
        let stored = layers.stored_bytes();
        layers.adopt(running.machine_mut()).map(|()| stored)
    });
    let layer_bytes = match stored {
        Ok(stored) => stored,
        Err(error) => return give_up(running, seq, &error),
    };
    match process::fork() {
        Ok(Forked::Child) => Zygote::adopt(running, saved, zygote_control),
        Ok(Forked::Parent { pid, pidfd }) => {
            let info = FrozenInfo { pid, layer_bytes, freeze_ns: monotonic_ns() - start_ns };
            let message = Message::Reply { seq, result: Ok(Reply::Frozen(info)) };
            let control = running.control();
            // If the host is gone, the zygote notices by itself.
            let _ = control.send(&message, &[pidfd.as_fd()]);
            running.shut_down();
            Role::Ended(ExitReason::Frozen, control)
        }
        Err(error) => give_up(running, seq, &error.into()),
    }
}

fn give_up(running: Box<Running>, seq: u64, error: &VmmError) -> Role {
    running.release();
    refuse(&running.control(), seq, error);
    Role::Running(running)
}
