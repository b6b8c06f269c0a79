//! Which open files two processes share.

use std::path::PathBuf;

/// A descriptor of a process and what it names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Descriptor {
    /// Its number.
    pub number: i32,
    /// What `/proc` says it is.
    pub names: PathBuf,
}

/// The descriptors of process `pid`.
///
/// # Errors
/// It has ended.
pub fn of(pid: u32) -> std::io::Result<Vec<Descriptor>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        let number = entry.file_name().to_string_lossy().parse().map_err(std::io::Error::other)?;
        found.push(Descriptor { number, names: std::fs::read_link(entry.path())? });
    }
    Ok(found)
}

/// The descriptors of `child` that are the same open file as one of `parent`'s (kcmp(2), `KCMP_FILE`).
///
/// # Errors
/// One has ended, or the kernel does not compare.
pub fn shared(parent: u32, child: u32) -> std::io::Result<Vec<Descriptor>> {
    let parents = of(parent)?;
    let mut found = Vec::new();
    for descriptor in of(child)? {
        for other in &parents {
            if same_open_file(parent, other.number, child, descriptor.number)? {
                found.push(descriptor.clone());
                break;
            }
        }
    }
    Ok(found)
}

#[allow(unsafe_code)]
fn same_open_file(pid: u32, fd: i32, other_pid: u32, other_fd: i32) -> std::io::Result<bool> {
    const KCMP_FILE: libc::c_int = 0;
    // SAFETY: the call reads five integers and touches no memory of this process.
    match unsafe { libc::syscall(libc::SYS_kcmp, pid, other_pid, KCMP_FILE, fd, other_fd) } {
        -1 => Err(std::io::Error::last_os_error()),
        order => Ok(order == 0),
    }
}
