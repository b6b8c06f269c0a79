//! Guest-physical address map and interrupt numbers.

/// First byte of the 32-bit MMIO gap; RAM below it is the low region.
pub const MMIO_GAP_START: u64 = 0xc000_0000;
/// First byte above the gap; RAM that does not fit below goes on here as the high region.
pub const MMIO_GAP_END: u64 = 0x1_0000_0000;
/// Where virtio-mmio devices begin.
pub const VIRTIO_MMIO_BASE: u64 = 0xd000_0000;
/// Size of one virtio-mmio window.
pub const VIRTIO_MMIO_SIZE: u64 = 0x1000;
/// First global system interrupt of a virtio-mmio device; device n has this plus n.
pub const VIRTIO_MMIO_GSI_BASE: u32 = 5;
/// Interrupt of the first serial port.
pub const SERIAL_GSI: u32 = 4;
/// First serial port.
pub const SERIAL_PORT: u16 = 0x3f8;
/// I/O APIC.
pub const IOAPIC_BASE: u32 = 0xfec0_0000;
/// Local APIC.
pub const LAPIC_BASE: u32 = 0xfee0_0000;
/// Three pages KVM needs on Intel for real-mode emulation (`KVM_SET_TSS_ADDR`).
pub const KVM_TSS_BASE: u64 = 0xfffb_d000;
/// One page KVM needs on Intel (`KVM_SET_IDENTITY_MAP_ADDR`).
pub const KVM_IDENTITY_MAP_BASE: u64 = 0xfffb_c000;
/// ACPI reset and sleep registers: write [`POWER_RESET`] or [`POWER_OFF`] to the port.
pub const POWER_PORT: u16 = 0x600;
/// Value that resets.
pub const POWER_RESET: u8 = 0x01;
/// SLP_EN with S5, as the ACPI sleep control register wants it: bit 5 set, SLP_TYP 5 in bits 2 to 4.
pub const POWER_OFF: u8 = 0x34;
/// i8042 command port; writing 0xfe there resets the machine.
pub const I8042_COMMAND_PORT: u16 = 0x64;
/// Interrupt of the generic event device that announces a new VM generation id.
pub const GED_GSI: u32 = 16;
/// Page that holds the VM generation id, inside the ACPI area; the 16 bytes stand at its start plus 40 as the
/// VMGenID specification wants (offset 40 of an 8-byte aligned, non-reclaimable page).
pub const VM_GENERATION_PAGE: u64 = 0x000f_f000;
/// ACPI tables, from the RSDP on.
pub const ACPI_BASE: u64 = 0x000e_0000;
/// First address above conventional RAM; from here to 1 MiB lie the legacy video and firmware areas.
pub const LOW_RAM_END: u64 = 0x000a_0000;
/// Where a micro-guest's code is copied and entered; also where a Linux guest's RAM goes on above the firmware area.
pub const PAYLOAD_BASE: u64 = 0x0010_0000;
/// ACPI sleep status register, next to [`POWER_PORT`]; the guest writes 0x80 there before it sleeps, which means nothing.
pub const SLEEP_STATUS_PORT: u16 = POWER_PORT + 1;
/// Offset of the VM generation id within [`VM_GENERATION_PAGE`].
pub const VM_GENERATION_OFFSET: u64 = 40;
/// ACPI's SLP_TYP of the off state, as [`POWER_OFF`] has it.
pub const SLEEP_TYPE_S5: u8 = 5;
/// `boot_params`, the "zero page".
pub const BOOT_PARAMS: u64 = 0x7000;
/// Top of the stack the kernel is entered with.
pub const BOOT_STACK_TOP: u64 = 0x8ff0;
/// Identity-mapping page tables of the first 4 GiB; they end at 0xf000.
pub const BOOT_PAGE_TABLES: u64 = 0x9000;
/// Kernel command line.
pub const CMDLINE: u64 = 0x2_0000;
/// First address of extended memory; kernels are loaded from here on.
pub const HIGH_MEMORY: u64 = 0x0010_0000;
/// An initramfs ends below this, which every kernel's boot protocol allows (`initrd_addr_max`).
pub const INITRAMFS_LIMIT: u64 = 0x7fff_f000;
