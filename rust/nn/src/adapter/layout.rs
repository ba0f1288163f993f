//! [`Layout`]: the layout of an adapter's parameters in files and in memory.

use trainable_candle_core::ops::cayley::size_of;
use trainable_candle_core::{DType, Error, Result, Tensor};

use super::oft::upper_places;
use crate::base::Base;

/// How the shape of an adapter's parameter in files differs from its shape in memory, for a convolution with h x w
/// kernels and c input channels (per group); n, m and k stand for any sizes. Parameters in memory are channels-last, as
/// this library's convolutions read them. For a linear layer both shapes are the same, except for
/// [`UpperTriangle`](Self::UpperTriangle).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// The same as in memory.
    Same,
    /// (n, h, w, c) in memory, (n, c, h, w) in files.
    Kernel,
    /// (n, h · w · c) in memory, (n, c · h · w) in files.
    FlatKernel,
    /// (n, m) in memory, (n, m, 1, 1) in files.
    Pointwise,
    /// (n) in memory, (1, n, 1, 1) in files.
    Channels,
    /// (1, n) in memory, (1, n, 1, 1) in files.
    Row,
    /// (k, n (n - 1) / 2) in memory: the strict upper triangles of k skew-symmetric matrices Q. (k, n, n) in files:
    /// matrices M with Q = M - Mᵀ. Written files have M with the upper triangle of Q and zeros elsewhere.
    UpperTriangle,
}

impl Layout {
    /// Convert a parameter to the layout of files, as a view where possible.
    ///
    /// # Errors
    /// [`Error::Shape`] if the parameter does not fit the layer.
    pub fn to_file(self, base: &Base<'_>, value: &Tensor) -> Result<Tensor> {
        if self == Self::UpperTriangle {
            return squares(value);
        }
        // A linear layer has no kernel size.
        let (Some([height, width]), dims) = (base.kernel(), value.dims()) else { return Ok(value.clone()) };
        match self {
            Self::Same | Self::UpperTriangle => Ok(value.clone()),
            Self::Kernel => value.permute(&[0, 3, 1, 2]),
            Self::FlatKernel => {
                let channels = dims[1] / (height * width).max(1);
                value
                    .reshape((dims[0], height, width, channels))?
                    .permute(&[0, 3, 1, 2])?
                    .contiguous()?
                    .reshape((dims[0], dims[1]))
            }
            Self::Pointwise | Self::Row => value.reshape((dims[0], dims[1], 1, 1)),
            Self::Channels => value.reshape((1, dims[0], 1, 1)),
        }
    }

    /// Convert a parameter from the layout of files to the layout in memory. [`Pointwise`](Self::Pointwise),
    /// [`Channels`](Self::Channels) and [`Row`](Self::Row) also accept their shape in memory. For a linear layer, only
    /// the shape of [`UpperTriangle`](Self::UpperTriangle) is checked.
    ///
    /// # Errors
    /// [`Error::Shape`] if the value does not have the layout of files.
    pub fn from_file(self, base: &Base<'_>, value: &Tensor) -> Result<Tensor> {
        if self == Self::UpperTriangle {
            return triangles(value);
        }
        // A linear layer has no kernel size.
        let Some([height, width]) = base.kernel() else { return Ok(value.clone()) };
        let misfit = |expected: &str| {
            Error::shape(
                "adapter",
                format!("a parameter has shape {:?} in the file, expected {expected}", value.dims()),
            )
        };
        match (self, value.dims()) {
            (Self::Same | Self::UpperTriangle, _) => Ok(value.clone()),
            (Self::Kernel, &[_, _, _, _]) => value.permute(&[0, 2, 3, 1])?.contiguous(),
            (Self::Kernel, _) => Err(misfit("(n, channels, height, width)")),
            (Self::FlatKernel, &[n, columns]) if columns.is_multiple_of((height * width).max(1)) => value
                .reshape((n, columns / (height * width).max(1), height, width))?
                .permute(&[0, 2, 3, 1])?
                .contiguous()?
                .reshape((n, columns)),
            (Self::FlatKernel, _) => Err(misfit(&format!("(n, channels x {height} x {width})"))),
            (Self::Pointwise | Self::Row, &[n, m, 1, 1] | &[n, m]) => value.reshape((n, m)),
            (Self::Channels, &[1, n, 1, 1] | &[n]) => value.reshape(n),
            (Self::Pointwise, _) => Err(misfit("(n, m, 1, 1)")),
            (Self::Channels | Self::Row, _) => Err(misfit("(1, n, 1, 1)")),
        }
    }
}

/// Expand strict upper triangles (k, n (n - 1) / 2) to matrices (k, n, n) that are zero elsewhere.
fn squares(value: &Tensor) -> Result<Tensor> {
    let (count, elements) = match *value.dims() {
        [count, elements] => (count, elements),
        _ => {
            return Err(Error::shape(
                "adapter",
                format!("a parameter of OFT has shape {:?}, expected (k, n (n - 1) / 2)", value.dims()),
            ));
        }
    };
    // The size n of the matrices. The 1 is never needed, because a parameter is made for some n.
    let size = size_of(elements).unwrap_or(1);
    // Each element of a matrix is an element of the triangle, or the 0 that is appended to it at the index `elements`.
    let mut ids = vec![elements as i64; size * size];
    for (id, (row, column)) in upper_places(size).enumerate() {
        ids[row * size + column] = id as i64;
    }
    let zero = Tensor::zeros((count, 1), value.dtype(), value.device())?;
    let ids = Tensor::from_vec(ids, size * size, value.device())?;
    Tensor::cat(&[value, &zero], 1)?.index_select(&ids, 1)?.reshape((count, size, size))
}

/// Compute, for each matrix M of `value` (k, n, n), the strict upper triangle of M - Mᵀ, in f32.
fn triangles(value: &Tensor) -> Result<Tensor> {
    let &[count, size, columns] = value.dims() else {
        let text = format!(
            "oft_blocks has shape {:?}, expected (blocks, n, n): the butterfly form is not supported",
            value.dims()
        );
        return Err(Error::shape("adapter", text));
    };
    if size != columns || size == 0 {
        return Err(Error::shape(
            "adapter",
            format!("oft_blocks has shape {:?}, expected (blocks, n, n)", value.dims()),
        ));
    }
    let value = value.to_dtype(DType::F32)?;
    let skew = value.sub(&value.transpose(1, 2)?)?.reshape((count, size * size))?;
    let ids: Vec<i64> = upper_places(size).map(|(row, column)| (row * size + column) as i64).collect();
    skew.index_select(&Tensor::from_vec(ids, size * (size - 1) / 2, value.device())?, 1)
}
