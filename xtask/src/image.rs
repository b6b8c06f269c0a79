//! The default guest image.

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use anyhow::{Context, Result};
use offshoot_image::{DebianSpec, Image};

use crate::steps::step;
use crate::workspace::Workspace;
use crate::{build, progress, setup};

/// Builds the default image unless the cache has it; returns its directory, to which `target/image` points.
pub fn run(workspace: &Workspace) -> Result<PathBuf> {
    step("guest image", || {
        setup::ensure(&setup::IMAGE_PACKAGES)?;
        let agent = build::agent(workspace)?;
        let mut show = progress::shower();
        let built = Image::build_debian(&DebianSpec::default(), &agent, &workspace.image_cache(), &mut show);
        progress::end();
        let image = built.context("could not build the default image")?;
        link(workspace, &image)?;
        eprintln!("image: {}", image.dir().display());
        Ok(image.dir().to_owned())
    })
}

fn link(workspace: &Workspace, image: &Image) -> Result<()> {
    let link = workspace.image_link();
    fs::create_dir_all(&workspace.target)?;
    match fs::remove_file(&link) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("could not replace {}", link.display()));
        }
        _ => {}
    }
    std::os::unix::fs::symlink(image.dir(), &link)
        .with_context(|| format!("could not link {}", link.display()))
}
