//! Kernel modules in the order in which they can be loaded.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Why modules could not be ordered.
#[derive(Debug, thiserror::Error)]
pub enum ModulesError {
    /// An index file is missing or unreadable.
    #[error("could not read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A module is neither in the index nor built in.
    #[error("the kernel with modules in {dir} has no module {name}, nor is it built in")]
    Unknown {
        /// The module.
        name: String,
        /// The modules directory.
        dir: PathBuf,
    },
    /// A module is compressed, which the loader in the guest does not read.
    #[error("module {path} is compressed; only plain .ko files can be packed")]
    Compressed {
        /// The file.
        path: PathBuf,
    },
}

/// The dependency index of one kernel's modules directory (`lib/modules/VERSION`, after depmod).
#[derive(Debug)]
pub struct ModuleIndex {
    dir: PathBuf,
    /// Canonical name → path and names it depends on.
    modules: BTreeMap<String, (PathBuf, Vec<String>)>,
    built_in: BTreeSet<String>,
}

impl ModuleIndex {
    /// Reads `modules.dep` and `modules.builtin` in `dir`.
    ///
    /// # Errors
    /// Fails where one of them cannot be read.
    pub fn open(dir: &Path) -> Result<Self, ModulesError> {
        let read = |name: &str| {
            let path = dir.join(name);
            fs::read_to_string(&path).map_err(|source| ModulesError::Read { path, source })
        };
        let mut modules = BTreeMap::new();
        for line in read("modules.dep")?.lines() {
            let Some((path, needs)) = line.split_once(':') else {
                continue;
            };
            let needs = needs.split_whitespace().map(canonical).collect();
            modules.insert(canonical(path), (dir.join(path), needs));
        }
        let built_in = read("modules.builtin")?.lines().map(canonical).collect();
        Ok(Self { dir: dir.to_owned(), modules, built_in })
    }

    /// The files of `names` and of all they depend on, each after what it needs; built-in modules take none.
    ///
    /// # Errors
    /// Fails on a name the kernel does not have and on compressed modules.
    pub fn closure(&self, names: &[&str]) -> Result<Vec<PathBuf>, ModulesError> {
        let mut order = Vec::new();
        let mut placed = BTreeSet::new();
        for name in names {
            self.place(&canonical(name), &mut placed, &mut order)?;
        }
        Ok(order)
    }

    fn place(
        &self,
        name: &str,
        placed: &mut BTreeSet<String>,
        order: &mut Vec<PathBuf>,
    ) -> Result<(), ModulesError> {
        // Marked before its needs are placed, so that a circular index (depmod refuses to write one) ends too.
        if self.built_in.contains(name) || !placed.insert(name.to_owned()) {
            return Ok(());
        }
        let Some((path, needs)) = self.modules.get(name) else {
            return Err(ModulesError::Unknown { name: name.to_owned(), dir: self.dir.clone() });
        };
        if path.extension().is_none_or(|extension| extension != "ko") {
            return Err(ModulesError::Compressed { path: path.clone() });
        }
        for need in needs {
            self.place(need, placed, order)?;
        }
        order.push(path.clone());
        Ok(())
    }
}

/// The name the kernel uses: no directory, no suffix, underscores.
fn canonical(name: &str) -> String {
    let file = name.rsplit('/').next().unwrap_or(name);
    let stem = file.split_once(".ko").map_or(file, |(stem, _)| stem);
    stem.replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index() -> (tempfile::TempDir, ModuleIndex) {
        let dir = tempfile::tempdir().unwrap();
        let dep = "kernel/kvm-amd.ko: kernel/kvm.ko kernel/irqbypass.ko kernel/ccp.ko\n\
                   kernel/kvm.ko: kernel/irqbypass.ko\nkernel/irqbypass.ko:\nkernel/ccp.ko: kernel/rng-core.ko\n\
                   kernel/squashed.ko.xz:\n";
        fs::write(dir.path().join("modules.dep"), dep).unwrap();
        fs::write(dir.path().join("modules.builtin"), "kernel/rng-core.ko\nkernel/fs/ext4/ext4.ko\n")
            .unwrap();
        let index = ModuleIndex::open(dir.path()).unwrap();
        (dir, index)
    }

    #[test]
    fn each_module_comes_once_and_after_what_it_needs() {
        let (dir, index) = index();
        let order = index.closure(&["kvm_amd", "irqbypass", "ext4"]).unwrap();
        let names: Vec<_> =
            order.iter().map(|p| p.strip_prefix(dir.path()).unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["kernel/irqbypass.ko", "kernel/kvm.ko", "kernel/ccp.ko", "kernel/kvm-amd.ko"]);
    }

    #[test]
    fn unknown_and_compressed_modules_are_named() {
        let (_dir, index) = index();
        assert!(index.closure(&["no_such"]).unwrap_err().to_string().contains("no_such"));
        assert!(matches!(index.closure(&["squashed"]), Err(ModulesError::Compressed { .. })));
    }
}
