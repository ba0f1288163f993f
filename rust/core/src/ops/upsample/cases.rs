//! Test cases of nearest-neighbour resizing.

use super::{UPSAMPLE_NEAREST2D, sources, upsample_nearest2d};
use crate::ops::case::{Case, Entry};
use crate::{Result, Tensor};

/// The plain form for `x` (batch, height, width, channels) and `size`, the (height, width) of the result:
/// `index_select` along height and along width.
fn plain(x: &Tensor, size: [usize; 2]) -> Result<Tensor> {
    // For each output position along `axis` of `x`, the input position that it copies. `size` has no batch dimension,
    // so the number of output positions is `size[axis - 1]`.
    let index = |axis: usize| {
        let positions = sources(x.dims()[axis], size[axis - 1]).into_iter().map(|i| i as i64).collect::<Vec<_>>();
        Tensor::from_vec(positions, size[axis - 1], x.device())
    };
    x.index_select(&index(1)?, 1)?.index_select(&index(2)?, 2)
}

/// Registry entry of this operation.
pub static ENTRIES: &[Entry] = &[Entry {
    info: &UPSAMPLE_NEAREST2D,
    cases: || {
        let case = |label, dims: &[usize], size| {
            Case::new(label, &[dims], move |x| upsample_nearest2d(&x[0], size)).plain(move |x| plain(&x[0], size))
        };
        vec![
            case("doubled", &[2, 3, 2, 5], [6, 4]),
            case("odd sizes", &[1, 3, 4, 2], [5, 7]),
            case("smaller", &[1, 5, 7, 3], [3, 2]),
            case("no images", &[0, 2, 2, 3], [4, 4]),
            // This case tests only that sizes of 0 are accepted, which needs no plain form.
            Case::new("no pixels", &[&[1, 2, 0, 3]], |x| upsample_nearest2d(&x[0], [4, 0])),
        ]
    },
}];
