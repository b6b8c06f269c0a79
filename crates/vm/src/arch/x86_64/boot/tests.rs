use std::io::Write as _;
use std::path::PathBuf;

use super::*;
use crate::arch::x86_64::layout::HIGH_MEMORY;
use crate::arch::x86_64::testing;

const ENTRY: u64 = 0x100_0000;

struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::File::create(&path).unwrap().write_all(bytes).unwrap();
        path
    }
}

fn put(bytes: &mut [u8], offset: usize, value: &[u8]) {
    bytes[offset..offset + value.len()].copy_from_slice(value);
}

/// A vmlinux with one segment of `code` at [`ENTRY`] that takes `memory_bytes` there.
fn vmlinux(code: &[u8], memory_bytes: u64) -> Vec<u8> {
    let mut elf = vec![0; 0x1000];
    put(&mut elf, 0, b"\x7fELF\x02\x01\x01");
    put(&mut elf, 16, &2_u16.to_le_bytes());
    put(&mut elf, 18, &62_u16.to_le_bytes());
    put(&mut elf, 24, &ENTRY.to_le_bytes());
    put(&mut elf, 32, &64_u64.to_le_bytes());
    put(&mut elf, 54, &56_u16.to_le_bytes());
    put(&mut elf, 56, &1_u16.to_le_bytes());
    let words = [1 | (5 << 32), 0x1000, ENTRY, ENTRY, code.len() as u64, memory_bytes, 0x1000];
    for (index, word) in words.into_iter().enumerate() {
        put(&mut elf, 64 + 8 * index, &u64::to_le_bytes(word));
    }
    elf.extend(code);
    elf
}

/// A bzImage with `code` as its protected-mode part.
fn bzimage(code: &[u8], init_size: u32) -> Vec<u8> {
    let mut image = vec![0; 5 * 512];
    image[0x1f1] = 4;
    put(&mut image, 0x1f4, &(code.len().div_ceil(16) as u32).to_le_bytes());
    put(&mut image, 0x202, b"HdrS");
    put(&mut image, 0x206, &0x020f_u16.to_le_bytes());
    image[0x211] = 1;
    put(&mut image, 0x214, &(HIGH_MEMORY as u32).to_le_bytes());
    put(&mut image, 0x236, &1_u16.to_le_bytes());
    put(&mut image, 0x238, &2047_u32.to_le_bytes());
    put(&mut image, 0x258, &ENTRY.to_le_bytes());
    put(&mut image, 0x260, &init_size.to_le_bytes());
    image.extend(code);
    image
}

fn boot<'a>(kernel: &'a Path, initramfs: Option<&'a Path>, cmdline: &'a str) -> LinuxBoot<'a> {
    LinuxBoot { kernel, initramfs, cmdline, rsdp: GuestAddress(0xe0000) }
}

fn refused(mem: &Memory, boot: &LinuxBoot<'_>) -> BootError {
    load_linux(mem, boot).expect_err("must be refused")
}

#[test]
fn a_vmlinux_is_loaded_where_it_wants_to_be() {
    let files = Files::new();
    let kernel = files.file("vmlinux", &vmlinux(&[0xf4; 100], 0x5000));
    let mem = testing::memory(128);
    let entry = load_linux(&mem, &boot(&kernel, None, "console=ttyS0")).unwrap();
    assert_eq!(entry, Entry { rip: GuestAddress(ENTRY), boot_params: GuestAddress(BOOT_PARAMS) });
    assert_eq!(mem.read_obj::<u8>(GuestAddress(ENTRY + 99)).unwrap(), 0xf4);
    let params: boot_params = mem.read_obj(GuestAddress(BOOT_PARAMS)).unwrap();
    assert_eq!({ params.acpi_rsdp_addr }, 0xe0000);
    assert_eq!({ params.hdr.header }, 0x5372_6448);
    assert_eq!(params.e820_entries, 3);
    let mut cmdline = [0; 14];
    mem.read_slice(&mut cmdline, GuestAddress(u64::from(params.hdr.cmd_line_ptr))).unwrap();
    assert_eq!(&cmdline, b"console=ttyS0\0");
}

#[test]
fn a_bzimage_is_entered_at_its_64_bit_entry() {
    let files = Files::new();
    let kernel = files.file("vmlinuz", &bzimage(&[0x90; 4096], 0x10_0000));
    let mem = testing::memory(128);
    let entry = load_linux(&mem, &boot(&kernel, None, "")).unwrap();
    assert_eq!(entry.rip, GuestAddress(HIGH_MEMORY + 0x200));
    assert_eq!(mem.read_obj::<u8>(GuestAddress(HIGH_MEMORY + 4095)).unwrap(), 0x90);
}

#[test]
fn the_initramfs_ends_high_in_the_low_region() {
    let files = Files::new();
    let kernel = files.file("vmlinux", &vmlinux(&[0xf4], 1));
    let initramfs = files.file("initramfs", &[7; 5000]);
    for (memory_mib, end) in [(128, 128 << 20), (5120, INITRAMFS_LIMIT)] {
        let mem = testing::memory(memory_mib);
        load_linux(&mem, &boot(&kernel, Some(&initramfs), "")).unwrap();
        let params: boot_params = mem.read_obj(GuestAddress(BOOT_PARAMS)).unwrap();
        let start = u64::from(params.hdr.ramdisk_image);
        assert_eq!((start, { params.hdr.ramdisk_size }), (end - 8192, 5000));
        assert_eq!(mem.read_obj::<u8>(GuestAddress(start + 4999)).unwrap(), 7);
    }
}

#[test]
fn files_that_are_missing_or_no_files_are_named() {
    let files = Files::new();
    let mem = testing::memory(128);
    let missing = files.folder.path().join("absent");
    let error = refused(&mem, &boot(&missing, None, ""));
    assert!(matches!(error, BootError::Read { role: FileRole::Kernel, .. }), "{error}");
    assert!(error.to_string().contains("absent"));
    let error = refused(&mem, &boot(files.folder.path(), None, ""));
    assert!(matches!(error, BootError::NotAFile { .. }), "{error}");
    let error = refused(&mem, &boot(&files.file("empty", b""), None, ""));
    assert!(matches!(error, BootError::Empty { .. }), "{error}");
    let kernel = files.file("vmlinux", &vmlinux(&[0xf4], 1));
    let error = refused(&mem, &boot(&kernel, Some(&missing), ""));
    assert!(matches!(error, BootError::Read { role: FileRole::Initramfs, .. }), "{error}");
}

#[test]
fn what_is_no_kernel_is_refused() {
    let files = Files::new();
    let mem = testing::memory(128);
    for bytes in [&b"#!/bin/sh\n"[..], &[0; 4096]] {
        let error = refused(&mem, &boot(&files.file("text", bytes), None, ""));
        assert!(matches!(error, BootError::NotAKernel { .. }), "{error}");
    }
    let mut arm = vmlinux(&[0xf4], 1);
    put(&mut arm, 18, &183_u16.to_le_bytes());
    let error = refused(&mem, &boot(&files.file("arm", &arm), None, ""));
    assert!(matches!(error, BootError::Unsupported { .. }), "{error}");
    let mut old = bzimage(&[0x90; 64], 4096);
    put(&mut old, 0x236, &0_u16.to_le_bytes());
    let error = refused(&mem, &boot(&files.file("old", &old), None, ""));
    assert!(matches!(error, BootError::Unsupported { .. }), "{error}");
}

/// Every shorter file is refused, wherever it is cut, and never loaded in part.
#[test]
fn truncated_kernels_are_refused() {
    let files = Files::new();
    let mem = testing::memory(128);
    for (name, image) in [("elf", vmlinux(&[0xf4; 300], 300)), ("bz", bzimage(&[0x90; 320], 4096))] {
        for bytes in [5, 63, 100, 600, 1023, 1024, 2000, 3000, image.len() - 1] {
            if bytes >= image.len() {
                continue;
            }
            let error = refused(&mem, &boot(&files.file(name, &image[..bytes]), None, ""));
            let cut = matches!(error, BootError::Truncated { .. } | BootError::NotAKernel { .. });
            assert!(cut, "{name} cut to {bytes}: {error}");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let files = Files::new();
    let mem = testing::memory(64);
    let kernel = files.file("big", &vmlinux(&[0xf4], 49 << 20));
    assert!(matches!(refused(&mem, &boot(&kernel, None, "")), BootError::KernelTooBig { .. }));
    let kernel = files.file("bigbz", &bzimage(&[0x90; 64], 49 << 20));
    assert!(matches!(refused(&mem, &boot(&kernel, None, "")), BootError::KernelTooBig { .. }));
    let kernel = files.file("vmlinux", &vmlinux(&[0xf4], 40 << 20));
    let initramfs = files.file("initramfs", &vec![1; 9 << 20]);
    let error = refused(&mem, &boot(&kernel, Some(&initramfs), ""));
    assert!(matches!(error, BootError::InitramfsTooBig { .. }), "{error}");
}

#[test]
fn addresses_that_wrap_are_refused() {
    let files = Files::new();
    let mem = testing::memory(64);
    let mut wraps = vmlinux(&[0xf4], u64::MAX - 5);
    let error = refused(&mem, &boot(&files.file("memory", &wraps), None, ""));
    assert!(matches!(error, BootError::KernelTooBig { .. }), "{error}");
    put(&mut wraps, 64 + 8, &(u64::MAX - 1).to_le_bytes());
    let error = refused(&mem, &boot(&files.file("offset", &wraps), None, ""));
    assert!(matches!(error, BootError::Truncated { .. }), "{error}");
    put(&mut wraps, 32, &(u64::MAX - 1).to_le_bytes());
    let error = refused(&mem, &boot(&files.file("table", &wraps), None, ""));
    assert!(matches!(error, BootError::Truncated { .. }), "{error}");
}

#[test]
fn the_command_line_has_a_limit() {
    let files = Files::new();
    let mem = testing::memory(128);
    let kernel = files.file("vmlinux", &vmlinux(&[0xf4], 1));
    load_linux(&mem, &boot(&kernel, None, &"x".repeat(2047))).unwrap();
    let error = refused(&mem, &boot(&kernel, None, &"x".repeat(2048)));
    assert!(matches!(error, BootError::CmdlineTooLong { bytes: 2048, limit_bytes: 2047 }), "{error}");
    let error = refused(&mem, &boot(&kernel, None, "a\0b"));
    assert!(matches!(error, BootError::CmdlineZero { at: 1 }), "{error}");
}

#[test]
fn the_boot_vcpu_enters_the_kernel() {
    use kvm_ioctls::VcpuExit;

    let Some(kvm) = testing::kvm() else { return };
    let files = Files::new();
    // mov eax, [rsi + 0x202]; mov dx, 0x80; out dx, eax: the magic out of boot_params.
    let code = [0x8b, 0x86, 0x02, 0x02, 0, 0, 0x66, 0xba, 0x80, 0, 0xef, 0xf4];
    let kernel = files.file("vmlinux", &vmlinux(&code, 4096));
    let mem = testing::memory(64);
    let entry = load_linux(&mem, &boot(&kernel, None, "")).unwrap();
    let mut vm = testing::bare_vm(&kvm, &mem, 2);
    for (index, vcpu) in vm.vcpus.iter().enumerate() {
        vcpu.set_cpuid2(&crate::arch::x86_64::cpuid::for_vcpu(&kvm, index as u8, 2).unwrap()).unwrap();
    }
    configure_bsp(&vm.vcpus[0], &entry).unwrap();
    configure_ap(&vm.vcpus[1]).unwrap();
    match vm.vcpus[0].run().unwrap() {
        VcpuExit::IoOut(0x80, data) => assert_eq!(data, b"HdrS"),
        other => panic!("{other:?}"),
    }
}
