//! The position bias: attention adds to each score a bias that depends on the distance between the query and the key.

use trainable_candle_core::ops::index::embedding;
use trainable_candle_core::{DType, Result, Tensor};

use super::T5Config;

/// The bucket of a query at position `query` and a key at position `key`: the index of their row in the table of
/// biases. Keys at or before the query are in the first half of the rows, keys after it in the second half. In each
/// half, each short distance has its own row. Longer distances share rows on a logarithmic scale, and all distances
/// from `relative_attention_max_distance` on share the last row.
pub fn bucket(config: &T5Config, query: usize, key: usize) -> usize {
    let half = config.relative_attention_num_buckets / 2;
    // The number of distances, from 0 on, that have a row of their own.
    let exact = half / 2;
    let distance = query.abs_diff(key);
    let row = if distance < exact {
        distance
    } else {
        let (near, far) = (exact as f64, config.relative_attention_max_distance as f64);
        // How far the row is behind the row `exact`: 0 at the distance `near`, half - exact at the distance `far`.
        let rows_behind = (distance as f64 / near).ln() / (far / near).ln() * (half - exact) as f64;
        (exact + rows_behind as usize).min(half - 1)
    };
    row + if key > query { half } else { 0 }
}

/// The bias of the scores of `length` queries and keys, (1, heads, length, length) in f32, looked up in
/// `table (buckets, heads)`.
pub(super) fn bias(config: &T5Config, table: &Tensor, length: usize) -> Result<Tensor> {
    let rows_of_query = |query: usize| (0..length).map(move |key| bucket(config, query, key));
    // `embedding` would reject the row u32::MAX, because no table has so many rows.
    let rows: Vec<u32> =
        (0..length).flat_map(rows_of_query).map(|row| u32::try_from(row).unwrap_or(u32::MAX)).collect();
    let rows = Tensor::from_vec(rows, (length, length), table.device())?;
    embedding(&table.to_dtype(DType::F32)?, &rows)?.permute(&[2, 0, 1])?.contiguous()?.unsqueeze(0)
}
