//! The service `process.Process`.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, Stream};
use http::HeaderMap;
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::agent::{Agent, lock};
use crate::http::Answer;
use crate::process::hub::Output;
use crate::process::{Description, InputError, Process};
use crate::spawn::{DEFAULT_PATH, Launch, Streams, is_directory};
use crate::users::{User, UserError};

use super::connect::{self, Code, ConnectError, Messages};
use super::messages::{
    Input, ProcessConfig, ProcessInput, ProcessSelector, SelectRequest, SendInputRequest, SendSignalRequest,
    StartRequest, StreamInputRequest, UpdateRequest, data_event, end_event, keepalive_event, start_event,
};
use super::paths;

/// Longest a unary call may take where the client sets no limit.
const UNARY_LIMIT: Duration = Duration::from_secs(60);

/// Answers a call of the service; `None` for methods it does not have.
pub async fn call(agent: Arc<Agent>, method: &str, headers: HeaderMap, body: Incoming) -> Option<Answer> {
    let answer = match method {
        "Start" => start(&agent, &headers, body).await.unwrap_or_else(|error| connect::stream_error(&error)),
        "Connect" => {
            attach(&agent, &headers, body).await.unwrap_or_else(|error| connect::stream_error(&error))
        }
        "StreamInput" => {
            let result = stream_input(&agent, &headers, body).await;
            let envelopes = match &result {
                Ok(()) => vec![connect::envelope(&json!({})), connect::end(None)],
                Err(error) => vec![connect::end(Some(error))],
            };
            connect::stream(stream::iter(envelopes))
        }
        "List" | "SendInput" | "SendSignal" | "CloseStdin" | "Update" => {
            connect::unary(unary_in_time(&agent, method, &headers, body).await)
        }
        _ => return None,
    };
    Some(answer)
}

async fn unary_in_time(
    agent: &Agent,
    method: &str,
    headers: &HeaderMap,
    body: Incoming,
) -> Result<Value, ConnectError> {
    let limit = connect::timeout(headers)?.unwrap_or(UNARY_LIMIT);
    tokio::time::timeout(limit, unary(agent, method, headers, body)).await.unwrap_or_else(|_| {
        let message =
            format!("{method} was not done after {} ms: is the process reading?", limit.as_millis());
        Err(ConnectError::new(Code::DeadlineExceeded, message))
    })
}

async fn unary(
    agent: &Agent,
    method: &str,
    headers: &HeaderMap,
    body: Incoming,
) -> Result<Value, ConnectError> {
    match method {
        "SendInput" => {
            let request: SendInputRequest = connect::read_unary(headers, body).await?;
            write(&*find(agent, &request.process)?, &request.input).await?;
        }
        "SendSignal" => {
            let request: SendSignalRequest = connect::read_unary(headers, body).await?;
            send_signal(agent, &request)?;
        }
        "CloseStdin" => {
            let request: SelectRequest = connect::read_unary(headers, body).await?;
            find(agent, &request.process)?.close_stdin().await.map_err(refused)?;
        }
        "Update" => {
            let request: UpdateRequest = connect::read_unary(headers, body).await?;
            let process = find(agent, &request.process)?;
            if let Some(pty) = &request.pty {
                process.resize(pty.size()).map_err(refused)?;
            }
        }
        _ => {
            let _: Value = connect::read_unary(headers, body).await?;
            return Ok(list(agent));
        }
    }
    Ok(json!({}))
}

fn list(agent: &Agent) -> Value {
    let processes: Vec<Value> = agent.processes.living().iter().map(|process| describe(process)).collect();
    if processes.is_empty() { json!({}) } else { json!({ "processes": processes }) }
}

fn describe(process: &Process) -> Value {
    let Description { cmd, args, envs, cwd, tag } = process.description.clone();
    let mut value = json!({ "config": ProcessConfig { cmd, args, envs, cwd }, "pid": process.pid() });
    if let Some(tag) = tag {
        value["tag"] = tag.into();
    }
    value
}

fn find(agent: &Agent, selector: &ProcessSelector) -> Result<Arc<Process>, ConnectError> {
    let selector = selector.selector()?;
    agent
        .processes
        .find(&selector)
        .ok_or_else(|| ConnectError::new(Code::NotFound, format!("{selector} not found")))
}

fn send_signal(agent: &Agent, request: &SendSignalRequest) -> Result<(), ConnectError> {
    let process = find(agent, &request.process)?;
    match process.signal(request.signal()?) {
        Ok(true) => Ok(()),
        Ok(false) => Err(ConnectError::new(Code::NotFound, format!("process {} has ended", process.pid()))),
        Err(error) => {
            let message = format!("could not signal process {}: {error}", process.pid());
            Err(ConnectError::new(Code::Internal, message))
        }
    }
}

async fn write(process: &Process, input: &ProcessInput) -> Result<(), ConnectError> {
    match input.decode()? {
        Input::Stdin(data) => process.write_stdin(&data).await,
        Input::Pty(data) => process.write_pty(&data).await,
    }
    .map_err(refused)
}

fn refused(error: InputError) -> ConnectError {
    let code = match &error {
        InputError::Kind { .. } => Code::InvalidArgument,
        InputError::Closed { .. } => Code::FailedPrecondition,
        InputError::Write { source, .. } if source.kind() == io::ErrorKind::BrokenPipe => {
            Code::FailedPrecondition
        }
        InputError::Write { .. } => Code::Internal,
    };
    ConnectError::new(code, error.to_string())
}

async fn stream_input(agent: &Agent, headers: &HeaderMap, body: Incoming) -> Result<(), ConnectError> {
    let mut messages = Messages::new(headers, body)?;
    let mut process = None;
    while let Some(message) = messages.next::<StreamInputRequest>().await? {
        if let Some(start) = message.start {
            process = Some(find(agent, &start.process)?);
        }
        let Some(data) = message.data else { continue };
        let process = process.as_deref().ok_or_else(|| {
            ConnectError::new(Code::InvalidArgument, "the first message of an input stream must be \"start\"")
        })?;
        write(process, &data.input).await?;
    }
    Ok(())
}

async fn start(agent: &Agent, headers: &HeaderMap, body: Incoming) -> Result<Answer, ConnectError> {
    let time_limit = connect::timeout(headers)?;
    let user = agent.accounts.find(connect::basic_user(headers)?.as_deref()).map_err(user_refused)?;
    let request: StartRequest = Messages::new(headers, body)?.only().await?;
    let launch = plan(agent, &request, user)?;
    let config = request.process;
    let description = Description {
        cmd: config.cmd,
        args: config.args,
        envs: config.envs,
        cwd: config.cwd,
        tag: request.tag,
    };
    let name = description.cmd.clone();
    let (process, listener) =
        Process::start(&agent.spawner, launch, description, time_limit).map_err(|error| {
            ConnectError::new(Code::InvalidArgument, format!("error starting process '{name}': {error}"))
        })?;
    agent.processes.insert(process.clone());
    Ok(connect::stream(events(&process, listener, connect::keepalive(headers), time_limit)))
}

/// How a wrong user is told.
pub fn user_refused(error: UserError) -> ConnectError {
    let code = match error {
        UserError::Unknown { .. } => Code::Unauthenticated,
        UserError::NotPermitted { .. } => Code::PermissionDenied,
    };
    ConnectError::new(code, error.to_string())
}

fn plan(agent: &Agent, request: &StartRequest, user: User) -> Result<Launch, ConnectError> {
    let config = &request.process;
    if config.cmd.is_empty() {
        return Err(ConnectError::new(
            Code::InvalidArgument,
            "the request names no command (\"process\".\"cmd\")",
        ));
    }
    let cwd = match config.cwd.as_deref().filter(|cwd| !cwd.is_empty()) {
        None => user.usable_home().to_owned(),
        Some(cwd) => {
            let resolved = paths::resolve(cwd, &user)
                .map_err(|error| ConnectError::new(Code::InvalidArgument, error.to_string()))?;
            if !is_directory(&resolved) {
                return Err(ConnectError::new(Code::InvalidArgument, format!("cwd '{cwd}' does not exist")));
            }
            resolved
        }
    };
    let streams = match (&request.pty, request.stdin) {
        (Some(pty), _) => Streams::Pty(pty.size()),
        (None, Some(false)) => Streams::Output,
        (None, _) => Streams::InputOutput,
    };
    let mut env = base_environment(agent, &user);
    env.extend(config.envs.clone());
    Ok(Launch {
        program: config.cmd.clone().into(),
        args: config.args.iter().map(Into::into).collect(),
        env: env.into_iter().collect(),
        cwd,
        user,
        streams,
        extra_fds: Vec::new(),
    })
}

/// What every command of `user` has in its environment before the request's own variables.
pub fn base_environment(agent: &Agent, user: &User) -> std::collections::BTreeMap<String, String> {
    let mut env = std::collections::BTreeMap::from([
        ("PATH".to_owned(), DEFAULT_PATH.to_owned()),
        ("HOME".to_owned(), user.home.to_string_lossy().into_owned()),
        ("USER".to_owned(), user.name.clone()),
        ("LOGNAME".to_owned(), user.name.clone()),
    ]);
    env.extend(lock(&agent.globals).environment());
    env
}

async fn attach(agent: &Agent, headers: &HeaderMap, body: Incoming) -> Result<Answer, ConnectError> {
    let request: SelectRequest = Messages::new(headers, body)?.only().await?;
    let process = find(agent, &request.process)?;
    let listener = process.listen();
    Ok(connect::stream(events(&process, listener, connect::keepalive(headers), None)))
}

enum Step {
    Start,
    Running,
    Closing,
    Done,
}

/// The envelopes of one listener. `time_limit` is given to the caller that set it: it is told of the limit by an
/// error, as its own deadline would.
fn events(
    process: &Process,
    listener: mpsc::Receiver<Output>,
    keepalive: Duration,
    time_limit: Option<Duration>,
) -> impl Stream<Item = Bytes> + Send + use<> {
    let pid = process.pid();
    stream::unfold((Step::Start, listener), move |(step, mut listener)| async move {
        match step {
            Step::Start => Some((connect::envelope(&start_event(pid)), (Step::Running, listener))),
            Step::Running => {
                let (envelope, next) = match tokio::time::timeout(keepalive, listener.recv()).await {
                    Err(_idle) => (connect::envelope(&keepalive_event()), Step::Running),
                    Ok(Some(Output::Data(stream, chunk))) => {
                        (connect::envelope(&data_event(stream, &chunk)), Step::Running)
                    }
                    Ok(Some(Output::End(end))) => match time_limit.filter(|_| end.timed_out) {
                        Some(limit) => (connect::end(Some(&out_of_time(pid, limit))), Step::Done),
                        None => (connect::envelope(&end_event(end)), Step::Closing),
                    },
                    Ok(None) => (connect::end(Some(&cut_off(pid))), Step::Done),
                };
                Some((envelope, (next, listener)))
            }
            Step::Closing => Some((connect::end(None), (Step::Done, listener))),
            Step::Done => None,
        }
    })
}

fn out_of_time(pid: i32, limit: Duration) -> ConnectError {
    let message = format!("process {pid} was killed: its time limit of {} ms was over", limit.as_millis());
    ConnectError::new(Code::DeadlineExceeded, message)
}

fn cut_off(pid: i32) -> ConnectError {
    let message =
        format!("the output of process {pid} was read too slowly while others waited; connect again");
    ConnectError::new(Code::ResourceExhausted, message)
}
