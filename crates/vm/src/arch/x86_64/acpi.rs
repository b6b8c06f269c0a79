//! ACPI tables: hardware-reduced, just what Linux needs to find processors, interrupts and devices.
//!
//! ```text
//! RSDP → XSDT → FADT → DSDT (virtio-mmio devices, COM1, generic event device, VM generation id, \_S5)
//!             → MADT (local APICs, I/O APIC)
//! ```
//!
//! They stand from [`ACPI_BASE`] on, in the area that [`super::memory_map::e820`] reserves; so does the page of the VM
//! generation id. They describe KVM's in-kernel irqchip with its default routing, where global system interrupt n is
//! I/O APIC pin n (the PIT's, too), so that no interrupt override is needed. FADT does not announce the i8042: all there
//! is of it is a reset line, and Linux would wait half a second for a keyboard controller to answer.

use acpi_tables::aml::{
    Device, EISAName, Equal, IO, If, Interrupt, Memory32Fixed, Method, Name, Notify, Package, Path,
    ResourceTemplate, Return, Scope,
};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, ProcessorLocalApic};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, aml};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use super::layout::{
    ACPI_BASE, GED_GSI, IOAPIC_BASE, LAPIC_BASE, POWER_PORT, POWER_RESET, SERIAL_GSI, SERIAL_PORT,
    SLEEP_STATUS_PORT, SLEEP_TYPE_S5, VIRTIO_MMIO_BASE, VIRTIO_MMIO_GSI_BASE, VIRTIO_MMIO_SIZE,
    VM_GENERATION_OFFSET, VM_GENERATION_PAGE,
};
use super::memory_map::Memory;

const OEM: [u8; 6] = *b"OFFSHT";
const OEM_TABLE: [u8; 8] = *b"OFFSHOOT";
const OEM_REVISION: u32 = 1;
/// FADT IAPC_BOOT_ARCH: no VGA, no CMOS clock (ACPI 6.5, table 5.11).
const BOOT_ARCH: u16 = (1 << 2) | (1 << 5);
/// Notification value of a changed generation id (VMGenID specification, 2.4).
const GENERATION_CHANGED: u8 = 0x80;

/// Where the VM generation id stands, and where the tables say that it does.
pub const VM_GENERATION_ID: GuestAddress = GuestAddress(VM_GENERATION_PAGE + VM_GENERATION_OFFSET);

/// Why the tables could not be written.
#[derive(Debug, thiserror::Error)]
pub enum AcpiError {
    /// Guest memory does not reach there.
    #[error("could not write {bytes} bytes of acpi tables at {address:#x}")]
    Write {
        /// Guest-physical address.
        address: u64,
        /// Length.
        bytes: usize,
        /// Why.
        source: GuestMemoryError,
    },
    /// The tables would run into the generation id.
    #[error("acpi tables end at {end:#x}, beyond {limit:#x}; give the guest fewer devices")]
    TooBig {
        /// First address after the tables.
        end: u64,
        /// Where they have to end.
        limit: u64,
    },
    /// Their interrupts would meet the generic event device's.
    #[error("{count} virtio devices do not fit between interrupts {VIRTIO_MMIO_GSI_BASE} and {GED_GSI}")]
    Devices {
        /// What was asked for.
        count: u32,
    },
}

/// Writes all tables for `vcpus` vCPUs and `virtio_mmio_count` virtio-mmio devices; returns where the RSDP is.
///
/// # Errors
/// Fails if there are too many devices or memory does not reach there.
pub fn write_tables(mem: &Memory, vcpus: u8, virtio_mmio_count: u32) -> Result<GuestAddress, AcpiError> {
    if virtio_mmio_count > GED_GSI - VIRTIO_MMIO_GSI_BASE {
        return Err(AcpiError::Devices { count: virtio_mmio_count });
    }
    let mut next = ACPI_BASE + Rsdp::len().next_multiple_of(16) as u64;
    let mut place = |table: &dyn Aml| -> Result<u64, AcpiError> {
        let bytes = serialise(table);
        let address = next;
        next = (address + bytes.len() as u64).next_multiple_of(16);
        if next > VM_GENERATION_PAGE {
            return Err(AcpiError::TooBig { end: next, limit: VM_GENERATION_PAGE });
        }
        write(mem, address, &bytes)?;
        Ok(address)
    };
    let dsdt = place(&dsdt(virtio_mmio_count))?;
    let fadt = place(&fadt(dsdt))?;
    let madt = place(&madt(vcpus))?;
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, OEM_REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = place(&xsdt)?;
    write(mem, ACPI_BASE, &serialise(&Rsdp::new(OEM, xsdt)))?;
    Ok(GuestAddress(ACPI_BASE))
}

fn write(mem: &Memory, address: u64, bytes: &[u8]) -> Result<(), AcpiError> {
    mem.write_slice(bytes, GuestAddress(address)).map_err(|source| AcpiError::Write {
        address,
        bytes: bytes.len(),
        source,
    })
}

fn serialise(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

fn io_byte(port: u16) -> GAS {
    GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, u64::from(port))
}

fn fadt(dsdt: u64) -> impl Aml {
    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, OEM_REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        // No fixed-feature power or sleep button.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    fadt.iapc_boot_arch = BOOT_ARCH.into();
    fadt.reset_reg = io_byte(POWER_PORT);
    fadt.reset_value = POWER_RESET;
    fadt.sleep_control_reg = io_byte(POWER_PORT);
    fadt.sleep_status_reg = io_byte(SLEEP_STATUS_PORT);
    fadt.hypervisor_vendor_identity = u64::from_le_bytes(OEM_TABLE).into();
    fadt.finalize()
}

fn madt(vcpus: u8) -> impl Aml {
    const REVISION: u8 = 5;
    let mut madt = Sdt::new(*b"APIC", 36, REVISION, OEM, OEM_TABLE, OEM_REVISION);
    madt.append(LAPIC_BASE);
    // Flags: no 8259 that Linux would have to set up.
    madt.append(0_u32);
    for index in 0..vcpus {
        let lapic = ProcessorLocalApic::new(index, index, EnabledStatus::Enabled);
        madt.append_slice(&serialise(&lapic));
    }
    madt.append_slice(&serialise(&IoApic::new(0, IOAPIC_BASE, 0)));
    madt
}

fn dsdt(virtio_mmio_count: u32) -> impl Aml {
    const REVISION: u8 = 2;
    let mut dsdt = Sdt::new(*b"DSDT", 36, REVISION, OEM, OEM_TABLE, OEM_REVISION);
    let mut devices: Vec<u8> = (0..virtio_mmio_count).flat_map(virtio_mmio).collect();
    devices.extend(serial());
    devices.extend(generation_counter());
    devices.extend(event_device());
    dsdt.append_slice(&Scope::raw(Path::new("\\_SB_"), devices));
    let s5 = Package::new(vec![&SLEEP_TYPE_S5, &aml::ZERO]);
    dsdt.append_slice(&serialise(&Name::new("\\_S5_".into(), &s5)));
    dsdt
}

/// An edge-triggered, active-high interrupt of its own.
fn edge(gsi: u32) -> Interrupt {
    Interrupt::new(true, true, false, false, gsi)
}

fn virtio_mmio(index: u32) -> Vec<u8> {
    let base = VIRTIO_MMIO_BASE + u64::from(index) * VIRTIO_MMIO_SIZE;
    let registers = Memory32Fixed::new(true, base as u32, VIRTIO_MMIO_SIZE as u32);
    serialise(&Device::new(
        Path::new(&format!("VR{index:02}")),
        vec![
            &Name::new("_HID".into(), &"LNRO0005"),
            &Name::new("_UID".into(), &index),
            &Name::new("_CCA".into(), &aml::ONE),
            &Name::new(
                "_CRS".into(),
                &ResourceTemplate::new(vec![&registers, &edge(VIRTIO_MMIO_GSI_BASE + index)]),
            ),
        ],
    ))
}

fn serial() -> Vec<u8> {
    let ports = IO::new(SERIAL_PORT, SERIAL_PORT, 1, 8);
    serialise(&Device::new(
        "COM1".into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0501")),
            &Name::new("_UID".into(), &aml::ZERO),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&ports, &edge(SERIAL_GSI)])),
        ],
    ))
}

/// The VM generation id (Microsoft, "Virtual Machine Generation ID", 2018).
fn generation_counter() -> Vec<u8> {
    let address = VM_GENERATION_ID.0;
    let (low, high) = (address as u32, (address >> 32) as u32);
    serialise(&Device::new(
        "VGEN".into(),
        vec![
            &Name::new("_HID".into(), &"VMGENCTR"),
            &Name::new("_CID".into(), &"VM_Gen_Counter"),
            &Name::new("_DDN".into(), &"VM_Gen_Counter"),
            &Method::new("ADDR".into(), 0, false, vec![&Return::new(&Package::new(vec![&low, &high]))]),
        ],
    ))
}

fn event_device() -> Vec<u8> {
    let counter = Path::new("\\_SB_.VGEN");
    let notify = Notify::new(&counter, &GENERATION_CHANGED);
    let ours = Equal::new(&aml::Arg(0), &GED_GSI);
    let event = If::new(&ours, vec![&notify]);
    serialise(&Device::new(
        "GED_".into(),
        vec![
            &Name::new("_HID".into(), &"ACPI0013"),
            &Name::new("_UID".into(), &aml::ZERO),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&edge(GED_GSI)])),
            &Method::new("_EVT".into(), 1, true, vec![&event]),
        ],
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::x86_64::testing;

    fn bytes(mem: &Memory, address: u64, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        mem.read_slice(&mut bytes, GuestAddress(address)).unwrap();
        bytes
    }

    fn table(mem: &Memory, address: u64) -> Vec<u8> {
        let length: u32 = mem.read_obj(GuestAddress(address + 4)).unwrap();
        bytes(mem, address, length as usize)
    }

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum: u8, byte| sum.wrapping_add(*byte))
    }

    fn qword(bytes: &[u8], offset: usize) -> u64 {
        u64::from_le_bytes(bytes[offset..offset + 8].try_into().unwrap())
    }

    /// DSDT, FADT and MADT as a guest finds them, from the RSDP on.
    fn walk(mem: &Memory, rsdp: GuestAddress) -> [Vec<u8>; 3] {
        let root = bytes(mem, rsdp.0, 36);
        assert_eq!(&root[..8], b"RSD PTR ");
        assert_eq!((sum(&root[..20]), sum(&root)), (0, 0));
        let xsdt = table(mem, qword(&root, 24));
        assert_eq!(&xsdt[..4], b"XSDT");
        assert_eq!(xsdt.len(), 36 + 16);
        let fadt = table(mem, qword(&xsdt, 36));
        let madt = table(mem, qword(&xsdt, 44));
        let dsdt = table(mem, qword(&fadt, 140));
        for (table, name) in [(&xsdt, b"XSDT"), (&fadt, b"FACP"), (&madt, b"APIC"), (&dsdt, b"DSDT")] {
            assert_eq!(&table[..4], name);
            assert_eq!(sum(table), 0, "checksum of {}", String::from_utf8_lossy(name));
        }
        [dsdt, fadt, madt]
    }

    #[test]
    fn every_table_is_found_and_sums_to_zero() {
        let mem = testing::memory(16);
        let rsdp = write_tables(&mem, 8, 11).unwrap();
        let [dsdt, fadt, madt] = walk(&mem, rsdp);
        let names = |name: &[u8]| dsdt.windows(name.len()).filter(|window| window == &name).count();
        assert_eq!(names(b"LNRO0005"), 11);
        assert_eq!(names(b"ACPI0013"), 1);
        // MADT: eight local APICs and one I/O APIC.
        assert_eq!(madt.len(), 44 + 8 * 8 + 12);
        // FADT: reset register and value, sleep control.
        assert_eq!((qword(&fadt, 120), fadt[128]), (u64::from(POWER_PORT), POWER_RESET));
        assert_eq!(qword(&fadt, 248), u64::from(POWER_PORT));
        assert_ne!(fadt[114] & 0x10, 0, "hardware-reduced");
    }

    #[test]
    fn the_generation_id_is_where_the_tables_say() {
        let mem = testing::memory(16);
        write_tables(&mem, 1, 3).unwrap();
        mem.write_slice(b"0123456789abcdef", VM_GENERATION_ID).unwrap();
        let address = VM_GENERATION_PAGE + 40;
        assert_eq!(bytes(&mem, address, 16), b"0123456789abcdef");
        let [dsdt, ..] = walk(&mem, GuestAddress(ACPI_BASE));
        let mut package = vec![0x0c];
        package.extend((address as u32).to_le_bytes());
        assert!(dsdt.windows(package.len()).any(|window| window == package));
    }

    #[test]
    fn interrupts_that_would_collide_are_refused() {
        let mem = testing::memory(16);
        assert!(matches!(write_tables(&mem, 1, 12), Err(AcpiError::Devices { count: 12 })));
    }

    /// Writes the tables to the folder that the variable names, for `iasl -d`.
    #[test]
    fn tables_can_be_written_out_for_a_disassembler() {
        let Ok(folder) = std::env::var("OFFSHOOT_TEST_ACPI_DIR") else {
            return;
        };
        let mem = testing::memory(16);
        let rsdp = write_tables(&mem, 4, 4).unwrap();
        for table in walk(&mem, rsdp) {
            let name = String::from_utf8_lossy(&table[..4]).into_owned();
            std::fs::write(format!("{folder}/{name}.aml"), &table).unwrap();
        }
    }
}
