//! The virtio-serial ports.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// How long a port may take to appear.
const PORT_WAIT: Duration = Duration::from_secs(20);

/// Opens the port named `name`, which may still be on its way. A port can be opened once at a time.
pub fn open(name: &str) -> Result<File> {
    let deadline = Instant::now() + PORT_WAIT;
    loop {
        if let Some(device) = find(name) {
            let path = Path::new("/dev").join(&device);
            return File::options()
                .read(true)
                .write(true)
                .open(&path)
                .with_context(|| format!("could not open port {name} at {}", path.display()));
        }
        if Instant::now() >= deadline {
            bail!("port {name} did not appear in {} s", PORT_WAIT.as_secs());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn find(name: &str) -> Option<String> {
    fs::read_dir("/sys/class/virtio-ports").ok()?.flatten().find_map(|entry| {
        let found = fs::read_to_string(entry.path().join("name")).ok()?;
        (found.trim() == name).then(|| entry.file_name().to_string_lossy().into_owned())
    })
}
