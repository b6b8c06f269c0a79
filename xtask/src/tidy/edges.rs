//! Which crate may use which: the real edges are exactly the listed ones.

use std::collections::BTreeSet;

use anyhow::{Context, Result};

/// Compares the edges in cargo's metadata with `list`, lines of `crate -> crate crate`.
pub fn check(metadata: &str, list: &str) -> Result<Vec<String>> {
    let real = real_edges(metadata)?;
    let allowed = listed_edges(list)?;
    let mut problems = Vec::new();
    for (from, to) in real.difference(&allowed) {
        problems.push(format!("{from} uses {to}, which xtask/src/tidy/edges.txt does not allow"));
    }
    for (from, to) in allowed.difference(&real) {
        problems
            .push(format!("xtask/src/tidy/edges.txt allows {from} -> {to}, which does not exist; remove it"));
    }
    Ok(problems)
}

type Edges = BTreeSet<(String, String)>;

fn real_edges(metadata: &str) -> Result<Edges> {
    let metadata: serde_json::Value =
        serde_json::from_str(metadata).context("cargo metadata wrote no JSON")?;
    let packages = metadata["packages"].as_array().context("cargo metadata names no packages")?;
    let mut edges = Edges::new();
    for package in packages {
        let from = package["name"].as_str().context("a package has no name")?;
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            // Only a dependency on a crate of this workspace has a path.
            if let (Some(to), true) = (dependency["name"].as_str(), dependency["path"].is_string()) {
                edges.insert((from.to_owned(), to.to_owned()));
            }
        }
    }
    Ok(edges)
}

fn listed_edges(list: &str) -> Result<Edges> {
    let mut edges = Edges::new();
    for line in list.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (from, to) = line.split_once("->").with_context(|| format!("{line:?} is not CRATE -> CRATE…"))?;
        edges.extend(to.split_whitespace().map(|to| (from.trim().to_owned(), to.to_owned())));
    }
    Ok(edges)
}

#[cfg(test)]
mod tests {
    use super::*;

    const METADATA: &str = r#"{"packages":[
        {"name":"cli","dependencies":[{"name":"host","path":"/x"},{"name":"serde","path":null}]},
        {"name":"host","dependencies":[]}]}"#;

    #[test]
    fn listed_edges_are_fine() {
        assert!(check(METADATA, "# who -> whom\ncli -> host\n").unwrap().is_empty());
    }

    #[test]
    fn new_and_vanished_edges_are_found() {
        let problems = check(METADATA, "host -> cli\n").unwrap();
        assert_eq!(problems.len(), 2);
        assert!(problems[0].contains("cli uses host"));
        assert!(problems[1].contains("host -> cli"));
    }
}
