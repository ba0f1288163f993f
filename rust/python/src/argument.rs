//! Numbers, bools, and lists and dicts of numbers or texts, as a user passed them. [`Argument::get`] returns the value;
//! its errors name the operation and the parameter.

use std::collections::BTreeMap;

use pyo3::exceptions::PyOverflowError;
use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt};
use trainable_candle_core as tc;

use crate::arguments::{describe, wrong_type};
use crate::error::Result;

/// A type to which the argument for a parameter is converted.
pub trait Expected {
    /// The type's description, for the error about an argument of another type.
    const EXPECTED: &'static str;
}

macro_rules! expected {
    ($($type:ty: $text:literal),*) => {$(
        impl Expected for $type {
            const EXPECTED: &'static str = $text;
        }
    )*};
}

expected!(
    f64: "a number",
    bool: "True or False",
    Option<f64>: "a number or None",
    (f64, f64): "two numbers",
    (f64, f64, f64): "three numbers",
    (Option<f64>, f64): "two numbers, of which the first may be None",
    Vec<f64>: "a list of numbers",
    BTreeMap<String, f64>: "a dict of names and numbers",
    Option<BTreeMap<String, f64>>: "a dict of names and numbers, or None",
    Option<BTreeMap<String, String>>: "a dict of texts, or None"
);

/// The argument for a parameter of type `T`, or a description of an argument that is no `T`.
pub struct Argument<T>(std::result::Result<T, Wrong>);

/// What is wrong with an argument. Each variant holds the description that follows "is" in the error, which says for
/// example "Lion: lr is a value of type list, expected a number".
enum Wrong {
    /// A value of another type: "a value of type list".
    Type(String),
    /// An integer too large for a float, or a container with such an integer: "a value of type list with a number".
    TooLarge(String),
}

impl<T: Expected> Argument<T> {
    /// The default `value` of a parameter.
    pub const fn of(value: T) -> Self {
        Self(Ok(value))
    }

    /// The value.
    ///
    /// # Errors
    /// `TypeError` if the argument has another type, `ArgumentError` if a number is too large for a float.
    pub fn get(self, op: &'static str, name: &str) -> Result<T> {
        self.0.map_err(|wrong| match wrong {
            Wrong::Type(description) => wrong_type(op, name, &description, T::EXPECTED),
            Wrong::TooLarge(description) => {
                let expected = T::EXPECTED;
                let message =
                    format!("{name} is {description} beyond the range of floating point, expected {expected}");
                tc::Error::argument(op, message).into()
            }
        })
    }
}

impl<'a, 'py, T: FromPyObject<'a, 'py>> FromPyObject<'a, 'py> for Argument<T> {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = T::INPUT_TYPE;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Ok(Self(object.extract::<T>().map_err(|error| {
            let (error, py): (PyErr, _) = (error.into(), object.py());
            if error.is_instance_of::<PyOverflowError>(py) {
                let is_integer = object.is_instance_of::<PyInt>();
                return Wrong::TooLarge(if is_integer {
                    "an integer".to_owned()
                } else {
                    format!("{} with a number", describe(&object))
                });
            }
            // The type of a dict does not show which key or value is wrong; the error of the conversion describes it.
            let is_dict = object.is_instance_of::<PyDict>();
            Wrong::Type(if is_dict { format!("a dict ({})", error.value(py)) } else { describe(&object) })
        })))
    }
}
