//! Paths that clients give.

use std::path::{Path, PathBuf};

use crate::users::User;

/// Why a path cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PathError {
    /// `~someone`.
    #[error("path '{path}' names another user's home: give it in full")]
    OtherHome {
        /// The path.
        path: String,
    },
    /// A zero byte.
    #[error("path {path:?} holds a zero byte")]
    ZeroByte {
        /// The path.
        path: String,
    },
    /// Nothing.
    #[error("the path is empty")]
    Empty,
}

/// The absolute path that `path` means for `user`: relative ones, and `~`, begin at the home directory.
///
/// # Errors
/// Empty paths, zero bytes, and other users' homes.
pub fn resolve(path: &str, user: &User) -> Result<PathBuf, PathError> {
    if path.is_empty() {
        return Err(PathError::Empty);
    }
    if path.contains('\0') {
        return Err(PathError::ZeroByte { path: path.to_owned() });
    }
    if let Some(rest) = path.strip_prefix('~') {
        let rest = match rest.strip_prefix('/') {
            Some(rest) => rest,
            None if rest.is_empty() => "",
            None => {
                return Err(PathError::OtherHome { path: path.to_owned() });
            }
        };
        return Ok(user.home.join(rest.trim_start_matches('/')));
    }
    Ok(if Path::new(path).is_absolute() { PathBuf::from(path) } else { user.home.join(path) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_begin_at_home_or_root() {
        let user = User { name: "u".into(), uid: 1, gid: 1, home: "/home/u".into(), groups: vec![] };
        assert_eq!(resolve("a/b", &user), Ok("/home/u/a/b".into()));
        assert_eq!(resolve("~", &user), Ok("/home/u/".into()));
        assert_eq!(resolve("~/x", &user), Ok("/home/u/x".into()));
        assert_eq!(resolve("/etc/x", &user), Ok("/etc/x".into()));
        assert!(resolve("~root/x", &user).is_err());
        assert!(resolve("", &user).is_err());
        assert!(resolve("a\0b", &user).is_err());
    }
}
