//! Random names: sandbox ids, machine ids, VM generation ids.
//!
//! All come from the kernel's random source: two made in the same instant, or by two daemons with the same process id,
//! never agree.

use rustix::rand::{GetRandomFlags, getrandom};

const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
/// Characters of a sandbox id; 5 bits each.
pub const SANDBOX_ID_CHARS: usize = 20;

/// Fills an array with random bytes from the kernel.
pub fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0u8; N];
    let mut filled = 0;
    while filled < N {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(n) => filled += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("the kernel has getrandom since 3.17, and it answered {error}"),
        }
    }
    bytes
}

/// A new sandbox id: 100 random bits as lower-case letters and digits.
pub fn sandbox_id() -> String {
    random_bytes::<SANDBOX_ID_CHARS>()
        .iter()
        .map(|byte| char::from(ALPHABET[usize::from(byte % 32)]))
        .collect()
}

/// 128 random bits as 32 lower-case hexadecimal digits: a machine id or a VM generation id.
pub fn hex_id() -> String {
    random_bytes::<16>().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether `name` matches `[a-z0-9][a-z0-9_.-]{0,62}`.
pub fn is_valid_name(name: &str) -> bool {
    let bytes = name.as_bytes();
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    (1..=63).contains(&bytes.len())
        && plain(bytes[0])
        && bytes.iter().all(|&byte| plain(byte) || matches!(byte, b'_' | b'.' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_valid_names_and_never_repeat() {
        let ids: std::collections::BTreeSet<String> = (0..10_000).map(|_| sandbox_id()).collect();
        assert_eq!(ids.len(), 10_000);
        assert!(ids.iter().all(|id| is_valid_name(id) && id.len() == SANDBOX_ID_CHARS));
    }

    #[test]
    fn names_with_paths_or_capitals_are_refused() {
        for bad in ["", "../x", "a/b", "A", ".hidden", "-x", &"a".repeat(64)] {
            assert!(!is_valid_name(bad), "{bad:?}");
        }
        assert!(is_valid_name("py-3.11_warm"));
    }

    #[test]
    fn hex_ids_have_32_digits() {
        let id = hex_id();
        assert!(id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()));
    }
}
