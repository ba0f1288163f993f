//! [`LayerValues`]: the parameters of one adapter in a file, and the kind and the rank that they have.

use std::collections::BTreeMap;

use trainable_candle_core::{Error, Result, Tensor};

use super::{AdapterKind, KINDS};

/// The adapter of one layer, as stored in a file.
#[derive(Clone)]
pub struct LayerValues {
    /// Parameters under peft's names, laid out as in files.
    pub parameters: BTreeMap<String, Tensor>,
    /// The factor in front of the low-rank product.
    pub scale: f64,
    /// OFT: the number of terms of peft's series, if the adapter was trained with the series.
    pub cayley_neumann_terms: Option<usize>,
}

impl LayerValues {
    /// Find the kind of adapter that has all of these parameters. If the kind has a `mark`, a list of parameters that
    /// no other kind has, one of them must be among these parameters: DoRA has all parameters of LoRA, but an adapter
    /// without a magnitude is no DoRA.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no such kind.
    pub fn kind(&self) -> Result<&'static AdapterKind> {
        let fits = |kind: &&&AdapterKind| {
            self.parameters.keys().all(|name| kind.parameter(name).is_some())
                && (kind.mark.is_empty() || kind.mark.iter().any(|name| self.parameters.contains_key(*name)))
        };
        KINDS.iter().find(fits).copied().ok_or_else(|| {
            let names: Vec<&str> = self.parameters.keys().map(String::as_str).collect();
            Error::Config(format!("no kind of adapter has the parameters {}", names.join(", ")))
        })
    }

    /// Read the rank from the shape of a parameter; 0 if the adapter has no low-rank factors.
    ///
    /// # Errors
    /// As [`kind`](Self::kind).
    pub fn rank(&self) -> Result<usize> {
        // `ranked` names the parameters whose first dimension is the rank.
        let ranked = self.kind()?.ranked.iter().find_map(|name| self.parameters.get(*name));
        Ok(ranked.and_then(|tensor| tensor.dims().first().copied()).unwrap_or(0))
    }
}
