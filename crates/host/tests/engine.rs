//! What the host does, with fake VMMs: order of results, partial failure, identity, deaths, removal.

mod common;

use std::time::Duration;

use common::{Bench, eventually};
use offshoot_host::engine::{
    Cancel, CreateSpec, ForkSpec, Removal, SandboxError, SandboxInfo, SandboxState, TemplateError,
};
use offshoot_host::{Fault, Report};

fn ids(results: &[Result<SandboxInfo, SandboxError>]) -> Vec<&str> {
    results.iter().map(|result| result.as_ref().map_or("-", |info| info.id.as_str())).collect()
}

#[test]
fn clones_come_in_order_each_running_with_stop_lines_in_order() {
    let bench = Bench::new();
    bench.template("");
    let offspring = bench.create(12);
    assert_eq!(offspring.results.len(), 12);
    for result in &offspring.results {
        let info = result.as_ref().unwrap();
        assert_eq!((info.state, info.generation, info.depth), (SandboxState::Running, 1, 0));
        let lines = info.stop_lines;
        assert!(lines.first_instruction_ms > 0.0, "{lines:?}");
        assert!(lines.call_returned_ms <= lines.agent_replied_ms, "{lines:?}");
        assert!(lines.agent_replied_ms <= lines.identity_applied_ms, "{lines:?}");
        assert!(info.memory.is_some_and(|memory| memory.rss_kib > 0), "{info:?}");
    }
    assert_eq!(bench.dirs(), 12);
}

#[test]
fn one_failed_child_hides_no_other_and_leaves_nothing() {
    let bench = Bench::new();
    bench.template("fake.fail_child=1 fake.dead_child=3");
    let results = bench.create(5).results;
    let failed: Vec<usize> = (0..5).filter(|&i| results[i].is_err()).collect();
    assert_eq!(failed, [1, 3], "{results:?}");
    let first = Report::of(results[1].as_ref().unwrap_err());
    assert!(first.message.contains("no KVM VM to be had"), "{first:?}");
    let second = Report::of(results[3].as_ref().unwrap_err());
    assert!(second.message.contains("ended before it started"), "{second:?}");
    assert_eq!((bench.host.sandboxes().len(), bench.dirs()), (3, 3));
}

#[test]
fn a_sandbox_that_does_not_acknowledge_its_identity_is_ended() {
    let bench = Bench::with(|config| config.identity_timeout = Duration::from_millis(1500));
    bench.template("fake.mute_child=1");
    let watched = bench.host.watched();
    let results = bench.create(3).results;
    let error = results[1].as_ref().unwrap_err();
    assert_eq!(error.code(), "identity_not_applied");
    assert!(error.to_string().contains("identity was not acknowledged"), "{error}");
    assert!(results[0].is_ok() && results[2].is_ok());
    assert_eq!((bench.host.sandboxes().len(), bench.dirs()), (2, 2));
    eventually("its process is gone", || bench.host.watched() == watched + 2);
}

#[test]
fn an_agent_that_refuses_its_identity_ends_the_sandbox_at_once() {
    let bench = Bench::new();
    bench.template("fake.refuse_child=0");
    let results = bench.create(2).results;
    let report = Report::of(results[0].as_ref().unwrap_err());
    assert_eq!(report.code, "identity_not_applied");
    assert!(report.message.contains("no entropy credited"), "{report:?}");
    assert_eq!(bench.dirs(), 1);
}

#[test]
fn forks_of_forks_have_their_lineage() {
    let bench = Bench::new();
    bench.template("");
    let clone = bench.one();
    let forks = bench.fork(&clone.id, 3);
    assert!(forks.times.is_some());
    let fork = forks.results[1].as_ref().unwrap();
    assert_eq!((fork.depth, fork.generation, fork.parent.as_ref()), (1, 2, Some(&clone.id)));
    let grand = bench.fork(&fork.id, 1).results.remove(0).unwrap();
    assert_eq!((grand.depth, grand.generation, grand.parent.as_ref()), (2, 3, Some(&fork.id)));
    let tree = bench.host.tree();
    assert_eq!((tree.len(), tree[0].id.as_str(), tree[0].state), (1, "t", "ready"));
    let root = &tree[0].children[0];
    assert_eq!((root.id.as_str(), root.children.len()), (clone.id.as_str(), 3));
    let middle = root.children.iter().find(|node| node.id == fork.id).unwrap();
    assert_eq!(middle.children[0].id, grand.id);
}

#[test]
fn a_refused_fork_fails_every_child_and_not_the_parent() {
    let bench = Bench::new();
    bench.template("fake.refuse_fork");
    let clone = bench.one();
    let forks = bench.fork(&clone.id, 3);
    assert!(forks.times.is_none());
    for result in &forks.results {
        let report = Report::of(result.as_ref().unwrap_err());
        assert_eq!(report.code, "vmm_refused");
        assert!(report.message.contains("vCPU 0 did not stop"), "{report:?}");
    }
    assert_eq!(bench.host.sandbox(&clone.id).unwrap().state, SandboxState::Running);
    assert_eq!((bench.host.sandboxes().len(), bench.dirs()), (1, 1));
    bench.host.remove_sandbox(&clone.id).unwrap();
}

#[test]
fn a_guest_that_panics_is_dead_with_its_last_words_and_harms_no_sibling() {
    let bench = Bench::new();
    bench.template("");
    let offspring = bench.create(2).results;
    let (victim, other) = (offspring[0].as_ref().unwrap(), offspring[1].as_ref().unwrap());
    let vsock = bench.host.vsock_path(&victim.id).unwrap();
    bench.poke(&victim.id, "/panic");
    eventually("it is dead", || bench.host.sandbox(&victim.id).unwrap().state == SandboxState::Dead);
    let dead = bench.host.sandbox(&victim.id).unwrap();
    let cause = dead.cause.unwrap();
    assert!(cause.contains("reset") && cause.contains("Kernel panic - not syncing: fake"), "{cause}");
    assert!(!vsock.exists());
    let error = bench.host.vsock_path(&victim.id).unwrap_err();
    assert_eq!(error.code(), "sandbox_not_running");
    let refused = ForkSpec { parent: victim.id.clone(), count: 1, ..ForkSpec::default() };
    assert_eq!(bench.host.fork(&refused, 0).unwrap_err().code(), "sandbox_not_running");
    assert!(String::from_utf8_lossy(&bench.host.console(&victim.id, 4096).unwrap()).contains("panic"));
    assert_eq!(bench.host.sandbox(&other.id).unwrap().state, SandboxState::Running);
    bench.host.remove_sandbox(&victim.id).unwrap();
    assert_eq!(bench.host.sandbox(&victim.id).unwrap_err().code(), "sandbox_not_found");
    assert_eq!(bench.dirs(), 1);
}

#[test]
fn a_clone_killed_by_a_signal_says_which_though_its_zygote_reaped_it() {
    let bench = Bench::new();
    bench.template("");
    let clone = bench.one();
    bench.poke(&clone.id, "/abort");
    eventually("it is dead", || bench.host.sandbox(&clone.id).unwrap().state == SandboxState::Dead);
    let cause = bench.host.sandbox(&clone.id).unwrap().cause.unwrap();
    assert!(cause.contains("killed by signal 6"), "{cause}");
}

#[test]
fn a_template_in_use_is_kept_unless_forced_and_its_clones_live_on() {
    let bench = Bench::new();
    bench.template("");
    let clone = bench.one();
    let fork = bench.fork(&clone.id, 1).results.remove(0).unwrap();
    bench.host.remove_sandbox(&clone.id).unwrap();
    let error = bench.host.remove_template("t", Removal::IfUnused).unwrap_err();
    assert_eq!(error.code(), "template_in_use");
    assert!(error.to_string().contains(&fork.id), "{error}");
    bench.host.remove_template("t", Removal::Forced).unwrap();
    assert_eq!(bench.host.template("t").unwrap_err().code(), "template_not_found");
    let grand = bench.fork(&fork.id, 1).results.remove(0).unwrap();
    assert_eq!(bench.host.tree()[0].state, "removed");
    bench.host.remove_sandbox(&fork.id).unwrap();
    assert_eq!(bench.host.sandbox(&grand.id).unwrap().state, SandboxState::Running);
}

#[test]
fn a_lost_zygote_refuses_clones_and_keeps_those_it_has() {
    let bench = Bench::new();
    bench.template("");
    let clone = bench.one();
    let zygote = std::fs::read_to_string(format!("/proc/{}/stat", clone.pid)).unwrap();
    let parent: i32 = zygote.rsplit(')').next().unwrap().split_whitespace().nth(1).unwrap().parse().unwrap();
    let pid = rustix::process::Pid::from_raw(parent).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    eventually("it is noticed", || bench.host.template("t").unwrap().lost.is_some());
    let spec = CreateSpec { template: "t".into(), count: 1, ..CreateSpec::default() };
    assert_eq!(bench.host.create(&spec, 0).unwrap_err().code(), "template_lost");
    assert_eq!(bench.host.sandbox(&clone.id).unwrap().state, SandboxState::Running);
}

#[test]
fn failed_builds_say_why_and_leave_nothing() {
    let bench = Bench::new();
    let watched = bench.host.watched();
    let mut spec = Bench::spec("bad", "fake.panic_at_boot");
    let report = Report::of(&bench.build(spec.clone()).unwrap_err());
    assert_eq!(report.code, "guest_ended", "{report:?}");
    assert!(report.message.contains("Kernel panic - not syncing: fake"), "{report:?}");

    spec = Bench::spec("bad", "fake.no_agent");
    spec.boot_timeout = Duration::from_millis(500);
    let report = Report::of(&bench.build(spec).unwrap_err());
    assert_eq!(report.code, "boot_timeout", "{report:?}");
    assert!(report.message.contains("fake guest booted"), "{report:?}");

    for (source, code) in [("raise ValueError", "warm_failed"), ("die()", "guest_ended")] {
        let mut spec = Bench::spec("bad", "");
        spec.warm.as_mut().unwrap().source = source.into();
        let error = bench.build(spec).unwrap_err();
        assert_eq!(error.code(), code, "{error:?}");
    }
    let report = Report::of(&bench.build(Bench::spec("bad", "fake.refuse_freeze")).unwrap_err());
    assert_eq!(report.code, "vmm_refused");
    assert!(report.message.contains("no memory for layers"), "{report:?}");

    assert_eq!((bench.dirs(), bench.host.templates().len()), (0, 0));
    eventually("all processes are gone", || bench.host.watched() == watched);
    bench.build(Bench::spec("bad", "")).unwrap();
}

#[test]
fn a_cancelled_build_ends_at_once_though_its_warm_up_hangs() {
    let bench = Bench::new();
    let cancel = Cancel::default();
    let mut spec = Bench::spec("slow", "");
    spec.warm.as_mut().unwrap().source = "hang".into();
    spec.warm_timeout = Duration::from_secs(600);
    let began = std::time::Instant::now();
    let error = std::thread::scope(|scope| {
        let build = scope.spawn(|| bench.host.build_template(spec, &cancel, &mut |_| {}));
        std::thread::sleep(Duration::from_millis(300));
        cancel.cancel();
        build.join().unwrap().unwrap_err()
    });
    assert!(matches!(error, TemplateError::Cancelled { .. }), "{error:?}");
    assert!(began.elapsed() < Duration::from_secs(10));
    assert_eq!(bench.dirs(), 0);
}

#[test]
fn bad_requests_name_the_field() {
    let bench = Bench::new();
    bench.template("");
    let code = |spec: CreateSpec| bench.host.create(&spec, 0).unwrap_err().code();
    let spec = |count| CreateSpec { template: "t".into(), count, ..CreateSpec::default() };
    assert_eq!(code(spec(0)), "bad_request");
    assert_eq!(code(spec(1_000_000)), "bad_request");
    assert_eq!(code(CreateSpec { template: "none".into(), ..spec(1) }), "template_not_found");
    assert_eq!(code(CreateSpec { name: Some("Bad Name".into()), ..spec(1) }), "bad_request");
    let named = CreateSpec { name: Some("alice".into()), ..spec(1) };
    bench.host.create(&named, 0).unwrap().results.remove(0).unwrap();
    assert_eq!(code(named), "sandbox_exists");
    assert_eq!(bench.host.sandbox("alice").unwrap().name.as_deref(), Some("alice"));
    assert_eq!((bench.host.sandboxes().len(), bench.dirs()), (1, 1));
    let mut small = Bench::spec("small", "");
    small.memory_mib = 64;
    assert!(bench.build(small).unwrap_err().to_string().contains("128 to 12288"));
    let mut lost = Bench::spec("lost", "");
    lost.image = "none".into();
    assert_eq!(bench.build(lost).unwrap_err().code(), "image_not_found");
    assert_eq!(bench.build(Bench::spec("t", "")).unwrap_err().code(), "template_exists");
    assert_eq!(bench.host.remove_image("base").unwrap_err().code(), "image_in_use");
}

#[test]
fn a_truncated_image_is_named() {
    let bench = Bench::new();
    let disk = bench.dir.path().join("state/images/base/rootfs.raw");
    let file = std::fs::OpenOptions::new().write(true).open(&disk);
    let file = file.or_else(|_| {
        std::fs::set_permissions(&disk, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        std::fs::OpenOptions::new().write(true).open(&disk)
    });
    file.unwrap().set_len(512).unwrap();
    let report = Report::of(&bench.build(Bench::spec("t", "")).unwrap_err());
    assert_eq!(report.code, "image_corrupt", "{report:?}");
    assert!(report.message.contains("rootfs.raw") && report.hint.is_some(), "{report:?}");
}

#[test]
fn a_missing_vmm_program_is_named() {
    let bench = Bench::with(|config| config.vmm = "/nonexistent/offshoot-vmm".into());
    let report = Report::of(&bench.build(Bench::spec("t", "")).unwrap_err());
    assert_eq!(report.code, "vmm_not_started");
    assert!(report.message.contains("/nonexistent/offshoot-vmm") && report.hint.is_some(), "{report:?}");
    assert_eq!(bench.dirs(), 0);
}

#[test]
fn three_hundred_children_in_one_call_do_not_deadlock() {
    let bench = Bench::new();
    bench.template("");
    let results = bench.create(300).results;
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 300);
    let unique: std::collections::BTreeSet<&str> = ids(&results).into_iter().collect();
    assert_eq!(unique.len(), 300);
    let forks = bench.fork(ids(&results)[7], 100);
    assert_eq!(forks.results.iter().filter(|result| result.is_ok()).count(), 100);
}

#[test]
fn forks_in_flight_are_bounded() {
    let bench = Bench::with(|config| {
        config.max_forks_in_flight = 1;
        config.turn_timeout = Duration::from_millis(200);
        config.identity_timeout = Duration::from_secs(3);
    });
    bench.template("fake.mute_child=0");
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| bench.create(1));
        std::thread::sleep(Duration::from_millis(700));
        let spec = CreateSpec { template: "t".into(), count: 1, ..CreateSpec::default() };
        assert_eq!(bench.host.create(&spec, 0).unwrap_err().code(), "forks_busy");
        assert!(slow.join().unwrap().results[0].is_err());
    });
}

#[test]
fn the_probe_is_passed_on() {
    let bench = Bench::new();
    assert_eq!(bench.host.probe().unwrap()["kvm"], "fake");
}

#[test]
fn a_shutdown_ends_children_whose_agents_keep_silent() {
    let bench = Bench::new();
    bench.template("fake.mute_child=0");
    let began = std::time::Instant::now();
    std::thread::scope(|scope| {
        let create = scope.spawn(|| bench.create(1));
        eventually("the child is listed", || !bench.host.sandboxes().is_empty());
        std::thread::sleep(Duration::from_millis(200));
        assert!(bench.host.shutdown(), "something outlived the host");
        assert!(create.join().unwrap().results[0].is_err());
    });
    assert!(began.elapsed() < Duration::from_secs(8));
    assert_eq!(bench.dirs(), 0);
    let spec = CreateSpec { template: "t".into(), count: 1, ..CreateSpec::default() };
    assert!(bench.host.create(&spec, 0).is_err());
}
