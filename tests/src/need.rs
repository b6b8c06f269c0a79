//! What a test needs of its machine. A test that is skipped says why; in the lab nothing may be skipped.

use std::path::PathBuf;

/// Set in the lab, where everything must be there.
const LAB: &str = "OFFSHOOT_LAB";
/// Folder of the built programs.
const BIN_DIR: &str = "OFFSHOOT_BIN_DIR";

/// Whether this is the lab.
pub fn in_lab() -> bool {
    std::env::var_os(LAB).is_some()
}

/// True if `/dev/kvm` opens; else says why the test does nothing.
///
/// # Panics
/// In the lab, where it must open.
pub fn kvm(test: &str) -> bool {
    match std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(_) => true,
        Err(error) => {
            assert!(!in_lab(), "/dev/kvm does not open in the lab: {error}");
            eprintln!("{test} skipped: /dev/kvm does not open: {error}");
            false
        }
    }
}

/// A program of the project: from `OFFSHOOT_BIN_DIR`, or from the folder this test was built into.
///
/// # Panics
/// It has not been built.
pub fn program(name: &str) -> PathBuf {
    let folder = std::env::var_os(BIN_DIR).map(PathBuf::from).unwrap_or_else(|| {
        let test = std::env::current_exe().expect("a running test has a program");
        // target/PROFILE/deps/TEST
        test.ancestors().nth(2).expect("tests are built two folders down").to_owned()
    });
    let program = folder.join(name);
    assert!(program.exists(), "{} does not exist: build it first (cargo xtask build)", program.display());
    program
}
