//! The registry of images: one directory each under `<state_dir>/images`.

use std::path::{Path, PathBuf};

use offshoot_image::{Cache, DebianSpec, Image, ImportFiles};
use serde::Serialize;

use super::{Host, ImageStoreError, Progress};
use crate::ids::is_valid_name;

/// What to make an image of.
#[derive(Debug, Clone)]
pub enum ImageSource {
    /// Debian's archive.
    Debian(DebianSpec),
    /// Files that are there.
    Files(ImportFiles),
}

/// An image as clients see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ImageInfo {
    /// Its name.
    pub name: String,
    /// RFC 3339.
    pub created_at: String,
    /// Its kernel's version; absent where an imported kernel does not tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel_version: Option<String>,
    /// Size of its root disk, MiB.
    pub disk_mib: u32,
    /// Digest of its files.
    pub digest: String,
}

/// Keeps a name from being used twice while an image of it is made.
struct Making<'a> {
    host: &'a Host,
    name: &'a str,
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        self.host.lock().making_images.remove(self.name);
    }
}

impl Host {
    /// All images, by name. One that cannot be read is left out and named in the log.
    ///
    /// # Errors
    /// Fails where the registry's directory cannot be read.
    pub fn images(&self) -> Result<Vec<ImageInfo>, ImageStoreError> {
        let dir = self.config.images_dir();
        let store = |source| ImageStoreError::Store { doing: "read", path: dir.clone(), source };
        let mut images = Vec::new();
        for entry in std::fs::read_dir(&dir).map_err(store)? {
            let name = entry.map_err(store)?.file_name().to_string_lossy().into_owned();
            // Staging directories begin with a dot.
            if !is_valid_name(&name) {
                continue;
            }
            match self.image(&name) {
                Ok(image) => images.push(image),
                Err(error) => tracing::warn!(image = name, ?error, "an image cannot be read"),
            }
        }
        images.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(images)
    }

    /// One image.
    ///
    /// # Errors
    /// Fails where there is none of this name, or its files are missing or truncated.
    pub fn image(&self, name: &str) -> Result<ImageInfo, ImageStoreError> {
        Ok(info(name, &self.open_image(name)?))
    }

    pub(super) fn open_image(&self, name: &str) -> Result<Image, ImageStoreError> {
        let path = self.image_path(name)?;
        if !path.is_dir() {
            return Err(ImageStoreError::NotFound { name: name.to_owned() });
        }
        Image::open(&path).map_err(|source| ImageStoreError::Image { name: name.to_owned(), source })
    }

    /// Makes an image. It appears whole or not at all; parts stay in the cache for the next time.
    ///
    /// # Errors
    /// Fails on a bad or taken name and where the image cannot be made.
    pub fn make_image(
        &self,
        name: &str,
        source: ImageSource,
        on_progress: &mut dyn FnMut(Progress),
    ) -> Result<ImageInfo, ImageStoreError> {
        let path = self.image_path(name)?;
        let exists = || ImageStoreError::Exists { name: name.to_owned() };
        if path.exists() || !self.lock().making_images.insert(name.to_owned()) {
            return Err(exists());
        }
        let _making = Making { host: self, name };
        let failed = |source| ImageStoreError::Image { name: name.to_owned(), source };
        let image = match source {
            ImageSource::Files(files) => {
                let message = format!("copying {}", files.rootfs.display());
                on_progress(Progress { step: "import", message, done_of: Some((0, 1)) });
                Image::import_files(&files, &path)
            }
            ImageSource::Debian(spec) => {
                let cache = Cache::new(&self.config.cache_dir);
                let mut forward = |progress: offshoot_image::Progress<'_>| {
                    on_progress(Progress {
                        step: progress.step,
                        message: progress.message.to_owned(),
                        done_of: Some((progress.done, progress.total)),
                    });
                };
                Image::build_debian(&spec, &self.config.agent, &cache, &mut forward)
                    .and_then(|image| image.copy_to(&path))
            }
        };
        Ok(info(name, &image.map_err(failed)?))
    }

    /// Removes an image.
    ///
    /// # Errors
    /// Fails where there is none of this name, or a template needs it.
    pub fn remove_image(&self, name: &str) -> Result<(), ImageStoreError> {
        let path = self.image_path(name)?;
        // Held over the renaming: a build that begins meanwhile must not find the image half gone.
        let registry = self.lock();
        if !path.is_dir() {
            return Err(ImageStoreError::NotFound { name: name.to_owned() });
        }
        let built = registry.templates.values().filter(|t| t.spec.image == name).map(|t| t.name.clone());
        let building = registry.making_templates.iter().filter(|(_, image)| *image == name);
        let templates: Vec<String> = built.chain(building.map(|(template, _)| template.clone())).collect();
        if !templates.is_empty() {
            return Err(ImageStoreError::InUse { name: name.to_owned(), templates });
        }
        let grave = self.config.images_dir().join(format!(".removed-{}", crate::ids::sandbox_id()));
        let store = |doing, path: &Path| {
            let path = path.to_owned();
            move |source| ImageStoreError::Store { doing, path, source }
        };
        std::fs::rename(&path, &grave).map_err(store("remove", &path))?;
        drop(registry);
        std::fs::remove_dir_all(&grave).map_err(store("remove", &grave))
    }

    fn image_path(&self, name: &str) -> Result<PathBuf, ImageStoreError> {
        if is_valid_name(name) {
            Ok(self.config.images_dir().join(name))
        } else {
            Err(ImageStoreError::Name { name: name.to_owned() })
        }
    }
}

fn info(name: &str, image: &Image) -> ImageInfo {
    let manifest = image.manifest();
    ImageInfo {
        name: name.to_owned(),
        created_at: crate::clock::rfc3339(manifest.created_unix_s),
        kernel_version: manifest.kernel_version.clone(),
        disk_mib: manifest.disk_mib,
        digest: manifest.digest(),
    }
}

/// Removes what an interrupted build or removal left: its names begin with a dot, images' never do.
pub(super) fn remove_unfinished(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with('.')
            && let Err(error) = std::fs::remove_dir_all(entry.path())
        {
            tracing::warn!(path = %entry.path().display(), %error, "cannot remove an unfinished image");
        }
    }
}
