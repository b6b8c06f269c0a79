//! The lineage as a tree.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;

use super::state::Sandbox;
use super::{Host, SandboxState};

/// What a node of the tree is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeKind {
    /// A template.
    Template,
    /// A sandbox.
    Sandbox,
}

/// A template or sandbox with what descends from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Node {
    /// What it is.
    pub kind: NodeKind,
    /// Template name or sandbox id.
    pub id: String,
    /// A template is `ready`, `lost` or, where it is gone but its sandboxes live, `removed`; a sandbox has its own.
    pub state: &'static str,
    /// What was made from it, by id.
    pub children: Vec<Node>,
}

impl Host {
    /// The lineage of everything that is listed. Children of a removed sandbox hang from its nearest listed ancestor's
    /// place: their template.
    pub fn tree(&self) -> Vec<Node> {
        let registry = self.lock();
        let mut roots: BTreeMap<&str, &'static str> = BTreeMap::new();
        for template in registry.templates.values() {
            roots.insert(&template.name, if template.zygote.ended().is_some() { "lost" } else { "ready" });
        }
        // Children by the id of their parent, or by `None` and template.
        let mut children: BTreeMap<(Option<&str>, &str), Vec<&Arc<Sandbox>>> = BTreeMap::new();
        for sandbox in registry.sandboxes.values() {
            let template = sandbox.descent.template.as_str();
            roots.entry(template).or_insert("removed");
            let parent = sandbox.descent.parent.as_deref().filter(|id| registry.sandboxes.contains_key(*id));
            children.entry((parent, template)).or_default().push(sandbox);
        }
        let node = |(name, state): (&str, &'static str)| Node {
            kind: NodeKind::Template,
            id: name.to_owned(),
            state,
            children: below(None, name, &children),
        };
        roots.into_iter().map(node).collect()
    }
}

fn below(
    parent: Option<&str>,
    template: &str,
    children: &BTreeMap<(Option<&str>, &str), Vec<&Arc<Sandbox>>>,
) -> Vec<Node> {
    let node = |sandbox: &&Arc<Sandbox>| Node {
        kind: NodeKind::Sandbox,
        id: sandbox.id.clone(),
        state: match sandbox.state() {
            SandboxState::Starting => "starting",
            SandboxState::Running => "running",
            SandboxState::Dead => "dead",
        },
        children: below(Some(&sandbox.id), template, children),
    };
    children.get(&(parent, template)).map(|nodes| nodes.iter().map(node).collect()).unwrap_or_default()
}
