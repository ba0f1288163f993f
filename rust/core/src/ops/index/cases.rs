//! Test cases of index operations.

use super::{EMBEDDING, GATHER, INDEX_SELECT, embedding};
use crate::ops::case::{Case, Entry};
use crate::{Result, Tensor};

/// Ids `values` of shape `dims` on the device of `x`.
fn ids(x: &Tensor, values: &[i64], dims: &[usize]) -> Result<Tensor> {
    Tensor::from_vec(values.to_vec(), dims, x.device())
}

/// Registry entries of this folder. A case has a label, the shapes of the random inputs `x`, and a function of `x`. Its
/// ids are constants. In most cases an id repeats, so that the backward pass adds several gradients to one element.
pub static ENTRIES: &[Entry] = &[
    Entry {
        info: &INDEX_SELECT,
        cases: || {
            vec![
                Case::new("repeated rows", &[&[3, 5]], |x| x[0].index_select(&ids(&x[0], &[2, 0, 2, 2], &[4])?, 0)),
                Case::new("middle dimension", &[&[2, 3, 5]], |x| x[0].index_select(&ids(&x[0], &[1, 1], &[2])?, 1)),
                Case::new("last dimension", &[&[2, 5]], |x| x[0].index_select(&ids(&x[0], &[4, 0, 4], &[3])?, 1)),
                Case::new("no ids", &[&[3, 5]], |x| x[0].index_select(&ids(&x[0], &[], &[0])?, 0)),
                Case::new("empty rows", &[&[3, 0]], |x| x[0].index_select(&ids(&x[0], &[1, 1], &[2])?, 0)),
            ]
        },
    },
    Entry {
        info: &GATHER,
        cases: || {
            vec![
                Case::new("last dimension", &[&[2, 5]], |x| x[0].gather(&ids(&x[0], &[4, 1, 4, 0, 0, 0], &[2, 3])?, 1)),
                Case::new("first dimension", &[&[3, 2]], |x| {
                    x[0].gather(&ids(&x[0], &[2, 1, 2, 0, 2, 0, 1, 1], &[4, 2])?, 0)
                }),
                Case::new("ids of smaller shape", &[&[3, 4, 5]], |x| {
                    x[0].gather(&ids(&x[0], &[3, 1, 0, 0], &[2, 2, 1])?, 1)
                }),
                Case::new("no ids", &[&[3, 5]], |x| x[0].gather(&ids(&x[0], &[], &[3, 0])?, 1)),
            ]
        },
    },
    Entry {
        info: &EMBEDDING,
        cases: || {
            vec![
                Case::new("matrix of ids", &[&[5, 3]], |x| {
                    embedding(&x[0], &ids(&x[0], &[4, 1, 1, 0, 4, 4], &[2, 3])?)
                }),
                Case::new("scalar id", &[&[5, 3]], |x| embedding(&x[0], &ids(&x[0], &[3], &[])?)),
                Case::new("no ids", &[&[5, 3]], |x| embedding(&x[0], &ids(&x[0], &[], &[2, 0])?)),
            ]
        },
    },
];
