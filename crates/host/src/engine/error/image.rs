//! Errors of the image registry.

use std::io;
use std::path::PathBuf;

use offshoot_image::ImageError;
use offshoot_protocol::control::ErrorKind;

use crate::fault::{Fault, of_io};

/// Why an operation on images failed.
#[derive(Debug, thiserror::Error)]
pub enum ImageStoreError {
    /// No such image.
    #[error("there is no image {name:?}")]
    NotFound {
        /// The name asked for.
        name: String,
    },
    /// There is one of this name, or one is being made.
    #[error("image {name:?} exists already or is being made")]
    Exists {
        /// The name.
        name: String,
    },
    /// A template was made of it, and may be made of it again.
    #[error("image {name:?} is needed by the templates {}", templates.join(", "))]
    InUse {
        /// The image.
        name: String,
        /// Names of the templates.
        templates: Vec<String>,
    },
    /// The name is not allowed.
    #[error("image name {name:?} is not of the form [a-z0-9][a-z0-9_.-]{{0,62}}")]
    Name {
        /// The name.
        name: String,
    },
    /// The image could not be made or read.
    #[error("image {name:?}")]
    Image {
        /// Its name.
        name: String,
        /// Why.
        source: ImageError,
    },
    /// The registry could not be read or changed.
    #[error("{doing} {}", path.display())]
    Store {
        /// What was attempted.
        doing: &'static str,
        /// Where.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

impl Fault for ImageStoreError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::NotFound { .. } | Self::Exists { .. } | Self::InUse { .. } | Self::Name { .. } => {
                ErrorKind::Caller
            }
            Self::Image { source, .. } => source.kind(),
            Self::Store { source, .. } => of_io(source).0,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "image_not_found",
            Self::Exists { .. } => "image_exists",
            Self::InUse { .. } => "image_in_use",
            Self::Name { .. } => "bad_name",
            Self::Image { source, .. } => match source.kind() {
                ErrorKind::Corrupt => "image_corrupt",
                ErrorKind::Caller => "image_bad_input",
                ErrorKind::Unsupported => "image_unsupported",
                _ => "image_not_made",
            },
            Self::Store { source, .. } => of_io(source).1,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::NotFound { .. } => Some("`offshoot image ls` shows what there is".into()),
            Self::Exists { name } => {
                Some(format!("choose another name, or `offshoot image rm {name}` first"))
            }
            Self::InUse { .. } => Some("remove these templates first".into()),
            Self::Image { name, source } if source.kind() == ErrorKind::Corrupt => {
                Some(format!("`offshoot image rm {name}` and make it again"))
            }
            _ => None,
        }
    }
}
