//! One context: a task that owns an interpreter and runs one piece of code after the other in it.
//!
//! ```text
//! none --code comes--> starting --ready--> idle <--done-- running
//!   ^                     |                  |               |
//!   `------- exit, kill, restart, failed start --------------'
//! ```

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use offshoot_protocol::interpreter::Event;
use tokio::sync::{mpsc, watch};

use crate::agent::{Globals, lock};
use crate::spawn::{DEFAULT_PATH, Spawner, is_directory};
use crate::users::Accounts;

use super::driver::{Driver, Link, ReseedError, Settings};
use super::run::{Outcome, Running};
use super::wire::Message;

/// Executions that may wait for their turn.
const QUEUE: usize = 32;
/// How long Python may take to start.
const START_LIMIT: Duration = Duration::from_secs(60);

/// How much of what Python says when it cannot start is told, bytes.
const START_ERROR_BYTES: usize = 4096;

/// Code to run.
pub struct Job {
    /// Source text.
    pub code: String,
    /// File name for tracebacks; absent: the number of the execution.
    pub file: Option<String>,
    /// Variables for this run.
    pub vars: BTreeMap<String, String>,
    /// Interrupt the code after this time.
    pub time_limit: Option<Duration>,
    /// Begin with a new interpreter, and make what the code leaves exempt from garbage collection.
    pub warm_up: bool,
    /// Where its events go; dropped by a client that left.
    pub events: mpsc::Sender<Event>,
}

/// What every context needs.
pub struct Surroundings {
    /// Starts Python.
    pub spawner: Arc<Spawner>,
    /// Whom it runs as.
    pub accounts: Accounts,
    /// Environment.
    pub globals: Arc<Mutex<Globals>>,
    /// Directory with the driver's source.
    pub directory: PathBuf,
    /// Python.
    pub python: PathBuf,
}

/// A handle to a context; its task and interpreter end when it is dropped.
pub struct Context {
    /// Its id.
    pub id: String,
    /// Working directory given by the client.
    pub cwd: Option<PathBuf>,
    jobs: mpsc::Sender<Job>,
    restarts: watch::Sender<u64>,
    shared: Arc<Shared>,
}

/// What the task shows to others.
#[derive(Default)]
struct Shared {
    link: Mutex<Option<Arc<Link>>>,
    /// Counts seeds given: an interpreter that was starting meanwhile is given another.
    seeds: AtomicU64,
}

impl Context {
    /// A context without interpreter; its first job starts one.
    pub fn new(id: String, cwd: Option<PathBuf>, surroundings: Arc<Surroundings>) -> Arc<Self> {
        let (jobs, queue) = mpsc::channel(QUEUE);
        let (restarts, restarted) = watch::channel(0);
        let shared = Arc::new(Shared::default());
        let task = Task {
            surroundings,
            cwd: cwd.clone(),
            restarted,
            shared: shared.clone(),
            driver: None,
            note: None,
            executions: 0,
        };
        tokio::spawn(task.run(queue));
        Arc::new(Self { id, cwd, jobs, restarts, shared })
    }

    /// Queues a job; false if too many wait already.
    pub fn submit(&self, job: Job) -> bool {
        self.jobs.try_send(job).is_ok()
    }

    /// Ends what runs and the interpreter; the next job starts a new one.
    pub fn restart(&self) {
        self.restarts.send_modify(|count| *count += 1);
    }

    /// See [`Link::reseed`].
    ///
    /// # Errors
    /// As there.
    pub async fn reseed(&self, seed: &[u8]) -> Result<(), ReseedError> {
        self.shared.seeds.fetch_add(1, Ordering::Relaxed);
        let link = self.shared.link.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match link {
            Some(link) => link.reseed(seed).await,
            None => Ok(()),
        }
    }
}

struct Task {
    surroundings: Arc<Surroundings>,
    cwd: Option<PathBuf>,
    restarted: watch::Receiver<u64>,
    shared: Arc<Shared>,
    driver: Option<Driver>,
    /// Why the interpreter before was lost, for the next client.
    note: Option<String>,
    executions: u64,
}

impl Task {
    async fn run(mut self, mut queue: mpsc::Receiver<Job>) {
        loop {
            let job = tokio::select! {
                job = queue.recv() => job,
                changed = self.restarted.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.forget(None);
                    continue;
                }
                lost = idle(&mut self.driver) => {
                    self.forget(Some(lost));
                    continue;
                }
            };
            let Some(job) = job else { return };
            if self.restarted.has_changed().unwrap_or(false) || job.warm_up {
                self.restarted.mark_unchanged();
                self.forget(None);
            }
            // A client that left while it waited wants nothing.
            if !job.events.is_closed() {
                self.execute(job).await;
            }
        }
    }

    fn forget(&mut self, note: Option<String>) {
        self.shared.link.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.driver = None;
        self.note = note;
    }

    async fn execute(&mut self, job: Job) {
        // A warm-up is none, and begins anew: the first code of a clone is its first.
        self.executions = if job.warm_up { 0 } else { self.executions + 1 };
        if self.driver.is_none()
            && let Err(reason) = self.start().await
        {
            self.forget(None);
            super::run::report(&job.events, "InterpreterStartError", &reason).await;
            return;
        }
        let driver = self.driver.as_mut().expect("the interpreter was just started");
        let note = self.note.take();
        let env = lock(&self.surroundings.globals).environment();
        let running =
            Running { job: &job, driver, executions: self.executions, restarted: &mut self.restarted };
        match running.run(&env, note).await {
            Outcome::Alive => {}
            Outcome::Lost(reason) => self.forget(Some(reason)),
            Outcome::Restarted => self.forget(None),
        }
    }

    async fn start(&mut self) -> Result<(), String> {
        let seeds = self.shared.seeds.load(Ordering::Relaxed);
        let settings = self.settings()?;
        let mut driver = Driver::start(&self.surroundings.spawner, settings)
            .map_err(|error| format!("could not start {}: {error}", self.surroundings.python.display()))?;
        let mut said = String::new();
        let ready = async {
            loop {
                tokio::select! {
                    message = driver.control.message() => return match message {
                        Ok(Message::Ready) => Ok(()),
                        _ => Err("Python answered with something else than our driver would".to_owned()),
                    },
                    text = driver.stderr.read() => said.push_str(&text),
                    exit = &mut driver.exit => return Err(format!("Python ended at its start ({})", super::run::exit_text(exit.ok()))),
                }
                said.truncate(super::char_boundary(&said, START_ERROR_BYTES));
            }
        };
        let result = tokio::time::timeout(START_LIMIT, ready).await;
        result
            .unwrap_or_else(|_| Err(format!("Python was not ready after {} s", START_LIMIT.as_secs())))
            .map_err(
                |reason| {
                    if said.is_empty() { reason } else { format!("{reason}: {}", said.trim_end()) }
                },
            )?;
        if self.shared.seeds.load(Ordering::Relaxed) != seeds {
            self.seed_again(&driver).await?;
        }
        *self.shared.link.lock().unwrap_or_else(PoisonError::into_inner) = Some(driver.link.clone());
        self.driver = Some(driver);
        Ok(())
    }

    async fn seed_again(&self, driver: &Driver) -> Result<(), String> {
        let mut seed = [0; 32];
        rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| error.to_string())?;
        driver.link.reseed(&seed).await.map_err(|error| error.to_string())
    }

    fn settings(&self) -> Result<Settings, String> {
        let surroundings = &self.surroundings;
        let user = surroundings.accounts.find(None).map_err(|error| error.to_string())?;
        let cwd = match &self.cwd {
            None => user.usable_home().to_owned(),
            Some(cwd) if is_directory(cwd) => cwd.clone(),
            Some(cwd) => return Err(format!("the context's cwd '{}' does not exist", cwd.display())),
        };
        let mut env = BTreeMap::from([
            ("PATH".to_owned(), std::env::var("PATH").unwrap_or_else(|_| DEFAULT_PATH.to_owned())),
            ("HOME".to_owned(), user.home.to_string_lossy().into_owned()),
            ("USER".to_owned(), user.name.clone()),
            ("LOGNAME".to_owned(), user.name.clone()),
        ]);
        env.extend(lock(&surroundings.globals).environment());
        Ok(Settings {
            python: surroundings.python.clone(),
            directory: surroundings.directory.clone(),
            cwd,
            env: env.into_iter().collect(),
            user,
        })
    }
}

/// Drops the output of an interpreter that runs nothing; resolves with the reason when it is gone.
async fn idle(driver: &mut Option<Driver>) -> String {
    let Some(driver) = driver else {
        return std::future::pending().await;
    };
    // Its exit is a field of its own, so that both can be awaited.
    let exit = tokio::select! {
        exit = async { (&mut driver.exit).await } => exit,
        () = super::driver::discard(&mut driver.stdout, &mut driver.stderr) => unreachable!("output is discarded for ever"),
    };
    format!("the interpreter ended while idle ({})", super::run::exit_text(exit.ok()))
}
