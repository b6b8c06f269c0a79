//! HTTP of the interpreter service.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use offshoot_protocol::interpreter::{Event, Execute};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json as json_value};
use tokio::sync::mpsc;

use crate::agent::Agent;
use crate::http::{Answer, collect, error, full, json, status, streamed};

use super::context::Context;
use super::{DEFAULT_CONTEXT, InterpreterError};

const MAX_REQUEST_BYTES: usize = 16 * 1024 * 1024;
const KEEPALIVE: Duration = Duration::from_secs(5);

/// Body of `POST /contexts`.
#[derive(Debug, Default, Deserialize)]
struct CreateContext {
    #[serde(default)]
    language: Option<String>,
    #[serde(default)]
    cwd: Option<PathBuf>,
}

/// Answers a request.
pub async fn handle(agent: Arc<Agent>, request: Request<Incoming>) -> Answer {
    let (parts, body) = request.into_parts();
    let path: Vec<&str> = parts.uri.path().trim_matches('/').split('/').collect();
    let result = match (&parts.method, path.as_slice()) {
        (&Method::GET, ["health"]) => Ok(json(StatusCode::OK, &"OK")),
        (&Method::POST, ["execute"]) => execute(&agent, body).await,
        (&Method::GET, ["contexts"]) => Ok(list(&agent)),
        (&Method::POST, ["contexts"]) => create(&agent, body).await,
        (&Method::POST, ["contexts", id, "restart"]) => restart(&agent, id),
        (&Method::DELETE, ["contexts", id]) => {
            agent.interpreter.delete(id).map(|()| status(StatusCode::NO_CONTENT)).map_err(refused)
        }
        (method, _) => {
            let message = format!("{method} {} is not served here", parts.uri.path());
            Err(Box::new(error(StatusCode::NOT_FOUND, message)))
        }
    };
    result.unwrap_or_else(|refusal| *refusal)
}

type Refusal = Box<Answer>;

fn refused(cause: InterpreterError) -> Refusal {
    let message = cause.to_string();
    Box::new(match cause {
        // E2B's clients expect this one as text.
        InterpreterError::UnknownContext { .. } => {
            let mut answer = Response::new(full(message));
            *answer.status_mut() = StatusCode::NOT_FOUND;
            answer
        }
        InterpreterError::NoPython => error(StatusCode::SERVICE_UNAVAILABLE, message),
        InterpreterError::TooManyContexts | InterpreterError::Busy { .. } => {
            error(StatusCode::TOO_MANY_REQUESTS, message)
        }
        InterpreterError::WarmUp { .. } | InterpreterError::Reseed { .. } => {
            error(StatusCode::INTERNAL_SERVER_ERROR, message)
        }
    })
}

fn bad(message: impl Into<String>) -> Refusal {
    Box::new(error(StatusCode::BAD_REQUEST, message))
}

async fn read<Message: DeserializeOwned>(body: Incoming) -> Result<Message, Refusal> {
    let bytes = collect(body, MAX_REQUEST_BYTES).await.map_err(|error| bad(error.to_string()))?;
    let bytes: &[u8] = if bytes.is_empty() { b"{}" } else { &bytes };
    serde_json::from_slice(bytes).map_err(|error| bad(format!("the request is not understood: {error}")))
}

fn check_language(language: Option<&str>) -> Result<(), Refusal> {
    match language.map(str::to_ascii_lowercase).as_deref() {
        None | Some("" | "python" | "python3") => Ok(()),
        Some(other) => Err(bad(format!("language '{other}' is not served: only 'python' is"))),
    }
}

async fn execute(agent: &Agent, body: Incoming) -> Result<Answer, Refusal> {
    let request: Execute = read(body).await?;
    if request.context_id.is_some() && request.language.is_some() {
        return Err(bad("give either context_id or language, not both"));
    }
    check_language(request.language.as_deref())?;
    let interpreter = &agent.interpreter;
    let context = interpreter.context(request.context_id.as_deref()).map_err(refused)?;
    let limit = request.timeout_ms.map(Duration::from_millis);
    let events = interpreter
        .execute(&context, request.code, request.env_vars.unwrap_or_default(), limit)
        .map_err(refused)?;
    Ok(Response::new(streamed(lines(events))))
}

/// One line for each event, and a keepalive where nothing else is said.
fn lines(events: mpsc::Receiver<Event>) -> impl futures_util::Stream<Item = io::Result<Bytes>> + Send {
    stream::unfold(events, |mut events| async move {
        let event = match tokio::time::timeout(KEEPALIVE, events.recv()).await {
            Ok(event) => event?,
            Err(_idle) => Event::Keepalive,
        };
        let mut line = serde_json::to_vec(&event).expect("events have string keys and finite numbers");
        line.push(b'\n');
        Some((Ok(line.into()), events))
    })
}

fn describe(context: &Context) -> Value {
    json_value!({ "id": context.id, "language": "python", "cwd": context.cwd })
}

fn list(agent: &Agent) -> Answer {
    let contexts: Vec<Value> = agent.interpreter.contexts().iter().map(|context| describe(context)).collect();
    json(StatusCode::OK, &contexts)
}

async fn create(agent: &Agent, body: Incoming) -> Result<Answer, Refusal> {
    let request: CreateContext = read(body).await?;
    check_language(request.language.as_deref())?;
    if let Some(cwd) = &request.cwd
        && !crate::spawn::is_directory(cwd)
    {
        return Err(bad(format!("cwd '{}' does not exist", cwd.display())));
    }
    let context = agent.interpreter.create(random_id(), request.cwd).map_err(refused)?;
    Ok(json(StatusCode::OK, &describe(&context)))
}

fn random_id() -> String {
    let mut bytes = [0; 16];
    // 16 bytes come whole once the pool is seeded, which it is before the agent serves.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn restart(agent: &Agent, id: &str) -> Result<Answer, Refusal> {
    let id = Some(id).filter(|id| *id != DEFAULT_CONTEXT);
    agent.interpreter.context(id).map_err(refused)?.restart();
    Ok(status(StatusCode::NO_CONTENT))
}
