//! Warm interpreters on vsock port 49999: E2B's code interpreter protocol over Python processes of our own.
//!
//! A client that disconnects interrupts its code, as E2B has it. In a fork's child every connection is gone, so code
//! that was running in the parent's interpreter is interrupted there; work that must go on in both belongs into a
//! process or a thread.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use offshoot_protocol::interpreter::Event;
use tokio::sync::mpsc;

use crate::agent::Globals;
use crate::spawn::Spawner;
use crate::users::Accounts;

pub mod context;
pub mod driver;
pub mod http;
pub mod run;
pub mod wire;

use context::{Context, Job, Surroundings};

/// Id of the context that warm-ups run in, and code without a context.
pub const DEFAULT_CONTEXT: &str = "default";
/// Contexts at the same time.
const MAX_CONTEXTS: usize = 64;
/// Events in flight to one client.
const EVENT_QUEUE: usize = 8;
/// Most bytes of each stream that a warm-up's answer keeps.
const WARM_OUTPUT_BYTES: usize = 64 * 1024;
/// Lines of a failed warm-up's traceback that its error tells.
const WARM_TRACEBACK_LINES: usize = 12;

/// Why an interpreter cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum InterpreterError {
    /// The image has none.
    #[error("there is no python3 in this image: add the package python3, or use the process service")]
    NoPython,
    /// Unknown id.
    #[error("Context {id} not found")]
    UnknownContext {
        /// The id.
        id: String,
    },
    /// Too many.
    #[error("there are {MAX_CONTEXTS} contexts already: delete one")]
    TooManyContexts,
    /// A queue is full.
    #[error("too many executions wait for context {id}")]
    Busy {
        /// The id.
        id: String,
    },
    /// The warm-up raised, or its interpreter was lost.
    #[error("the warm-up failed: {name}: {value}\n{traceback}")]
    WarmUp {
        /// Exception.
        name: String,
        /// Its text.
        value: String,
        /// Last lines of the traceback.
        traceback: String,
    },
    /// An interpreter did not take its seed.
    #[error("context {id}: {source}")]
    Reseed {
        /// The id.
        id: String,
        /// Why.
        source: driver::ReseedError,
    },
}

/// What a warm-up wrote, each stream bounded.
#[derive(Debug, Default)]
pub struct WarmOutput {
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// All contexts.
pub struct Interpreter {
    spawner: Arc<Spawner>,
    accounts: Accounts,
    globals: Arc<Mutex<Globals>>,
    directory: PathBuf,
    contexts: Mutex<BTreeMap<String, Arc<Context>>>,
}

impl Interpreter {
    /// No context yet; the driver's source is in `directory`.
    pub fn new(
        spawner: Arc<Spawner>,
        accounts: Accounts,
        globals: Arc<Mutex<Globals>>,
        directory: PathBuf,
    ) -> Self {
        Self { spawner, accounts, globals, directory, contexts: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Context>>> {
        self.contexts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All contexts, by id.
    pub fn contexts(&self) -> Vec<Arc<Context>> {
        self.lock().values().cloned().collect()
    }

    /// Makes a context.
    ///
    /// # Errors
    /// Without Python, or where there are too many.
    pub fn create(&self, id: String, cwd: Option<PathBuf>) -> Result<Arc<Context>, InterpreterError> {
        let python = driver::find_python().ok_or(InterpreterError::NoPython)?;
        let mut contexts = self.lock();
        if contexts.len() >= MAX_CONTEXTS {
            return Err(InterpreterError::TooManyContexts);
        }
        let surroundings = Surroundings {
            spawner: self.spawner.clone(),
            accounts: self.accounts.clone(),
            globals: self.globals.clone(),
            directory: self.directory.clone(),
            python,
        };
        let context = Context::new(id.clone(), cwd, Arc::new(surroundings));
        contexts.insert(id, context.clone());
        Ok(context)
    }

    /// The context `id`, or the default one, which is made where it is missing.
    ///
    /// # Errors
    /// Unknown ids; without Python.
    pub fn context(&self, id: Option<&str>) -> Result<Arc<Context>, InterpreterError> {
        let id = id.unwrap_or(DEFAULT_CONTEXT);
        let known = self.lock().get(id).cloned();
        match known {
            Some(context) => Ok(context),
            None if id == DEFAULT_CONTEXT => self.create(id.to_owned(), None),
            None => Err(InterpreterError::UnknownContext { id: id.to_owned() }),
        }
    }

    /// Ends a context and what runs in it.
    ///
    /// # Errors
    /// Unknown ids.
    pub fn delete(&self, id: &str) -> Result<(), InterpreterError> {
        match self.lock().remove(id) {
            Some(_) => Ok(()),
            None => Err(InterpreterError::UnknownContext { id: id.to_owned() }),
        }
    }

    /// Starts code in a context; its events come in order, at the reader's pace.
    ///
    /// # Errors
    /// Where too much waits already.
    pub fn execute(
        &self,
        context: &Context,
        code: String,
        vars: BTreeMap<String, String>,
        time_limit: Option<Duration>,
    ) -> Result<mpsc::Receiver<Event>, InterpreterError> {
        let (events, receiver) = mpsc::channel(EVENT_QUEUE);
        let job = Job { code, file: None, vars, time_limit, warm_up: false, events };
        if context.submit(job) {
            Ok(receiver)
        } else {
            Err(InterpreterError::Busy { id: context.id.clone() })
        }
    }

    /// Runs a warm-up in a new default interpreter.
    ///
    /// # Errors
    /// Where it raises, takes too long, or its interpreter is lost.
    pub async fn warm(
        &self,
        code: String,
        file: String,
        limit: Duration,
    ) -> Result<WarmOutput, InterpreterError> {
        let context = self.context(None)?;
        context.restart();
        let (events, mut receiver) = mpsc::channel(EVENT_QUEUE);
        let vars = BTreeMap::new();
        let job = Job { code, file: Some(file), vars, time_limit: Some(limit), warm_up: true, events };
        if !context.submit(job) {
            return Err(InterpreterError::Busy { id: context.id.clone() });
        }
        let mut output = WarmOutput::default();
        let mut failure = None;
        while let Some(event) = receiver.recv().await {
            match event {
                Event::Stdout { text, .. } => append_bounded(&mut output.stdout, &text),
                Event::Stderr { text, .. } => append_bounded(&mut output.stderr, &text),
                Event::Error { name, value, traceback } => {
                    let traceback = last_lines(&traceback, WARM_TRACEBACK_LINES);
                    failure = Some(InterpreterError::WarmUp { name, value, traceback });
                }
                _ => {}
            }
        }
        failure.map_or(Ok(output), Err)
    }

    /// Gives every interpreter `seed`, each with its own ending.
    ///
    /// # Errors
    /// Where an idle interpreter does not take it.
    pub async fn reseed(&self, seed: &[u8]) -> Result<(), InterpreterError> {
        for (number, context) in (0_u32..).zip(self.contexts()) {
            let seed = [seed, &number.to_be_bytes()].concat();
            let reseeded = context.reseed(&seed).await;
            reseeded.map_err(|source| InterpreterError::Reseed { id: context.id.clone(), source })?;
        }
        Ok(())
    }
}

fn append_bounded(kept: &mut String, text: &str) {
    let room = WARM_OUTPUT_BYTES.saturating_sub(kept.len());
    kept.push_str(&text[..char_boundary(text, room)]);
}

/// The last end of a character of `text` at or before `bytes`.
fn char_boundary(text: &str, bytes: usize) -> usize {
    (0..=bytes.min(text.len())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0)
}

fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_output_is_bounded_at_a_character() {
        let mut kept = "x".repeat(WARM_OUTPUT_BYTES - 1);
        append_bounded(&mut kept, "ü");
        assert_eq!(kept.len(), WARM_OUTPUT_BYTES - 1);
        append_bounded(&mut kept, "abc");
        assert_eq!(kept.len(), WARM_OUTPUT_BYTES);
    }

    #[test]
    fn the_last_lines_are_kept() {
        assert_eq!(last_lines("a\nb\nc\n", 2), "b\nc");
        assert_eq!(last_lines("", 2), "");
    }
}
