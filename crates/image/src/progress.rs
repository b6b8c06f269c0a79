//! How far a long piece of work has come.

/// One step of a build, as it happens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress<'a> {
    /// Short fixed name of the step.
    pub step: &'static str,
    /// What is being done right now.
    pub message: &'a str,
    /// Steps finished before this one.
    pub done: u64,
    /// Steps in all.
    pub total: u64,
}

/// Passes [`Progress`] to the caller, keeping count of the steps.
pub struct Reporter<'a> {
    callback: &'a mut dyn FnMut(Progress<'_>),
    step: &'static str,
    done: u64,
    total: u64,
}

impl<'a> Reporter<'a> {
    /// A reporter of `total` steps that calls `callback` at each step and each message within one.
    pub fn new(total: u64, callback: &'a mut dyn FnMut(Progress<'_>)) -> Self {
        Self { callback, step: "", done: 0, total }
    }

    /// Begins the next step; the one before counts as done.
    pub fn begin(&mut self, step: &'static str, message: &str) {
        if !self.step.is_empty() {
            self.done = (self.done + 1).min(self.total);
        }
        self.step = step;
        self.say(message);
    }

    /// Says what the current step is doing.
    pub fn say(&mut self, message: &str) {
        (self.callback)(Progress { step: self.step, message, done: self.done, total: self.total });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_counts_as_done_when_the_next_begins() {
        let mut seen = Vec::new();
        let mut callback = |p: Progress<'_>| seen.push((p.step, p.message.to_owned(), p.done, p.total));
        let mut reporter = Reporter::new(2, &mut callback);
        reporter.begin("kernel", "download");
        reporter.say("unpack");
        reporter.begin("rootfs", "debootstrap");
        assert_eq!(
            seen,
            [
                ("kernel", "download".to_owned(), 0, 2),
                ("kernel", "unpack".to_owned(), 0, 2),
                ("rootfs", "debootstrap".to_owned(), 1, 2),
            ]
        );
    }
}
