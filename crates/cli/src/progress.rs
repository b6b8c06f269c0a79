//! Progress on standard error: a bar where a terminal shows it, plain lines elsewhere, nothing when not wanted.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::ui::Ui;

const TICK: Duration = Duration::from_millis(120);

/// Progress of one long piece of work; the bar is gone when this is dropped.
pub struct Progress {
    ui: Ui,
    bar: Option<ProgressBar>,
    last_line: String,
}

impl Progress {
    /// Progress by named steps.
    pub fn steps(ui: Ui, title: &str) -> Self {
        let bar = ui.draws_bars().then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            bar.set_style(style("{spinner} {msg} {elapsed}"));
            bar.set_message(title.to_owned());
            bar.enable_steady_tick(TICK);
            bar
        });
        Self { ui, bar, last_line: String::new() }
    }

    /// Progress by bytes; `total` where it is known.
    pub fn bytes(ui: Ui, total: Option<u64>) -> Self {
        let bar = ui.draws_bars().then(|| {
            let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr());
            bar.set_style(match total {
                Some(_) => {
                    style("{wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}")
                }
                None => style("{spinner} {binary_bytes} {binary_bytes_per_sec}"),
            });
            bar
        });
        Self { ui, bar, last_line: String::new() }
    }

    /// Now at `step`.
    pub fn step(&mut self, step: &str, message: &str, done: Option<u64>, total: Option<u64>) {
        let text = match message {
            "" => step.to_owned(),
            message => format!("{step}: {message}"),
        };
        let Some(bar) = &self.bar else {
            // Counts would flood a log: a line only when the words change.
            if text != self.last_line {
                self.ui.note(&text);
                self.last_line = text;
            }
            return;
        };
        match (done, total) {
            (Some(done), Some(total)) => {
                bar.set_style(style("{spinner} {msg} {wide_bar} {pos}/{len} {elapsed}"));
                bar.set_length(total);
                bar.set_position(done);
            }
            _ => bar.set_style(style("{spinner} {msg} {elapsed}")),
        }
        bar.set_message(text);
    }

    /// `count` more bytes are through.
    pub fn advance(&self, count: usize) {
        if let Some(bar) = &self.bar {
            bar.inc(count as u64);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the templates of this file are well-formed")
}
