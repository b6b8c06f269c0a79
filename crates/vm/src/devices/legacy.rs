//! Ports of the PC that no other device claims: reset and power, the micro-guests' doorbell, and the answers that make
//! a kernel's probes for absent hardware end at once.

use offshoot_protocol::ports::DOORBELL;

use crate::arch::x86_64::layout::{I8042_COMMAND_PORT, POWER_OFF, POWER_PORT, POWER_RESET};

const I8042_DATA_PORT: u16 = 0x60;
/// "Pulse the reset line."
const I8042_RESET: u8 = 0xfe;
/// Output buffer full, input buffer empty. Linux 6.1 `i8042_flush` reads 16 bytes and then says that there is no
/// controller, without the half second that each command to a silent one takes; `kb_wait` before a reset finds the
/// input buffer empty at its first look.
const I8042_STATUS: u8 = 0x01;

/// What a guest asked of the whole machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MachineEvent {
    /// Power off.
    PowerOff,
    /// Reset; a kernel panic ends so, too.
    Reset,
    /// A micro-guest wrote to [`DOORBELL`].
    Doorbell(u32),
}

/// Ports that no other device claims. Has no state, so there is nothing to detach.
#[derive(Debug, Default, Clone, Copy)]
pub struct LegacyPorts;

impl LegacyPorts {
    /// Guest `in` from `port`: all ones where there is nothing.
    pub fn read(&self, port: u16, data: &mut [u8]) {
        let value = match port {
            I8042_COMMAND_PORT => I8042_STATUS,
            I8042_DATA_PORT | POWER_PORT => 0,
            _ => 0xff,
        };
        data.fill(value);
    }

    /// Guest `out` to `port`, little-endian; what it asks of the machine, if anything.
    pub fn write(&self, port: u16, data: &[u8]) -> Option<MachineEvent> {
        match (port, data) {
            (I8042_COMMAND_PORT, [I8042_RESET]) | (POWER_PORT, [POWER_RESET]) => Some(MachineEvent::Reset),
            (POWER_PORT, [POWER_OFF]) => Some(MachineEvent::PowerOff),
            (DOORBELL, data) => {
                let value = <[u8; 4]>::try_from(data).ok()?;
                Some(MachineEvent::Doorbell(u32::from_le_bytes(value)))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_events_need_the_exact_port_width_and_value() {
        let ports = LegacyPorts;
        assert_eq!(ports.write(0x64, &[0xfe]), Some(MachineEvent::Reset));
        assert_eq!(ports.write(POWER_PORT, &[POWER_RESET]), Some(MachineEvent::Reset));
        assert_eq!(ports.write(POWER_PORT, &[POWER_OFF]), Some(MachineEvent::PowerOff));
        assert_eq!(ports.write(DOORBELL, &7u32.to_le_bytes()), Some(MachineEvent::Doorbell(7)));
        for (port, data) in [
            (0x64, &[0xd1][..]),
            (0x64, &[0xfe, 0xfe]),
            (0x60, &[0xfe]),
            (POWER_PORT, &[0]),
            (POWER_PORT, &[0x80]),
            (DOORBELL, &[1, 2]),
            (DOORBELL, &[]),
            (0x80, &[1]),
            (0xcf8, &[0, 0, 0, 0x80]),
        ] {
            assert_eq!(ports.write(port, data), None, "{port:#x} {data:?}");
        }
    }

    #[test]
    fn absent_hardware_reads_as_ones() {
        let mut data = [0; 4];
        for port in [0x70, 0x71, 0x80, 0xcf8, 0xcfc, 0xffff] {
            LegacyPorts.read(port, &mut data);
            assert_eq!(data, [0xff; 4], "{port:#x}");
        }
        LegacyPorts.read(0x64, &mut data[..1]);
        assert_eq!(data[0], I8042_STATUS);
    }
}
