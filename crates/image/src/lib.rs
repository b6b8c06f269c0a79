//! Guest images: a kernel, an initramfs and a root file system, not yet booted.
//!
//! An [`Image`] is a directory of five files. [`Image::build_debian`] makes one from Debian's archive,
//! [`Image::import_files`] from files made elsewhere, [`Image::open`] finds one again and refuses what is missing or
//! truncated. The pieces are usable by themselves: [`rootfs`] makes ext4 disks by debootstrap, [`kernel`] takes Debian's
//! cloud kernel from its package and extracts its ELF, [`modules`] orders kernel modules, [`cpio`] and [`initramfs`]
//! pack them.
//!
//! The crate reads neither environment nor home: the caller says where the [`Cache`] is. It never boots anything, and it
//! mounts nothing. What it builds is staged under a temporary name and renamed when whole; two builders of the same
//! thing take turns. Building needs root (debootstrap and `chroot`), opening does not.
//!
//! Start reading at [`image`].

pub mod cache;
pub mod cpio;
mod debian;
pub mod digest;
pub mod image;
pub mod initramfs;
pub mod kernel;
pub mod manifest;
pub mod modules;
pub mod progress;
pub mod rootfs;
pub mod tool;

pub use cache::Cache;
pub use debian::DebianSpec;
pub use image::{Image, ImageError, ImportFiles};
pub use progress::{Progress, Reporter};
