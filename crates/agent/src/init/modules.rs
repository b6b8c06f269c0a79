//! Kernel modules of the initramfs.

use std::fs::File;
use std::path::Path;

use rustix::io::Errno;
use rustix::system::finit_module;

/// Loads the modules listed in `list`, one path a line, in that order; answers with what failed, in words. No list
/// means no modules.
pub fn load_listed(list: &Path) -> Vec<String> {
    let text = match std::fs::read_to_string(list) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => {
            return vec![format!("the module list {} could not be read: {error}", list.display())];
        }
    };
    paths(&text).filter_map(|path| load(path).err().map(|error| format!("module {path}: {error}"))).collect()
}

fn paths(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
}

fn load(path: &str) -> std::io::Result<()> {
    let file = File::open(path)?;
    match finit_module(&file, c"", 0) {
        // Loaded already, or built into the kernel.
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_lines_and_comments_are_no_modules() {
        let listed: Vec<_> = paths("/modules/a.ko\n\n# b\n  /modules/c.ko  \n").collect();
        assert_eq!(listed, ["/modules/a.ko", "/modules/c.ko"]);
    }

    #[test]
    fn a_missing_list_is_no_failure_and_a_missing_module_is_named() {
        assert!(load_listed(Path::new("/nonexistent/order")).is_empty());
        let list = std::env::temp_dir().join(format!("offshoot-order-{}", std::process::id()));
        std::fs::write(&list, "/nonexistent/a.ko\n").unwrap();
        let failures = load_listed(&list);
        std::fs::remove_file(&list).unwrap();
        assert!(failures[0].starts_with("module /nonexistent/a.ko: "), "{failures:?}");
    }
}
