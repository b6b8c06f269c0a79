//! What a user may do, and what may go wrong, with real Linux guests: each failure is a clear error that names the thing,
//! leaves nothing behind and harms nobody else.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use offshoot_tests::linux::shared;
use offshoot_tests::stack::id;

#[test]
fn commands_give_output_errors_status_and_signal_apart() {
    let Some(linux) = shared("commands_give_output_errors_status_and_signal_apart") else {
        return;
    };
    let sandbox = linux.clone_one();
    let outcome = linux.sh(&sandbox, "echo out; echo err >&2; exit 7");
    assert_eq!((outcome.code, outcome.stdout.as_str(), outcome.stderr.as_str()), (Some(7), "out\n", "err\n"));
    let killed = linux.sh(&sandbox, "kill -9 $$");
    assert_eq!(killed.code, Some(128 + 9), "{killed:?}");
    let missing = linux.stack.cli(&["exec", &sandbox, "--", "no-such-program"]).unwrap();
    assert!(missing.code != Some(0) && missing.stderr.contains("no-such-program"), "{missing:?}");
    let start = Instant::now();
    let late = linux
        .stack
        .cli(&["exec", &sandbox, "--timeout", "2s", "--", "sh", "-c", "sleep 300 & sleep 300"])
        .unwrap();
    assert_eq!(late.code, Some(124), "{late:?}");
    assert!(start.elapsed() < Duration::from_secs(60));
    // The time limit took the grandchild along.
    assert_eq!(linux.sh_ok(&sandbox, "pgrep -c sleep || true"), "0");
    linux.remove(&[sandbox]);
}

/// More output than any buffer, with everything in it that a framing by markers would trip over.
#[test]
fn a_flood_of_output_arrives_whole() {
    let Some(linux) = shared("a_flood_of_output_arrives_whole") else {
        return;
    };
    let sandbox = linux.clone_one();
    let outcome =
        linux.sh(&sandbox, "yes '{\"end\":{\"exitCode\":0}}' | head -c 3000000; echo; echo done >&2");
    assert_eq!(outcome.code, Some(0));
    assert_eq!((outcome.stdout.len(), outcome.stderr.as_str()), (3_000_001, "done\n"));
    // A flood on the console is bounded and costs nobody anything.
    linux.sh_ok(&sandbox, "head -c 300000 /dev/zero | tr '\\0' x > /dev/console");
    assert_eq!(linux.sh_ok(&sandbox, "echo alive"), "alive");
    linux.remove(&[sandbox]);
}

#[test]
fn the_interpreter_gives_value_output_and_error_apart() {
    let Some(linux) = shared("the_interpreter_gives_value_output_and_error_apart") else {
        return;
    };
    let sandbox = linux.clone_one();
    let evaluated = linux
        .stack
        .evaluate(
            &sandbox,
            "import sys\nprint('out')\nprint('err', file=sys.stderr)\nos.system('echo sub')\nmarker",
        )
        .unwrap();
    assert_eq!(evaluated.value.as_deref(), Some("warm"));
    assert!(evaluated.stdout.contains("out\n") && evaluated.stdout.contains("sub\n"), "{evaluated:?}");
    assert_eq!((evaluated.stderr.as_str(), &evaluated.error), ("err\n", &None));
    let failed = linux.stack.evaluate(&sandbox, "1/0").unwrap();
    assert_eq!((failed.value, failed.error.as_deref()), (None, Some("ZeroDivisionError: division by zero")));
    assert_eq!(linux.stack.value(&sandbox, "1 + 1").unwrap(), 2);
    linux.remove(&[sandbox]);
}

#[test]
fn files_go_in_and_out_whole() {
    let Some(linux) = shared("files_go_in_and_out_whole") else {
        return;
    };
    let sandbox = linux.clone_one();
    let folder = tempfile::tempdir().unwrap();
    let (up, down) = (folder.path().join("up"), folder.path().join("down"));
    let bytes: Vec<u8> = (0..2_000_000u32).map(|index| (index * 7 % 251) as u8).collect();
    std::fs::write(&up, &bytes).unwrap();
    let remote = format!("{sandbox}:/tmp/deep/er/file");
    for (from, to) in [(up.to_str().unwrap(), remote.as_str()), (remote.as_str(), down.to_str().unwrap())] {
        let outcome = linux.stack.cli(&["--quiet", "cp", from, to]).unwrap();
        assert_eq!(outcome.code, Some(0), "cp {from} {to}: {outcome:?}");
    }
    assert!(std::fs::read(&down).unwrap() == bytes);
    linux.refused(
        &["cp", &format!("{sandbox}:/no/such/file"), down.to_str().unwrap()],
        3,
        &["/no/such/file"],
    );
    linux.remove(&[sandbox]);
}

/// The guest gets ENOSPC at the overlay's limit; the VMM and the guest live on, and freed room can be used again.
#[test]
fn a_full_overlay_is_no_space_left_in_the_guest() {
    let Some(linux) = shared("a_full_overlay_is_no_space_left_in_the_guest") else {
        return;
    };
    linux
        .stack
        .build_template(
            "tight",
            "debian",
            "import os\n",
            &["--memory-mib", "256", "--overlay-limit-mib", "96"],
        )
        .unwrap();
    let sandbox = id(&linux.stack.create("tight", 1).unwrap()[0]);
    let fill = "dd if=/dev/zero of=/root/fill bs=1M count=200 oflag=direct 2>&1";
    for _ in 0..2 {
        let outcome = linux.sh(&sandbox, fill);
        assert!(outcome.code != Some(0) && outcome.stdout.contains("No space left on device"), "{outcome:?}");
        linux.sh_ok(
            &sandbox,
            "rm /root/fill; sync; fstrim / 2>/dev/null || true; echo small > /root/note; sync",
        );
        assert_eq!(linux.sh_ok(&sandbox, "cat /root/note; dmesg | grep -ci 'i/o error' || true"), "small\n0");
    }
    let fork = linux.forks(&sandbox, 1).remove(0);
    assert_eq!(linux.sh_ok(&fork, "cat /root/note"), "small");
    linux.remove(&[fork, sandbox]);
    assert_eq!(linux.stack.cli(&["template", "rm", "tight"]).unwrap().code, Some(0));
}

#[test]
fn a_guest_that_panics_is_dead_with_its_cause_and_alone() {
    let Some(linux) = shared("a_guest_that_panics_is_dead_with_its_cause_and_alone") else {
        return;
    };
    let victim = linux.clone_one();
    let fork = linux.forks(&victim, 1).remove(0);
    linux.sh(&victim, "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger");
    let deadline = Instant::now() + Duration::from_secs(60);
    let cause = loop {
        let listing = linux.stack.json(&["ls"]).unwrap();
        let dead =
            listing["sandboxes"].as_array().unwrap().iter().find(|sandbox| id(sandbox) == victim).cloned();
        match dead {
            Some(dead) if dead["state"] == "dead" => break dead["cause"].to_string(),
            _ => assert!(Instant::now() < deadline, "still running: {listing}"),
        }
        std::thread::sleep(Duration::from_millis(200));
    };
    assert!(cause.contains("sysrq") || cause.contains("panic"), "{cause}");
    linux.refused(&["exec", &victim, "--", "true"], 4, &[&victim]);
    linux.refused(&["fork", &victim], 4, &[&victim]);
    assert_eq!(linux.sh_ok(&fork, "echo alive"), "alive");
    linux.remove(&[victim, fork]);
}

#[test]
fn a_warm_up_that_fails_or_hangs_is_told_and_leaves_nothing() {
    let Some(linux) = shared("a_warm_up_that_fails_or_hangs_is_told_and_leaves_nothing") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    for (source, words) in [
        ("import nothing_of_this_name", ["nothing_of_this_name", "warm"]),
        ("import time\ntime.sleep(600)", ["warm", "3"]),
    ] {
        let file = folder.path().join("bad.py");
        std::fs::write(&file, source).unwrap();
        let file = file.to_str().unwrap();
        let arguments =
            ["template", "build", "bad", "--image", "debian", "--warm", file, "--memory-mib", "256"];
        let outcome = linux.stack.cli(&[&arguments[..], &["--warm-timeout", "3s"]].concat()).unwrap();
        assert!(!matches!(outcome.code, Some(0) | None), "{outcome:?}");
        assert!(words.iter().all(|word| outcome.stderr.contains(word)), "{outcome:?}");
        let templates = linux.stack.json(&["template", "ls"]).unwrap().to_string();
        assert!(!templates.contains("\"bad\""), "{templates}");
    }
    let left = std::fs::read_dir(linux.stack.run_dir().join("sandboxes")).unwrap().count();
    // The zygote of the shared template keeps its folder.
    assert!(left <= 1, "{left} folders are left");
}

#[test]
fn wrong_requests_name_what_is_wrong() {
    let Some(linux) = shared("wrong_requests_name_what_is_wrong") else {
        return;
    };
    linux.refused(&["create", "no-such-template"], 3, &["no-such-template"]);
    linux.refused(&["exec", "no-such-sandbox", "--", "true"], 3, &["no-such-sandbox"]);
    linux.refused(&["fork", "no-such-sandbox"], 3, &["no-such-sandbox"]);
    linux.refused(&["rm", "no-such-sandbox"], 3, &["no-such-sandbox"]);
    linux.refused(&["template", "build", "t", "--image", "no-such-image"], 3, &["no-such-image"]);
    linux.refused(
        &["template", "build", "t", "--image", "debian", "--memory-mib", "64"],
        2,
        &["memory-mib", "128"],
    );
    linux.refused(&["template", "build", "t", "--image", "debian", "--vcpus", "9"], 2, &["vcpus", "8"]);
    linux.refused(
        &[
            "image",
            "add",
            "i",
            "--kernel",
            "/no/kernel",
            "--initramfs",
            "/no/initramfs",
            "--rootfs",
            "/no/rootfs",
        ],
        3,
        &["/no/kernel"],
    );
}

#[test]
fn a_template_with_live_clones_is_kept_unless_forced_and_the_clones_live_on() {
    let test = "a_template_with_live_clones_is_kept_unless_forced_and_the_clones_live_on";
    let Some(linux) = shared(test) else { return };
    linux
        .stack
        .build_template("brief", "debian", "x = 5\n", &["--memory-mib", "256", "--vcpus", "2"])
        .unwrap();
    let sandbox = id(&linux.stack.create("brief", 1).unwrap()[0]);
    linux.refused(&["template", "rm", "brief"], 3, &["brief", &sandbox]);
    assert_eq!(linux.stack.cli(&["template", "rm", "brief", "--force"]).unwrap().code, Some(0));
    assert_eq!(linux.stack.value(&sandbox, "x").unwrap(), 5);
    let fork = linux.forks(&sandbox, 1).remove(0);
    assert_eq!(linux.stack.value(&fork, "x").unwrap(), 5);
    assert_eq!(linux.sh_ok(&fork, "nproc"), "2");
    linux.remove(&[fork, sandbox]);
}
