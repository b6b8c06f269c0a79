//! One function a command; each gives the process's exit code.

mod copy;
mod create;
mod doctor;
mod exec;
mod list;
mod logs;
mod make;
mod remove;
mod run;
mod serve;
mod shell;
mod tree;

use clap::CommandFactory;

use crate::args::Args;
use crate::client::Client;
use crate::failure::{Failure, Result};
use crate::plan::{Action, Plan};
use crate::ui::Ui;

/// Where and how a command runs.
pub struct Context {
    /// The daemon.
    pub client: Client,
    /// The output.
    pub ui: Ui,
}

/// Does what is planned.
pub async fn perform(plan: Plan) -> Result<u8> {
    let context = Context { client: Client::new(&plan.socket), ui: plan.ui };
    match plan.action {
        Action::Doctor => doctor::doctor(&context).await,
        Action::Serve(args) => serve::serve(&plan.socket, &args),
        Action::MakeImage(body) => make::image(&context, &body).await,
        Action::MakeTemplate(template) => make::template(&context, &template).await,
        Action::List(things) => list::list(&context, things).await,
        Action::Show(things, name) => list::show(&context, things, &name).await,
        Action::Remove(things, thing) => remove::thing(&context, things, &thing).await,
        Action::Create(body) => create::create(&context, &body).await,
        Action::Fork(plan) => create::fork(&context, &plan).await,
        Action::Exec(spec) => exec::exec(&context, &spec).await,
        Action::Shell(spec) => shell::shell(&context, spec).await,
        Action::Run(plan) => run::run(&context, &plan).await,
        Action::Tree => tree::tree(&context).await,
        Action::Copy(plan) => copy::copy(&context, &plan).await,
        Action::Logs(plan) => logs::logs(&context, &plan).await,
        Action::End(targets) => remove::sandboxes(&context, targets).await,
        Action::Completions(shell) => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "offshoot", &mut script);
            context.ui.line(String::from_utf8_lossy(&script).trim_end())?;
            Ok(0)
        }
    }
}

/// A program of Offshoot's: beside this one, or on the path.
fn find_program(name: &str) -> Option<std::path::PathBuf> {
    let beside = std::env::current_exe().ok().and_then(|own| own.parent().map(|folder| folder.join(name)));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|folder| folder.join(name)).collect::<Vec<_>>();
    beside.into_iter().chain(on_path).find(|candidate| candidate.is_file())
}

/// Whether a failure only says that no daemon listens.
fn is_unreachable(failure: &Failure) -> bool {
    matches!(failure, Failure::Report(report) if report.code == "daemon_unreachable")
}
