//! Sizes, times and tables for people.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::Value;

/// Shown for what the daemon did not tell.
pub const UNKNOWN: &str = "-";

/// A number of bytes with a binary unit.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let mut value = count as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// A number of KiB with a binary unit.
pub fn kib(count: Option<u64>) -> String {
    count.map_or_else(|| UNKNOWN.into(), |count| bytes(count.saturating_mul(1024)))
}

/// Milliseconds.
pub fn ms(value: f64) -> String {
    if value < 100.0 { format!("{value:.1} ms") } else { format!("{value:.0} ms") }
}

/// How long ago `created_at` (RFC 3339 text or seconds since the Unix epoch) was, in one unit.
pub fn age(created_at: &Value, now: SystemTime) -> String {
    match instant(created_at) {
        Some(then) => span(now.duration_since(then).unwrap_or_default()),
        None => UNKNOWN.into(),
    }
}

fn instant(value: &Value) -> Option<SystemTime> {
    match value {
        Value::String(text) => humantime::parse_rfc3339_weak(text).ok(),
        Value::Number(number) => {
            let seconds = Duration::try_from_secs_f64(number.as_f64()?).ok()?;
            UNIX_EPOCH.checked_add(seconds)
        }
        _ => None,
    }
}

fn span(length: Duration) -> String {
    match length.as_secs() {
        seconds @ 0..120 => format!("{seconds}s"),
        seconds @ 120..7200 => format!("{}m", seconds / 60),
        seconds @ 7200..172_800 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

/// Rows under a head, columns as wide as they need to be, without spaces at the ends of lines.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with this head.
    pub fn new(head: &[&str]) -> Self {
        Self { rows: vec![head.iter().map(|&cell| cell.to_owned()).collect()] }
    }

    /// Adds a row; it has as many cells as the head.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// The lines, joined.
    pub fn render(&self) -> String {
        let columns = self.rows[0].len();
        let width = |column: usize| {
            let widths = self.rows.iter().filter_map(|row| row.get(column));
            widths.map(|cell| cell.chars().count()).max().unwrap_or_default()
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let line = |row: &Vec<String>| {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        self.rows.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

/// A JSON object as `path: value` lines, nested objects flattened with dots.
pub fn fields(value: &Value) -> String {
    let mut lines = Vec::new();
    flatten("", value, &mut lines);
    lines.join("\n")
}

fn flatten(path: &str, value: &Value, lines: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            for (key, inner) in map {
                let inner_path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                flatten(&inner_path, inner, lines);
            }
        }
        Value::Array(items) if items.iter().all(Value::is_string) => {
            let items: Vec<&str> = items.iter().filter_map(Value::as_str).collect();
            lines.push(format!("{path}: {}", items.join(" ")).trim_end().to_owned());
        }
        Value::Null => {}
        Value::String(text) => lines.push(format!("{path}: {text}")),
        Value::Number(number) if number.is_u64() && path.ends_with("_kib") => {
            lines.push(format!("{}: {}", path.trim_end_matches("_kib"), kib(number.as_u64())));
        }
        Value::Number(number) if number.is_u64() && path.ends_with("_bytes") => {
            lines.push(format!(
                "{}: {}",
                path.trim_end_matches("_bytes"),
                bytes(number.as_u64().unwrap_or_default())
            ));
        }
        Value::Number(number) if path.ends_with("_ms") => {
            lines.push(format!(
                "{}: {}",
                path.trim_end_matches("_ms"),
                ms(number.as_f64().unwrap_or_default())
            ));
        }
        other => lines.push(format!("{path}: {other}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn sizes_have_units_and_never_show_1024() {
        let shown: Vec<String> = [0, 1023, 1024, 1536, (1 << 20) - 1, 1 << 20, 5 << 30].map(bytes).into();
        assert_eq!(shown, ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 MiB", "5.0 GiB"]);
    }

    #[test]
    fn ages_come_from_text_and_numbers() {
        let now = UNIX_EPOCH + Duration::from_secs(1_000_000);
        assert_eq!(age(&json!(999_990), now), "10s");
        assert_eq!(age(&json!("1970-01-12T12:46:40Z"), now), "60m");
        assert_eq!(age(&json!(1_000_005), now), "0s", "a clock that runs ahead");
        assert_eq!(age(&json!(null), now), "-");
        assert_eq!(age(&json!("yesterday"), now), "-");
    }

    #[test]
    fn columns_fit_their_widest_cell() {
        let mut table = Table::new(&["ID", "STATE"]);
        table.row(vec!["sb-long".into(), "running".into()]);
        table.row(vec!["a".into(), "-".into()]);
        assert_eq!(table.render(), "ID       STATE\nsb-long  running\na        -");
    }

    #[test]
    fn fields_are_flat_and_have_units() {
        let value = json!({"name": "t", "clones": ["a", "b"], "memory": {"rss_kib": 2048}, "boot_ms": 12.25, "gone": null});
        assert_eq!(fields(&value), "boot: 12.2 ms\nclones: a b\nmemory.rss: 2.0 MiB\nname: t");
    }
}
