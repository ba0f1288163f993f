//! Test cases of softmax and log-softmax.
//!
//! The inputs are between -2 and 2, so the plain forms need not subtract the maximum before `exp`. Cases without
//! elements have no plain form, because there are no values to compare.

use super::{LOG_SOFTMAX, SOFTMAX};
use crate::ops::case::{Case, Entry};
use crate::{Result, Tensor};

fn softmax_plain(x: &Tensor, dim: usize) -> Result<Tensor> {
    let e = x.exp()?;
    e.div(&e.sum(&[dim], true)?)
}

fn log_softmax_plain(x: &Tensor, dim: usize) -> Result<Tensor> {
    x.sub(&x.exp()?.sum(&[dim], true)?.log()?)
}

/// Registry entries of this folder.
pub static ENTRIES: &[Entry] = &[
    Entry {
        info: &SOFTMAX,
        cases: || {
            vec![
                Case::new("last", &[&[3, 7]], |x| x[0].softmax(1)).plain(|x| softmax_plain(&x[0], 1)),
                // Rows of several SIMD vectors, the last of them incomplete.
                Case::new("long rows", &[&[2, 71]], |x| x[0].softmax(1)).plain(|x| softmax_plain(&x[0], 1)),
                Case::new("middle", &[&[2, 5, 3]], |x| x[0].softmax(1)).plain(|x| softmax_plain(&x[0], 1)),
                Case::new("no rows", &[&[0, 3]], |x| x[0].softmax(1)),
                Case::new("empty rows", &[&[3, 0]], |x| x[0].softmax(1)),
            ]
        },
    },
    Entry {
        info: &LOG_SOFTMAX,
        cases: || {
            vec![
                Case::new("last", &[&[3, 7]], |x| x[0].log_softmax(1)).plain(|x| log_softmax_plain(&x[0], 1)),
                Case::new("long rows", &[&[2, 71]], |x| x[0].log_softmax(1)).plain(|x| log_softmax_plain(&x[0], 1)),
                Case::new("first", &[&[5, 3]], |x| x[0].log_softmax(0)).plain(|x| log_softmax_plain(&x[0], 0)),
                Case::new("no rows", &[&[0, 3]], |x| x[0].log_softmax(1)),
                Case::new("empty rows", &[&[3, 0]], |x| x[0].log_softmax(1)),
            ]
        },
    },
];
