//! The first serial port, output only: what the guest writes goes to a log file of bounded length.
//!
//! Registers and pending interrupts are memory and survive a fork; log and interrupt line are swapped, and an interrupt
//! that was pending is raised again, as its edge may have been lost.

mod log;

use std::cell::RefCell;
use std::convert::Infallible;

use rustix::event::epoll;
use vm_superio::Trigger;
use vm_superio::serial::{NoEvents, Serial};

pub use self::log::BoundedLog;
use super::{AttachError, BusDevice, Device, HostResources, IrqLine};
use crate::arch::x86_64::layout::SERIAL_GSI;

/// 16550 IER bits of the receive and transmit interrupts; IIR values while one of them is pending.
const RECEIVE_ENABLED: u8 = 0b01;
const TRANSMIT_ENABLED: u8 = 0b10;
const RECEIVE_PENDING: u8 = 0b100;
const TRANSMIT_PENDING: u8 = 0b010;

/// The interrupt line, changed by attach and detach while the UART model keeps its own reference.
#[derive(Default)]
struct Line(RefCell<Option<IrqLine>>);

impl Trigger for Line {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        if let Some(line) = &*self.0.borrow() {
            line.pulse();
        }
        Ok(())
    }
}

/// COM1, writing to the sandbox's console log.
pub struct SerialConsole {
    uart: Serial<Line, NoEvents, BoundedLog>,
}

impl Default for SerialConsole {
    fn default() -> Self {
        Self::new()
    }
}

impl SerialConsole {
    /// A port in its reset state; output before it is attached is dropped and counted.
    pub fn new() -> Self {
        Self { uart: Serial::new(Line::default(), BoundedLog::default()) }
    }

    /// The console log and its counters.
    pub fn log(&self) -> &BoundedLog {
        self.uart.writer()
    }

    /// Writes out a last line without an end; to be called when the guest ends.
    pub fn flush(&mut self) {
        self.uart.writer_mut().write_out();
    }

    fn interrupt_is_pending(&self) -> bool {
        let state = self.uart.state();
        let pending = |enabled, identification| {
            state.interrupt_enable & enabled != 0 && state.interrupt_identification & identification != 0
        };
        pending(RECEIVE_ENABLED, RECEIVE_PENDING) || pending(TRANSMIT_ENABLED, TRANSMIT_PENDING)
    }
}

impl Device for SerialConsole {
    fn name(&self) -> &'static str {
        "serial"
    }

    fn detach(&mut self) {
        *self.uart.interrupt_evt().0.borrow_mut() = None;
        self.uart.writer_mut().close();
    }

    fn attach(&mut self, host: &mut HostResources<'_>) -> Result<(), AttachError> {
        let file =
            host.descriptors.log.take().ok_or(AttachError::Missing { device: "serial", what: "log" })?;
        self.uart.writer_mut().open(file).map_err(|source| AttachError::Prepare {
            device: "serial",
            action: "find the end of its log",
            source,
        })?;
        let line = IrqLine::new(host.irqs.clone(), SERIAL_GSI);
        if self.interrupt_is_pending() {
            line.pulse();
        }
        *self.uart.interrupt_evt().0.borrow_mut() = Some(line);
        Ok(())
    }

    fn ready(&mut self, _token: u32, _events: epoll::EventFlags) {}
}

impl BusDevice for SerialConsole {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        match (u8::try_from(offset), data) {
            (Ok(register @ 0..8), [value]) => *value = self.uart.read(register),
            (_, data) => data.fill(0xff),
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let (Ok(register @ 0..8), [value]) = (u8::try_from(offset), data) {
            // Neither the trigger nor the log ever fails; loopback on a full FIFO loses the byte, as hardware does.
            let _ = self.uart.write(register, *value);
        }
    }
}

#[cfg(test)]
mod tests;
