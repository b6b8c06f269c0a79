//! The main job, step by step.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use offshoot_tests::stack::{Stack, id};
use serde_json::{Value, json};

use crate::Arguments;
use crate::report::Report;

/// Where the counting thread writes.
const TICKS: &str = "/tmp/ticks";
/// Tolerance of a guest's wall clock against the host's.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(1);

/// Runs everything and tells what came out.
pub fn main_job(arguments: &Arguments) -> anyhow::Result<Report> {
    let stack = Stack::start(&arguments.bin_dir, &arguments.state, &[("debian", &arguments.image)])?;
    let job = job(&stack, arguments).map_err(|error| {
        error.context(format!("the daemon's log ends with\n{}", last_lines(&stack.daemon_log(), 20)))
    })?;
    stack.stop()?;
    Ok(job)
}

fn job(stack: &Stack, arguments: &Arguments) -> anyhow::Result<Report> {
    let mut stop_lines = BTreeMap::new();
    say("boot the image, import numpy, make a 64 MiB array, freeze");
    let template = timed(&mut stop_lines, "template ready", || {
        stack.build_template("numpy", "debian", include_str!("warm.py"), &["--memory-mib", "512"])
    })?;
    for (line, name) in
        [("boot_ms", "template: booted"), ("warm_ms", "template: warmed"), ("freeze_ms", "template: frozen")]
    {
        if let Some(ms) = template["stop_lines"][line].as_f64() {
            stop_lines.insert(name.into(), ms);
        }
    }
    say(&format!("clone it {} times", arguments.clones));
    let count = arguments.clones;
    let clones = timed(&mut stop_lines, "all clones: call returned, identity in force", || {
        stack.create("numpy", count)
    })?;
    note_stop_lines(&mut stop_lines, "clone", &clones);
    let ids: Vec<String> = clones.iter().map(id).collect();
    say("run Python in each");
    let answers = timed(&mut stop_lines, "all clones: all results", || ask_all(stack, &ids))?;
    let correct = (0u64..).zip(&answers).filter(|(number, answer)| answer.is_right(*number)).count();

    say("in one: change the array and a file, count in RAM and on disk");
    let parent = ids.first().context("no clone to fork")?;
    stack.value(parent, &change(777))?;
    stack.value(
        parent,
        &format!("threading.Thread(target=count, args=({TICKS:?},), daemon=True).start()\n1"),
    )?;
    wait_for_ticks(stack, parent, 10)?;
    let (before_ticks, _) = counters(stack, parent)?;
    say(&format!("fork it {} times while it counts", arguments.forks));
    let (forks, times) = timed(&mut stop_lines, "all forks: call returned, identity in force", || {
        stack.fork(parent, arguments.forks)
    })?;
    if let Some(ms) = times["pause_ms"].as_f64() {
        stop_lines.insert("fork: parent's pause".into(), ms);
    }
    note_stop_lines(&mut stop_lines, "fork", &forks);
    let forks: Vec<String> = forks.iter().map(id).collect();
    let consistent = count_consistent(stack, parent, &forks, before_ticks)?;
    say("write in each, look in all");
    let isolated = check_isolation(stack, parent, &forks, &ids[1..])?;

    let fork_answers = timed(&mut stop_lines, "all forks: all results", || ask_all(stack, &forks))?;
    let everyone: Vec<&Answer> = answers.iter().chain(&fork_answers).collect();
    let random: HashSet<&str> = everyone.iter().map(|answer| answer.random.as_str()).collect();
    Ok(Report {
        clones: ids.len(),
        correct,
        forks: forks.len(),
        consistent,
        isolated,
        distinct_random: random.len() == everyone.len() && !random.contains(""),
        clock_ok: everyone.iter().all(|answer| answer.clock_is_right()),
        stop_lines,
        memory: memory(stack)?,
        tree: stack.cli(&["tree"])?.stdout,
    })
}

/// What one sandbox answered, and when it was asked.
struct Answer {
    sum: u64,
    total: u64,
    random: String,
    clock: Duration,
    asked: Duration,
    answered: Duration,
}

impl Answer {
    fn is_right(&self, number: u64) -> bool {
        let elements = 1000 * (number + 1);
        let length = 8u64 << 20;
        self.sum == elements * (elements - 1) / 2 + number && self.total == length * (length - 1) / 2
    }

    fn clock_is_right(&self) -> bool {
        self.clock + CLOCK_TOLERANCE >= self.asked && self.clock <= self.answered + CLOCK_TOLERANCE
    }
}

/// Asks each sandbox for a sum over the warm array with its own number, random bytes and the time.
fn ask_all(stack: &Stack, ids: &[String]) -> anyhow::Result<Vec<Answer>> {
    (0u64..).zip(ids).map(|(number, id)| ask(stack, id, number)).collect()
}

fn ask(stack: &Stack, id: &str, number: u64) -> anyhow::Result<Answer> {
    let code = format!(
        "number = {number}\n\
         json.dumps([int(base[:1000 * (number + 1)].sum()) + number, total, os.urandom(16).hex(), time.time_ns()])"
    );
    let asked = now();
    let answer = stack.value(id, &code)?;
    let answered = now();
    let field = |index: usize| answer[index].as_u64().unwrap_or_default();
    let random = answer[2].as_str().unwrap_or_default().to_owned();
    Ok(Answer {
        sum: field(0),
        total: field(1),
        random,
        clock: Duration::from_nanos(field(3)),
        asked,
        answered,
    })
}

/// Code that writes `value` to the array and to a file, and says what it found in both before.
fn change(value: u64) -> String {
    format!(
        "before = [int(base[0]), open('/tmp/note').read() if os.path.exists('/tmp/note') else '']\n\
         base[0] = {value}\n\
         open('/tmp/note', 'w').write('{value}')\n\
         json.dumps(before)"
    )
}

fn look(stack: &Stack, id: &str) -> anyhow::Result<Value> {
    stack.value(
        id,
        "json.dumps([int(base[0]), open('/tmp/note').read() if os.path.exists('/tmp/note') else ''])",
    )
}

fn counters(stack: &Stack, id: &str) -> anyhow::Result<(u64, u64)> {
    let pair = stack.value(id, &format!("json.dumps(counters({TICKS:?}))"))?;
    Ok((pair[0].as_u64().unwrap_or_default(), pair[1].as_u64().unwrap_or_default()))
}

fn wait_for_ticks(stack: &Stack, id: &str, ticks: u64) -> anyhow::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(60);
    // The file appears with the first tick.
    while !matches!(counters(stack, id), Ok((disk, _)) if disk >= ticks) {
        anyhow::ensure!(Instant::now() < deadline, "sandbox {id} does not count");
    }
    Ok(())
}

/// A fork is consistent if RAM and disk agree to the tick, if it shares the parent's past up to the fork and its
/// siblings' from the same tick on no longer, and if it goes on counting.
fn count_consistent(
    stack: &Stack,
    parent: &str,
    forks: &[String],
    before_ticks: u64,
) -> anyhow::Result<usize> {
    let past = |id: &str| -> anyhow::Result<Vec<String>> {
        let history = stack.value(id, "json.dumps(history)")?;
        Ok(serde_json::from_value(history)?)
    };
    let parents = past(parent)?;
    let mut consistent = 0;
    for fork in forks {
        let (disk, ram) = counters(stack, fork)?;
        // The disk is read first; while the reply is made the thread may tick once more.
        let agrees = ram >= disk && ram - disk <= 2;
        let own = past(fork)?;
        let shared = own.iter().zip(&parents).take_while(|(own, parent)| own == parent).count() as u64;
        let goes_on = wait_for_ticks(stack, fork, ram + 2).is_ok();
        let diverged = own.len() as u64 > shared && parents.len() as u64 > shared;
        if agrees && goes_on && shared >= before_ticks && diverged {
            consistent += 1;
        } else {
            eprintln!(
                "demo: fork {fork}: disk {disk}, ram {ram}, shares {shared} ticks with its parent, at least \
                 {before_ticks} expected, goes on: {goes_on}, diverged: {diverged}"
            );
        }
    }
    Ok(consistent)
}

/// Each fork must find the parent's change, and after each has made its own, everyone must find their own only.
fn check_isolation(stack: &Stack, parent: &str, forks: &[String], others: &[String]) -> anyhow::Result<bool> {
    let mut isolated = true;
    let mut expect = |what: &str, found: Value, wanted: Value| {
        if found != wanted {
            eprintln!("demo: {what} found {found}, expected {wanted}");
            isolated = false;
        }
    };
    for (number, fork) in (0u64..).zip(forks) {
        expect(fork, stack.value(fork, &change(1000 + number))?, json!([777, "777"]));
    }
    for (number, fork) in (0u64..).zip(forks) {
        expect(fork, look(stack, fork)?, json!([1000 + number, (1000 + number).to_string()]));
    }
    expect(parent, look(stack, parent)?, json!([777, "777"]));
    for other in others {
        expect(other, look(stack, other)?, json!([0, ""]));
    }
    Ok(isolated)
}

fn memory(stack: &Stack) -> anyhow::Result<Vec<Value>> {
    let listing = stack.json(&["ls"])?;
    let sandboxes = listing["sandboxes"].as_array().context("ls lists no sandboxes")?;
    Ok(sandboxes
        .iter()
        .map(|sandbox| {
            let mut memory = sandbox["memory"].clone();
            memory["id"] = sandbox["id"].clone();
            memory
        })
        .collect())
}

/// The slowest of several sandboxes at each of their stop-lines.
fn note_stop_lines(stop_lines: &mut BTreeMap<String, f64>, what: &str, sandboxes: &[Value]) {
    for line in ["first_instruction", "agent_replied", "identity_applied"] {
        let times =
            sandboxes.iter().filter_map(|sandbox| sandbox["stop_lines"][format!("{line}_ms")].as_f64());
        if let Some(slowest) = times.max_by(f64::total_cmp) {
            stop_lines.insert(format!("slowest {what}: {line}"), slowest);
        }
    }
}

fn timed<T>(
    stop_lines: &mut BTreeMap<String, f64>,
    name: &str,
    work: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let start = Instant::now();
    let result = work()?;
    stop_lines.insert(name.into(), start.elapsed().as_secs_f64() * 1e3);
    Ok(result)
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn say(what: &str) {
    println!("demo: {what}");
}

fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}
