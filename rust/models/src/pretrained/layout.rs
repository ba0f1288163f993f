//! Where the parameters of a model are in a file: under what key, and in what form.

use trainable_candle_core::{Error, Result, Tensor};

/// Whose names the tensors of a file have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// Those of diffusers and transformers, which are the models' own.
    Own,
    /// Those of the code that the model was published with.
    Original,
}

/// How the keys of a model are written in a file that holds others too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Original {
    /// What they begin with.
    pub prefix: &'static str,
    /// Whose names follow.
    pub naming: Naming,
}

/// The names of a model's parameters in one kind of file. A model's `keys.rs` has one for each kind.
pub trait Layout {
    /// What the keys of this model begin with in a file that holds others too.
    fn prefix(&self) -> &str {
        ""
    }

    /// Where the parameter `name` may be, without the prefix. Files are written with the first.
    fn places(&self, name: &str) -> Vec<Key>;

    /// Whether the key (without the prefix) may be left unread: what is computed, or concerns training alone.
    fn ignores(&self, key: &str) -> bool {
        let _ = key;
        false
    }
}

/// Files whose names are the model's own.
pub struct OwnNames;

impl Layout for OwnNames {
    fn places(&self, name: &str) -> Vec<Key> {
        vec![Key::plain(name)]
    }
}

/// A model's own names in a file that holds others too, with what they begin with.
pub struct PrefixedNames(pub &'static str);

impl Layout for PrefixedNames {
    fn prefix(&self) -> &str {
        self.0
    }

    fn places(&self, name: &str) -> Vec<Key> {
        OwnNames.places(name)
    }
}

/// One parameter in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// The name of the tensor in the file.
    pub key: String,
    /// What the tensor is to the parameter.
    pub form: Form,
}

/// A layer of a model, the layer of a file that holds it, and in what form.
pub type Renaming = (&'static str, &'static str, Form);

/// The key of a parameter whose layer is in `renamings`: `ff.net.2.bias` is `mlp.fc2.bias`.
pub fn renamed(name: &str, renamings: &[Renaming]) -> Option<Key> {
    renamings.iter().find_map(|(ours, theirs, form)| {
        let parameter = name.strip_prefix(ours)?.strip_prefix('.')?;
        Some(Key { key: format!("{theirs}.{parameter}"), form: *form })
    })
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
    /// One of several parameters, one below the other, as so many of the equal shares of the tensor's rows.
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
}

impl Key {
    /// The parameter itself under `key`.
    pub fn plain(key: impl Into<String>) -> Self {
        Self { key: key.into(), form: Form::Plain }
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
            _ => None,
        }
    }

    /// The shape of the tensor if the parameter's is `dims`.
    pub(super) fn stored_shape(self, dims: &[usize]) -> Vec<usize> {
        match (self, dims) {
            (Self::Transposed, &[rows, columns]) => vec![columns, rows],
            (Self::Pointwise, dims) => [dims, &[1, 1]].concat(),
            (Self::Rows { count, of, .. }, &[rows, ref rest @ ..]) => [&[rows / count * of], rest].concat(),
            _ => dims.to_vec(),
        }
    }

    /// The parameter that `stored` holds; `shape` must have found it possible.
    pub(super) fn read(self, stored: &Tensor) -> Result<Tensor> {
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
        }
    }

    /// The tensor to write for all parameters under one key, each with its form.
    pub(super) fn write(parts: &[(Self, Tensor)]) -> Result<Tensor> {
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
        }
    }
}

/// The two halves of the rows, the second one first.
fn swapped(tensor: &Tensor) -> Result<Tensor> {
    let half = tensor.dims()[0] / 2;
    Tensor::cat(&[&tensor.narrow(0, half, half)?, &tensor.narrow(0, 0, half)?], 0)
}
