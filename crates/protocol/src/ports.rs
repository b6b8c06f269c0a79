//! Fixed vsock ports and I/O ports.

/// vsock port of the agent's process, file and health services (HTTP/1.1; the E2B envd protocol).
pub const ENVD: u32 = 49983;
/// vsock port of the warm interpreter (HTTP/1.1; the E2B code interpreter protocol).
pub const INTERPRETER: u32 = 49999;
/// vsock port of identity and shutdown. The agent answers it only to the host (peer context id 2).
pub const HOST_ONLY: u32 = 49984;
/// The guest's vsock context id. Every sandbox has the same one: each VMM is its own transport.
pub const GUEST_CID: u64 = 3;
/// I/O port a micro-guest writes to: a 4-byte `out` becomes a [`crate::control::Event::Doorbell`]. A 4-byte `in` gives
/// the first four bytes (big-endian) of the VM generation id: the first time a vCPU reads it in a VM at once, later only
/// after that VM has been stopped and let go again. So a micro-guest that has nothing to do reads it in a loop, costs no
/// processor time, and finds out when it is a clone.
pub const DOORBELL: u16 = 0x0ff0;
/// I/O port from which a micro-guest reads the same number without waiting.
pub const GENERATION: u16 = 0x0ff4;
