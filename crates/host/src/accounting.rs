//! Memory of one VMM process, as the kernel accounts it.

use std::os::fd::OwnedFd;

use serde::Serialize;

use crate::control::is_alive;

/// Memory of one process, KiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Memory {
    /// Pages mapped, shared or not.
    pub rss_kib: u64,
    /// Private pages, and of each shared page this process' share.
    pub pss_kib: u64,
    /// Pages only this process maps, clean or dirty.
    pub private_kib: u64,
    /// Pages others map, too.
    pub shared_kib: u64,
    /// Page tables.
    pub page_table_kib: u64,
}

impl Memory {
    /// Reads `/proc/<pid>`; `None` where the process is gone or may not be read.
    ///
    /// The pidfd is asked before and after: it names the process, the number may by then name another.
    /// Cost: the kernel walks the process' page tables.
    pub fn of(pid: u32, pidfd: &OwnedFd) -> Option<Self> {
        if !is_alive(pidfd) {
            return None;
        }
        let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        is_alive(pidfd).then(|| Self::parse(&rollup, &status))
    }

    /// Reads the texts of `smaps_rollup` and `status` (Documentation/filesystems/proc.rst); absent fields are zero.
    pub fn parse(rollup: &str, status: &str) -> Self {
        let of = |name: &str| field_kib(rollup, name);
        Self {
            rss_kib: of("Rss"),
            pss_kib: of("Pss"),
            private_kib: of("Private_Clean") + of("Private_Dirty") + of("Private_Hugetlb"),
            shared_kib: of("Shared_Clean") + of("Shared_Dirty") + of("Shared_Hugetlb"),
            page_table_kib: field_kib(status, "VmPTE"),
        }
    }
}

fn field_kib(text: &str, name: &str) -> u64 {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    value.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Memory that the host could give without swapping, MiB: `MemAvailable` of `/proc/meminfo` (Linux 3.14,
/// Documentation/filesystems/proc.rst). `None` where it does not say.
pub fn available_mib() -> Option<u64> {
    parse_available_mib(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse_available_mib(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? / 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_in_mib() {
        let meminfo = "MemTotal:       24000000 kB\nMemAvailable:    2097152 kB\n";
        assert_eq!(parse_available_mib(meminfo), Some(2048));
        assert_eq!(parse_available_mib("MemTotal: 1 kB\n"), None);
    }

    const ROLLUP: &str = "55d0-7ffe ---p 00000000 00:00 0    [rollup]\n\
        Rss:                5120 kB\nPss:                2100 kB\nPss_Dirty:           900 kB\n\
        Shared_Clean:       3000 kB\nShared_Dirty:         20 kB\nPrivate_Clean:       100 kB\n\
        Private_Dirty:      2000 kB\nShared_Hugetlb:        0 kB\nPrivate_Hugetlb:       4 kB\n";

    #[test]
    fn fields_are_matched_by_their_whole_name() {
        let memory = Memory::parse(ROLLUP, "Name:\tx\nVmPTE:\t      84 kB\n");
        let expected =
            Memory { rss_kib: 5120, pss_kib: 2100, private_kib: 2104, shared_kib: 3020, page_table_kib: 84 };
        assert_eq!(memory, expected);
    }

    #[test]
    fn a_process_that_is_gone_has_no_figures() {
        let mut child = std::process::Command::new("/bin/true").spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        child.wait().unwrap();
        assert_eq!(Memory::of(child.id(), &pidfd), None);
    }

    #[test]
    fn this_process_has_figures() {
        let pidfd =
            rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty());
        let memory = Memory::of(std::process::id(), &pidfd.unwrap()).unwrap();
        assert!(memory.rss_kib > 0 && memory.page_table_kib > 0, "{memory:?}");
    }
}
