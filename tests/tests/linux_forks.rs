//! The invariants of a fork with real Linux guests: one instant of RAM, vCPU, devices and disk; nobody sees anybody
//! else's writes; each its own machine before it answers.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashSet;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use offshoot_tests::linux::{Linux, shared};
use serde_json::Value;

const TICKS: &str = "/home/user/ticks";

/// Starts the counting thread and waits until it counts.
fn start_counting(linux: &Linux, sandbox: &str) {
    let start = format!("threading.Thread(target=count, args=({TICKS:?},), daemon=True).start()\n1");
    linux.stack.value(sandbox, &start).unwrap();
    wait_until(|| linux.stack.value(sandbox, "ram").unwrap().as_u64() > Some(5), "the guest counts");
}

fn wait_until(mut condition: impl FnMut() -> bool, what: &str) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Stops every process of the guest's user, then reads the disk past the page cache, then lets the interpreter go on.
/// So the counter in RAM is at most one tick ahead of the disk's: the write in flight.
fn counters_agree(linux: &Linux, sandbox: &str) -> (u64, u64) {
    let script = format!(
        "pkill -STOP python3; sync; echo 3 > /proc/sys/vm/drop_caches; cat {TICKS}; pkill -CONT python3"
    );
    let disk: u64 = linux.sh_ok(sandbox, &script).trim_start_matches('0').parse().unwrap();
    let ram = linux.stack.value(sandbox, "ram").unwrap().as_u64().unwrap();
    (disk, ram)
}

/// Forks a counting guest `rounds` times, and a fork of it once more.
fn one_instant(linux: &Linux, template: &str, rounds: usize) {
    let parent = linux.clone_of(template);
    start_counting(linux, &parent);
    for round in 0..rounds {
        let before = linux.stack.value(&parent, "ram").unwrap().as_u64().unwrap();
        let mut forks = linux.forks(&parent, 2);
        if round == 0 {
            forks.extend(linux.forks(&forks[0], 1));
        }
        for fork in &forks {
            let (disk, ram) = counters_agree(linux, fork);
            assert!(
                disk >= before && ram >= disk,
                "fork {fork}: disk {disk}, ram {ram}, {before} before the fork"
            );
            wait_until(
                || linux.stack.value(fork, "ram").unwrap().as_u64() > Some(ram),
                "the fork goes on counting",
            );
            // What its file system holds is whole: the kernel finds no error on its own disk.
            assert_eq!(linux.sh_ok(fork, "dmesg | grep -ci 'ext4-fs error\\|i/o error' || true"), "0");
        }
        let (disk, ram) = counters_agree(linux, &parent);
        assert!(disk > before && ram >= disk, "parent: disk {disk}, ram {ram}");
        linux.remove(&forks);
    }
    linux.remove(&[parent]);
}

#[test]
fn ram_and_disk_of_a_fork_are_of_one_instant() {
    let Some(linux) = shared("ram_and_disk_of_a_fork_are_of_one_instant") else { return };
    one_instant(&linux, "warm", 2);
}

#[test]
fn ram_and_disk_of_a_fork_are_of_one_instant_with_four_vcpus() {
    let Some(linux) = shared("ram_and_disk_of_a_fork_are_of_one_instant_with_four_vcpus") else { return };
    linux.build_warm("warm4", &["--memory-mib", "256", "--vcpus", "4"]);
    one_instant(&linux, "warm4", 1);
    assert_eq!(linux.stack.cli(&["template", "rm", "warm4"]).unwrap().code, Some(0));
}

/// A page that is dirty in the guest's page cache and not yet on its disk is in both after a fork.
#[test]
fn unsynced_writes_are_in_parent_and_child_and_apart_afterwards() {
    let Some(linux) = shared("unsynced_writes_are_in_parent_and_child_and_apart_afterwards") else {
        return;
    };
    let parent = linux.clone_one();
    linux.sh_ok(
        &parent,
        "dd if=/dev/urandom of=/root/data bs=64k count=32 2>/dev/null; echo before > /root/note",
    );
    let sum = linux.sh_ok(&parent, "sha256sum < /root/data");
    let forks = linux.forks(&parent, 2);
    linux.sh_ok(&parent, "echo parent > /root/note");
    for fork in &forks {
        assert_eq!(linux.sh_ok(fork, "cat /root/note"), "before");
        linux.sh_ok(fork, &format!("echo {fork} > /root/note; sync; echo 3 > /proc/sys/vm/drop_caches"));
    }
    for fork in &forks {
        assert_eq!(linux.sh_ok(fork, "cat /root/note"), *fork);
        assert_eq!(linux.sh_ok(fork, "sha256sum < /root/data"), sum);
    }
    linux.sh_ok(&parent, "sync; echo 3 > /proc/sys/vm/drop_caches");
    assert_eq!(linux.sh_ok(&parent, "cat /root/note; sha256sum < /root/data"), format!("parent\n{sum}"));
    linux.remove(&[forks, vec![parent]].concat());
}

#[test]
fn forks_of_forks_keep_their_own_memory() {
    let Some(linux) = shared("forks_of_forks_keep_their_own_memory") else {
        return;
    };
    let mut line = vec![linux.clone_one()];
    for depth in 0..4 {
        let parent = line.last().unwrap().clone();
        linux.stack.value(&parent, &format!("seen.append({depth})\nlen(seen)")).unwrap();
        line.push(linux.forks(&parent, 1).remove(0));
    }
    for (depth, sandbox) in line.iter().enumerate() {
        let seen = linux.stack.value(sandbox, "json.dumps(seen)").unwrap();
        let length = (depth + 1).min(4);
        assert_eq!(seen, Value::from((0..length).collect::<Vec<_>>()), "at depth {depth}");
    }
    let tree = linux.stack.json(&["tree"]).unwrap().to_string();
    assert!(line.iter().all(|sandbox| tree.contains(sandbox.as_str())), "{tree}");
    linux.remove(&line);
}

#[test]
fn every_clone_and_fork_is_its_own_machine() {
    let Some(linux) = shared("every_clone_and_fork_is_its_own_machine") else {
        return;
    };
    let clones: Vec<String> =
        linux.stack.create("warm", 3).unwrap().iter().map(offshoot_tests::stack::id).collect();
    let forks = linux.forks(&clones[0], 2);
    let all = [clones, forks].concat();
    let mut seen: HashSet<String> = HashSet::new();
    for sandbox in &all {
        let asked = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let facts = linux.stack.value(
            sandbox,
            "json.dumps([os.urandom(16).hex(), random.random(), open('/etc/machine-id').read().strip(), \
             os.uname().nodename, open('/proc/sys/kernel/random/uuid').read().strip(), time.time()])",
        );
        let answered = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let facts = facts.unwrap();
        for fact in facts.as_array().unwrap().iter().take(5) {
            assert!(seen.insert(fact.to_string()), "{sandbox}: {fact} was seen before");
        }
        assert_eq!(facts[3].as_str(), Some(sandbox.as_str()), "the hostname is the id");
        let clock = facts[5].as_f64().unwrap();
        let (low, high) = (asked.as_secs_f64() - 1.0, answered.as_secs_f64() + 1.0);
        assert!((low..high).contains(&clock), "{sandbox}: clock {clock}, host {low} to {high}");
        assert_ne!(linux.sh_ok(sandbox, "cat /run/offshoot/generation"), "0");
    }
    linux.remove(&all);
}

/// Guest time neither jumps nor stops: no soft lockup, timers fire, the monotonic clock goes on from the fork.
#[test]
fn guest_time_goes_on_from_the_fork() {
    let Some(linux) = shared("guest_time_goes_on_from_the_fork") else {
        return;
    };
    let parent = linux.clone_one();
    let before = linux.stack.value(&parent, "time.monotonic()").unwrap().as_f64().unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let fork = linux.forks(&parent, 1).remove(0);
    let after = linux.stack.value(&fork, "time.monotonic()").unwrap().as_f64().unwrap();
    assert!(after > before && after < before + 60.0, "monotonic {before} before, {after} after");
    let slept =
        linux.stack.value(&fork, "t = time.monotonic(); time.sleep(0.5); time.monotonic() - t").unwrap();
    let slept = slept.as_f64().unwrap();
    assert!((0.5..20.0).contains(&slept), "a sleep of half a second took {slept}");
    assert_eq!(
        linux.sh_ok(&fork, "dmesg | grep -ci 'soft lockup\\|rcu.*stall\\|clocksource.*unstable' || true"),
        "0"
    );
    linux.remove(&[fork, parent]);
}

/// A stream of the parent's is not disturbed by a fork; the child has none of it and answers new calls.
#[test]
fn the_parents_connections_survive_a_fork() {
    let Some(linux) = shared("the_parents_connections_survive_a_fork") else {
        return;
    };
    let parent = linux.clone_one();
    let script = "for i in 1 2 3 4 5 6 7 8 9 10; do echo $i; sleep 0.3; done";
    let mut command = linux.stack.command();
    command.args(["--quiet", "exec", &parent, "--", "sh", "-c", script]).stdin(std::process::Stdio::null());
    let stream = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(700));
    let forks = linux.forks(&parent, 2);
    for fork in &forks {
        assert_eq!(linux.sh_ok(fork, "echo alive"), "alive");
    }
    let output = stream.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n");
    assert!(output.status.success());
    linux.remove(&[forks, vec![parent]].concat());
}

#[test]
fn the_console_of_a_fork_works() {
    let Some(linux) = shared("the_console_of_a_fork_works") else {
        return;
    };
    let parent = linux.clone_one();
    let fork = linux.forks(&parent, 1).remove(0);
    linux.sh_ok(&fork, "echo said-by-the-fork > /dev/console");
    linux.sh_ok(&parent, "echo said-by-the-parent > /dev/console");
    let logs = |sandbox: &str| linux.stack.cli(&["logs", sandbox]).unwrap().stdout;
    wait_until(|| logs(&fork).contains("said-by-the-fork"), "the fork's console");
    wait_until(|| logs(&parent).contains("said-by-the-parent"), "the parent's console");
    assert!(!logs(&fork).contains("said-by-the-parent") && !logs(&parent).contains("said-by-the-fork"));
    linux.remove(&[fork, parent]);
}
