//! `offshoot-bench`: measures Offshoot and its floors in one run and writes `results.json`.

use std::path::PathBuf;

use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use offshoot_bench::fan_out::Template;
use offshoot_bench::floor::{self, Floor};
use offshoot_bench::micro;
use offshoot_bench::record::Record;
use offshoot_host::accounting::Memory;
use offshoot_vm::process;

/// Measures Offshoot and its floors in one run.
#[derive(Debug, Parser)]
struct Arguments {
    /// Where the records go.
    #[arg(long, default_value = "target/bench/results.json")]
    out: PathBuf,
    /// The VMM program; default: beside this one.
    #[arg(long)]
    vmm: Option<PathBuf>,
    /// Samples of each record.
    #[arg(long, default_value_t = 10)]
    samples: u32,
    /// Guest memory, MiB.
    #[arg(long, default_value_t = 512)]
    memory_mib: u32,
    /// Clones at once.
    #[arg(long, default_value_t = 100)]
    clones: u32,
}

fn main() -> anyhow::Result<()> {
    process::use_one_arena();
    let arguments = Arguments::parse();
    let records = run(&arguments)?;
    print_table(&records);
    if let Some(folder) = arguments.out.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    }
    std::fs::write(&arguments.out, serde_json::to_vec_pretty(&records)?)
        .with_context(|| format!("write {}", arguments.out.display()))?;
    println!("records: {}", arguments.out.display());
    Ok(())
}

fn run(arguments: &Arguments) -> anyhow::Result<Vec<Record>> {
    let vmm = match &arguments.vmm {
        Some(vmm) => vmm.clone(),
        None => std::env::current_exe()?.with_file_name("offshoot-vmm"),
    };
    // All memory but the first 2 MiB and a little slack above is filled and resident in the layer.
    let fill_bytes = u64::from(arguments.memory_mib - 4) << 20;
    let mut rounds = Rounds::default();
    // Floors fork this process, so they come before it has threads.
    let kvm_floor = floor::Template::new(Floor::Kvm, arguments.memory_mib, fill_bytes)?;
    let process_floor = floor::Template::new(Floor::Process, arguments.memory_mib, fill_bytes)?;
    let scratch = tempfile::tempdir()?;
    let code = micro::answering(fill_bytes)?;
    let mut template = Template::build(&vmm, scratch.path(), &code, arguments.memory_mib, 1)?;
    for round in 0..=arguments.samples {
        let offshoot = template.fan_out(arguments.clones);
        let (offshoot, memory) = match offshoot {
            Ok(clones) => {
                let memory = clones.memory()?;
                let elapsed_ms = clones.elapsed_ms;
                clones.end();
                (Ok(elapsed_ms), memory)
            }
            Err(error) => (Err(error), Vec::new()),
        };
        let kvm = kvm_floor.fan_out(arguments.clones);
        let process = process_floor.fan_out(arguments.clones);
        // The first round warms caches and is not counted.
        if round > 0 {
            rounds.offshoot.add(offshoot);
            rounds.kvm.add(kvm);
            rounds.process.add(process);
            rounds.memory.extend(memory);
        }
    }
    let idle = idle_clones(&mut template)?;
    Ok(rounds.into_records(arguments, idle))
}

/// Samples of one system.
#[derive(Debug, Default)]
struct Samples {
    ms: Vec<f64>,
    failures: u32,
}

impl Samples {
    fn add(&mut self, sample: anyhow::Result<f64>) {
        match sample {
            Ok(ms) => self.ms.push(ms),
            Err(error) => {
                eprintln!("attempt failed: {error:#}");
                self.failures += 1;
            }
        }
    }
}

#[derive(Debug, Default)]
struct Rounds {
    offshoot: Samples,
    kvm: Samples,
    process: Samples,
    memory: Vec<Memory>,
}

impl Rounds {
    fn into_records(self, arguments: &Arguments, idle: Vec<Memory>) -> Vec<Record> {
        let record = |name: &str, system: &str, n| Record {
            name: name.into(),
            system: system.into(),
            guest: "micro".into(),
            mem_mib: arguments.memory_mib,
            page_size: "thp".into(),
            vcpus: 1,
            n,
            stop_line: "all_n_results".into(),
            samples_ms: Vec::new(),
            p50_ms: 0.0,
            p99_ms: 0.0,
            failures: 0,
            private_kib: None,
            page_table_kib: None,
            pss_kib: None,
        };
        let fan_out = |system, samples: Samples| {
            let failures = samples.failures;
            Record { failures, ..record("fan_out", system, arguments.clones) }.with_samples(samples.ms)
        };
        let idle_count = idle.len() as u32;
        vec![
            fan_out("offshoot", self.offshoot).with_memory(&self.memory),
            fan_out("kvm_floor", self.kvm),
            fan_out("process_fork", self.process),
            Record { stop_line: "answered_and_idle".into(), ..record("idle_clone", "offshoot", idle_count) }
                .with_memory(&idle),
        ]
    }
}

/// Memory of clones that have answered and then done nothing for a while.
fn idle_clones(template: &mut Template) -> anyhow::Result<Vec<Memory>> {
    const COUNT: u32 = 20;
    const SETTLE: Duration = Duration::from_secs(1);
    let clones = template.fan_out(COUNT)?;
    std::thread::sleep(SETTLE);
    let memory = clones.memory()?;
    clones.end();
    Ok(memory)
}

fn print_table(records: &[Record]) {
    let kib = |value: Option<u64>| value.map_or_else(|| "-".to_owned(), |value| value.to_string());
    println!(
        "{:<12} {:<14} {:>5} {:>8} {:>10} {:>10} {:>8} {:>12} {:>12} {:>10}",
        "name",
        "system",
        "n",
        "mem_mib",
        "p50_ms",
        "p99_ms",
        "failures",
        "private_kib",
        "pagetab_kib",
        "pss_kib"
    );
    for record in records {
        println!(
            "{:<12} {:<14} {:>5} {:>8} {:>10.2} {:>10.2} {:>8} {:>12} {:>12} {:>10}",
            record.name,
            record.system,
            record.n,
            record.mem_mib,
            record.p50_ms,
            record.p99_ms,
            record.failures,
            kib(record.private_kib),
            kib(record.page_table_kib),
            kib(record.pss_kib)
        );
    }
}
