//! A directory of things that take long to make, each under the key of its inputs.
//!
//! An entry exists or it does not: it is built in a staging directory beside its place and renamed. A lock file per
//! entry makes a second builder wait for the first and then use what it made; the kernel drops the lock of a builder
//! that dies, and the next one removes what it left.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

/// How long one builder waits for another.
const LOCK_WAIT: Duration = Duration::from_secs(30 * 60);
/// Hexadecimal digits of a key that name its entry.
const NAME_DIGITS: usize = 24;

/// Why the cache itself failed.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// A file operation.
    #[error("could not {action} {path}")]
    Io {
        /// What was attempted.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// Another builder holds the entry.
    #[error("another process has been building {path} for {waited_s} s; end it or wait")]
    Busy {
        /// The entry.
        path: PathBuf,
        /// How long was waited, seconds.
        waited_s: u64,
    },
}

/// A cache rooted in one directory.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
    lock_wait: Duration,
}

impl Cache {
    /// The cache in `root`, which is created when the first entry is.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), lock_wait: LOCK_WAIT }
    }

    /// Where the cache is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where the entry of `kind` and `key` is or will be.
    pub fn place(&self, kind: &str, key: &str) -> PathBuf {
        self.root.join(kind).join(&key[..key.len().min(NAME_DIGITS)])
    }

    /// The entry of `kind` and `key`, made by `build` in the directory it is given, unless it is there already.
    ///
    /// # Errors
    /// Passes on `build`'s error, after which nothing of the entry is left, and the cache's own.
    pub fn entry<E: From<CacheError>>(
        &self,
        kind: &str,
        key: &str,
        build: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<PathBuf, E> {
        let place = self.place(kind, key);
        if place.is_dir() {
            return Ok(place);
        }
        let parent = self.root.join(kind);
        fs::create_dir_all(&parent).map_err(io("create", &parent))?;
        let _lock = self.lock(&place)?;
        if place.is_dir() {
            return Ok(place);
        }
        let name = place.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let prefix = format!(".staging-{name}-");
        remove_stale(&parent, &prefix)?;
        let staging = tempfile::Builder::new()
            .prefix(&prefix)
            .tempdir_in(&parent)
            .map_err(io("create a directory in", &parent))?;
        build(staging.path())?;
        publish(staging, &place)?;
        Ok(place)
    }

    fn lock(&self, place: &Path) -> Result<File, CacheError> {
        let path = place.with_extension("lock");
        let file = File::create(&path).map_err(io("create", &path))?;
        let deadline = Instant::now() + self.lock_wait;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(file),
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(io("lock", &path)(errno.into())),
            }
            if Instant::now() >= deadline {
                return Err(CacheError::Busy { path: place.to_owned(), waited_s: self.lock_wait.as_secs() });
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

/// Gives a finished staging directory its final name, durably.
pub(crate) fn publish(staging: tempfile::TempDir, place: &Path) -> Result<(), CacheError> {
    // tempdir makes it 0700; an entry is for every user who can reach the cache.
    fs::set_permissions(staging.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .map_err(io("set permissions of", staging.path()))?;
    for entry in fs::read_dir(staging.path()).map_err(io("read", staging.path()))? {
        let path = entry.map_err(io("read", staging.path()))?.path();
        if path.is_file() {
            File::open(&path).and_then(|file| file.sync_all()).map_err(io("sync", &path))?;
        }
    }
    sync_dir(staging.path())?;
    fs::rename(staging.path(), place).map_err(io("rename a finished directory to", place))?;
    // The name it had is gone; nothing is left to remove.
    let _ = staging.keep();
    sync_dir(place.parent().unwrap_or(Path::new("/")))
}

fn sync_dir(path: &Path) -> Result<(), CacheError> {
    File::open(path).and_then(|dir| dir.sync_all()).map_err(io("sync", path))
}

/// Removes what builders that died left; the caller holds the entry's lock.
fn remove_stale(parent: &Path, prefix: &str) -> Result<(), CacheError> {
    for entry in fs::read_dir(parent).map_err(io("read", parent))? {
        let entry = entry.map_err(io("read", parent))?;
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            fs::remove_dir_all(entry.path()).map_err(io("remove", &entry.path()))?;
        }
    }
    Ok(())
}

/// Makes a [`CacheError::Io`] out of an I/O error.
pub(crate) fn io<'a>(action: &'static str, path: &'a Path) -> impl Fn(std::io::Error) -> CacheError + 'a {
    move |source| CacheError::Io { action, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    fn cache() -> (tempfile::TempDir, Cache) {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache { root: dir.path().join("cache"), lock_wait: Duration::from_secs(20) };
        (dir, cache)
    }

    fn names(cache: &Cache) -> Vec<String> {
        let list = fs::read_dir(cache.root().join("kind")).unwrap();
        list.map(|e| e.unwrap().file_name().into_string().unwrap())
            .filter(|n| !n.ends_with(".lock"))
            .collect()
    }

    #[test]
    fn concurrent_builders_build_once() {
        let (_dir, cache) = cache();
        let builds = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let place = cache.entry::<CacheError>("kind", "key", |dir| {
                        builds.fetch_add(1, Ordering::SeqCst);
                        std::thread::sleep(Duration::from_millis(50));
                        fs::write(dir.join("file"), "whole").map_err(io("write", dir))
                    });
                    assert_eq!(fs::read_to_string(place.unwrap().join("file")).unwrap(), "whole");
                });
            }
        });
        assert_eq!(builds.load(Ordering::SeqCst), 1);
        assert_eq!(names(&cache), ["key"]);
    }

    #[test]
    fn a_failed_build_leaves_nothing_and_can_be_tried_again() {
        let (_dir, cache) = cache();
        let failed = cache.entry::<CacheError>("kind", "key", |dir| {
            fs::write(dir.join("half"), "").map_err(io("write", dir))?;
            Err(CacheError::Busy { path: dir.to_owned(), waited_s: 0 })
        });
        assert!(failed.is_err());
        assert!(names(&cache).is_empty());
        cache.entry::<CacheError>("kind", "key", |_| Ok(())).unwrap();
        assert_eq!(names(&cache), ["key"]);
    }

    #[test]
    fn what_a_dead_builder_left_is_removed() {
        let (_dir, cache) = cache();
        fs::create_dir_all(cache.root().join("kind/.staging-key-dead")).unwrap();
        fs::create_dir_all(cache.root().join("kind/.staging-other-alive")).unwrap();
        cache.entry::<CacheError>("kind", "key", |_| Ok(())).unwrap();
        let mut left = names(&cache);
        left.sort();
        assert_eq!(left, [".staging-other-alive", "key"]);
    }

    #[test]
    fn a_builder_that_never_ends_is_named() {
        let (_dir, mut cache) = cache();
        cache.lock_wait = Duration::from_millis(300);
        fs::create_dir_all(cache.root().join("kind")).unwrap();
        let _held = cache.lock(&cache.place("kind", "key")).unwrap();
        let error = cache.entry::<CacheError>("kind", "key", |_| Ok(())).unwrap_err();
        assert!(matches!(error, CacheError::Busy { .. }), "{error}");
    }
}
