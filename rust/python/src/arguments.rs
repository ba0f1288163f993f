//! Integers, names and paths as a user passed them.
//!
//! An error must name the function and the parameter, but PyO3 extracts an argument without these names. So extraction
//! to the types of this module accepts any object. The function then reads the value with a method, to which it passes
//! both names for an error.

use std::path::PathBuf;

use pyo3::exceptions::PyTypeError;
use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyFloat, PyInt, PySequence, PyString, PyTuple};
use pyo3::{PyTypeInfo, type_hint_identifier, type_hint_subscript, type_hint_union};
use trainable_candle_core as tc;

use crate::error::{Error, Result};

/// A message quotes a value of at most this many characters, and describes a longer value by its type.
const LONGEST: usize = 40;

/// Describe an object in an error: None, a float or a short str by its value, any other object by its type.
pub fn describe(object: &Bound<'_, PyAny>) -> String {
    let is_quotable = object.is_none() || object.is_instance_of::<PyFloat>() || object.is_instance_of::<PyString>();
    if is_quotable
        && let Some(text) = object.repr().ok().and_then(|text| text.to_str().map(str::to_owned).ok())
        && text.chars().count() <= LONGEST
    {
        return text;
    }
    object.get_type().name().map_or_else(|_| "an object".to_owned(), |kind| format!("a value of type {kind}"))
}

/// A `TypeError` of `op` about the parameter `name`, whose argument has the `description` that [`describe`] returns.
#[cold]
pub fn wrong_type(op: &str, name: &str, description: &str, expected: &str) -> Error {
    PyTypeError::new_err(format!("{op}: {name} is {description}, expected {expected}")).into()
}

/// An argument for a parameter that takes an integer.
#[derive(Clone)]
pub struct Integer(Value);

#[derive(Clone)]
enum Value {
    /// An integer that fits i64 or u64.
    Number(i128),
    /// The description of an integer that fits neither i64 nor u64: its sign and number of bits.
    Huge(String),
    /// The description, from [`describe`], of an object that is not an integer.
    Other(String),
}

impl Integer {
    /// The default `value` of a parameter.
    pub const fn of(value: i64) -> Self {
        Self(Value::Number(value as i128))
    }

    /// The value as a `T`; `expected` describes the allowed integers in an error.
    ///
    /// # Errors
    /// `TypeError` if the argument is not an integer, `ArgumentError` if it is outside the range of `T`.
    fn ranged<T: TryFrom<i128>>(&self, op: &'static str, name: &str, expected: &str) -> Result<T> {
        let out_of_range = |given: &dyn std::fmt::Display| {
            Err(tc::Error::argument(op, format!("{name} is {given}, expected {expected}")).into())
        };
        match &self.0 {
            Value::Number(value) => T::try_from(*value).or_else(|_| out_of_range(value)),
            Value::Huge(description) => out_of_range(description),
            Value::Other(description) => Err(wrong_type(op, name, description, "an integer")),
        }
    }

    /// The value as a signed integer of 64 bits.
    pub fn signed(&self, op: &'static str, name: &str) -> Result<i64> {
        self.ranged(op, name, "an integer from -2**63 to 2**63 - 1")
    }

    /// The value as a count, which may be 0.
    pub fn count(&self, op: &'static str, name: &str) -> Result<usize> {
        self.at_least(op, name, 0)
    }

    /// The value as a count of at least `least`.
    pub fn at_least(&self, op: &'static str, name: &str, least: usize) -> Result<usize> {
        let value: i64 = self.ranged(op, name, &format!("an integer from {least} to 2**63 - 1"))?;
        match usize::try_from(value) {
            Ok(count) if count >= least => Ok(count),
            _ => {
                let message = format!("{name} is {value}, expected an integer of at least {least}");
                Err(tc::Error::argument(op, message).into())
            }
        }
    }

    /// The value as an unsigned integer of 64 bits.
    pub fn as_u64(&self, op: &'static str, name: &str) -> Result<u64> {
        self.ranged(op, name, "an integer from 0 to 2**64 - 1")
    }

    /// The value as an unsigned integer of 32 bits.
    pub fn as_u32(&self, op: &'static str, name: &str) -> Result<u32> {
        self.ranged(op, name, "an integer from 0 to 2**32 - 1")
    }

    /// The index, among `rank` dimensions, of the dimension that the value selects. A negative value counts from the
    /// end.
    pub fn dim(&self, op: &'static str, rank: usize) -> Result<usize> {
        Ok(resolve_dim(op, self.signed(op, "dim")?, rank)?)
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Integer {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = i64::INPUT_TYPE;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(value) = object.extract::<i64>() {
            return Ok(Self(Value::Number(i128::from(value))));
        }
        // The call fails if the object is not an integer: a float has no `__index__`, and the `__index__` of a tensor
        // may raise.
        let Ok(integer) = object.py().import("operator")?.call_method1("index", (object,)) else {
            return Ok(Self(Value::Other(describe(&object))));
        };
        Ok(Self(match integer.cast::<PyInt>()?.extract::<u64>() {
            Ok(value) => Value::Number(i128::from(value)),
            Err(_) => {
                let prefix = if integer.lt(0)? { "a negative" } else { "an" };
                let bits: u64 = integer.call_method0("bit_length")?.extract()?;
                Value::Huge(format!("{prefix} integer of {bits} bits"))
            }
        }))
    }
}

/// The index of dimension `dim` among `rank` dimensions. A negative `dim` counts from the end.
fn resolve_dim(op: &'static str, dim: i64, rank: usize) -> tc::Result<usize> {
    let resolved = if dim < 0 { dim.saturating_add_unsigned(rank as u64) } else { dim };
    if (0..rank as i64).contains(&resolved) {
        return Ok(resolved as usize);
    }
    let expected = if rank == 0 {
        "a tensor without dimensions has none".to_owned()
    } else {
        format!("expected {} to {} for a tensor of {rank} dimensions", -(rank as isize), rank - 1)
    };
    Err(tc::Error::index(op, format!("dimension {dim} is out of range; {expected}")))
}

/// An integer, or a sequence of integers.
enum Integers {
    One(Integer),
    Several(Vec<Integer>),
}

impl Integers {
    fn read(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        // A str or bytes object is a sequence too, but the error must describe it as one wrong argument.
        let is_text = object.is_instance_of::<PyString>() || object.is_instance_of::<PyBytes>();
        match object.cast::<PySequence>() {
            Ok(items) if !is_text => {
                Ok(Self::Several(items.try_iter()?.map(|item| item?.extract()).collect::<PyResult<_>>()?))
            }
            _ => Ok(Self::One(object.extract()?)),
        }
    }

    /// Read `*arguments`: integers, or one sequence of integers.
    fn from_arguments(arguments: &Bound<'_, PyTuple>) -> PyResult<Self> {
        if arguments.len() == 1 { Self::read(&arguments.get_item(0)?) } else { Self::read(arguments) }
    }

    /// The values, each converted by `convert`, which also gets `op` and, for errors, the name of the integer: `name`
    /// or `name[index]`.
    fn get<T>(
        &self,
        op: &'static str,
        name: &str,
        convert: impl Fn(&Integer, &'static str, &str) -> Result<T>,
    ) -> Result<Vec<T>> {
        match self {
            Self::One(Integer(Value::Other(description))) => {
                Err(wrong_type(op, name, description, "an integer or a sequence of integers"))
            }
            Self::One(one) => Ok(vec![convert(one, op, name)?]),
            Self::Several(several) => {
                let convert_item = |(index, item): (usize, &Integer)| convert(item, op, &format!("{name}[{index}]"));
                several.iter().enumerate().map(convert_item).collect()
            }
        }
    }
}

const INTS: PyStaticExpr =
    type_hint_subscript!(type_hint_identifier!("collections.abc", "Sequence"), Integer::INPUT_TYPE);
const INT_OR_INTS: PyStaticExpr = type_hint_union!(Integer::INPUT_TYPE, INTS);

/// One dimension, or a sequence of dimensions.
pub struct Dims(Integers);

impl Dims {
    /// The dimensions in the arguments of a call such as `f(0, 1)`, `f((0, 1))` or `f([0, 1])`.
    pub fn from_arguments(arguments: &Bound<'_, PyTuple>) -> PyResult<Self> {
        Integers::from_arguments(arguments).map(Self)
    }

    /// The indices of the dimensions among `rank` dimensions. Returns an error if a dimension was given twice.
    pub fn resolve(&self, op: &'static str, rank: usize) -> Result<Vec<usize>> {
        let given = self.0.get(op, "dim", Integer::signed)?;
        let mut dims = Vec::with_capacity(given.len());
        for dim in given {
            let resolved = resolve_dim(op, dim, rank)?;
            if dims.contains(&resolved) {
                return Err(tc::Error::argument(op, format!("dimension {dim} was given twice")).into());
            }
            dims.push(resolved);
        }
        Ok(dims)
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Dims {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = INT_OR_INTS;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Integers::read(&object).map(Self)
    }
}

/// A shape: the sizes of the dimensions.
pub struct Shape(Integers);

impl Shape {
    /// The shape in the arguments of a call such as `f(2, 3)`, `f((2, 3))` or `f([2, 3])`.
    pub fn from_arguments(arguments: &Bound<'_, PyTuple>) -> PyResult<Self> {
        Integers::from_arguments(arguments).map(Self)
    }

    /// The sizes as they were passed. They may be negative.
    pub fn numbers(&self, op: &'static str) -> Result<Vec<i64>> {
        self.0.get(op, "shape", Integer::signed)
    }

    /// The sizes. Returns an error if a size is negative.
    pub fn sizes(&self, op: &'static str) -> Result<Vec<usize>> {
        sizes(op, &self.numbers(op)?)
    }

    /// The sizes. If one of them is -1, it is replaced so that the product of the sizes is `elements`; without a -1,
    /// the product is not checked.
    ///
    /// # Errors
    /// `ShapeError` if several sizes are -1, if another size is negative, or if no size in place of -1 gives the
    /// product, or every size does (because another size and `elements` are 0).
    pub fn infer(&self, op: &'static str, elements: usize) -> Result<Vec<usize>> {
        let given = self.numbers(op)?;
        let Some(unknown) = given.iter().position(|&size| size == -1) else { return sizes(op, &given) };
        let mut known = given.clone();
        known.remove(unknown);
        if known.contains(&-1) {
            return Err(tc::Error::shape(op, format!("only one size can be -1, found shape {given:?}")).into());
        }
        let mut inferred = sizes_in(op, &known, &given)?;
        let product = inferred.iter().try_fold(1usize, |n, &s| n.checked_mul(s)).unwrap_or(usize::MAX);
        if product == 0 || !elements.is_multiple_of(product) {
            return Err(tc::Error::shape(op, format!("{elements} elements do not fill shape {given:?}")).into());
        }
        inferred.insert(unknown, elements / product);
        Ok(inferred)
    }
}

/// The sizes in `shape`. Returns an error if a size is negative.
pub fn sizes(op: &'static str, shape: &[i64]) -> Result<Vec<usize>> {
    sizes_in(op, shape, shape)
}

/// The given `sizes`, some or all of those in `shape`. Returns an error that quotes `shape` if one of them is negative.
fn sizes_in(op: &'static str, sizes: &[i64], shape: &[i64]) -> Result<Vec<usize>> {
    let negative_size = |size: i64| tc::Error::shape(op, format!("negative size {size} in shape {shape:?}"));
    Ok(sizes.iter().map(|&size| usize::try_from(size).map_err(|_| negative_size(size))).collect::<tc::Result<_>>()?)
}

impl<'a, 'py> FromPyObject<'a, 'py> for Shape {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = INT_OR_INTS;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Integers::read(&object).map(Self)
    }
}

/// One number for both height and width, or (height, width).
pub struct Pair(Integers);

impl Pair {
    /// The default `value` of a parameter, for both height and width.
    pub const fn of(value: i64) -> Self {
        Self(Integers::One(Integer::of(value)))
    }

    /// The height and the width.
    pub fn get(&self, op: &'static str, name: &str) -> Result<[usize; 2]> {
        match self.0.get(op, name, Integer::count)?.as_slice() {
            &[both] => Ok([both, both]),
            &[height, width] => Ok([height, width]),
            several => {
                let message = format!("{name} has {} numbers, expected one number or (height, width)", several.len());
                Err(tc::Error::argument(op, message).into())
            }
        }
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Pair {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = INT_OR_INTS;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Integers::read(&object).map(Self)
    }
}

/// How a dimension is split into parts: one length for all parts, or the length of each part.
pub struct Sections(Integers);

impl Sections {
    /// The lengths of the parts of a dimension with `total` elements. If one length was passed, the last part may be
    /// shorter. If a sequence was passed, the caller must check that the sum of the lengths is `total`.
    pub fn lengths(&self, op: &'static str, name: &str, total: usize) -> Result<Vec<usize>> {
        let given = self.0.get(op, name, Integer::count)?;
        match (&self.0, given.as_slice()) {
            (Integers::Several(_), _) => Ok(given),
            // A dimension without elements has one part without elements, as in torch.
            (Integers::One(_), &[length]) if length > 0 => {
                Ok((0..total.max(1)).step_by(length).map(|start| length.min(total - start)).collect())
            }
            _ => Err(tc::Error::argument(op, "the size of a part must be at least 1, found 0").into()),
        }
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Sections {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = INT_OR_INTS;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Integers::read(&object).map(Self)
    }
}

/// One name, or a list of names; for any other argument, its description from [`describe`].
pub struct Names(std::result::Result<Vec<String>, String>);

impl Names {
    /// The names.
    pub fn get(self, op: &'static str, name: &str) -> Result<Vec<String>> {
        self.0.map_err(|description| wrong_type(op, name, &description, "a name or a list of names"))
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Names {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = type_hint_union!(
        PyString::TYPE_HINT,
        type_hint_subscript!(type_hint_identifier!("collections.abc", "Sequence"), PyString::TYPE_HINT)
    );

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(name) = object.extract::<String>() {
            return Ok(Self(Ok(vec![name])));
        }
        Ok(Self(object.extract::<Vec<String>>().map_err(|_| describe(&object))))
    }
}

/// A path (a str, bytes or an `os.PathLike`); for any other argument, its description from [`describe`].
pub struct FilePath(std::result::Result<PathBuf, String>);

impl FilePath {
    /// The path, called "the path" in errors.
    pub fn get(&self, op: &'static str) -> Result<PathBuf> {
        self.named(op, "the path")
    }

    /// The path, called `name` in errors.
    pub fn named(&self, op: &'static str, name: &str) -> Result<PathBuf> {
        let path = self.0.clone();
        let path = path.map_err(|description| wrong_type(op, name, &description, "a str, bytes or an os.PathLike"))?;
        if path.as_os_str().is_empty() {
            return Err(tc::Error::argument(op, format!("{name} is empty, expected a file or a folder")).into());
        }
        Ok(path)
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for FilePath {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = type_hint_union!(
        PyString::TYPE_HINT,
        PyBytes::TYPE_HINT,
        type_hint_subscript!(type_hint_identifier!("os", "PathLike"), PyString::TYPE_HINT),
        type_hint_subscript!(type_hint_identifier!("os", "PathLike"), PyBytes::TYPE_HINT)
    );

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        // `fsdecode` accepts str, bytes and PathLike, and decodes bytes with the encoding of file names.
        let path = object.py().import("os")?.call_method1("fsdecode", (object,)).and_then(|path| path.extract());
        Ok(Self(path.map_err(|_| describe(&object))))
    }
}
