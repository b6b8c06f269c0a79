//! `offshoot-vmm`: one microVM, driven over a control socket; or a probe of this host.

use std::io::Write;
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::ExitCode;

use offshoot_vm::arch::x86_64::probe;
use offshoot_vm::{process, vmm};

const USAGE: &str = "usage: offshoot-vmm --control-fd N    serve the control socket N
       offshoot-vmm --probe           print what this host's KVM can do, as JSON
       offshoot-vmm --version";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--control-fd", number] => serve(number),
        ["--probe"] => {
            let report = serde_json::to_string_pretty(&probe::run()).expect("a report always encodes");
            // A reader that has gone away wants no report.
            match writeln!(std::io::stdout(), "{report}") {
                Ok(()) => ExitCode::SUCCESS,
                Err(_) => ExitCode::FAILURE,
            }
        }
        ["--version"] => {
            println!("offshoot-vmm {}", env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn serve(number: &str) -> ExitCode {
    let control = match number.parse() {
        Ok(number) if number > 2 => control_socket(number),
        _ => {
            eprintln!("offshoot-vmm: control descriptor {number:?} is not a number above 2\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    process::use_one_arena();
    match vmm::serve(control) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("offshoot-vmm: {error}");
            ExitCode::FAILURE
        }
    }
}

#[allow(unsafe_code)]
fn control_socket(number: i32) -> OwnedFd {
    // SAFETY: the caller of this program passes a descriptor by this number for it to own; nothing else in this
    // process, which has only begun, owns it. A wrong number fails at the first read.
    unsafe { OwnedFd::from_raw_fd(number) }
}
