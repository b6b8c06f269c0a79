//! The host's ends of the lab's virtio-serial ports.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use xtask::lab_protocol::{CONTROL_PORT, FromLab, STDERR_PORT, STDIN_PORT, STDOUT_PORT};

/// Bytes copied at a time.
const CHUNK_BYTES: usize = 32 * 1024;

/// A port that QEMU has not connected to yet.
#[derive(Debug)]
struct Waiting {
    name: &'static str,
    listener: UnixListener,
}

/// All ports before QEMU runs.
#[derive(Debug)]
pub struct Listeners {
    waiting: Vec<Waiting>,
}

/// Where the socket of port `name` is.
pub fn socket(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.sock"))
}

impl Listeners {
    /// Listens on a socket in `dir` for each port of `names`.
    pub fn bind(dir: &Path, names: &[&'static str]) -> Result<Self> {
        let bind = |name: &&'static str| {
            let path = socket(dir, name);
            let listener = UnixListener::bind(&path)
                .with_context(|| format!("could not listen on {}", path.display()))?;
            listener.set_nonblocking(true)?;
            Ok(Waiting { name, listener })
        };
        Ok(Self { waiting: names.iter().map(bind).collect::<Result<_>>()? })
    }

    /// Takes QEMU's connections; `alive` fails when there will be none.
    pub fn accept(self, deadline: Instant, mut alive: impl FnMut() -> Result<()>) -> Result<Link> {
        let mut link = Link::new();
        for Waiting { name, listener } in self.waiting {
            let stream = loop {
                match listener.accept() {
                    Ok((stream, _)) => break stream,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error).with_context(|| format!("could not accept port {name}")),
                }
                alive()?;
                if Instant::now() >= deadline {
                    bail!("QEMU did not connect port {name}");
                }
                std::thread::sleep(Duration::from_millis(5));
            };
            stream.set_nonblocking(false)?;
            link.attach(name, stream)?;
        }
        Ok(link)
    }
}

/// The connected ports, each served by a thread of its own.
#[derive(Debug)]
pub struct Link {
    /// What the lab tells.
    pub messages: Receiver<FromLab>,
    sender: Sender<FromLab>,
    control: Option<UnixStream>,
    stdout: Arc<AtomicU64>,
    stderr: Arc<AtomicU64>,
}

impl Link {
    fn new() -> Self {
        let (sender, messages) = channel();
        Self { messages, sender, control: None, stdout: Arc::default(), stderr: Arc::default() }
    }

    fn attach(&mut self, name: &str, stream: UnixStream) -> Result<()> {
        match name {
            CONTROL_PORT => {
                let (sender, lines) = (self.sender.clone(), BufReader::new(stream.try_clone()?));
                self.control = Some(stream);
                std::thread::spawn(move || read_messages(lines, &sender));
            }
            STDOUT_PORT => pass_on(stream, std::io::stdout(), Arc::clone(&self.stdout)),
            STDERR_PORT => pass_on(stream, std::io::stderr(), Arc::clone(&self.stderr)),
            STDIN_PORT => pass_on(std::io::stdin(), stream, Arc::default()),
            other => bail!("{other} is no port of the lab"),
        }
        Ok(())
    }

    /// The control port, for writing.
    pub fn control(&self) -> Result<UnixStream> {
        Ok(self.control.as_ref().context("the control port is not connected")?.try_clone()?)
    }

    /// Whether this much of the command's output has been passed on.
    pub fn has_passed_on(&self, stdout_bytes: u64, stderr_bytes: u64) -> bool {
        self.stdout.load(Ordering::SeqCst) >= stdout_bytes
            && self.stderr.load(Ordering::SeqCst) >= stderr_bytes
    }
}

fn read_messages(lines: impl BufRead, sender: &Sender<FromLab>) {
    for line in lines.lines().map_while(Result::ok) {
        match serde_json::from_str(&line) {
            Ok(message) => {
                if sender.send(message).is_err() {
                    return;
                }
            }
            Err(error) => eprintln!("lab: the control port said {line:?}: {error}"),
        }
    }
}

/// Copies live, in a thread, and counts what has been passed on.
fn pass_on(mut from: impl Read + Send + 'static, mut to: impl Write + Send + 'static, count: Arc<AtomicU64>) {
    std::thread::spawn(move || {
        let mut buffer = vec![0; CHUNK_BYTES];
        let mut writable = true;
        loop {
            match from.read(&mut buffer) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => return,
                Ok(length) => {
                    // Where nobody reads any more (a closed pipe), the lab's command still runs to its end.
                    writable = writable && to.write_all(&buffer[..length]).and_then(|()| to.flush()).is_ok();
                    count.fetch_add(length as u64, Ordering::SeqCst);
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_lines_become_messages_and_rubbish_is_passed_over() {
        let (sender, messages) = channel();
        let text = "{\"up\":{\"kvm\":true}}\nrubbish\n{\"exited\":{\"code\":3,\"stdout_bytes\":1,\"stderr_bytes\":2}}\n";
        read_messages(text.as_bytes(), &sender);
        drop(sender);
        let seen: Vec<_> = messages.iter().collect();
        assert_eq!(
            seen,
            [FromLab::Up { kvm: true }, FromLab::Exited { code: 3, stdout_bytes: 1, stderr_bytes: 2 }]
        );
    }

    #[test]
    fn a_port_that_nobody_connects_ends_at_the_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let listeners = Listeners::bind(dir.path(), &[CONTROL_PORT]).unwrap();
        let error = listeners.accept(Instant::now() + Duration::from_millis(50), || Ok(())).unwrap_err();
        assert!(error.to_string().contains(CONTROL_PORT));
    }
}
