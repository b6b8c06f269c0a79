//! The kernel's command line.

use std::path::PathBuf;

use super::InitError;

/// What Offshoot says on it.
#[derive(Debug, PartialEq, Eq)]
pub struct Cmdline {
    /// `offshoot.root`: device of the root file system.
    pub root: Option<PathBuf>,
    /// `offshoot.rootfstype`, `ext4` where absent.
    pub root_fs_type: String,
    /// `offshoot.overlay_limit_mib`: bound of the disk's overlay, MiB.
    pub overlay_limit_mib: Option<u64>,
}

impl Cmdline {
    /// Reads a command line; the last of several equal parameters counts, as for the kernel.
    ///
    /// # Errors
    /// Where a limit is not a number.
    pub fn parse(text: &str) -> Result<Self, InitError> {
        let value = |name: &str| {
            let words = text.split_ascii_whitespace().rev();
            words
                .filter_map(|word| word.split_once('='))
                .find(|(key, _)| *key == name)
                .map(|(_, value)| value)
        };
        let overlay_limit_mib = value("offshoot.overlay_limit_mib")
            .map(|limit| {
                limit.parse().map_err(|_| InitError::Cmdline {
                    name: "offshoot.overlay_limit_mib",
                    value: limit.to_owned(),
                })
            })
            .transpose()?;
        Ok(Self {
            root: value("offshoot.root").filter(|root| !root.is_empty()).map(PathBuf::from),
            root_fs_type: value("offshoot.rootfstype").unwrap_or("ext4").to_owned(),
            overlay_limit_mib,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_parameter_counts() {
        let line =
            "console=ttyS0 offshoot.root=/dev/vdb offshoot.root=/dev/vda offshoot.overlay_limit_mib=64\n";
        let parsed = Cmdline::parse(line).unwrap();
        assert_eq!(parsed.root, Some("/dev/vda".into()));
        assert_eq!((parsed.root_fs_type.as_str(), parsed.overlay_limit_mib), ("ext4", Some(64)));
    }

    #[test]
    fn no_parameter_means_no_root_and_no_limit() {
        let parsed = Cmdline::parse("quiet root=/dev/sda").unwrap();
        assert_eq!((parsed.root, parsed.overlay_limit_mib), (None, None));
        assert!(Cmdline::parse("offshoot.overlay_limit_mib=lots").is_err());
    }
}
