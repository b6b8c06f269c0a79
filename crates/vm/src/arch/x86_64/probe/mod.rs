//! What `offshoot doctor` measures: can this host's KVM run Linux?
//!
//! There are hosts whose `/dev/kvm` opens and names every capability, yet runs only the guest's *user* mode on the
//! processor and emulates its *kernel* mode, at a few million instructions a second and without some instructions. So
//! this runs a little of both, times it, and tries what Linux needs. Whatever the guest does is a finding, not a failure
//! of the probe; every run has a deadline.

mod code;
mod guest;

use std::time::Duration;

use kvm_ioctls::{Cap, Kvm};
use serde::{Deserialize, Serialize};

use self::guest::Program;
use super::cpuid;
use super::segments::Ring;

/// Least kernel-mode speed at which Linux is worth booting, million instructions a second. Booting Debian takes some
/// 10⁹ kernel instructions. Hosts that emulate them reach 1 to 4, a guest in a software-emulated machine over 100,
/// others thousands: the limit lies far from each.
pub const MIN_KERNEL_MIPS: f64 = 20.0;
/// The only version there is (Documentation/virt/kvm/api.rst, 4.1).
const API_VERSION: i32 = 12;
/// Longest time of one measurement.
const DEADLINE: Duration = Duration::from_secs(3);
/// Turns of the loop at first: a few thousand instructions, a few milliseconds where they are emulated.
const FIRST_TURNS: u64 = 2_000;
/// A run this long is timed well enough.
const LONG_ENOUGH: Duration = Duration::from_millis(10);

/// A KVM capability Offshoot needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capability {
    /// `KVM_CAP_…`.
    pub name: String,
    /// Whether this host has it.
    pub present: bool,
}

/// One kernel-mode instruction that was tried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelInstruction {
    /// Mnemonic.
    pub name: String,
    /// Whether it did what the manual says.
    pub ok: bool,
    /// What happened instead; empty if nothing.
    pub detail: String,
}

/// The findings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// `/dev/kvm` could be opened.
    pub kvm_opens: bool,
    /// `KVM_GET_API_VERSION`.
    pub api_version: Option<i32>,
    /// Why the probe could not go on, or what the speed guests did instead of finishing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Needed capabilities.
    pub capabilities: Vec<Capability>,
    /// Speed of guest user-mode code, million instructions a second.
    pub user_mips: Option<f64>,
    /// Speed of guest kernel-mode code, million instructions a second.
    pub kernel_mips: Option<f64>,
    /// Kernel-mode instructions that were tried.
    pub kernel_instructions: Vec<KernelInstruction>,
    /// Whether a Linux guest can run here.
    pub runs_linux: bool,
    /// One line for people.
    pub reason: String,
}

/// What the VMM uses.
const NEEDED: &[(&str, Cap)] = &[
    ("KVM_CAP_IRQCHIP", Cap::Irqchip),
    ("KVM_CAP_USER_MEMORY", Cap::UserMemory),
    ("KVM_CAP_SET_TSS_ADDR", Cap::SetTssAddr),
    ("KVM_CAP_EXT_CPUID", Cap::ExtCpuid),
    ("KVM_CAP_MP_STATE", Cap::MpState),
    ("KVM_CAP_PIT2", Cap::Pit2),
    ("KVM_CAP_PIT_STATE2", Cap::PitState2),
    ("KVM_CAP_ADJUST_CLOCK", Cap::AdjustClock),
    ("KVM_CAP_VCPU_EVENTS", Cap::VcpuEvents),
    ("KVM_CAP_DEBUGREGS", Cap::Debugregs),
    ("KVM_CAP_XCRS", Cap::Xcrs),
    ("KVM_CAP_XSAVE2", Cap::Xsave2),
    ("KVM_CAP_GET_TSC_KHZ", Cap::GetTscKhz),
    ("KVM_CAP_TSC_DEADLINE_TIMER", Cap::TscDeadlineTimer),
    ("KVM_CAP_IMMEDIATE_EXIT", Cap::ImmediateExit),
];

/// Probes this host. Takes well under a second where guests behave, and a bounded time where they do not.
pub fn run() -> Report {
    let mut report = Report {
        kvm_opens: false,
        api_version: None,
        error: None,
        capabilities: Vec::new(),
        user_mips: None,
        kernel_mips: None,
        kernel_instructions: Vec::new(),
        runs_linux: false,
        reason: String::new(),
    };
    match Kvm::new() {
        Err(error) => report.error = Some(format!("/dev/kvm does not open: {error}")),
        Ok(kvm) => {
            report.kvm_opens = true;
            report.api_version = Some(kvm.get_api_version());
            report.capabilities = NEEDED
                .iter()
                .map(|&(name, cap)| Capability { name: name.into(), present: kvm.check_extension(cap) })
                .collect();
            measure(&kvm, &mut report);
        }
    }
    (report.runs_linux, report.reason) = verdict(&report);
    report
}

fn measure(kvm: &Kvm, report: &mut Report) {
    let speed = |ring, mode| mips(ring).map_err(|error| format!("{mode}-mode guest: {error}"));
    match speed(Ring::User, "user") {
        Ok(mips) => report.user_mips = Some(mips),
        Err(error) => report.error = Some(error),
    }
    match speed(Ring::Kernel, "kernel") {
        Ok(mips) => report.kernel_mips = Some(mips),
        Err(error) => report.error = Some(error),
    }
    let xsave = cpuid::for_vcpu(kvm, 0, 1).is_ok_and(|cpuid| guest::has_xsave(&cpuid));
    let tried = code::TRIALS.iter().filter(|trial| xsave || !trial.needs_xsave);
    report.kernel_instructions = tried.map(attempt).collect();
}

fn attempt(trial: &code::Trial) -> KernelInstruction {
    let program = Program { code: trial.code, ring: Ring::Kernel, count: 0 };
    let detail = match guest::run(program, DEADLINE) {
        Ok(run) if run.value == trial.expected => String::new(),
        Ok(run) => format!("result {:#x} instead of {:#x}", run.value, trial.expected),
        Err(error) => error,
    };
    KernelInstruction { name: trial.name.into(), ok: detail.is_empty(), detail }
}

/// Speed of the loop.
fn mips(ring: Ring) -> Result<f64, String> {
    let program = Program { code: code::LOOP, ring, count: FIRST_TURNS };
    let seconds = guest::seconds_a_turn(program, LONG_ENOUGH, DEADLINE)?;
    Ok(code::LOOP_INSTRUCTIONS as f64 / seconds / 1e6)
}

/// Whether Linux runs, and the one line that says why.
fn verdict(report: &Report) -> (bool, String) {
    let no = |reason: String| (false, reason);
    if !report.kvm_opens {
        let error = report.error.as_deref().unwrap_or("/dev/kvm does not open");
        return no(format!("{error}; load the kvm module, or join the group that owns the device"));
    }
    if report.api_version != Some(API_VERSION) {
        return no(format!("kvm's api version is {:?}, not {API_VERSION}", report.api_version));
    }
    let absent: Vec<_> =
        report.capabilities.iter().filter(|cap| !cap.present).map(|cap| cap.name.as_str()).collect();
    if !absent.is_empty() {
        return no(format!("kvm lacks {}; use a newer host kernel", absent.join(", ")));
    }
    let Some(kernel_mips) = report.kernel_mips else {
        let error = report.error.as_deref().unwrap_or("it was not measured");
        return no(format!("guest kernel code does not run here: {error}"));
    };
    if kernel_mips < MIN_KERNEL_MIPS {
        return no(format!(
            "guest kernel code is emulated here, at {kernel_mips:.1} million instructions a second \
             ({MIN_KERNEL_MIPS:.0} are needed); linux guests need the lab or another host"
        ));
    }
    let failed: Vec<_> = report
        .kernel_instructions
        .iter()
        .filter(|tried| !tried.ok)
        .map(|tried| tried.name.as_str())
        .collect();
    let decisive: Vec<_> = failed.iter().copied().filter(|&name| name != code::XSETBV).collect();
    if !decisive.is_empty() {
        return no(format!("guest kernel code cannot execute {} here", decisive.join(", ")));
    }
    let speed =
        format!("linux guests run here, kernel code at {kernel_mips:.0} million instructions a second");
    if failed.is_empty() {
        return (true, speed);
    }
    (
        true,
        format!(
            "{speed}; but they lose vector registers, since xsetbv has no effect: hide xsave from this host"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Report {
        Report {
            kvm_opens: true,
            api_version: Some(12),
            error: None,
            capabilities: vec![Capability { name: "KVM_CAP_IRQCHIP".into(), present: true }],
            user_mips: Some(3000.0),
            kernel_mips: Some(3000.0),
            kernel_instructions: vec![KernelInstruction {
                name: "popcnt".into(),
                ok: true,
                detail: String::new(),
            }],
            runs_linux: false,
            reason: String::new(),
        }
    }

    #[test]
    fn a_complete_host_runs_linux() {
        assert!(verdict(&good()).0);
    }

    #[test]
    fn each_lack_is_named() {
        let mut report = good();
        report.kernel_mips = Some(1.2);
        let (runs, reason) = verdict(&report);
        assert!(!runs && reason.contains("1.2 million"), "{reason}");
        let mut report = good();
        report.capabilities[0].present = false;
        assert!(verdict(&report).1.contains("KVM_CAP_IRQCHIP"));
        let mut report = good();
        report.kernel_instructions[0].ok = false;
        assert!(verdict(&report).1.contains("popcnt"));
        let mut report = good();
        let failed = KernelInstruction { name: code::XSETBV.into(), ok: false, detail: String::new() };
        report.kernel_instructions.push(failed);
        let (runs, reason) = verdict(&report);
        assert!(runs && reason.contains("hide xsave"), "{reason}");
        let mut report = good();
        (report.kernel_mips, report.error) = (None, Some("kernel-mode guest: it hung".into()));
        assert!(verdict(&report).1.contains("it hung"));
        let report =
            Report { kvm_opens: false, error: Some("/dev/kvm does not open: EACCES".into()), ..good() };
        assert!(verdict(&report).1.contains("EACCES"));
    }

    #[test]
    fn this_host_can_be_probed() {
        let started = std::time::Instant::now();
        let report = run();
        eprintln!("{}", serde_json::to_string_pretty(&report).unwrap());
        assert!(!report.reason.is_empty());
        assert!(started.elapsed() < Duration::from_secs(60));
        if report.kvm_opens {
            assert!(report.user_mips.is_some_and(|mips| mips > 0.0), "{:?}", report.error);
            assert!(report.kernel_instructions.iter().any(|tried| tried.name == "popcnt"));
        }
    }
}
