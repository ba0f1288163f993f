//! What a tensor in a file is to a parameter of a model.

use trainable_candle_core::{Error, Result, Tensor};

/// One parameter in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// The name of the tensor in the file.
    pub key: String,
    /// What the tensor is to the parameter.
    pub form: Form,
}

/// What a tensor in a file is to a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The parameter itself.
    Plain,
    /// A matrix, transposed.
    Transposed,
    /// The matrix of a linear layer as a 1×1 convolution, (out, in, 1, 1).
    Pointwise,
    /// One of several stacked parameters, as this many of the equal shares of the tensor's rows.
    Rows {
        /// Its first share, from 0.
        first: usize,
        /// How many shares are its rows.
        count: usize,
        /// How many shares there are.
        of: usize,
    },
    /// Its second half of rows, then the first.
    Swapped,
    /// The rows of heads, in which those of its first half and its second take turns.
    Interleaved {
        /// How many heads there are.
        heads: usize,
    },
}

impl Key {
    /// The parameter itself under `key`.
    pub fn plain(key: impl Into<String>) -> Self {
        Self { key: key.into(), form: Form::Plain }
    }

    /// The layer whose weight this is.
    pub fn of_layer(self) -> Option<Self> {
        Some(Self { key: self.key.strip_suffix(".weight")?.to_owned(), form: self.form })
    }
}

impl Form {
    /// The share `index` of `of` equal ones.
    pub const fn share(index: usize, of: usize) -> Self {
        Self::Rows { first: index, count: 1, of }
    }

    /// The parameter's shape if the tensor's is `stored`; none if that cannot be.
    pub fn shape(self, stored: &[usize]) -> Option<Vec<usize>> {
        match (self, stored) {
            (Self::Plain, dims) => Some(dims.to_vec()),
            (Self::Transposed, &[rows, columns]) => Some(vec![columns, rows]),
            (Self::Pointwise, &[out, input] | &[out, input, 1, 1]) => Some(vec![out, input]),
            (Self::Rows { count, of, .. }, &[rows, ref rest @ ..]) if rows % of == 0 => {
                Some(std::iter::once(rows / of * count).chain(rest.iter().copied()).collect())
            }
            (Self::Swapped, dims @ &[rows, ..]) if rows % 2 == 0 => Some(dims.to_vec()),
            (Self::Interleaved { heads }, dims @ &[rows, ..]) if rows % (2 * heads) == 0 => Some(dims.to_vec()),
            _ => None,
        }
    }

    /// The shape of the tensor if the parameter's is `dims`.
    #[must_use]
    pub fn stored_shape(self, dims: &[usize]) -> Vec<usize> {
        match (self, dims) {
            (Self::Transposed, &[rows, columns]) => vec![columns, rows],
            (Self::Pointwise, dims) => [dims, &[1, 1]].concat(),
            (Self::Rows { count, of, .. }, &[rows, ref rest @ ..]) => [&[rows / count * of], rest].concat(),
            _ => dims.to_vec(),
        }
    }

    /// The parameter that `stored` holds; [`shape`](Self::shape) must have found it possible.
    ///
    /// # Errors
    /// Those of the copy.
    pub fn read(self, stored: &Tensor) -> Result<Tensor> {
        match self {
            Self::Plain => Ok(stored.clone()),
            Self::Transposed => stored.t()?.contiguous(),
            Self::Pointwise => stored.reshape(&stored.dims()[..2]),
            Self::Rows { first, count, of } => {
                let share = stored.dims()[0] / of;
                // A copy, or each part would keep the whole.
                Ok(Tensor::from_raw(&stored.narrow(0, first * share, count * share)?.raw().force_contiguous()?))
            }
            Self::Swapped => swapped(stored),
            Self::Interleaved { heads } => turned(stored, |half| [heads, half, 2]),
        }
    }

    /// Whether it leaves each row as it is, so that rows may be of any elements.
    pub const fn keeps_rows(self) -> bool {
        matches!(self, Self::Plain | Self::Rows { .. } | Self::Swapped | Self::Interleaved { .. })
    }

    /// The tensor to write for all parameters under one key, each with its form.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is none; those of the copy.
    pub fn write(parts: &[(Self, Tensor)]) -> Result<Tensor> {
        let [(form, parameter), ..] = parts else {
            return Err(Error::argument("save", "there is nothing to write"));
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
            Self::Swapped => swapped(parameter),
            Self::Interleaved { heads } => turned(parameter, |half| [*heads, 2, half]),
        }
    }
}

/// Rows seen as `sizes` of half a head, the last two exchanged.
fn turned(tensor: &Tensor, sizes: impl Fn(usize) -> [usize; 3]) -> Result<Tensor> {
    let dims = tensor.dims();
    let heads = sizes(0)[0];
    let [heads, outer, inner] = sizes(dims[0] / heads / 2);
    let columns = dims[1..].iter().product::<usize>();
    tensor.reshape((heads, outer, inner, columns))?.transpose(1, 2)?.contiguous()?.reshape(dims)
}

/// The two halves of the rows, the second one first.
///
/// # Errors
/// Those of the copy.
pub fn swapped(tensor: &Tensor) -> Result<Tensor> {
    let half = tensor.dims()[0] / 2;
    Tensor::cat(&[&tensor.narrow(0, half, half)?, &tensor.narrow(0, 0, half)?], 0)
}
