//! [`Form`]: how a tensor in a file is related to a parameter of a model.

use trainable_candle_core::{Error, Result, Tensor};

/// Where a file stores a parameter: in which tensor, and in which form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// The name of the tensor in the file.
    pub key: String,
    /// How the tensor is related to the parameter.
    pub form: Form,
}

/// How a tensor in a file is related to a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The parameter itself.
    Plain,
    /// The parameter is a matrix, and the tensor is its transpose.
    Transposed,
    /// The parameter is the matrix (out, in) of a linear layer. The tensor is the weight (out, in, 1, 1) of a 1×1
    /// convolution. Reading also accepts (out, in).
    Pointwise,
    /// The tensor stacks several parameters. Its rows are divided into `of` equal shares. The parameter consists of
    /// `count` consecutive shares, beginning with share `first`.
    Rows {
        /// The index of the parameter's first share, from 0.
        first: usize,
        /// The number of shares that belong to the parameter.
        count: usize,
        /// The total number of shares of the tensor.
        of: usize,
    },
    /// The tensor has the second half of the parameter's rows first, then the first half.
    Swapped,
    /// The rows of the parameter are divided into heads, and the rows of each head into two halves. The tensor has the
    /// rows of a head in this order: row 0 of the first half, row 0 of the second half, row 1 of the first half, row 1
    /// of the second half, and so on.
    Interleaved {
        /// The number of heads.
        heads: usize,
    },
    /// The parameter is a vector (size). The tensor has further dimensions of size 1: (size, 1, …).
    Vector {
        /// The number of the tensor's dimensions.
        rank: usize,
    },
    /// The tensor is the kernel (out, in, time, height, width) of a convolution that is causal in time. The parameter
    /// is the kernel's last slice in time, (out, in, height, width). For a single image, the earlier slices multiply
    /// only padding. Writing gives the earlier slices the value 0.
    LastFrame {
        /// The size of the kernel in time.
        frames: usize,
    },
}

impl Key {
    /// A parameter that a file stores unchanged as the tensor `key`.
    pub fn plain(key: impl Into<String>) -> Self {
        Self { key: key.into(), form: Form::Plain }
    }

    /// The key of the layer whose weight has this key: this key without its ending `.weight`. `None` if the key does
    /// not end in `.weight`.
    pub fn of_layer(self) -> Option<Self> {
        Some(Self { key: self.key.strip_suffix(".weight")?.to_owned(), form: self.form })
    }
}

impl Form {
    /// The parameter is the share with this index, from 0, among `of` equal shares of the tensor.
    pub const fn share(index: usize, of: usize) -> Self {
        Self::Rows { first: index, count: 1, of }
    }

    /// The shape of the parameter, given the shape `stored` of the tensor. `None` if a tensor of the shape `stored`
    /// cannot have this form.
    pub fn shape(self, stored: &[usize]) -> Option<Vec<usize>> {
        match (self, stored) {
            (Self::Plain, dims) => Some(dims.to_vec()),
            (Self::Transposed, &[rows, columns]) => Some(vec![columns, rows]),
            (Self::Pointwise, &[out, input] | &[out, input, 1, 1]) => Some(vec![out, input]),
            (Self::Rows { count, of, .. }, &[rows, ref rest @ ..]) if rows % of == 0 => {
                Some(std::iter::once(rows / of * count).chain(rest.iter().copied()).collect())
            }
            (Self::Vector { rank }, &[size, ref ones @ ..])
                if ones.len() + 1 == rank && ones.iter().all(|&n| n == 1) =>
            {
                Some(vec![size])
            }
            (Self::LastFrame { frames }, &[out, input, time, height, width]) if time == frames => {
                Some(vec![out, input, height, width])
            }
            (Self::Swapped, dims @ &[rows, ..]) if rows % 2 == 0 => Some(dims.to_vec()),
            (Self::Interleaved { heads }, dims @ &[rows, ..]) if rows % (2 * heads) == 0 => Some(dims.to_vec()),
            _ => None,
        }
    }

    /// The shape of the tensor, given the shape `dims` of the parameter.
    #[must_use]
    pub fn stored_shape(self, dims: &[usize]) -> Vec<usize> {
        match (self, dims) {
            (Self::Transposed, &[rows, columns]) => vec![columns, rows],
            (Self::Pointwise, dims) => [dims, &[1, 1]].concat(),
            (Self::Rows { count, of, .. }, &[rows, ref rest @ ..]) => [&[rows / count * of], rest].concat(),
            (Self::Vector { rank }, &[size]) => std::iter::once(size).chain(vec![1; rank - 1]).collect(),
            (Self::LastFrame { frames }, &[out, input, height, width]) => vec![out, input, frames, height, width],
            _ => dims.to_vec(),
        }
    }

    /// The parameter in the tensor `stored`. [`shape`](Self::shape) must accept the shape of `stored`.
    ///
    /// # Errors
    /// The errors of the tensor operations.
    pub fn read(self, stored: &Tensor) -> Result<Tensor> {
        match self {
            Self::Plain => Ok(stored.clone()),
            Self::Transposed => stored.t()?.contiguous(),
            Self::Pointwise => stored.reshape(&stored.dims()[..2]),
            Self::Rows { first, count, of } => {
                let share = stored.dims()[0] / of;
                // The rows are copied, because a view would keep the memory of the whole tensor allocated.
                Ok(Tensor::from_raw(&stored.narrow(0, first * share, count * share)?.raw().force_contiguous()?))
            }
            Self::Vector { .. } => stored.reshape(stored.elem_count()),
            Self::LastFrame { frames } => {
                let last = stored.narrow(2, frames - 1, 1)?.squeeze(2)?;
                Ok(Tensor::from_raw(&last.raw().force_contiguous()?))
            }
            Self::Swapped => swapped(stored),
            // In the tensor, a head has `half` pairs of rows; a pair has one row of each of the head's two halves.
            Self::Interleaved { heads } => transposed_in_heads(stored, |half| [heads, half, 2]),
        }
    }

    /// Whether the form only selects or reorders whole rows, so that it can be applied to rows of quantized elements.
    pub const fn keeps_rows(self) -> bool {
        matches!(self, Self::Plain | Self::Rows { .. } | Self::Swapped | Self::Interleaved { .. })
    }

    /// Make one tensor of a file. `parts` are all parameters that this tensor contains, each with its form.
    ///
    /// # Errors
    /// [`Error::Argument`] if `parts` is empty; the errors of the tensor operations.
    pub fn write(parts: &[(Self, Tensor)]) -> Result<Tensor> {
        // Only a tensor of the form `Rows` contains several parameters, all of that form.
        let [(form, parameter), ..] = parts else {
            return Err(Error::argument("save", "there is no parameter to write"));
        };
        match form {
            Self::Plain => Ok(parameter.clone()),
            Self::Transposed => parameter.t()?.contiguous(),
            Self::Pointwise => parameter.reshape([parameter.dims(), &[1, 1]].concat()),
            Self::Rows { .. } => {
                let mut parts: Vec<(usize, &Tensor)> = parts
                    .iter()
                    .map(|(form, tensor)| (if let Self::Rows { first, .. } = form { *first } else { 0 }, tensor))
                    .collect();
                parts.sort_by_key(|&(first, _)| first);
                Tensor::cat(&parts.into_iter().map(|(_, tensor)| tensor).collect::<Vec<_>>(), 0)
            }
            Self::Vector { .. } => parameter.reshape(form.stored_shape(parameter.dims())),
            Self::LastFrame { frames } => {
                let mut dims = form.stored_shape(parameter.dims());
                dims[2] = frames - 1;
                let earlier = Tensor::zeros(dims, parameter.dtype(), parameter.device())?;
                Tensor::cat(&[&earlier, &parameter.unsqueeze(2)?], 2)
            }
            Self::Swapped => swapped(parameter),
            // In the parameter, each of the two halves of a head has `half` rows.
            Self::Interleaved { heads } => transposed_in_heads(parameter, |half| [*heads, 2, half]),
        }
    }
}

/// Reshape the rows of a tensor to three dimensions (heads, outer, inner) and exchange the dimensions outer and inner.
/// `sizes` gets the number of rows in half a head and returns the sizes of the three dimensions.
fn transposed_in_heads(tensor: &Tensor, sizes: impl Fn(usize) -> [usize; 3]) -> Result<Tensor> {
    let dims = tensor.dims();
    // The number of heads does not depend on the argument, so any argument gives it.
    let heads = sizes(0)[0];
    let [heads, outer, inner] = sizes(dims[0] / heads / 2);
    let columns = dims[1..].iter().product::<usize>();
    tensor.reshape((heads, outer, inner, columns))?.transpose(1, 2)?.contiguous()?.reshape(dims)
}

/// A copy of `tensor` with the second half of its rows first, then the first half.
///
/// # Errors
/// The errors of the tensor operations.
pub fn swapped(tensor: &Tensor) -> Result<Tensor> {
    let half = tensor.dims()[0] / 2;
    Tensor::cat(&[&tensor.narrow(0, half, half)?, &tensor.narrow(0, 0, half)?], 0)
}
