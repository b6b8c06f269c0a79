//! Guest memory: regions, layers, accounting.
