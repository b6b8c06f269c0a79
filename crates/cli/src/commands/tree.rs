//! `tree`: the lineage, drawn.

use http::Method;
use serde::Deserialize;
use serde_json::Value;

use super::Context;
use crate::client::LOOKUP_DEADLINE;
use crate::failure::{Failure, Result};
use crate::wire::{Node, Tree};

/// Stack for reading and drawing a lineage: more than a level's frames need, for each byte that a level takes at least.
const STACK_BYTES_PER_LEVEL: usize = 4096;
const LEVEL_BYTES: usize = 24;
const MAX_STACK_BYTES: usize = 1 << 30;

/// Prints the lineage.
pub async fn tree(context: &Context) -> Result<u8> {
    let body = context.client.fetch(Method::GET, "/tree", LOOKUP_DEADLINE).await?;
    let json = context.ui.is_json();
    // Lineages get deeper than JSON readers and an ordinary stack allow: forks of forks, thousands of times.
    let stack_bytes = (body.len() / LEVEL_BYTES * STACK_BYTES_PER_LEVEL).clamp(1 << 21, MAX_STACK_BYTES);
    let drawing = std::thread::Builder::new()
        .stack_size(stack_bytes)
        .spawn(move || if json { compact(&body) } else { draw(&body) })
        .map_err(|error| Failure::local("cannot start a thread to read the lineage", &error))?;
    let text = drawing.join().expect("reading a lineage does not panic")?;
    context.ui.line(&text)?;
    Ok(0)
}

fn compact(body: &[u8]) -> Result<String> {
    Ok(read::<Value>(body)?.to_string())
}

fn draw(body: &[u8]) -> Result<String> {
    let tree: Tree = read(body)?;
    let mut lines = Vec::new();
    for root in &tree.roots {
        lines.push(label(root));
        branches(root, "", &mut lines);
    }
    Ok(match lines.is_empty() {
        true => "no templates and no sandboxes".into(),
        false => lines.join("\n"),
    })
}

fn read<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T> {
    let mut reader = serde_json::Deserializer::from_slice(body);
    reader.disable_recursion_limit();
    T::deserialize(&mut reader).map_err(|error| {
        Failure::protocol(format!("the daemon's answer to /tree is not as expected: {error}"))
    })
}

fn label(node: &Node) -> String {
    let kind = if node.kind == "template" { "template " } else { "" };
    format!("{kind}{} {}", node.id, node.state).trim_end().to_owned()
}

fn branches(node: &Node, indent: &str, lines: &mut Vec<String>) {
    for (index, child) in node.children.iter().enumerate() {
        let last = index + 1 == node.children.len();
        let (elbow, below) = if last { ("└── ", "    ") } else { ("├── ", "│   ") };
        lines.push(format!("{indent}{elbow}{}", label(child)));
        branches(child, &format!("{indent}{below}"), lines);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lineage_a_thousand_forks_deep_is_drawn() {
        let depth = 1000;
        let mut text = r#"{"id":"a","children":["#.repeat(depth);
        text.push_str(r#"{"id":"leaf"}"#);
        text.push_str(&"]}".repeat(depth));
        let body = format!(r#"{{"roots":[{text}]}}"#);
        let stack_bytes = body.len() / LEVEL_BYTES * STACK_BYTES_PER_LEVEL;
        let thread = std::thread::Builder::new().stack_size(stack_bytes).spawn(move || draw(body.as_bytes()));
        let drawn = thread.unwrap().join().unwrap().unwrap();
        assert_eq!(drawn.lines().count(), depth + 1);
        assert!(drawn.ends_with("└── leaf"));
    }
}
