//! What the demo found out.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

/// All figures of one run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Clones made.
    pub clones: usize,
    /// Clones whose every answer was right.
    pub correct: usize,
    /// Forks made of one running clone.
    pub forks: usize,
    /// Forks whose counters in RAM and on disk agree, that share the parent's past to the tick, and go on counting.
    pub consistent: usize,
    /// Nobody sees a write of anybody else, in memory or on disk.
    pub isolated: bool,
    /// All random bytes of all sandboxes differ.
    pub distinct_random: bool,
    /// All wall clocks are within a second of the host's, give or take the time of asking.
    pub clock_ok: bool,
    /// Milliseconds to each stop-line.
    pub stop_lines: BTreeMap<String, f64>,
    /// Memory of each sandbox, as the daemon tells it.
    pub memory: Vec<Value>,
    /// The fork tree as the command prints it.
    #[serde(skip)]
    pub tree: String,
}

impl Report {
    /// Whether every check held.
    pub fn all_well(&self) -> bool {
        self.correct == self.clones
            && self.consistent == self.forks
            && self.isolated
            && self.distinct_random
            && self.clock_ok
    }

    /// Writes all of it for people.
    pub fn print(&self) {
        println!("\n{}", self.tree.trim_end());
        println!("\n{:<44} {:>10}", "time until", "ms");
        for (name, ms) in &self.stop_lines {
            println!("{name:<44} {ms:>10.1}");
        }
        println!(
            "\n{:<24} {:>14} {:>14} {:>14} {:>14}",
            "sandbox", "private_kib", "shared_kib", "pss_kib", "pagetab_kib"
        );
        for sandbox in &self.memory {
            let kib = |field: &str| sandbox[field].as_u64().map_or_else(|| "-".into(), |kib| kib.to_string());
            println!(
                "{:<24} {:>14} {:>14} {:>14} {:>14}",
                sandbox["id"].as_str().unwrap_or("-"),
                kib("private_kib"),
                kib("shared_kib"),
                kib("pss_kib"),
                kib("page_table_kib")
            );
        }
        println!(
            "\n{} of {} clones correct, {} of {} forks consistent, isolated: {}, random bytes distinct: {}, clocks right: {}",
            self.correct,
            self.clones,
            self.consistent,
            self.forks,
            self.isolated,
            self.distinct_random,
            self.clock_ok
        );
    }
}
