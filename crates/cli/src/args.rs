//! The command line as typed. [`crate::plan`] turns it into what is to be done.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueHint};
use offshoot_protocol::control::PageSize;

/// Where `offshootd` listens unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/offshoot/offshootd.sock";

const EXIT_CODES: &str = "\
Exit codes:
  0 done    1 guest code failed    2 wrong command line    3 wrong request or no such thing
  4 not possible in this state     5 host cannot do it     6 host is out of a resource
  7 no daemon answers              8 corrupt data or a bug
exec and shell pass on the guest command's own status (128+n for signal n, 124 for --timeout).";

/// Clones and forks running virtual machines.
#[derive(Debug, Parser)]
#[command(name = "offshoot", version, after_help = EXIT_CODES, disable_help_subcommand = true)]
pub struct Args {
    /// Flags of every command.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Flags of every command.
#[derive(Debug, clap::Args)]
pub struct Global {
    /// The daemon's Unix socket
    #[arg(long, global = true, env = "OFFSHOOT_SOCKET", default_value = DEFAULT_SOCKET, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub socket: PathBuf,
    /// Print JSON: one object, or one object a line for streams; errors, too
    #[arg(long, global = true)]
    pub json: bool,
    /// No progress and no remarks on standard error
    #[arg(long, short, global = true)]
    pub quiet: bool,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Say whether this host can run sandboxes, and what it lacks
    Doctor,
    /// Run the daemon, offshootd; further flags are its own
    Serve {
        /// Passed to offshootd
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
        args: Vec<String>,
    },
    /// Build, add, list and remove images
    #[command(subcommand)]
    Image(ImageCommand),
    /// Build, list and remove templates
    #[command(subcommand)]
    Template(TemplateCommand),
    /// Make sandboxes from a template; prints their ids
    Create {
        /// Template to clone
        #[arg(value_parser = name)]
        template: String,
        /// How many
        #[arg(short = 'n', long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
        count: u32,
        /// Name of the sandbox
        #[arg(long, value_parser = name)]
        name: Option<String>,
        /// Environment of its processes; repeatable
        #[arg(short, long, value_name = "KEY=VALUE", value_parser = pair)]
        env: Vec<(String, String)>,
    },
    /// Run a command in a sandbox; its exit status becomes ours
    Exec(ExecArgs),
    /// Run Python in a sandbox's warm interpreter
    Run {
        /// Sandbox
        #[arg(value_parser = name)]
        sandbox: String,
        /// Code to run
        #[arg(short, long, conflicts_with = "file", allow_hyphen_values = true)]
        code: Option<String>,
        /// File with the code; `-` for standard input
        #[arg(required_unless_present = "code", value_hint = ValueHint::FilePath)]
        file: Option<PathBuf>,
        /// Interrupt the code after this time, e.g. 30s
        #[arg(long, value_parser = duration)]
        timeout: Option<Duration>,
    },
    /// Open a terminal in a sandbox
    Shell {
        /// Sandbox
        #[arg(value_parser = name)]
        sandbox: String,
        /// Guest user
        #[arg(short, long)]
        user: Option<String>,
        /// Command instead of a login shell
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
        command: Vec<String>,
    },
    /// Fork a running sandbox; prints a line for each child, in order
    Fork {
        /// Sandbox to fork
        #[arg(value_parser = name)]
        sandbox: String,
        /// How many children
        #[arg(short = 'n', long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
        count: u32,
        /// Environment of the children's new processes; repeatable
        #[arg(short, long, value_name = "KEY=VALUE", value_parser = pair)]
        env: Vec<(String, String)>,
    },
    /// List sandboxes with what they cost
    Ls,
    /// Draw which sandbox came from which
    Tree,
    /// Copy a file into or out of a sandbox
    Cp {
        /// FILE, SANDBOX:PATH, or - for standard input
        #[arg(value_name = "SRC", value_hint = ValueHint::FilePath)]
        from: String,
        /// FILE, SANDBOX:PATH, or - for standard output
        #[arg(value_name = "DST", value_hint = ValueHint::FilePath)]
        to: String,
        /// Guest user
        #[arg(short, long)]
        user: Option<String>,
    },
    /// Print a sandbox's console
    Logs {
        /// Sandbox
        #[arg(value_parser = name)]
        sandbox: String,
        /// Go on printing until the sandbox ends
        #[arg(short, long)]
        follow: bool,
        /// Begin with this many bytes from the end
        #[arg(long, default_value_t = 65_536)]
        tail_bytes: u64,
    },
    /// End sandboxes
    Rm {
        /// Sandboxes
        #[arg(required_unless_present = "all", conflicts_with = "all", value_parser = name, value_name = "SANDBOX")]
        sandboxes: Vec<String>,
        /// All of them
        #[arg(long)]
        all: bool,
    },
    /// Print a completion script
    Completions {
        /// Shell to complete in
        shell: clap_complete::Shell,
    },
}

/// Flags of `exec`.
#[derive(Debug, clap::Args)]
pub struct ExecArgs {
    /// Sandbox
    #[arg(value_parser = name)]
    pub sandbox: String,
    /// Guest user
    #[arg(short, long)]
    pub user: Option<String>,
    /// Working directory in the guest
    #[arg(short = 'w', long)]
    pub cwd: Option<String>,
    /// Environment; repeatable
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = pair)]
    pub env: Vec<(String, String)>,
    /// Kill the command after this time, e.g. 60s
    #[arg(long, value_parser = duration)]
    pub timeout: Option<Duration>,
    /// Pass standard input on
    #[arg(short = 'i', long)]
    pub stdin: bool,
    /// The command, after --
    #[arg(last = true, required = true, value_name = "CMD")]
    pub command: Vec<String>,
}

/// What to do with images.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Build a Debian image
    Build {
        /// Its name
        #[arg(value_parser = name)]
        name: String,
        /// Debian packages to install, besides the base system and Python; repeatable or comma-separated
        #[arg(long = "package", visible_alias = "packages", value_delimiter = ',', value_name = "PACKAGE")]
        packages: Vec<String>,
        /// Size of the root disk
        #[arg(long, default_value_t = 2048, value_name = "MIB")]
        disk_mib: u32,
    },
    /// Add an image made elsewhere
    Add {
        /// Its name
        #[arg(value_parser = name)]
        name: String,
        /// Kernel: vmlinux or bzImage
        #[arg(long, value_hint = ValueHint::FilePath)]
        kernel: PathBuf,
        /// Initramfs
        #[arg(long, value_hint = ValueHint::FilePath)]
        initramfs: PathBuf,
        /// Raw image of the root file system
        #[arg(long, value_hint = ValueHint::FilePath)]
        rootfs: PathBuf,
    },
    /// List images
    Ls,
    /// Describe an image
    Show {
        /// Its name
        #[arg(value_parser = name)]
        name: String,
    },
    /// Remove an image
    Rm {
        /// Its name
        #[arg(value_parser = name)]
        name: String,
    },
}

/// What to do with templates.
#[derive(Debug, Subcommand)]
pub enum TemplateCommand {
    /// Boot an image, run a warm-up in it and freeze it
    Build(TemplateBuildArgs),
    /// List templates
    Ls,
    /// Describe a template
    Show {
        /// Its name
        #[arg(value_parser = name)]
        name: String,
    },
    /// Remove a template
    Rm {
        /// Its name
        #[arg(value_parser = name)]
        name: String,
        /// Even while clones of it live; they live on
        #[arg(long)]
        force: bool,
    },
}

/// Flags of `template build`.
#[derive(Debug, clap::Args)]
pub struct TemplateBuildArgs {
    /// Its name
    #[arg(value_parser = name)]
    pub name: String,
    /// Image to boot
    #[arg(long, value_parser = name)]
    pub image: String,
    /// Python file to run in the interpreter before freezing; `-` for standard input
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub warm: Option<PathBuf>,
    /// Guest memory
    #[arg(long, default_value_t = 512, value_name = "MIB", value_parser = clap::value_parser!(u32).range(128..=12_288))]
    pub memory_mib: u32,
    /// Number of vCPUs
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    pub vcpus: u8,
    /// Page size of guest memory, which cannot be changed afterwards: 4k or thp
    #[arg(long, default_value = "thp", value_parser = page_size)]
    pub page_size: PageSize,
    /// Bound of each clone's private disk overlay
    #[arg(long, default_value_t = 1024, value_name = "MIB")]
    pub overlay_limit_mib: u32,
    /// Appended to the kernel command line
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    pub cmdline: String,
    /// Bound of the warm-up
    #[arg(long, default_value = "120s", value_parser = duration)]
    pub warm_timeout: Duration,
    /// Bound of the boot
    #[arg(long, default_value = "90s", value_parser = duration)]
    pub boot_timeout: Duration,
}

/// A name or id as the API takes it.
pub fn name(text: &str) -> Result<String, String> {
    let first = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let rest = |byte: u8| first(byte) || matches!(byte, b'_' | b'.' | b'-');
    let bytes = text.as_bytes();
    if bytes.len() <= 63 && bytes.first().copied().is_some_and(first) && bytes.iter().copied().all(rest) {
        return Ok(text.to_owned());
    }
    Err("a name has 1 to 63 of a-z 0-9 _ . - and begins with a letter or digit".into())
}

/// `KEY=VALUE`.
fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("expected KEY=VALUE".into()),
    }
}

/// A time with a unit, or whole seconds.
fn duration(text: &str) -> Result<Duration, String> {
    let parsed = match text.parse::<u64>() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => humantime::parse_duration(text).map_err(|_| "expected a time such as 500ms, 60s or 2m")?,
    };
    if parsed < Duration::from_millis(1) {
        return Err("the time must be at least 1ms".into());
    }
    Ok(parsed)
}

fn page_size(text: &str) -> Result<PageSize, String> {
    match text {
        "4k" | "small4k" => Ok(PageSize::Small4k),
        "thp" => Ok(PageSize::Thp),
        _ => Err("expected 4k or thp".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Args::command().debug_assert();
    }

    #[test]
    fn names_are_those_of_the_api() {
        for good in ["a", "0", "py-3.11_x"] {
            assert!(name(good).is_ok(), "{good}");
        }
        let long = "a".repeat(64);
        for bad in ["", "-a", "A", "a/b", "a b", "../x", "é", &long] {
            assert!(name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn times_have_units_or_are_seconds() {
        assert_eq!(duration("90"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("1m 30s"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("5ms"), Ok(Duration::from_millis(5)));
        for bad in ["", "soon", "0", "0s", "-1", "10ns"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_guest_command_keeps_its_own_flags() {
        let args = Args::try_parse_from(["offshoot", "exec", "sb", "--", "ls", "--json", "-q"]).unwrap();
        assert!(!args.global.json && !args.global.quiet);
        let Command::Exec(exec) = args.command else { panic!("not exec") };
        assert_eq!(exec.command, ["ls", "--json", "-q"]);
    }
}
