//! LoKr (`LyCORIS`, arXiv:2309.14859) changes a weight W to W + s C ⊗ D: s is the adapter's scale, and C ⊗ D is the
//! Kronecker product of a small matrix C and a larger matrix D. Each of the two matrices is stored whole or as a
//! low-rank product.
//!
//! On a convolution, D also has the kernel's height and width. LyCORIS' Tucker form of convolutions is not supported.
//!
//! The code follows
//! <https://github.com/KohakuBlueleaf/LyCORIS/blob/f49d30d670591ec8841d241d79aaa8449b30a715/lycoris/functional/lokr.py#L11>
//! and
//! <https://github.com/KohakuBlueleaf/LyCORIS/blob/f49d30d670591ec8841d241d79aaa8449b30a715/lycoris/functional/general.py#L14>.

use trainable_candle_core::{DType, Error, Result, Tensor, Var};

use super::delta::{Added, Delta};
use super::kind::{Parameters, SavedByAdapter, Start, StartValues, find};
use super::{Adapter, AdapterKind, AdapterSettings, Layout};
use crate::base::Base;

/// The names of C's parameters: the whole matrix C, or the two factors of a low-rank C.
const SMALL: [&str; 3] = ["lokr_w1", "lokr_w1_a", "lokr_w1_b"];
/// The names of D's parameters: the whole matrix D, or the two factors of a low-rank D.
const LARGE: [&str; 3] = ["lokr_w2", "lokr_w2_a", "lokr_w2_b"];

/// LoKr in the registry.
pub static KIND: AdapterKind = AdapterKind {
    name: "lokr",
    // Files have channels before height and width, memory has them after. `Kernel` and `FlatKernel` convert between the
    // two orders, for four dimensions and for a matrix (rank, height · width · channels).
    parameters: &[
        (SMALL[0], Layout::Same),
        (SMALL[1], Layout::Same),
        (SMALL[2], Layout::Same),
        (LARGE[0], Layout::Kernel),
        (LARGE[1], Layout::Same),
        (LARGE[2], Layout::FlatKernel),
    ],
    // Each LoKr has exactly one of these parameters, by which readers of files recognize the kind.
    mark: &[SMALL[0], SMALL[1]],
    // The first dimension of these parameters is the rank.
    ranked: &[LARGE[2], SMALL[2]],
    saved: SavedByAdapter::low_rank,
    start,
    build,
};

/// Return two numbers whose product is `size`, the smaller first. `factor` is the setting `decompose_factor`. If it
/// divides `size`, it is one of the two numbers. Otherwise the smaller number is the largest divisor of `size` that is
/// at most √`size` and, if a `factor` is given, at most `factor`.
fn factorization(size: usize, factor: Option<usize>) -> (usize, usize) {
    if let Some(factor) = factor.filter(|&f| f > 0 && size.is_multiple_of(f)) {
        return (factor.min(size / factor), factor.max(size / factor));
    }
    let small = (1..=factor.unwrap_or(size).min(size))
        .take_while(|small| small * small <= size)
        .filter(|&small| size.is_multiple_of(small))
        .last()
        .unwrap_or(1);
    (small, size / small)
}

/// The shapes and initial values of `LyCORIS` (not the start of PiSSA): D, or the second factor of a low-rank D, is
/// zero, and all other parameters have the initial values of torch's linear layers. As in `LyCORIS`, D is low-rank if
/// the rank is less than half of its longer side. The same holds for C if `decompose_both` is set; otherwise C is
/// whole.
fn start(base: &Base<'_>, settings: &AdapterSettings) -> Parameters<Start> {
    let rank = settings.rank;
    let (out_small, out_large) = factorization(base.rows(), settings.decompose_factor);
    let (in_small, in_large) = factorization(base.inputs(), settings.decompose_factor);
    let kaiming = |dims: [usize; 2]| Start::new(dims, StartValues::Kaiming);
    let mut parameters = Vec::new();
    if settings.decompose_both && 2 * rank < out_small.max(in_small) {
        parameters.push((SMALL[1], kaiming([out_small, rank])));
        parameters.push((SMALL[2], kaiming([rank, in_small])));
    } else {
        parameters.push((SMALL[0], kaiming([out_small, in_small])));
    }
    if 2 * rank < out_large.max(in_large) {
        parameters.push((LARGE[1], kaiming([out_large, rank])));
        // On a convolution, `base.columns()` is height · width · inputs, so this is height · width · `in_large`.
        let large_columns = base.columns() / in_small;
        parameters.push((LARGE[2], Start::new([rank, large_columns], StartValues::Zero)));
    } else {
        let dims = match base.kernel() {
            Some([height, width]) => vec![out_large, height, width, in_large],
            None => vec![out_large, in_large],
        };
        parameters.push((LARGE[0], Start::new(dims, StartValues::Zero)));
    }
    parameters
}

fn build(parameters: &[(&'static str, Var)], base: &Base<'_>, settings: &AdapterSettings) -> Result<Box<dyn Adapter>> {
    let lokr = LoKr { small: Matrix::of(parameters, SMALL)?, large: Matrix::of(parameters, LARGE)? };
    let fits = match (lokr.small.dims(), lokr.large.dims()) {
        (Some((small_rows, small_columns)), Some((large_rows, large_columns))) => {
            small_rows * large_rows == base.rows() && small_columns * large_columns == base.columns()
        }
        _ => false,
    };
    if !fits {
        let found: Vec<String> = parameters.iter().map(|(name, var)| format!("{name} {:?}", var.dims())).collect();
        return Err(Error::shape(
            "LoKr",
            format!(
                "found {} (channels last), expected matrices whose Kronecker product has the weight's shape, {:?}",
                found.join(", "),
                base.weight.dims()
            ),
        ));
    }
    Ok(Box::new(Added::new(lokr, settings)))
}

/// One of the two matrices of the Kronecker product.
enum Matrix {
    /// The whole matrix: (n, m), or (n, height, width, m).
    Whole(Var),
    /// The two factors of a low-rank matrix: (n, r) and (r, m).
    LowRank(Var, Var),
}

impl Matrix {
    /// Find the parameters of one matrix by their `names`, as in [`SMALL`].
    fn of(parameters: &[(&'static str, Var)], names: [&str; 3]) -> Result<Self> {
        match names.map(|name| find(parameters, name)) {
            [Some(whole), None, None] => Ok(Self::Whole(whole)),
            [None, Some(a), Some(b)] => Ok(Self::LowRank(a, b)),
            _ => {
                let [whole, a, b] = names;
                Err(Error::Config(format!("LoKr: expected either {whole} alone, or {a} and {b}")))
            }
        }
    }

    /// The numbers of rows and columns of the matrix; height and width count as columns. None if the factors of a
    /// low-rank matrix do not fit together.
    fn dims(&self) -> Option<(usize, usize)> {
        match self {
            Self::Whole(whole) => whole.dims().split_first().map(|(n, rest)| (*n, rest.iter().product())),
            Self::LowRank(a, b) => match (a.dims(), b.dims()) {
                (&[n, r], &[b_rank, m]) if r == b_rank => Some((n, m)),
                _ => None,
            },
        }
    }

    /// Compute the matrix from parameters converted to `dtype`.
    fn value(&self, dtype: DType) -> Result<Tensor> {
        match self {
            Self::Whole(whole) => whole.to_dtype(dtype),
            Self::LowRank(a, b) => a.to_dtype(dtype)?.matmul(&b.to_dtype(dtype)?),
        }
    }
}

/// The two matrices of one layer.
struct LoKr {
    small: Matrix,
    large: Matrix,
}

impl Delta for LoKr {
    /// Compute Δ[a · n + i, p, b · m + j] = C[a, b] · D[i, p, j], where D has n rows and, for each position p in the
    /// convolution's kernel, m columns.
    fn delta(&self, base: &Base<'_>, dtype: DType) -> Result<Tensor> {
        let (small, large) = (self.small.value(dtype)?, self.large.value(dtype)?);
        let (small_rows, small_columns) = (small.dims()[0], small.dims()[1]);
        let positions = base.kernel().map_or(1, |[height, width]| height * width);
        let (large_rows, large_columns) = (large.dims()[0], base.inputs() / small_columns.max(1));
        let small = small.reshape((small_rows, 1, 1, small_columns, 1))?;
        let large = large.reshape((1, large_rows, positions, 1, large_columns))?;
        small.mul(&large)?.reshape(base.weight.dims())
    }
}

#[cfg(test)]
mod tests {
    use super::factorization;

    /// Each size has the expected results for `factor` = None, 2, 4, 8 and 16: those of
    /// `lycoris.functional.general.factorization` of LyCORIS 4.1.
    #[test]
    fn sizes_are_factored_as_in_lycoris() {
        for (size, expected) in [
            (127, [(1, 127), (1, 127), (1, 127), (1, 127), (1, 127)]),
            (128, [(8, 16), (2, 64), (4, 32), (8, 16), (8, 16)]),
            (250, [(10, 25), (2, 125), (2, 125), (5, 50), (10, 25)]),
            (360, [(18, 20), (2, 180), (4, 90), (8, 45), (15, 24)]),
            (512, [(16, 32), (2, 256), (4, 128), (8, 64), (16, 32)]),
            (1024, [(32, 32), (2, 512), (4, 256), (8, 128), (16, 64)]),
        ] {
            for (factor, expected) in [None, Some(2), Some(4), Some(8), Some(16)].into_iter().zip(expected) {
                assert_eq!(factorization(size, factor), expected, "size {size}, factor {factor:?}");
            }
        }
    }
}
