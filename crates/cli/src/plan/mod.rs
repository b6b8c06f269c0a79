//! What is to be done: the command line with its files read, its paths resolved and its contradictions refused.

mod copy;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

pub use self::copy::{CopyPlan, Direction, GuestPath, LocalEnd};

use crate::args::{Args, Command, ExecArgs, ImageCommand, TemplateBuildArgs, TemplateCommand};
use crate::failure::{Failure, Result};
use crate::process::{Input, Spec, WindowSize};
use crate::ui::{Format, Ui};
use crate::wire::{NewTemplate, Warm};

/// What the daemon takes, with room for the quoting of JSON.
const MAX_SOURCE_BYTES: u64 = 4 << 20;

/// A command ready to run.
#[derive(Debug)]
pub struct Plan {
    /// The daemon's socket.
    pub socket: PathBuf,
    /// How to talk.
    pub ui: Ui,
    /// What to do.
    pub action: Action,
}

/// What to do.
#[derive(Debug)]
pub enum Action {
    /// Report on the host.
    Doctor,
    /// Become the daemon.
    Serve(Vec<String>),
    /// Post the body to `/images`.
    MakeImage(Value),
    /// Post the body to `/templates`.
    MakeTemplate(Box<NewTemplate>),
    /// List things.
    List(Things),
    /// Describe a thing.
    Show(Things, String),
    /// Remove an image or template.
    Remove(Things, RemoveThing),
    /// Post the body to `/sandboxes`.
    Create(Value),
    /// Fork a sandbox.
    Fork(ForkPlan),
    /// Run a command.
    Exec(Spec),
    /// Open a terminal.
    Shell(Spec),
    /// Run Python.
    Run(RunPlan),
    /// Draw the lineage.
    Tree,
    /// Copy a file.
    Copy(CopyPlan),
    /// Print a console.
    Logs(LogsPlan),
    /// End sandboxes.
    End(Targets),
    /// Print a completion script.
    Completions(clap_complete::Shell),
}

/// Kinds of things that can be listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Things {
    /// Images.
    Images,
    /// Templates.
    Templates,
    /// Sandboxes.
    Sandboxes,
}

/// An image or template to remove.
#[derive(Debug)]
pub struct RemoveThing {
    /// Its name.
    pub name: String,
    /// Even while it is in use.
    pub force: bool,
}

/// How to fork.
#[derive(Debug)]
pub struct ForkPlan {
    /// Sandbox to fork.
    pub sandbox: String,
    /// The request's body.
    pub body: Value,
}

/// Python to run.
#[derive(Debug)]
pub struct RunPlan {
    /// Sandbox.
    pub sandbox: String,
    /// Source text.
    pub code: String,
    /// Interrupted after this time.
    pub timeout: Option<Duration>,
}

/// What to print of a console.
#[derive(Debug)]
pub struct LogsPlan {
    /// Sandbox.
    pub sandbox: String,
    /// Where to begin, bytes from the end.
    pub tail_bytes: u64,
    /// Go on until the sandbox ends.
    pub follow: bool,
}

/// Sandboxes to end.
#[derive(Debug)]
pub enum Targets {
    /// These.
    These(Vec<String>),
    /// All.
    All,
}

impl Plan {
    /// Resolves what was typed.
    pub fn of(args: Args) -> Result<Self> {
        let format = if args.global.json { Format::Json } else { Format::Text };
        let action = match args.command {
            Command::Doctor => Action::Doctor,
            Command::Serve { args } => Action::Serve(args),
            Command::Image(command) => image(command)?,
            Command::Template(command) => template(command)?,
            Command::Create { template, count, name, env } => create(&template, count, name, env)?,
            Command::Exec(args) => Action::Exec(exec(args)),
            Command::Run { sandbox, code, file, timeout } => {
                Action::Run(RunPlan { sandbox, code: code_or_file(code, file)?, timeout })
            }
            Command::Shell { sandbox, user, command } => Action::Shell(shell(sandbox, user, command)),
            Command::Fork { sandbox, count, env } => {
                let body = json!({"count": count, "env": env_map(env)});
                Action::Fork(ForkPlan { sandbox, body })
            }
            Command::Ls => Action::List(Things::Sandboxes),
            Command::Tree => Action::Tree,
            Command::Cp { from, to, user } => Action::Copy(copy::copy(&from, &to, user, format)?),
            Command::Logs { sandbox, follow, tail_bytes } => {
                Action::Logs(LogsPlan { sandbox, tail_bytes, follow })
            }
            Command::Rm { all: true, .. } => Action::End(Targets::All),
            Command::Rm { sandboxes, .. } => Action::End(Targets::These(sandboxes)),
            Command::Completions { shell } => Action::Completions(shell),
        };
        Ok(Self { socket: args.global.socket, ui: Ui::new(format, args.global.quiet), action })
    }
}

fn code_or_file(code: Option<String>, file: Option<PathBuf>) -> Result<String> {
    match (code, file) {
        (Some(code), _) => Ok(code),
        (None, Some(file)) => source(&file),
        (None, None) => Err(Failure::usage("give -c CODE, a file, or - for standard input")),
    }
}

fn image(command: ImageCommand) -> Result<Action> {
    Ok(match command {
        ImageCommand::Build { name, packages, disk_mib } => {
            let packages: Vec<String> = packages.into_iter().filter(|package| !package.is_empty()).collect();
            Action::MakeImage(
                json!({"name": name, "source": {"debian": {"packages": packages, "disk_mib": disk_mib}}}),
            )
        }
        ImageCommand::Add { name, kernel, initramfs, rootfs } => {
            let files = json!({
                "kernel": daemon_path("kernel", &kernel)?,
                "initramfs": daemon_path("initramfs", &initramfs)?,
                "rootfs": daemon_path("root file system", &rootfs)?,
            });
            Action::MakeImage(json!({"name": name, "source": {"files": files}}))
        }
        ImageCommand::Ls => Action::List(Things::Images),
        ImageCommand::Show { name } => Action::Show(Things::Images, name),
        ImageCommand::Rm { name } => Action::Remove(Things::Images, RemoveThing { name, force: false }),
    })
}

fn template(command: TemplateCommand) -> Result<Action> {
    Ok(match command {
        TemplateCommand::Build(args) => Action::MakeTemplate(Box::new(new_template(args)?)),
        TemplateCommand::Ls => Action::List(Things::Templates),
        TemplateCommand::Show { name } => Action::Show(Things::Templates, name),
        TemplateCommand::Rm { name, force } => Action::Remove(Things::Templates, RemoveThing { name, force }),
    })
}

fn new_template(args: TemplateBuildArgs) -> Result<NewTemplate> {
    Ok(NewTemplate {
        warm: args.warm.as_deref().map(warm).transpose()?,
        name: args.name,
        image: args.image,
        memory_mib: args.memory_mib,
        vcpus: args.vcpus,
        page_size: args.page_size,
        overlay_limit_mib: args.overlay_limit_mib,
        cmdline: args.cmdline,
        warm_timeout_ms: whole_ms(args.warm_timeout),
        boot_timeout_ms: whole_ms(args.boot_timeout),
    })
}

fn warm(path: &Path) -> Result<Warm> {
    let file_name = match path.file_name() {
        _ if path == Path::new("-") => "<stdin>".into(),
        Some(name) => name.to_string_lossy().into_owned(),
        None => return Err(Failure::usage(format!("{} names no file", path.display()))),
    };
    Ok(Warm { source: source(path)?, file_name })
}

fn create(template: &str, count: u32, name: Option<String>, env: Vec<(String, String)>) -> Result<Action> {
    let mut body = json!({"template": template, "count": count, "env": env_map(env)});
    if let Some(name) = name {
        if count > 1 {
            return Err(Failure::usage(format!("--name {name} names one sandbox, but -n asks for {count}")));
        }
        body["name"] = json!(name);
    }
    Ok(Action::Create(body))
}

fn exec(args: ExecArgs) -> Spec {
    let mut command = args.command.into_iter();
    Spec {
        sandbox: args.sandbox,
        cmd: command.next().unwrap_or_default(),
        args: command.collect(),
        envs: env_map(args.env),
        cwd: args.cwd,
        user: args.user,
        timeout: args.timeout,
        input: if args.stdin { Input::Pipe } else { Input::Null },
    }
}

/// The terminal's size and type are filled in when it is opened.
fn shell(sandbox: String, user: Option<String>, command: Vec<String>) -> Spec {
    let mut command = command.into_iter();
    let (cmd, args) = match command.next() {
        Some(cmd) => (cmd, command.collect()),
        None => ("/bin/bash".into(), vec!["-i".into(), "-l".into()]),
    };
    let input = Input::Terminal(WindowSize { cols: 80, rows: 24 });
    Spec { sandbox, cmd, args, envs: BTreeMap::new(), cwd: None, user, timeout: None, input }
}

/// The daemon opens the file itself, from another working directory.
fn daemon_path(what: &str, path: &Path) -> Result<PathBuf> {
    std::fs::canonicalize(path)
        .map_err(|error| Failure::local(format!("cannot find the {what} {}", path.display()), &error))
}

fn source(path: &Path) -> Result<String> {
    let shown = if path == Path::new("-") { "standard input".into() } else { path.display().to_string() };
    let mut bytes = Vec::new();
    let read = if path == Path::new("-") {
        io::stdin().take(MAX_SOURCE_BYTES + 1).read_to_end(&mut bytes)
    } else {
        File::open(path).and_then(|file| file.take(MAX_SOURCE_BYTES + 1).read_to_end(&mut bytes))
    };
    read.map_err(|error| Failure::local(format!("cannot read {shown}"), &error))?;
    if bytes.len() as u64 > MAX_SOURCE_BYTES {
        let message = format!("{shown} has over {} MiB, too much for source text", MAX_SOURCE_BYTES >> 20);
        return Err(Failure::usage(message));
    }
    String::from_utf8(bytes).map_err(|_| Failure::usage(format!("{shown} is not UTF-8 text")))
}

fn env_map(env: Vec<(String, String)>) -> BTreeMap<String, String> {
    env.into_iter().collect()
}

fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn plan(words: &[&str]) -> Result<Action> {
        let args = Args::try_parse_from([&["offshoot"], words].concat()).unwrap();
        Plan::of(args).map(|plan| plan.action)
    }

    fn usage_error(words: &[&str]) -> String {
        match plan(words) {
            Err(Failure::Report(report)) => {
                assert_eq!(report.exit_code(), 2);
                report.message
            }
            other => panic!("{words:?} gave {other:?}"),
        }
    }

    #[test]
    fn either_side_of_a_copy_may_be_in_a_sandbox() {
        let Ok(Action::Copy(up)) = plan(&["cp", "a/b.txt", "sb:/tmp/"]) else { panic!() };
        assert_eq!((up.direction, up.guest.path.as_str()), (Direction::Upload, "/tmp/b.txt"));
        let Ok(Action::Copy(down)) = plan(&["cp", "sb:/tmp/x", "-"]) else { panic!() };
        assert_eq!((down.direction, down.local), (Direction::Download, LocalEnd::Standard));
        let Ok(Action::Copy(colon)) = plan(&["cp", "./a:b", "sb:c"]) else { panic!() };
        assert_eq!((colon.local, colon.guest.path.as_str()), (LocalEnd::File("./a:b".into()), "c"));
    }

    #[test]
    fn copies_that_cannot_be_are_refused() {
        assert!(usage_error(&["cp", "a:/x", "b:/y"]).contains("from one to another"));
        assert!(usage_error(&["cp", "x", "y"]).contains("SANDBOX:PATH"));
        assert!(usage_error(&["cp", "-", "sb:/tmp/"]).contains("file's name"));
        assert!(usage_error(&["cp", "sb:", "y"]).contains("no path"));
        assert!(usage_error(&["--json", "cp", "sb:/x", "-"]).contains("--json"));
    }

    #[test]
    fn one_name_is_not_given_to_many() {
        assert!(usage_error(&["create", "t", "-n", "2", "--name", "x"]).contains("--name x"));
    }

    #[test]
    fn a_missing_warm_up_names_its_file() {
        let result = plan(&["template", "build", "t", "--image", "i", "--warm", "/nonexistent/warm.py"]);
        let Err(Failure::Report(report)) = result else { panic!() };
        assert!(report.message.contains("/nonexistent/warm.py"), "{}", report.message);
        assert_eq!(report.exit_code(), 3);
    }
}
