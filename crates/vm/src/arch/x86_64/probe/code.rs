//! What the probe's guests run. The tests assemble the same programs and compare.
//!
//! All end by writing EAX to [`PORT`]. On entry RDI is a count, RSI a zeroed, 64-byte aligned area.

use offshoot_protocol::ports::DOORBELL;

/// Port the programs write their result to.
pub const PORT: u16 = DOORBELL;

/// Two instructions `count` times: `dec rdi; jnz`.
pub const LOOP: &[u8] = &[0x48, 0xff, 0xcf, 0x75, 0xfb, 0x66, 0xba, 0xf0, 0x0f, 0xef];
/// Instructions of one turn of [`LOOP`].
pub const LOOP_INSTRUCTIONS: u64 = 2;

/// A program that tries one instruction in kernel mode.
pub struct Trial {
    /// What it tries.
    pub name: &'static str,
    /// The program.
    pub code: &'static [u8],
    /// What it writes if all is well.
    pub expected: u32,
    /// Only for processors with XSAVE.
    pub needs_xsave: bool,
}

/// The trial whose failure lets Linux run, yet lose all but x87 state: the host does not notice that the guest turns on
/// more (QEMU's software-emulated SVM does so). The way out is a processor model without XSAVE.
pub const XSETBV: &str = "xsetbv";

/// Vector 3's handler is at the start of the code plus this; the other programs never get there.
pub const BREAKPOINT_HANDLER_OFFSET: u64 = 1;

/// Instructions that Linux uses in kernel mode, and that incomplete emulators are known to lack.
pub const TRIALS: &[Trial] = &[
    Trial {
        name: "popcnt",
        // mov eax, 0xff0f; popcnt eax, eax
        code: &[0xb8, 0x0f, 0xff, 0, 0, 0xf3, 0x0f, 0xb8, 0xc0, 0x66, 0xba, 0xf0, 0x0f, 0xef],
        expected: 12,
        needs_xsave: false,
    },
    Trial {
        name: "cmpxchg16b",
        // xor eax, eax; xor edx, edx; mov ebx, 5; xor ecx, ecx; lock cmpxchg16b [rsi]; mov eax, [rsi]
        code: &[
            0x31, 0xc0, 0x31, 0xd2, 0xbb, 5, 0, 0, 0, 0x31, 0xc9, 0xf0, 0x48, 0x0f, 0xc7, 0x0e, 0x8b, 0x06,
            0x66, 0xba, 0xf0, 0x0f, 0xef,
        ],
        expected: 5,
        needs_xsave: false,
    },
    Trial {
        name: "int3",
        // int3; handler: mov eax, 0x33
        code: &[0xcc, 0xb8, 0x33, 0, 0, 0, 0x66, 0xba, 0xf0, 0x0f, 0xef],
        expected: 0x33,
        needs_xsave: false,
    },
    Trial {
        name: "xsave, xrstor",
        // mov eax, 3; xor edx, edx; xsave [rsi]; xrstor [rsi]; mov eax, 0x55
        code: &[
            0xb8, 3, 0, 0, 0, 0x31, 0xd2, 0x0f, 0xae, 0x26, 0x0f, 0xae, 0x2e, 0xb8, 0x55, 0, 0, 0, 0x66,
            0xba, 0xf0, 0x0f, 0xef,
        ],
        expected: 0x55,
        needs_xsave: true,
    },
    Trial {
        name: "wrmsr, rdmsr",
        // mov ecx, KERNEL_GS_BASE; mov eax, 0x1234; xor edx, edx; wrmsr; xor eax, eax; rdmsr
        code: &[
            0xb9, 0x02, 0x01, 0, 0xc0, 0xb8, 0x34, 0x12, 0, 0, 0x31, 0xd2, 0x0f, 0x30, 0x31, 0xc0, 0x0f,
            0x32, 0x66, 0xba, 0xf0, 0x0f, 0xef,
        ],
        expected: 0x1234,
        needs_xsave: false,
    },
    Trial {
        name: XSETBV,
        // xor ecx, ecx; mov eax, 3; xor edx, edx; xsetbv; xor eax, eax; cpuid (leaves the guest); xor ecx, ecx; xgetbv
        code: &[
            0x31, 0xc9, 0xb8, 3, 0, 0, 0, 0x31, 0xd2, 0x0f, 0x01, 0xd1, 0x31, 0xc0, 0x0f, 0xa2, 0x31, 0xc9,
            0x0f, 0x01, 0xd0, 0x66, 0xba, 0xf0, 0x0f, 0xef,
        ],
        expected: 3,
        needs_xsave: true,
    },
    Trial {
        name: "mov cr3",
        // mov rax, cr3; mov cr3, rax; mov eax, 0x77
        code: &[0x0f, 0x20, 0xd8, 0x0f, 0x22, 0xd8, 0xb8, 0x77, 0, 0, 0, 0x66, 0xba, 0xf0, 0x0f, 0xef],
        expected: 0x77,
        needs_xsave: false,
    },
];

#[cfg(test)]
mod tests {
    use iced_x86::code_asm::*;

    use super::*;

    fn assemble(build: impl FnOnce(&mut CodeAssembler)) -> Vec<u8> {
        let mut asm = CodeAssembler::new(64).unwrap();
        build(&mut asm);
        asm.mov(dx, i32::from(PORT)).unwrap();
        asm.out(dx, eax).unwrap();
        asm.assemble(0x10_0000).unwrap()
    }

    fn trial(name: &str) -> &'static [u8] {
        TRIALS.iter().find(|trial| trial.name == name).unwrap().code
    }

    #[test]
    fn the_bytes_are_the_programs_in_their_comments() {
        let counting = assemble(|asm| {
            let mut again = asm.create_label();
            asm.set_label(&mut again).unwrap();
            asm.dec(rdi).unwrap();
            asm.jne(again).unwrap();
        });
        assert_eq!(counting, LOOP);
        let popcount = assemble(|asm| {
            asm.mov(eax, 0xff0f).unwrap();
            asm.popcnt(eax, eax).unwrap();
        });
        assert_eq!(popcount, trial("popcnt"));
        let exchange = assemble(|asm| {
            asm.xor(eax, eax).unwrap();
            asm.xor(edx, edx).unwrap();
            asm.mov(ebx, 5).unwrap();
            asm.xor(ecx, ecx).unwrap();
            asm.lock().cmpxchg16b(xmmword_ptr(rsi)).unwrap();
            asm.mov(eax, dword_ptr(rsi)).unwrap();
        });
        assert_eq!(exchange, trial("cmpxchg16b"));
        let breakpoint = assemble(|asm| {
            asm.int3().unwrap();
            asm.mov(eax, 0x33).unwrap();
        });
        assert_eq!(breakpoint, trial("int3"));
        let extended = assemble(|asm| {
            asm.mov(eax, 3).unwrap();
            asm.xor(edx, edx).unwrap();
            asm.xsave(ptr(rsi)).unwrap();
            asm.xrstor(ptr(rsi)).unwrap();
            asm.mov(eax, 0x55).unwrap();
        });
        assert_eq!(extended, trial("xsave, xrstor"));
        let msr = assemble(|asm| {
            asm.mov(ecx, 0xc000_0102_u32).unwrap();
            asm.mov(eax, 0x1234).unwrap();
            asm.xor(edx, edx).unwrap();
            asm.wrmsr().unwrap();
            asm.xor(eax, eax).unwrap();
            asm.rdmsr().unwrap();
        });
        assert_eq!(msr, trial("wrmsr, rdmsr"));
        let features = assemble(|asm| {
            asm.xor(ecx, ecx).unwrap();
            asm.mov(eax, 3).unwrap();
            asm.xor(edx, edx).unwrap();
            asm.xsetbv().unwrap();
            asm.xor(eax, eax).unwrap();
            asm.cpuid().unwrap();
            asm.xor(ecx, ecx).unwrap();
            asm.xgetbv().unwrap();
        });
        assert_eq!(features, trial("xsetbv"));
        let control = assemble(|asm| {
            asm.mov(rax, cr3).unwrap();
            asm.mov(cr3, rax).unwrap();
            asm.mov(eax, 0x77).unwrap();
        });
        assert_eq!(control, trial("mov cr3"));
    }
}
