//! Reads the names and shapes of the parameters of published models from `tests/golden`.

use std::collections::BTreeMap;
use std::path::Path;

/// The shapes of parameters by name.
pub type Shapes = BTreeMap<String, Vec<usize>>;

/// The parameters that the file `name` of `tests/golden` describes. The file is a list of rules. A rule has a name, a
/// shape, and a list of block indices. It stands for one parameter per index, whose name has the index in place of `*`.
/// If the name has no `*`, the list is empty, and the rule stands for the parameter of this name.
pub fn published(name: &str) -> Shapes {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name);
    let rules: Vec<(String, Vec<usize>, Vec<usize>)> =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut shapes = Shapes::new();
    for (pattern, shape, indices) in rules {
        if indices.is_empty() {
            shapes.insert(pattern.clone(), shape.clone());
        }
        shapes.extend(indices.iter().map(|index| (pattern.replacen('*', &index.to_string(), 1), shape.clone())));
    }
    shapes
}
