//! The invariants of a fork, with writers running on every vCPU: memory and registers are of one instant, and nobody
//! ever sees a page of anybody else. The guest itself checks each page before each write (`offshoot_bench::micro`).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use offshoot_bench::micro::{self, READY};
use offshoot_host::accounting::Memory;
use offshoot_host::clock::Deadline;
use offshoot_protocol::control::{ErrorKind, Role};
use offshoot_tests::descriptors;
use offshoot_tests::micro::{Guest, Rig};
use offshoot_tests::need;

/// Pages that each vCPU sweeps over, in each area; fewer where everything is emulated.
fn pages() -> u32 {
    if need::in_lab() { 200 } else { 2000 }
}

fn writers(rig: &mut Rig, memory_mib: u32, vcpus: u8) -> Guest {
    let code = micro::writers(pages(), memory_mib > 4096).unwrap();
    let root = rig.boot(&code, memory_mib, vcpus).unwrap();
    rig.wait_for(&root.vmm, vcpus, !root.number).unwrap();
    root
}

/// Each child has found out that it is one, and has then swept on for a while without finding a foreign page.
fn all_well(rig: &mut Rig, children: &[Guest], vcpus: u8) {
    for child in children {
        rig.wait_for(&child.vmm, vcpus, child.number).unwrap();
        rig.wait_for(&child.vmm, vcpus, !child.number).unwrap();
    }
}

fn exits(rig: &Rig, guest: &Guest) -> u64 {
    guest.vmm.status(rig.deadline()).unwrap().kvm_exits
}

fn runs_on(rig: &mut Rig, guest: &Guest) {
    let before = exits(rig, guest);
    let deadline = rig.deadline();
    while exits(rig, guest) <= before {
        assert!(!deadline.is_over(), "guest {} stands still", guest.vmm.id());
        std::thread::sleep(Duration::from_millis(1));
    }
    rig.check_untorn().unwrap();
}

fn repeated_forks(memory_mib: u32, vcpus: u8) {
    let mut rig = Rig::new().unwrap();
    let root = writers(&mut rig, memory_mib, vcpus);
    for _ in 0..4 {
        let children = rig.fork(&root.vmm, 3).unwrap();
        all_well(&mut rig, &children, vcpus);
        runs_on(&mut rig, &root);
    }
}

#[test]
fn forks_are_of_one_instant_with_one_vcpu() {
    if need::kvm("forks_are_of_one_instant_with_one_vcpu") {
        repeated_forks(64, 1);
    }
}

#[test]
fn forks_are_of_one_instant_with_four_vcpus() {
    if need::kvm("forks_are_of_one_instant_with_four_vcpus") {
        repeated_forks(128, 4);
    }
}

/// A guest with memory above the 32-bit MMIO gap has two regions; both are forked.
#[test]
fn both_regions_of_a_large_guest_are_forked() {
    if need::kvm("both_regions_of_a_large_guest_are_forked") {
        repeated_forks(5120, 2);
    }
}

#[test]
fn forks_of_forks_are_of_one_instant() {
    if !need::kvm("forks_of_forks_are_of_one_instant") {
        return;
    }
    let mut rig = Rig::new().unwrap();
    let mut line = vec![writers(&mut rig, 64, 2)];
    for _ in 0..8 {
        let parent = line.last().unwrap();
        let mut children = rig.fork(&parent.vmm, 2).unwrap();
        all_well(&mut rig, &children, 2);
        line.push(children.remove(0));
    }
    for ancestor in &line {
        runs_on(&mut rig, ancestor);
    }
}

#[test]
fn clones_of_a_template_go_on_from_where_it_was_frozen() {
    if !need::kvm("clones_of_a_template_go_on_from_where_it_was_frozen") {
        return;
    }
    let mut rig = Rig::new().unwrap();
    let root = writers(&mut rig, 5120, 4);
    let zygote = rig.freeze(root).unwrap();
    for _ in 0..3 {
        let clones = rig.fork(&zygote, 4).unwrap();
        all_well(&mut rig, &clones, 4);
        let forks = rig.fork(&clones[0].vmm, 2).unwrap();
        all_well(&mut rig, &forks, 4);
    }
    assert_eq!(zygote.status(rig.deadline()).unwrap().role, Role::Zygote);
}

#[test]
fn a_template_of_a_clone_holds_layer_and_changes() {
    if !need::kvm("a_template_of_a_clone_holds_layer_and_changes") {
        return;
    }
    let mut rig = Rig::new().unwrap();
    let root = writers(&mut rig, 64, 1);
    let mut zygote = rig.freeze(root).unwrap();
    for _ in 0..3 {
        let clone = rig.fork(&zygote, 1).unwrap().remove(0);
        all_well(&mut rig, std::slice::from_ref(&clone), 1);
        zygote = rig.freeze(clone).unwrap();
    }
    let clones = rig.fork(&zygote, 2).unwrap();
    all_well(&mut rig, &clones, 1);
}

#[test]
fn a_child_shares_only_the_listed_descriptors() {
    if !need::kvm("a_child_shares_only_the_listed_descriptors") {
        return;
    }
    let mut rig = Rig::new().unwrap();
    let root = writers(&mut rig, 64, 2);
    let zygote = rig.freeze(root).unwrap();
    let clones = rig.fork(&zygote, 2).unwrap();
    let forks = rig.fork(&clones[0].vmm, 2).unwrap();
    let pid = |guest: &Guest| guest.vmm.pid().unwrap();
    let pairs = [
        (zygote.pid().unwrap(), pid(&clones[0])),
        (pid(&clones[0]), pid(&clones[1])),
        (pid(&clones[0]), pid(&forks[0])),
        (pid(&forks[0]), pid(&forks[1])),
    ];
    for (parent, child) in pairs {
        for descriptor in descriptors::shared(parent, child).unwrap() {
            let name = descriptor.names.to_string_lossy().into_owned();
            let listed = name == "/dev/kvm" || name == "/dev/null" || name.starts_with("/memfd:offshoot-");
            assert!(listed, "process {child} shares descriptor {descriptor:?} with {parent}");
        }
        let open = descriptors::of(child).unwrap();
        let vms = open.iter().filter(|descriptor| descriptor.names.ends_with("anon_inode:kvm-vm")).count();
        assert_eq!(vms, 1, "process {child} has {open:?}");
    }
}

#[test]
fn a_fork_with_a_wrong_child_fails_and_the_parent_runs() {
    if !need::kvm("a_fork_with_a_wrong_child_fails_and_the_parent_runs") {
        return;
    }
    let mut rig = Rig::new().unwrap();
    let root = writers(&mut rig, 64, 1);
    let error = rig.try_fork(&root.vmm, 0).map(|_| ()).unwrap_err();
    assert!(format!("{error:#}").contains("1 to 4096"), "{error:#}");
    runs_on(&mut rig, &root);
    let children = rig.fork(&root.vmm, 1).unwrap();
    all_well(&mut rig, &children, 1);
}

/// A fork that fails inside the pause: the parent has no descriptor left for its twin. It must run on, and fork again.
#[test]
fn a_fork_that_fails_half_way_leaves_the_parent_running() {
    if !need::kvm("a_fork_that_fails_half_way_leaves_the_parent_running") {
        return;
    }
    let mut rig = Rig::new().unwrap();
    let root = writers(&mut rig, 64, 2);
    let pid = rustix::process::Pid::from_raw(root.vmm.pid().unwrap().cast_signed()).unwrap();
    let nofile = rustix::process::Resource::Nofile;
    let before = rustix::process::getrlimit(nofile);
    let open = descriptors::of(root.vmm.pid().unwrap()).unwrap();
    let is_open = |number: i32| open.iter().any(|descriptor| descriptor.number == number);
    // The twin's socket and the child's three descriptors still fit; the twin's pidfd does not.
    let fifth_free = (0..).filter(|number| !is_open(*number)).nth(4).unwrap();
    let tight =
        rustix::process::Rlimit { current: Some(fifth_free.unsigned_abs().into()), maximum: before.maximum };
    rustix::process::prlimit(Some(pid), nofile, tight).unwrap();
    let error = rig.try_fork(&root.vmm, 1).map(|_| ()).unwrap_err();
    assert!(format!("{error:#}").contains("descriptor"), "{error:#}");
    runs_on(&mut rig, &root);
    rustix::process::prlimit(Some(pid), nofile, before).unwrap();
    let children = rig.fork(&root.vmm, 2).unwrap();
    all_well(&mut rig, &children, 2);
    runs_on(&mut rig, &root);
}

#[test]
fn the_end_of_one_process_harms_no_other() {
    if !need::kvm("the_end_of_one_process_harms_no_other") {
        return;
    }
    let mut rig = Rig::new().unwrap();
    let root = writers(&mut rig, 64, 2);
    let zygote = rig.freeze(root).unwrap();
    let clones = rig.fork(&zygote, 3).unwrap();
    all_well(&mut rig, &clones, 2);
    let forks = rig.fork(&clones[0].vmm, 2).unwrap();
    all_well(&mut rig, &forks, 2);
    for victim in [&zygote, &clones[0].vmm, &forks[0].vmm] {
        victim.kill();
        assert!(victim.wait_ended(rig.deadline()).is_some());
        for survivor in [&clones[1], &clones[2], &forks[1]] {
            runs_on(&mut rig, survivor);
        }
    }
    let more = rig.fork(&forks[1].vmm, 2).unwrap();
    all_well(&mut rig, &more, 2);
}

#[test]
fn a_paused_guest_stands_still_can_be_forked_and_goes_on() {
    if !need::kvm("a_paused_guest_stands_still_can_be_forked_and_goes_on") {
        return;
    }
    let mut rig = Rig::new().unwrap();
    let root = writers(&mut rig, 64, 2);
    root.vmm.pause(rig.deadline()).unwrap();
    let status = root.vmm.status(rig.deadline()).unwrap();
    assert_eq!(status.role, Role::Paused);
    let children = rig.fork(&root.vmm, 2).unwrap();
    all_well(&mut rig, &children, 2);
    assert_eq!(exits(&rig, &root), status.kvm_exits);
    root.vmm.resume(rig.deadline()).unwrap();
    runs_on(&mut rig, &root);
    assert!(root.vmm.resume(rig.deadline()).is_err());
}

#[test]
fn a_vmm_ends_when_its_host_is_gone() {
    if !need::kvm("a_vmm_ends_when_its_host_is_gone") {
        return;
    }
    let mut rig = Rig::new().unwrap();
    let root = writers(&mut rig, 64, 1);
    let zygote = rig.freeze(root).unwrap();
    let clone = rig.fork(&zygote, 1).unwrap().remove(0);
    let pids = [zygote.pid().unwrap(), clone.vmm.pid().unwrap()];
    drop((zygote, clone, rig));
    let deadline = Deadline::after(Duration::from_secs(20));
    while pids.iter().any(|pid| is_running(*pid)) {
        assert!(!deadline.is_over(), "one of {pids:?} still runs");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn is_running(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    !status.is_empty() && !status.contains("State:\tZ")
}

#[test]
fn an_idle_clone_costs_less_than_a_mebibyte() {
    if !need::kvm("an_idle_clone_costs_less_than_a_mebibyte") {
        return;
    }
    let mut rig = Rig::new().unwrap();
    let root = rig.boot(&micro::answering(60 << 20).unwrap(), 64, 1).unwrap();
    rig.wait_for(&root.vmm, 1, READY).unwrap();
    let zygote = rig.freeze(root).unwrap();
    let clones = rig.fork(&zygote, 8).unwrap();
    for clone in &clones {
        rig.wait_for(&clone.vmm, 1, clone.number).unwrap();
    }
    for clone in &clones {
        let memory = Memory::of(clone.vmm.pid().unwrap(), &clone.vmm.pidfd().unwrap()).unwrap();
        assert!(memory.private_kib + memory.page_table_kib < 1024, "{memory:?}");
    }
}

#[test]
fn bad_settings_are_refused_by_name() {
    if !need::kvm("bad_settings_are_refused_by_name") {
        return;
    }
    let mut rig = Rig::new().unwrap();
    let code = micro::answering(1 << 20).unwrap();
    for (memory_mib, vcpus, named) in
        [(8, 1, "memory_mib is 8"), (99999, 1, "memory_mib"), (64, 0, "vcpus is 0"), (64, 9, "vcpus")]
    {
        let error = rig.boot(&code, memory_mib, vcpus).map(|_| ()).unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains(named), "{text}");
        let refused = error.downcast_ref::<offshoot_host::vmm::VmmError>();
        let kind = match refused {
            Some(offshoot_host::vmm::VmmError::Refused { source, .. }) => source.kind,
            other => panic!("{other:?}"),
        };
        assert_eq!(kind, ErrorKind::Caller);
    }
}
