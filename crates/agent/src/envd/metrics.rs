//! `GET /metrics`: the guest's own view of its processors, memory and disk.

use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// One sample.
#[derive(Debug, Clone, Serialize)]
pub struct Sample {
    ts: u64,
    cpu_count: u32,
    cpu_used_pct: f64,
    mem_total: u64,
    mem_used: u64,
    mem_cache: u64,
    mem_total_mib: u64,
    mem_used_mib: u64,
    disk_used: u64,
    disk_total: u64,
}

/// Processor time since boot, ticks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct CpuTimes {
    busy: u64,
    all: u64,
}

/// Remembers the last sample, since processor use is a difference.
#[derive(Default)]
pub struct Metrics {
    last: Mutex<CpuTimes>,
}

impl Metrics {
    /// Samples now; processor use is that since the sample before, or since boot.
    pub fn sample(&self) -> Sample {
        let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let now = cpu_times(&stat);
        let before = std::mem::replace(&mut *self.last.lock().unwrap_or_else(PoisonError::into_inner), now);
        let memory = |name| meminfo_bytes(&meminfo, name);
        let mem_total = memory("MemTotal");
        let mem_used = mem_total.saturating_sub(memory("MemAvailable"));
        let (disk_used, disk_total) = rustix::fs::statvfs("/").map_or((0, 0), |disk| {
            (disk.f_blocks.saturating_sub(disk.f_bfree) * disk.f_frsize, disk.f_blocks * disk.f_frsize)
        });
        Sample {
            ts: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            cpu_count: cpu_count(&stat),
            cpu_used_pct: used_percent(before, now),
            mem_total,
            mem_used,
            mem_cache: memory("Cached"),
            mem_total_mib: mem_total >> 20,
            mem_used_mib: mem_used >> 20,
            disk_used,
            disk_total,
        }
    }
}

fn cpu_times(stat: &str) -> CpuTimes {
    const IDLE: usize = 3;
    const IO_WAIT: usize = 4;
    /// Guest time is contained in user time.
    const COUNTED: usize = 8;
    let line = stat.lines().next().unwrap_or_default();
    let fields = line.split_ascii_whitespace().skip(1).take(COUNTED).map(|field| field.parse().unwrap_or(0));
    fields.enumerate().fold(CpuTimes::default(), |times, (index, ticks): (usize, u64)| CpuTimes {
        busy: times.busy + if matches!(index, IDLE | IO_WAIT) { 0 } else { ticks },
        all: times.all + ticks,
    })
}

fn used_percent(before: CpuTimes, now: CpuTimes) -> f64 {
    let all = now.all.saturating_sub(before.all);
    if all == 0 {
        return 0.0;
    }
    let percent = now.busy.saturating_sub(before.busy) as f64 * 100.0 / all as f64;
    (percent * 100.0).round() / 100.0
}

fn cpu_count(stat: &str) -> u32 {
    stat.lines().filter(|line| line.starts_with("cpu") && !line.starts_with("cpu ")).count() as u32
}

fn meminfo_bytes(meminfo: &str, name: &str) -> u64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_use_is_a_difference() {
        let before = cpu_times("cpu  100 0 0 900 0 0 0 0 0 0\ncpu0 100 0 0 900\n");
        let now = cpu_times("cpu  150 0 0 950 0 0 0 0 50 0\ncpu0 1\ncpu1 1\n");
        assert_eq!(used_percent(before, now), 50.0);
        assert_eq!(cpu_count("cpu  1\ncpu0 1\ncpu1 1\nintr 1\n"), 2);
    }

    #[test]
    fn memory_lines_are_found_by_whole_name() {
        assert_eq!(meminfo_bytes("MemTotal:  10 kB\nCached: 3 kB\n", "Cached"), 3 * 1024);
        assert_eq!(meminfo_bytes("SwapCached: 3 kB\n", "Cached"), 0);
    }
}
