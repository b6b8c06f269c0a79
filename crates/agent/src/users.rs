//! User accounts, read from `/etc/passwd` and `/etc/group` without the C library's name service, which a static
//! binary does not have.

use std::path::{Path, PathBuf};

use rustix::fs::{Gid, Uid};

/// One account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Login name.
    pub name: String,
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Home directory.
    pub home: PathBuf,
    /// Supplementary groups, the primary one included.
    pub groups: Vec<u32>,
}

/// Why an account cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum UserError {
    /// No such line in `/etc/passwd`.
    #[error("user '{name}' does not exist in this sandbox")]
    Unknown {
        /// Login name.
        name: String,
    },
    /// The agent is not root and cannot become someone else.
    #[error("user '{name}' cannot be used: the agent does not run as root")]
    NotPermitted {
        /// Login name.
        name: String,
    },
}

/// The account that requests without a user get, where it exists; root where not.
const DEFAULT_USER: &str = "user";

/// The accounts of one root directory.
#[derive(Debug, Clone)]
pub struct Accounts {
    etc: PathBuf,
    agent_uid: u32,
}

impl Accounts {
    /// The accounts under `/etc`.
    pub fn new() -> Self {
        Self { etc: PathBuf::from("/etc"), agent_uid: rustix::process::geteuid().as_raw() }
    }

    /// The account `name`, or the default one.
    ///
    /// # Errors
    /// Unknown names, and, where the agent is not root, all but its own.
    pub fn find(&self, name: Option<&str>) -> Result<User, UserError> {
        let passwd = std::fs::read_to_string(self.etc.join("passwd")).unwrap_or_default();
        let group = std::fs::read_to_string(self.etc.join("group")).unwrap_or_default();
        let user = match name {
            Some(name) => {
                by_name(&passwd, name).ok_or_else(|| UserError::Unknown { name: name.to_owned() })?
            }
            None if self.agent_uid != 0 => by_uid(&passwd, self.agent_uid),
            None => by_name(&passwd, DEFAULT_USER).unwrap_or_else(|| by_uid(&passwd, 0)),
        };
        if self.agent_uid != 0 && user.uid != self.agent_uid {
            return Err(UserError::NotPermitted { name: user.name });
        }
        Ok(User { groups: groups_of(&group, &user), ..user })
    }

    /// Root's account.
    ///
    /// # Errors
    /// Where the agent is not root.
    pub fn root(&self) -> Result<User, UserError> {
        self.find(Some("root"))
    }
}

impl User {
    /// Kernel ids, for `chown` and the like.
    pub fn ids(&self) -> (Uid, Gid) {
        (Uid::from_raw(self.uid), Gid::from_raw(self.gid))
    }

    /// The home directory where it exists, else the root directory.
    pub fn usable_home(&self) -> &Path {
        if self.home.is_dir() { &self.home } else { Path::new("/") }
    }
}

fn parse_passwd_line(line: &str) -> Option<User> {
    let mut fields = line.split(':');
    let name = fields.next()?.to_owned();
    let uid = fields.nth(1)?.parse().ok()?;
    let gid = fields.next()?.parse().ok()?;
    let home = PathBuf::from(fields.nth(1)?);
    Some(User { name, uid, gid, home, groups: Vec::new() })
}

fn by_name(passwd: &str, name: &str) -> Option<User> {
    passwd.lines().filter_map(parse_passwd_line).find(|user| user.name == name)
}

fn by_uid(passwd: &str, uid: u32) -> User {
    passwd.lines().filter_map(parse_passwd_line).find(|user| user.uid == uid).unwrap_or_else(|| User {
        name: if uid == 0 { "root".to_owned() } else { uid.to_string() },
        uid,
        gid: uid,
        home: PathBuf::from(if uid == 0 { "/root" } else { "/" }),
        groups: Vec::new(),
    })
}

fn groups_of(group: &str, user: &User) -> Vec<u32> {
    let mut groups = vec![user.gid];
    for line in group.lines() {
        let mut fields = line.split(':').skip(2);
        let (Some(gid), Some(members)) = (fields.next(), fields.next()) else {
            continue;
        };
        let Ok(gid) = gid.parse() else { continue };
        if members.split(',').any(|member| member.trim() == user.name) && !groups.contains(&gid) {
            groups.push(gid);
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/bash\nbroken line\nuser:x:1000:1001::/home/user:/bin/sh\n";
    const GROUP: &str = "root:x:0:\nsudo:x:27:user\nuser:x:1001:\nbad\n";

    #[test]
    fn finds_accounts_and_skips_broken_lines() {
        let user = by_name(PASSWD, "user").unwrap();
        assert_eq!((user.uid, user.gid, user.home.to_str().unwrap()), (1000, 1001, "/home/user"));
        assert!(by_name(PASSWD, "nobody").is_none());
    }

    #[test]
    fn a_user_has_primary_and_listed_groups() {
        let user = by_name(PASSWD, "user").unwrap();
        assert_eq!(groups_of(GROUP, &user), [1001, 27]);
    }

    #[test]
    fn an_unlisted_uid_still_has_an_account() {
        assert_eq!(by_uid("", 0).home, PathBuf::from("/root"));
        assert_eq!(by_uid(PASSWD, 7).name, "7");
    }
}
