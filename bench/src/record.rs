//! What a bench writes.

use offshoot_host::accounting::Memory;
use serde::{Deserialize, Serialize};

/// One measured thing. All samples are of one run; a failure is an attempt that gave no sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// What was done.
    pub name: String,
    /// Who did it: `offshoot`, or a peer or floor in the same run.
    pub system: String,
    /// What ran inside.
    pub guest: String,
    /// Guest memory, MiB.
    pub mem_mib: u32,
    /// `small4k` or `thp`: of the template when it was built.
    pub page_size: String,
    /// vCPUs of each guest.
    pub vcpus: u32,
    /// How many at once.
    pub n: u32,
    /// The event at which each sample ends.
    pub stop_line: String,
    /// Every sample, in order, milliseconds.
    pub samples_ms: Vec<f64>,
    /// Median of the samples.
    pub p50_ms: f64,
    /// 99th percentile of the samples; of fewer than 100 samples, the greatest.
    pub p99_ms: f64,
    /// Attempts that gave no sample.
    pub failures: u32,
    /// Median private memory of one, KiB; absent where it was not measured.
    pub private_kib: Option<u64>,
    /// Median page tables of one, KiB.
    pub page_table_kib: Option<u64>,
    /// Median proportional set size of one, KiB.
    pub pss_kib: Option<u64>,
}

impl Record {
    /// Fills in percentiles from `samples_ms`.
    pub fn with_samples(mut self, samples_ms: Vec<f64>) -> Self {
        self.p50_ms = percentile(&samples_ms, 50);
        self.p99_ms = percentile(&samples_ms, 99);
        self.samples_ms = samples_ms;
        self
    }

    /// Fills in medians of what was read from each of several processes.
    pub fn with_memory(mut self, memory: &[Memory]) -> Self {
        let median = |read: fn(&Memory) -> u64| {
            let mut values: Vec<u64> = memory.iter().map(read).collect();
            values.sort_unstable();
            values.get(values.len() / 2).copied()
        };
        self.private_kib = median(|memory| memory.private_kib);
        self.page_table_kib = median(|memory| memory.page_table_kib);
        self.pss_kib = median(|memory| memory.pss_kib);
        self
    }
}

/// The smallest sample that at least `percent` of all samples do not exceed; zero without samples.
pub fn percentile(samples: &[f64], percent: usize) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::percentile;

    #[test]
    fn percentiles_are_of_the_samples() {
        let samples: Vec<f64> = (1..=10).rev().map(f64::from).collect();
        assert_eq!(
            (percentile(&samples, 50), percentile(&samples, 99), percentile(&[], 50)),
            (5.0, 10.0, 0.0)
        );
    }
}
