//! Reads the fields of a `config.json` that another library wrote.

use std::collections::BTreeSet;

use serde_json::{Map, Value};
use trainable_candle_core::{Error, Result};

/// The largest size that a field may have. It is far above any sensible size, and low enough that a product of three
/// sizes does not overflow.
const LARGEST: u64 = 1 << 20;

/// The fields of a configuration. Callers read them by name; a field that is null counts as missing. A field with a
/// wrong value, or a missing field without a default, is an [`Error::Config`].
///
/// [`finish`](Self::finish) rejects a field that no caller has read, unless its name begins with `_` or its value is
/// null or false: newer versions of the libraries write null or false for new features that a model does not use.
pub(crate) struct Fields<'a> {
    /// The name of the model's class, for messages.
    owner: &'static str,
    map: &'a Map<String, Value>,
    /// The names of the fields that were read.
    seen: BTreeSet<&'static str>,
}

impl<'a> Fields<'a> {
    /// The fields of `owner`'s configuration.
    pub const fn new(owner: &'static str, map: &'a Map<String, Value>) -> Self {
        Self { owner, map, seen: BTreeSet::new() }
    }

    /// The value of a field, which counts as read from now on; None if the field is missing or null.
    fn get(&mut self, name: &'static str) -> Option<&'a Value> {
        self.seen.insert(name);
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// The error for a field with a wrong value, or for a missing field.
    pub fn wrong(&self, name: &str, expected: &str) -> Error {
        let found = self.map.get(name).map_or_else(|| "missing".to_owned(), Value::to_string);
        Error::Config(format!("{}: {name} is {found}, expected {expected}", self.owner))
    }

    /// A positive integer that is not too large; None for any other value.
    fn as_size(value: &Value) -> Option<usize> {
        value.as_u64().filter(|n| (1..=LARGEST).contains(n)).and_then(|n| usize::try_from(n).ok())
    }

    /// The value of a field that holds a positive integer; `default` if the field is missing.
    pub fn size(&mut self, name: &'static str, default: Option<usize>) -> Result<usize> {
        match self.get(name) {
            Some(value) => Self::as_size(value),
            None => default,
        }
        .ok_or_else(|| self.wrong(name, &format!("an integer from 1 to {LARGEST}")))
    }

    /// The value of a field that gives a positive integer for each of a model's `count` levels of resolution. The field
    /// holds one integer for all levels, or a list with one integer for each level. If the field is missing, every
    /// level has `default`.
    pub fn sizes(&mut self, name: &'static str, count: usize, default: Option<usize>) -> Result<Vec<usize>> {
        let sizes = match self.get(name) {
            Some(Value::Array(list)) => list.iter().map(Self::as_size).collect::<Option<Vec<_>>>(),
            Some(value) => Self::as_size(value).map(|size| vec![size; count]),
            None => default.map(|size| vec![size; count]),
        };
        sizes.filter(|sizes| sizes.len() == count).ok_or_else(|| {
            let expected = format!("a positive integer, or a list of {count} positive integers, one for each level");
            self.wrong(name, &expected)
        })
    }

    /// The value of a field that holds a list of at least one positive integer.
    pub fn list(&mut self, name: &'static str) -> Result<Vec<usize>> {
        self.get(name)
            .and_then(Value::as_array)
            .and_then(|list| list.iter().map(Self::as_size).collect::<Option<Vec<_>>>())
            .filter(|list| !list.is_empty())
            .ok_or_else(|| self.wrong(name, "a list of positive integers that is not empty"))
    }

    /// The integers, in ascending order, of a field that holds a list of different integers from 0 to `count` - 1; an
    /// empty list if the field is missing.
    pub fn indices(&mut self, name: &'static str, count: usize) -> Result<Vec<usize>> {
        let Some(value) = self.get(name) else { return Ok(Vec::new()) };
        let index = |value: &Value| value.as_u64().map(|n| n as usize).filter(|&n| n < count);
        let indices = value.as_array().and_then(|list| list.iter().map(index).collect::<Option<BTreeSet<_>>>());
        // The set is smaller than the list if the list has a number twice.
        let distinct = indices.filter(|indices| Some(indices.len()) == value.as_array().map(Vec::len));
        distinct.map(|indices| indices.into_iter().collect()).ok_or_else(|| {
            self.wrong(name, &format!("a list of different integers from 0 to {}", count.saturating_sub(1)))
        })
    }

    /// The meanings of the names in a field that holds a list of `count` names. `known` has each supported name with
    /// its meaning.
    pub fn names<T: Copy>(&mut self, name: &'static str, count: usize, known: &[(&str, T)]) -> Result<Vec<T>> {
        let list = self.get(name).and_then(Value::as_array).filter(|list| list.len() == count);
        list.and_then(|list| {
            list.iter()
                .map(|value| known.iter().find(|(text, _)| value.as_str() == Some(text)).map(|&(_, meaning)| meaning))
                .collect()
        })
        .ok_or_else(|| {
            let texts: Vec<&str> = known.iter().map(|&(text, _)| text).collect();
            self.wrong(name, &format!("a list of {count} names, each one of {}", texts.join(", ")))
        })
    }

    /// The value of a field that holds a number; `default` if the field is missing.
    pub fn number(&mut self, name: &'static str, default: Option<f64>) -> Result<f64> {
        match self.get(name) {
            Some(value) => value.as_f64(),
            None => default,
        }
        .filter(|number| number.is_finite())
        .ok_or_else(|| self.wrong(name, "a number"))
    }

    /// The value of a field that holds a number; None if the field is missing.
    pub fn optional_number(&mut self, name: &'static str) -> Result<Option<f64>> {
        if self.get(name).is_none() { Ok(None) } else { self.number(name, None).map(Some) }
    }

    /// The value of a field that holds a list of `count` numbers.
    pub fn numbers(&mut self, name: &'static str, count: usize) -> Result<Vec<f64>> {
        self.get(name)
            .and_then(Value::as_array)
            .and_then(|list| list.iter().map(Value::as_f64).collect::<Option<Vec<_>>>())
            .filter(|list| list.len() == count)
            .ok_or_else(|| self.wrong(name, &format!("a list of {count} numbers")))
    }

    /// The fields of the object that the field `name` holds; None if the field is missing. These fields have a
    /// [`finish`](Self::finish) of their own.
    pub fn object(&mut self, name: &'static str) -> Result<Option<Fields<'a>>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let map = value.as_object().ok_or_else(|| self.wrong(name, "an object with fields"))?;
        Ok(Some(Fields::new(self.owner, map)))
    }

    /// Whether a field is present and not null. The field does not count as read.
    pub fn is_given(&self, name: &str) -> bool {
        self.map.get(name).is_some_and(|value| !value.is_null())
    }

    /// Whether a field is present and null. The field does not count as read.
    pub fn is_null(&self, name: &str) -> bool {
        self.map.get(name).is_some_and(Value::is_null)
    }

    /// The value of a field that holds a boolean; `default` if the field is missing.
    pub fn flag(&mut self, name: &'static str, default: bool) -> Result<bool> {
        match self.get(name) {
            Some(value) => value.as_bool().ok_or_else(|| self.wrong(name, "true or false")),
            None => Ok(default),
        }
    }

    /// The value of a field that holds a string; None if the field is missing or holds another type.
    pub fn text(&mut self, name: &'static str) -> Option<&'a str> {
        self.get(name).and_then(Value::as_str)
    }

    /// Check fields of which only one value is supported. A missing or null field stands for the supported value.
    pub fn only(&mut self, supported: &[(&'static str, Value)]) -> Result<()> {
        for (name, expected) in supported {
            // As numbers, 3 and 3.0 are equal.
            let is_expected = |found: &Value| match (found.as_f64(), expected.as_f64()) {
                (Some(found), Some(expected)) => found == expected,
                _ => found == expected,
            };
            if self.get(name).is_some_and(|found| !is_expected(found)) {
                return Err(self.wrong(name, &expected.to_string()));
            }
        }
        Ok(())
    }

    /// Accept fields that do not affect the model, with any value.
    pub fn ignore(&mut self, names: &[&'static str]) {
        self.seen.extend(names);
    }

    /// Check that every field was read, apart from fields that may stay unread (see [`Fields`]).
    pub fn finish(self) -> Result<()> {
        let is_unused = |value: &Value| matches!(value, Value::Null | Value::Bool(false));
        let unread = self
            .map
            .iter()
            .find(|(name, value)| !name.starts_with('_') && !self.seen.contains(name.as_str()) && !is_unused(value));
        match unread {
            None => Ok(()),
            Some((name, value)) => {
                Err(Error::Config(format!("{}: {name} is {value}, but the field is not supported", self.owner)))
            }
        }
    }
}
