//! Templates: frozen, warmed sandboxes, each served by a zygote.

use std::sync::Arc;

use offshoot_protocol::control::{FrozenInfo, PageSize};
use serde::Serialize;

use super::state::{SandboxState, memory_of};
use super::{Host, Registry, TemplateError, TemplateSpec};
use crate::accounting::Memory;
use crate::clock::Deadline;
use crate::vmm::Vmm;

pub(super) struct Template {
    pub(super) name: String,
    pub(super) spec: TemplateSpec,
    pub(super) created_at: String,
    pub(super) zygote: Vmm,
    pub(super) frozen: FrozenInfo,
    pub(super) times: BuildTimes,
}

/// How long the steps of a template's build took, milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct BuildTimes {
    /// From the start of the VMM to the agent's first answer.
    pub boot_ms: f64,
    /// The warm-up; 0 where there is none.
    pub warm_ms: f64,
    /// From the freeze request to a zygote that answers.
    pub freeze_ms: f64,
}

/// A template as clients see it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TemplateInfo {
    /// Its name.
    pub name: String,
    /// The image it was booted from.
    pub image: String,
    /// RFC 3339.
    pub created_at: String,
    /// Guest memory, MiB.
    pub memory_mib: u32,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Page size of guest memory.
    pub page_size: PageSize,
    /// Bytes stored in its layers; zero pages are not stored.
    pub layer_bytes: u64,
    /// Why it cannot be cloned any more, if its zygote has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost: Option<String>,
    /// Ids of the live sandboxes that descend from it.
    pub clones: Vec<String>,
    /// How long its build took.
    pub stop_lines: BuildTimes,
    /// Memory of its zygote; absent when that may not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
}

impl Host {
    /// All templates, by name.
    pub fn templates(&self) -> Vec<TemplateInfo> {
        let templates: Vec<(Arc<Template>, Vec<String>)> = {
            let registry = self.lock();
            registry.templates.values().map(|t| (Arc::clone(t), live_clones(&registry, &t.name))).collect()
        };
        templates.into_iter().map(|(template, clones)| info(&template, clones)).collect()
    }

    /// One template.
    ///
    /// # Errors
    /// Fails where there is none of this name.
    pub fn template(&self, name: &str) -> Result<TemplateInfo, TemplateError> {
        let (template, clones) = {
            let registry = self.lock();
            (find(&registry, name)?, live_clones(&registry, name))
        };
        Ok(info(&template, clones))
    }

    pub(super) fn find_template(&self, name: &str) -> Result<Arc<Template>, TemplateError> {
        find(&self.lock(), name)
    }

    /// Ends a template's zygote.
    ///
    /// # Errors
    /// Fails where there is none of this name.
    pub fn remove_template(&self, name: &str, removal: Removal) -> Result<(), TemplateError> {
        let template = {
            let mut registry = self.lock();
            let template = find(&registry, name)?;
            let clones = live_clones(&registry, name);
            if removal == Removal::IfUnused && !clones.is_empty() {
                return Err(TemplateError::InUse { name: name.to_owned(), clones });
            }
            registry.templates.remove(name);
            template
        };
        if template.zygote.stop(Deadline::after(self.config.stop_timeout)).is_none() {
            tracing::error!(
                template = name,
                "the zygote did not end; it is killed when its last fork has ended"
            );
        }
        Ok(())
    }
}

/// What to do with a template whose sandboxes live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// Refuse.
    IfUnused,
    /// Remove it; its sandboxes hold the layers themselves and live on.
    Forced,
}

fn find(registry: &Registry, name: &str) -> Result<Arc<Template>, TemplateError> {
    let template = registry.templates.get(name).cloned();
    template.ok_or_else(|| TemplateError::NotFound { name: name.to_owned() })
}

fn live_clones(registry: &Registry, template: &str) -> Vec<String> {
    let live = |s: &&Arc<super::Sandbox>| s.descent.template == template && s.state() != SandboxState::Dead;
    registry.sandboxes.values().filter(live).map(|sandbox| sandbox.id.clone()).collect()
}

pub(super) fn info(template: &Template, clones: Vec<String>) -> TemplateInfo {
    TemplateInfo {
        name: template.name.clone(),
        image: template.spec.image.clone(),
        created_at: template.created_at.clone(),
        memory_mib: template.spec.memory_mib,
        vcpus: template.spec.vcpus,
        page_size: template.spec.page_size,
        layer_bytes: template.frozen.layer_bytes,
        lost: template.zygote.ended().map(|end| end.to_string()),
        clones,
        stop_lines: template.times,
        memory: memory_of(&template.zygote),
    }
}
