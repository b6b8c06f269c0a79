//! Nothing is left of sandboxes that have ended: no descriptor, no process, no file. Alone in its process, because it
//! counts what the process has.

mod common;

use common::{Bench, eventually};
use offshoot_host::engine::Removal;

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}

/// Children of this process, zombies among them.
fn processes() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("procfs");
    let children = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.ok()?.path().join("children")).ok()
    };
    tasks.filter_map(children).map(|text| text.split_whitespace().count()).sum()
}

#[test]
fn nothing_is_left_of_what_has_ended() {
    let bench = Bench::new();
    let (fds, children) = (descriptors(), processes());
    for round in 0..3 {
        bench.template("fake.fail_child=2 fake.dead_child=3");
        let results = bench.create(6).results;
        let running: Vec<_> = results.iter().filter_map(|result| result.as_ref().ok()).collect();
        assert_eq!(running.len(), 4);
        let forks = bench.fork(&running[0].id, 6);
        assert_eq!(forks.results.iter().filter(|result| result.is_err()).count(), 2);
        bench.poke(&running[1].id, "/panic");
        bench.poke(&running[2].id, "/abort");
        // In one round the zygote goes first, and its children become this process' own to reap.
        if round == 1 {
            bench.host.remove_template("t", Removal::Forced).unwrap();
        }
        for sandbox in bench.host.sandboxes() {
            bench.host.remove_sandbox(&sandbox.id).unwrap();
        }
        if round != 1 {
            bench.host.remove_template("t", Removal::IfUnused).unwrap();
        }
        eventually("no process is watched", || bench.host.watched() == 0);
        eventually("every child is reaped", || processes() == children);
        eventually("every descriptor is closed", || descriptors() == fds);
        assert_eq!(bench.dirs(), 0);
    }
}
