//! One execution: output as it comes, limits, and the end.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use offshoot_protocol::interpreter::Event;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::clock::rfc3339;
use crate::reaper::Exit;

use super::context::Job;
use super::driver::{Driver, Output};
use super::wire::{self, Message, Raised, Value};

/// How long interrupted code may take to yield before it is killed.
const YIELD_LIMIT: Duration = Duration::from_secs(5);
/// How long the last events wait for a client that does not read.
const FAREWELL_LIMIT: Duration = Duration::from_secs(30);

/// What is left after an execution.
pub enum Outcome {
    /// The interpreter, idle.
    Alive,
    /// Nothing; the reason is for the next client.
    Lost(String),
    /// Nothing, as was asked.
    Restarted,
}

/// What [`Running::step`] came to.
enum Step {
    Go,
    Done(Option<Value>, Option<Raised>),
    Lost(&'static str, String),
    Restarted,
}

enum Which {
    Stdout,
    Stderr,
}

/// Why code was interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    TimeLimit,
    ClientLeft,
}

/// When the code must be interrupted, and when it must have yielded.
struct Limits {
    interrupt_at: Option<Instant>,
    interrupted: Option<(Why, Instant)>,
    /// The code can be interrupted.
    started: bool,
    signalled: bool,
    client_left: bool,
}

/// An execution under way.
pub struct Running<'a> {
    /// What to run.
    pub job: &'a Job,
    /// Where.
    pub driver: &'a mut Driver,
    /// Its number.
    pub executions: u64,
    /// Changes when it has to end at once.
    pub restarted: &'a mut watch::Receiver<u64>,
}

impl Running<'_> {
    /// Runs the job to its end.
    pub async fn run(mut self, env: &BTreeMap<String, String>, note: Option<String>) -> Outcome {
        let mut limits = Limits {
            interrupt_at: self.job.time_limit.map(|limit| Instant::now() + limit),
            interrupted: None,
            started: false,
            signalled: false,
            client_left: false,
        };
        self.driver.link.busy.store(true, Ordering::Relaxed);
        let step = self.steps(&mut limits, env, note).await;
        self.driver.link.busy.store(false, Ordering::Relaxed);
        match step {
            Step::Go | Step::Done(None, None) => {
                farewell(&self.job.events, None).await;
                Outcome::Alive
            }
            Step::Done(value, raised) => {
                let event = match (raised, value) {
                    (Some(raised), _) => Some(error_event(self.with_reason(raised, &limits))),
                    (None, value) => value.map(result_event),
                };
                farewell(&self.job.events, event).await;
                Outcome::Alive
            }
            Step::Lost(name, reason) => {
                self.driver.link.kill();
                report(&self.job.events, name, &reason).await;
                Outcome::Lost(reason)
            }
            Step::Restarted => {
                self.driver.link.kill();
                report(&self.job.events, "InterpreterRestarted", "the context was restarted").await;
                Outcome::Restarted
            }
        }
    }

    async fn steps(
        &mut self,
        limits: &mut Limits,
        env: &BTreeMap<String, String>,
        note: Option<String>,
    ) -> Step {
        let count = Event::NumberOfExecutions { execution_count: self.executions };
        let note =
            note.map(|note| stderr_event(format!("{note}; this is a new one, without the old variables\n")));
        for event in [Some(count), note].into_iter().flatten() {
            if let Some(step) = self.put(limits, event).await {
                return step;
            }
        }
        let file = self.job.file.clone().unwrap_or_else(|| format!("<cell {}>", self.executions));
        let request = wire::Run {
            code: &self.job.code,
            file: &file,
            env,
            vars: &self.job.vars,
            freeze: self.job.warm_up,
        };
        if self.driver.control.send(&request).await.is_err() {
            return self.lost().await;
        }
        loop {
            let step = self.step(limits).await;
            match step {
                Step::Go => {}
                Step::Done(value, raised) => {
                    return self.drain(limits).await.unwrap_or(Step::Done(value, raised));
                }
                other => return other,
            }
        }
    }

    async fn step(&mut self, limits: &mut Limits) -> Step {
        let (which, text) = tokio::select! {
            _ = self.restarted.changed() => return Step::Restarted,
            () = limits.wait() => return self.limit_reached(limits),
            () = self.job.events.closed(), if !limits.client_left => {
                limits.leave();
                return self.interrupt_if_due(limits);
            }
            text = self.driver.stdout.read() => (Which::Stdout, text),
            text = self.driver.stderr.read() => (Which::Stderr, text),
            message = self.driver.control.message() => return match message {
                Ok(Message::Started) => {
                    limits.started = true;
                    self.interrupt_if_due(limits)
                }
                Ok(Message::Done { result, error }) => Step::Done(result, error),
                Ok(Message::Ready) => Step::Go,
                Err(garbled) => Step::Lost("InterpreterKilled", garbled.to_string()),
            },
            exit = &mut self.driver.exit => {
                let text = exit_text(exit.ok());
                let lost = Step::Lost("InterpreterExited", format!("the interpreter ended ({text})"));
                return self.drain(limits).await.unwrap_or(lost);
            }
        };
        self.put_text(limits, which, text).await.unwrap_or(Step::Go)
    }

    /// Sends what was written before now.
    async fn drain(&mut self, limits: &mut Limits) -> Option<Step> {
        for which in [Which::Stdout, Which::Stderr] {
            let mut left = self.output(&which).available_bytes();
            while left > 0 {
                let Some(text) = self.output(&which).read_now(&mut left) else {
                    break;
                };
                let step = self.put_text(limits, copy(&which), text).await;
                if step.is_some() {
                    return step;
                }
            }
            let rest = self.output(&which).finish();
            let step = self.put_text(limits, which, rest).await;
            if step.is_some() {
                return step;
            }
        }
        None
    }

    fn output(&mut self, which: &Which) -> &mut Output {
        match which {
            Which::Stdout => &mut self.driver.stdout,
            Which::Stderr => &mut self.driver.stderr,
        }
    }

    async fn put_text(&mut self, limits: &mut Limits, which: Which, text: String) -> Option<Step> {
        if text.is_empty() {
            return None;
        }
        let event = match which {
            Which::Stdout => Event::Stdout { text, timestamp: rfc3339(SystemTime::now()) },
            Which::Stderr => stderr_event(text),
        };
        self.put(limits, event).await
    }

    /// Sends an event, at the client's pace; the limits go on meanwhile. `None`: go on.
    async fn put(&mut self, limits: &mut Limits, event: Event) -> Option<Step> {
        if limits.client_left {
            return None;
        }
        loop {
            let step = tokio::select! {
                permit = self.job.events.reserve() => {
                    match permit {
                        Ok(permit) => {
                            permit.send(event);
                            return None;
                        }
                        Err(_) => {
                            limits.leave();
                            match self.interrupt_if_due(limits) {
                                Step::Go => return None,
                                other => return Some(other),
                            }
                        }
                    }
                }
                _ = self.restarted.changed() => Step::Restarted,
                () = limits.wait() => self.limit_reached(limits),
            };
            if !matches!(step, Step::Go) {
                return Some(step);
            }
        }
    }

    fn limit_reached(&mut self, limits: &mut Limits) -> Step {
        if limits.interrupted.is_some() {
            let reason = format!(
                "the interpreter was killed: the code did not yield within {} s of its interrupt",
                YIELD_LIMIT.as_secs()
            );
            return Step::Lost("InterpreterKilled", reason);
        }
        limits.interrupted = Some((Why::TimeLimit, Instant::now()));
        self.interrupt_if_due(limits)
    }

    fn interrupt_if_due(&mut self, limits: &mut Limits) -> Step {
        if limits.interrupted.is_some() && limits.started && !limits.signalled {
            limits.signalled = true;
            self.driver.link.interrupt();
        }
        Step::Go
    }

    async fn lost(&mut self) -> Step {
        let exit = tokio::time::timeout(YIELD_LIMIT, &mut self.driver.exit).await;
        let text = exit_text(exit.ok().and_then(Result::ok));
        Step::Lost("InterpreterExited", format!("the interpreter ended ({text})"))
    }

    fn with_reason(&self, raised: Raised, limits: &Limits) -> Raised {
        match (limits.interrupted, self.job.time_limit) {
            (Some((Why::TimeLimit, _)), Some(limit)) if raised.name == "KeyboardInterrupt" => Raised {
                value: format!("interrupted: the time limit of {} ms was over", limit.as_millis()),
                ..raised
            },
            _ => raised,
        }
    }
}

impl Limits {
    /// Resolves when [`Running::limit_reached`] is due.
    async fn wait(&self) {
        let at = match self.interrupted {
            Some((_, since)) => Some(since + YIELD_LIMIT),
            None => self.interrupt_at,
        };
        match at {
            Some(at) => tokio::time::sleep_until(at).await,
            None => std::future::pending().await,
        }
    }

    fn leave(&mut self) {
        self.client_left = true;
        if self.interrupted.is_none() {
            self.interrupted = Some((Why::ClientLeft, Instant::now()));
        }
    }
}

fn copy(which: &Which) -> Which {
    match which {
        Which::Stdout => Which::Stdout,
        Which::Stderr => Which::Stderr,
    }
}

fn stderr_event(text: String) -> Event {
    Event::Stderr { text, timestamp: rfc3339(SystemTime::now()) }
}

fn result_event(value: Value) -> Event {
    Event::Result { is_main_result: true, text: value.text, json: value.json }
}

fn error_event(raised: Raised) -> Event {
    Event::Error { name: raised.name, value: raised.value, traceback: raised.traceback }
}

/// Tells a client of an error that is not the code's, and that this was all.
pub async fn report(events: &mpsc::Sender<Event>, name: &str, reason: &str) {
    let raised =
        Raised { name: name.to_owned(), value: reason.to_owned(), traceback: format!("{name}: {reason}\n") };
    farewell(events, Some(error_event(raised))).await;
}

async fn farewell(events: &mpsc::Sender<Event>, event: Option<Event>) {
    for event in event.into_iter().chain([Event::EndOfExecution]) {
        // A client that left, or does not read for so long, misses the end.
        let _ = events.send_timeout(event, FAREWELL_LIMIT).await;
    }
}

/// An exit in words.
pub fn exit_text(exit: Option<Exit>) -> String {
    match exit {
        Some(Exit::Code(code)) => format!("exit status {code}"),
        Some(Exit::Signal { number: libc::SIGKILL, .. }) => "killed by signal 9; out of memory?".to_owned(),
        Some(Exit::Signal { number, .. }) => format!("killed by signal {number}"),
        None => "its status is not known".to_owned(),
    }
}
