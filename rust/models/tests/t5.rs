//! Tests of T5's encoder without its weights: names and shapes at full size, configurations, errors, and buckets of
//! distances.

use std::collections::BTreeMap;
use std::path::Path;

use trainable_candle_core::DType;
use trainable_candle_models::t5::{FeedForward, T5Config, T5Encoder, bucket};
use trainable_candle_models::{Architecture, Configuration, Model};
use trainable_candle_nn::{Module, Source};

/// What `full_size.json` has for each name: the shape of the parameter, and the number of blocks that have it. The
/// indices of these blocks replace the `*` in the name. The number is 1 for a name without `*`.
type Rule = (Vec<usize>, usize);

#[test]
fn the_encoder_at_full_size_has_the_names_and_shapes_of_transformers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/t5/full_size.json");
    let rules: BTreeMap<String, Rule> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let expected: BTreeMap<String, Vec<usize>> = rules
        .into_iter()
        .flat_map(|(name, (shape, count))| (0..count).map(move |i| (name.replace('*', &i.to_string()), shape.clone())))
        .collect();
    let model = T5Encoder::new(T5Config::default(), &mut Source::shapes(DType::F16).root()).unwrap();
    let found: BTreeMap<String, Vec<usize>> =
        model.named_tensors().into_iter().map(|(name, tensor)| (name, tensor.dims().to_vec())).collect();
    assert_eq!(found, expected);
    // The number of parameters of T5 1.1 XXL's encoder.
    assert_eq!(found.values().map(|dims| dims.iter().product::<usize>()).sum::<usize>(), 4_762_310_656);
    // Each of 24 blocks has four layers in the attention and three in the feed-forward part.
    assert_eq!(model.named_layers().len(), 24 * 7);
    assert_eq!((model.class_name(), T5Encoder::KIND.name), ("T5EncoderModel", "T5Encoder"));
}

#[test]
fn configurations_are_read_as_written() {
    let small = T5Config { feed_forward_proj: FeedForward::Relu, d_kv: 3, num_heads: 5, ..T5Config::default() };
    for config in [T5Config::default(), small] {
        assert_eq!(T5Config::from_json(&config.to_json()).unwrap(), config);
    }
}

#[test]
fn wrong_values_of_fields_are_reported() {
    for (field, value, expected) in [
        (
            "feed_forward_proj",
            r#""gated-silu""#,
            r#"feed_forward_proj is "gated-silu", expected "gated-gelu" or "relu""#,
        ),
        ("num_heads", "0", "num_heads is 0, expected an integer from 1"),
        // Half of the buckets are for keys after the query, the other half for the rest. On each side, a quarter of all
        // buckets have one distance each. This must be at least one bucket, so 4 is the least number. With the default
        // 32 buckets it is 8 buckets, for the distances 0 to 7, so the largest distance must exceed 8.
        ("relative_attention_num_buckets", "3", "relative_attention_num_buckets is 3, expected 4 or more"),
        ("relative_attention_max_distance", "8", "relative_attention_max_distance is 8, expected more than 8"),
    ] {
        let mut map = T5Config::default().to_json();
        map.insert(field.into(), serde_json::from_str(value).unwrap());
        let error = T5Config::from_json(&map).unwrap_err().to_string();
        assert!(error.starts_with("T5EncoderModel: ") && error.contains(expected), "{error}");
    }
}

/// The expected values are those of transformers' `_relative_position_bucket`.
#[test]
fn distances_have_the_buckets_of_transformers() {
    let config = T5Config::default();
    let distances = [0, 1, 7, 8, 11, 12, 16, 22, 23, 32, 45, 46, 63, 64, 90, 91, 127, 128, 1000];
    let buckets = [0, 1, 7, 8, 8, 9, 10, 10, 11, 12, 12, 13, 13, 14, 14, 15, 15, 15, 15];
    for (distance, expected) in distances.into_iter().zip(buckets) {
        // The arguments are the positions of the query and of the key.
        assert_eq!(bucket(&config, distance, 0), expected, "{distance}");
        // Keys after the query have the second half of the 32 buckets.
        let after = if distance > 0 { expected + 16 } else { 0 };
        assert_eq!(bucket(&config, 0, distance), after, "{distance}");
    }
    // Ten buckets before the query: five with one distance each, and five with several.
    let other = T5Config { relative_attention_num_buckets: 20, relative_attention_max_distance: 50, ..config };
    for (distance, expected) in [(4, 4), (5, 5), (7, 5), (8, 6), (12, 6), (13, 7), (19, 7), (20, 8), (31, 8), (32, 9)] {
        assert_eq!(bucket(&other, distance, 0), expected, "{distance}");
    }
}
