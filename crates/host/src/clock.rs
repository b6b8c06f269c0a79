//! Clocks and deadlines.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// `CLOCK_MONOTONIC`, nanoseconds; the clock of every stop-line.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// Wall clock, nanoseconds since the Unix epoch.
pub fn wall_clock_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// A moment after which a wait gives up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(u64);

impl Deadline {
    /// `span` from now.
    pub fn after(span: Duration) -> Self {
        Self(monotonic_ns().saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// What is left; zero once it has passed.
    pub fn left(self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(monotonic_ns()))
    }

    /// Whether it has passed.
    pub fn is_over(self) -> bool {
        self.left().is_zero()
    }

    /// The earlier of this and `span` from now.
    pub fn at_most(self, span: Duration) -> Self {
        self.min(Self::after(span))
    }
}

/// The moment as RFC 3339 in UTC, whole seconds.
pub fn rfc3339(unix_seconds: u64) -> String {
    let days = unix_seconds / 86_400;
    let (hour, minute, second) = (unix_seconds / 3600 % 24, unix_seconds / 60 % 60, unix_seconds % 60);
    // Days to civil date over eras of 400 years that begin on 1 March (146,097 days each).
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// The present moment as RFC 3339.
pub fn now_rfc3339() -> String {
    rfc3339(wall_clock_ns() / 1_000_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_civil() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(rfc3339(1_709_251_199), "2024-02-29T23:59:59Z");
        assert_eq!(rfc3339(1_735_689_599), "2024-12-31T23:59:59Z");
    }

    #[test]
    fn a_deadline_passes() {
        let deadline = Deadline::after(Duration::ZERO);
        assert!(deadline.is_over());
        assert!(!Deadline::after(Duration::from_secs(60)).is_over());
        assert!(Deadline::after(Duration::from_secs(60)).at_most(Duration::ZERO).is_over());
    }
}
