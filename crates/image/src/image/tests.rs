use super::*;

struct Fixture {
    dir: tempfile::TempDir,
    files: ImportFiles,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let files =
            ImportFiles { kernel: path("kernel"), initramfs: path("initramfs"), rootfs: path("rootfs") };
        let mut elf = vec![0u8; 4096];
        elf[..4].copy_from_slice(b"\x7fELF");
        elf[18] = 62;
        fs::write(&files.kernel, elf).unwrap();
        fs::write(&files.initramfs, "070701").unwrap();
        File::create(&files.rootfs).unwrap().set_len(8 << 20).unwrap();
        Self { dir, files }
    }

    fn dest(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    fn import(&self) -> Image {
        Image::import_files(&self.files, &self.dest()).unwrap()
    }

    /// Everything in the fixture's directory but the files to import.
    fn left(&self) -> Vec<String> {
        let names =
            fs::read_dir(self.dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        names.filter(|name| !["kernel", "initramfs", "rootfs"].contains(&name.as_str())).collect()
    }

    /// Changes a file of the image, read-only or not.
    fn overwrite(&self, name: &str, content: &[u8]) {
        let path = self.dest().join(name);
        fs::remove_file(&path).unwrap();
        fs::write(path, content).unwrap();
    }
}

#[test]
fn an_imported_image_opens_and_verifies() {
    let fixture = Fixture::new();
    let image = fixture.import();
    assert_eq!(image.manifest().disk_mib, 8);
    assert_eq!(image.vmlinuz(), None);
    image.verify().unwrap();
    assert_eq!(Image::open(&fixture.dest()).unwrap().manifest(), image.manifest());
    assert_eq!(fixture.left(), ["image"]);
}

#[test]
fn a_copy_is_the_same_image() {
    let fixture = Fixture::new();
    let image = fixture.import();
    let copy = image.copy_to(&fixture.dir.path().join("copy")).unwrap();
    copy.verify().unwrap();
    assert_eq!(copy.manifest().digest(), image.manifest().digest());
    assert!(matches!(image.copy_to(copy.dir()), Err(ImageError::Exists { .. })));
}

#[test]
fn a_truncated_disk_is_named_with_both_sizes() {
    let fixture = Fixture::new();
    fixture.import();
    fixture.overwrite(ROOTFS, &[0; 4096]);
    let error = Image::open(&fixture.dest()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("rootfs.raw has 4096 bytes") && text.contains("8388608"), "{text}");
    assert_eq!(error.kind(), ErrorKind::Corrupt);
}

#[test]
fn a_changed_file_is_found_by_verify_and_a_missing_one_by_open() {
    let fixture = Fixture::new();
    let image = fixture.import();
    fixture.overwrite(INITRAMFS, b"070702");
    Image::open(&fixture.dest()).unwrap();
    assert!(image.verify().unwrap_err().to_string().contains("initramfs.cpio has digest"));
    fs::remove_file(fixture.dest().join(INITRAMFS)).unwrap();
    let error = Image::open(&fixture.dest()).unwrap_err().to_string();
    assert!(error.contains("could not read initramfs.cpio of the image in"), "{error}");
}

#[test]
fn manifests_that_cannot_be_trusted_are_refused() {
    let fixture = Fixture::new();
    let image = fixture.import();
    let manifest = serde_json::to_value(image.manifest()).unwrap();

    fixture.overwrite(FILE_NAME, b"{");
    assert!(matches!(Image::open(&fixture.dest()), Err(ImageError::Manifest { .. })));

    fixture.overwrite(FILE_NAME, br#"{"format":2,"unheard":"of"}"#);
    assert!(matches!(Image::open(&fixture.dest()), Err(ImageError::Format { format: 2, .. })));

    let mut escaping = manifest.clone();
    escaping["files"]["../../etc/passwd"] = escaping["files"][ROOTFS].clone();
    fixture.overwrite(FILE_NAME, escaping.to_string().as_bytes());
    assert!(matches!(Image::open(&fixture.dest()), Err(ImageError::Files { .. })));

    let mut lacking = manifest;
    lacking["files"].as_object_mut().unwrap().remove(VMLINUX);
    fixture.overwrite(FILE_NAME, lacking.to_string().as_bytes());
    assert!(matches!(Image::open(&fixture.dest()), Err(ImageError::Files { .. })));

    assert!(matches!(Image::open(&fixture.dir.path().join("none")), Err(ImageError::Unreadable { .. })));
}

#[test]
fn files_that_could_not_boot_are_refused_and_nothing_is_left() {
    let check = |change: fn(&ImportFiles), expected: &str| {
        let fixture = Fixture::new();
        change(&fixture.files);
        let error = Image::import_files(&fixture.files, &fixture.dest()).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(error.kind(), ErrorKind::Caller);
        assert!(fixture.left().is_empty(), "{:?}", fixture.left());
    };
    check(|files| fs::remove_file(&files.kernel).unwrap(), "could not read the kernel");
    check(|files| fs::write(&files.kernel, "text").unwrap(), "neither a bzImage nor an x86-64 ELF file");
    check(|files| fs::write(&files.initramfs, "").unwrap(), "is empty");
    check(|files| fs::remove_file(&files.rootfs).unwrap(), "could not read the root disk");
    check(|files| fs::write(&files.rootfs, [0; 700]).unwrap(), "is it truncated?");
    let mut half_bzimage = vec![0u8; 0x300];
    half_bzimage[0x202..0x206].copy_from_slice(b"HdrS");
    half_bzimage[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes());
    let fixture = Fixture::new();
    fs::write(&fixture.files.kernel, half_bzimage).unwrap();
    let error = Image::import_files(&fixture.files, &fixture.dest()).unwrap_err();
    assert!(matches!(error, ImageError::ImportKernel { .. }), "{error}");
    assert!(fixture.left().is_empty());
}

#[test]
fn an_existing_destination_is_left_alone() {
    let fixture = Fixture::new();
    fs::create_dir(fixture.dest()).unwrap();
    let error = Image::import_files(&fixture.files, &fixture.dest()).unwrap_err();
    assert!(matches!(error, ImageError::Exists { .. }));
    assert_eq!(error.kind(), ErrorKind::State);
}
