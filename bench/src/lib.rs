//! Benches, the floors they are compared with in the same run, and the micro-guests they and the tests run.
//!
//! A time is quoted with its stop-line and its system; ratios are only taken within one run. Start with [`fan_out`].

pub mod fan_out;
pub mod floor;
pub mod micro;
pub mod record;
