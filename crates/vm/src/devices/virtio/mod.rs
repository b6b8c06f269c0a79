//! Virtio over MMIO.
