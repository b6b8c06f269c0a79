//! Debian's stock kernel boots in every shape a template can have, and a fork of it answers.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use offshoot_bench::micro::generation_id;
use offshoot_host::agent::{AgentClient, IdentityOf, give_identity};
use offshoot_host::clock::Deadline;
use offshoot_protocol::control::{BootConfig, BootSource, DiskConfig, PageSize};
use offshoot_tests::linux;
use offshoot_tests::micro::Rig;

/// Boots, waits for the agent, forks twice in one call, and gives each child an identity.
fn boots_and_forks(test: &str, kernel: &str, memory_mib: u32, vcpus: u8) {
    let Some(image) = linux::image(test) else { return };
    let mut rig = Rig::new().unwrap();
    let (vmm, resources) = rig.spawn("linux").unwrap();
    let config = BootConfig {
        id: "linux".into(),
        memory_mib,
        vcpus,
        page_size: PageSize::Thp,
        source: BootSource::Linux {
            kernel: image.join(kernel),
            initramfs: Some(image.join("initramfs.cpio")),
            cmdline: String::new(),
        },
        disk: Some(DiskConfig { base: image.join("rootfs.raw"), size_mib: 0, overlay_limit_mib: 256 }),
        vm_generation: generation_id(1),
    };
    vmm.boot(config, resources, rig.deadline()).unwrap();
    wait_for_agent(&rig, "linux");
    let children = rig.fork(&vmm, 2).unwrap();
    for child in &children {
        let env = BTreeMap::new();
        let of = IdentityOf { sandbox_id: child.vmm.id(), generation: 2, env: &env };
        give_identity(&rig.vsock_path(child.vmm.id()), &of, rig.deadline(), &|| true).unwrap();
    }
    // The parent's agent answers as before.
    wait_for_agent(&rig, "linux");
}

fn wait_for_agent(rig: &Rig, id: &str) {
    let deadline = rig.deadline();
    let vsock: PathBuf = rig.vsock_path(id);
    loop {
        let attempt = deadline.at_most(Duration::from_secs(5));
        match AgentClient::connect(&vsock, attempt).and_then(|mut agent| agent.ping(attempt)) {
            Ok(_) => return,
            Err(error) => assert!(!deadline.is_over(), "{error}; console:\n{}", rig.console(id)),
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn an_elf_kernel_boots_with_one_vcpu() {
    boots_and_forks("an_elf_kernel_boots_with_one_vcpu", "vmlinux", 128, 1);
}

#[test]
fn a_bzimage_boots() {
    boots_and_forks("a_bzimage_boots", "vmlinuz", 256, 1);
}

#[test]
fn four_vcpus_boot_with_memory_above_the_gap() {
    boots_and_forks("four_vcpus_boot_with_memory_above_the_gap", "vmlinux", 5120, 4);
}

#[test]
fn a_guest_that_cannot_boot_is_refused_by_name() {
    let test = "a_guest_that_cannot_boot_is_refused_by_name";
    if !offshoot_tests::need::kvm(test) {
        return;
    }
    let mut rig = Rig::new().unwrap();
    let folder = rig.folder().to_owned();
    std::fs::write(folder.join("text"), "not a kernel").unwrap();
    let mut refused = |kernel: PathBuf, disk: Option<PathBuf>, words: &[&str]| {
        let id = format!("bad-{}", words.len());
        let (vmm, resources) = rig.spawn(&id).unwrap();
        let config = BootConfig {
            id,
            memory_mib: 128,
            vcpus: 1,
            page_size: PageSize::Thp,
            source: BootSource::Linux { kernel, initramfs: None, cmdline: String::new() },
            disk: disk.map(|base| DiskConfig { base, size_mib: 0, overlay_limit_mib: 16 }),
            vm_generation: generation_id(1),
        };
        let error = vmm.boot(config, resources, Deadline::after(Duration::from_secs(30))).unwrap_err();
        let text = format!("{:#}", anyhow::Error::from(error));
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    };
    refused(folder.join("missing"), None, &["missing"]);
    refused(folder.join("text"), None, &["text", "kernel"]);
    refused(folder.clone(), None, &["kernel", "regular file", folder.to_str().unwrap()]);
    refused(folder.join("text"), Some(folder.join("no-disk")), &["root disk", "no-disk", "open", "disk"]);
}
