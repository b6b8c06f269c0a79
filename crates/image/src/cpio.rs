//! Writes cpio archives in the `newc` format, as the kernel unpacks for an initramfs
//! (Linux, Documentation/driver-api/early-userspace/buffer-format.rst).
//!
//! The bytes depend only on what is added and in which order: no times, owners or inode numbers of the host.

/// File type bits of `c_mode` (inode(7)).
const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
const S_IFCHR: u32 = 0o020_000;
/// Name of the record that ends an archive.
const TRAILER: &str = "TRAILER!!!";

/// An archive being written.
#[derive(Debug, Default)]
pub struct Cpio {
    bytes: Vec<u8>,
    next_inode: u32,
}

/// What one record says.
struct Record<'a> {
    name: &'a str,
    mode: u32,
    device: (u32, u32),
    content: &'a [u8],
}

impl Cpio {
    /// An empty archive.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a directory; `name` has no leading slash, and its parent was added before.
    pub fn dir(&mut self, name: &str, permissions: u32) {
        self.record(&Record { name, mode: S_IFDIR | permissions, device: (0, 0), content: &[] });
    }

    /// Adds a file.
    pub fn file(&mut self, name: &str, permissions: u32, content: &[u8]) {
        self.record(&Record { name, mode: S_IFREG | permissions, device: (0, 0), content });
    }

    /// Adds a character device with the numbers `device` (major, minor).
    pub fn char_device(&mut self, name: &str, permissions: u32, device: (u32, u32)) {
        self.record(&Record { name, mode: S_IFCHR | permissions, device, content: &[] });
    }

    /// Ends the archive and returns its bytes.
    pub fn finish(mut self) -> Vec<u8> {
        self.record(&Record { name: TRAILER, mode: 0, device: (0, 0), content: &[] });
        self.bytes
    }

    fn record(&mut self, record: &Record<'_>) {
        let inode = if record.name == TRAILER { 0 } else { self.next_inode + 1 };
        self.next_inode += 1;
        let size_bytes = u32::try_from(record.content.len()).expect("initramfs files are far below 4 GiB");
        let name_bytes = u32::try_from(record.name.len() + 1).expect("names are short");
        // c_ino, c_mode, c_uid, c_gid, c_nlink, c_mtime, c_filesize, c_devmajor, c_devminor, c_rdevmajor, c_rdevminor,
        // c_namesize, c_check
        let (major, minor) = record.device;
        let fields = [inode, record.mode, 0, 0, 1, 0, size_bytes, 0, 0, major, minor, name_bytes, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(record.name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(record.content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads an archive back: name, mode, content.
    fn parse(mut bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut found = Vec::new();
        let mut at = 0;
        loop {
            assert_eq!(&bytes[..6], b"070701");
            let field = |n: usize| {
                u32::from_str_radix(std::str::from_utf8(&bytes[6 + 8 * n..14 + 8 * n]).unwrap(), 16).unwrap()
            };
            let (mode, size, name_size) = (field(1), field(6) as usize, field(11) as usize);
            let name = String::from_utf8(bytes[110..110 + name_size - 1].to_vec()).unwrap();
            let begin = (at + 110 + name_size).next_multiple_of(4) - at;
            let end = (at + begin + size).next_multiple_of(4) - at;
            if name == TRAILER {
                assert_eq!(bytes.len(), end);
                return found;
            }
            found.push((name, mode, bytes[begin..begin + size].to_vec()));
            bytes = &bytes[end..];
            at += end;
        }
    }

    #[test]
    fn archives_read_back() {
        let mut cpio = Cpio::new();
        cpio.dir("modules", 0o755);
        cpio.file("modules/a.ko", 0o644, b"12345");
        cpio.file("init", 0o755, b"");
        let expected = [
            ("modules".to_owned(), 0o040_755, vec![]),
            ("modules/a.ko".to_owned(), 0o100_644, b"12345".to_vec()),
            ("init".to_owned(), 0o100_755, vec![]),
        ];
        assert_eq!(parse(&cpio.finish()), expected);
    }

    #[test]
    fn the_cpio_program_agrees() {
        use std::io::Write;
        use std::process::{Command, Stdio};
        let mut cpio = Cpio::new();
        cpio.dir("dev", 0o755);
        cpio.char_device("dev/console", 0o600, (5, 1));
        cpio.file("init", 0o755, b"abc");
        let spawned = Command::new("cpio")
            .args(["-itv", "--quiet"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let Ok(mut child) = spawned else {
            println!("skipped: no cpio program here");
            return;
        };
        child.stdin.take().unwrap().write_all(&cpio.finish()).unwrap();
        let list = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
        assert!(list.contains("crw-------") && list.contains("5,   1"), "{list}");
        assert!(list.contains("-rwxr-xr-x") && list.contains(" init"), "{list}");
    }
}
