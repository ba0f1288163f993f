//! Cases of the Cayley transform.

use super::{CAYLEY, cayley};
use crate::ops::case::{Case, Entry};

/// Registry entry of this operation.
pub static ENTRIES: &[Entry] = &[Entry {
    info: &CAYLEY,
    cases: || {
        // `dims` are (number of matrices, n (n - 1) / 2): the operation reads the elements above the diagonal of n x n
        // matrices, 28 elements of an 8 x 8 matrix and 6 of a 4 x 4 matrix.
        let case = |label, dims: &[usize]| Case::new(label, &[dims], |x| cayley(&x[0]));
        vec![
            case("5 x 5", &[3, 10]),
            case("2 x 2", &[5, 1]),
            case("one matrix", &[1, 28]),
            case("no matrices", &[0, 6]),
            case("1 x 1", &[3, 0]),
        ]
    },
}];
