//! Tests of losses: results and gradients against the definitions in f64, extreme values, rounding, threads, errors.

use half::bf16;

use super::*;
use crate::cpu::pool::tests::with_1_and_n_threads;
use crate::quantized::{Format, Ggml};
use crate::raw::{from_vec, to_f64_vec};
use crate::{DType, Device, Quantized, Tensor, Var, WeightRef};

fn tensor(values: &[f64], dims: &[usize], dtype: DType) -> Tensor {
    Tensor::constant(from_vec(values.to_vec(), dims).to_dtype(dtype).unwrap())
}

/// `count` irregular numbers from `-scale` to about `scale`. Each `seed` begins the same sequence at another place.
fn numbers(count: usize, seed: usize, scale: f64) -> Vec<f64> {
    (0..count).map(|i| (((i + seed) * 7919 % 10_007) as f64 / 5003.0 - 1.0) * scale).collect()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    to_f64_vec(tensor.raw()).unwrap()
}

/// Calls `compute` with variables that have the values of `inputs`. Returns the loss, and the gradient of each
/// variable.
fn loss_and_gradients(inputs: &[&Tensor], compute: impl Fn(&[Var]) -> Result<Tensor>) -> (f64, Vec<Vec<f64>>) {
    let variables: Vec<Var> = inputs.iter().map(|input| Var::from_tensor(input).unwrap()).collect();
    let loss = compute(&variables).unwrap();
    let gradients = loss.backward().unwrap();
    (loss.item().unwrap(), variables.iter().map(|variable| values(&gradients.get(variable).unwrap())).collect())
}

fn assert_close(found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() <= tolerance, "element {i}: {f}, expected {e}");
    }
}

/// Returns the mean loss in f64 over the rows that are not ignored, and its gradient with respect to the logits. The
/// loss of a row is -Σ q log p over the classes, where p is the row's softmax and q its smoothed one-hot target.
fn cross_entropy_by_hand(logits: &[f64], classes: usize, targets: &[i64], smoothing: f64) -> (f64, Vec<f64>) {
    let count = targets.iter().filter(|&&t| t != IGNORE_INDEX).count() as f64;
    let (mut loss, mut gradient) = (0.0, vec![0.0; logits.len()]);
    for (row, &target) in targets.iter().enumerate().filter(|&(_, &t)| t != IGNORE_INDEX) {
        let range = row * classes..(row + 1) * classes;
        let largest = logits[range.clone()].iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits[range.clone()].iter().map(|x| (x - largest).exp()).sum();
        for (class, at) in range.enumerate() {
            let q = smoothing / classes as f64 + if class as i64 == target { 1.0 - smoothing } else { 0.0 };
            let log_p = logits[at] - largest - sum.ln();
            // 0 · log 0 is NaN, but the term is 0.
            if q > 0.0 {
                loss -= q * log_p / count;
            }
            gradient[at] = (log_p.exp() - q) / count;
        }
    }
    (loss, gradient)
}

#[test]
fn cross_entropy_matches_its_definition() {
    // The second size has several blocks of classes. The third has several ranges of rows, for several threads.
    for (rows, classes) in [(6, 5), (5, 3001), (900, 301)] {
        let mut targets: Vec<i64> = (0..rows as i64).map(|i| i * 13 % classes as i64).collect();
        // One row is ignored.
        targets[3] = IGNORE_INDEX;
        let ids = Tensor::constant(from_vec(targets.clone(), rows));
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 2e-6), (DType::BF16, 4e-3), (DType::F16, 5e-4)] {
            for smoothing in [0.0, 0.1] {
                let logits = tensor(&numbers(rows * classes, 5, 4.0), &[rows, classes], dtype);
                let (loss, gradients) = loss_and_gradients(&[&logits], |x| {
                    cross_entropy(&x[0], &ids, IGNORE_INDEX, smoothing, Reduction::Mean)
                });
                let (expected, expected_gradient) =
                    cross_entropy_by_hand(&values(&logits), classes, &targets, smoothing);
                assert_close(&[loss], &[expected], tolerance * expected);
                assert_close(&gradients[0], &expected_gradient, tolerance / rows as f64);
            }
        }
    }
}

#[test]
fn cross_entropy_takes_strided_logits_and_u32_targets() {
    // As in a causal language model, the logits of a position predict the id of the next position. So the last position
    // of the logits is dropped, and the first of the ids.
    let logits = tensor(&numbers(2 * 4 * 7, 1, 2.0), &[2, 4, 7], DType::F32);
    let ids = Tensor::constant(from_vec((0..8).map(|i| i * 5 % 7).collect::<Vec<u32>>(), (2, 4)));
    let loss = |logits: &Tensor, ids: &Tensor| cross_entropy(logits, ids, IGNORE_INDEX, 0.1, Reduction::Mean);
    let as_targets = |ids: &Tensor| -> Vec<i64> { ids.to_vec::<u32>().unwrap().into_iter().map(i64::from).collect() };
    let next_ids = ids.narrow(1, 1, 3).unwrap();
    let (found, gradients) = loss_and_gradients(&[&logits], |x| loss(&x[0].narrow(1, 0, 3)?, &next_ids));
    let read_logits = logits.narrow(1, 0, 3).unwrap();
    let (expected, expected_gradient) = cross_entropy_by_hand(&values(&read_logits), 7, &as_targets(&next_ids), 0.1);
    assert_close(&[found], &[expected], 1e-6);
    let found_gradient = values(&tensor(&gradients[0], &[2, 4, 7], DType::F64).narrow(1, 0, 3).unwrap());
    assert_close(&found_gradient, &expected_gradient, 1e-6);
    // Logits (3, 7) of three rows, whose classes are not contiguous in memory.
    let transposed_logits = tensor(&numbers(7 * 3, 9, 2.0), &[7, 3], DType::F64).t().unwrap();
    let three_ids = ids.narrow(1, 0, 3).unwrap().narrow(0, 0, 1).unwrap().reshape(3).unwrap();
    let (expected, _) = cross_entropy_by_hand(&values(&transposed_logits), 7, &as_targets(&three_ids), 0.1);
    assert_close(&[loss(&transposed_logits, &three_ids).unwrap().item().unwrap()], &[expected], 1e-12);
}

#[test]
fn if_every_target_is_ignored_the_mean_is_nan_and_the_sum_and_the_gradient_are_zero() {
    let logits = tensor(&numbers(10, 0, 1.0), &[2, 5], DType::F32);
    let ignored = 7i64;
    let ids = Tensor::constant(from_vec(vec![ignored; 2], 2));
    let reduced = |reduction| loss_and_gradients(&[&logits], |x| cross_entropy(&x[0], &ids, ignored, 0.0, reduction));
    let (mean, gradients) = reduced(Reduction::Mean);
    assert!(mean.is_nan());
    assert_eq!(gradients[0], [0.0; 10]);
    let (sum, gradients) = reduced(Reduction::Sum);
    assert_eq!((sum, gradients[0].as_slice()), (0.0, &[0.0; 10][..]));
}

#[test]
fn huge_and_infinite_logits_do_not_make_the_cross_entropy_nan() {
    // Classes 2000 and 2999 have probability 1/2 each, all others 0.
    let mut logits = vec![f64::NEG_INFINITY; 3000];
    logits[2000] = 1e4;
    logits[2999] = 1e4;
    let logits = tensor(&logits, &[1, 3000], DType::F32);
    let ids = Tensor::constant(from_vec(vec![2999i64], 1));
    let (loss, gradients) =
        loss_and_gradients(&[&logits], |x| cross_entropy(&x[0], &ids, IGNORE_INDEX, 0.0, Reduction::Mean));
    assert_close(&[loss], &[2f64.ln()], 1e-3);
    assert_close(&[gradients[0][0], gradients[0][2000], gradients[0][2999]], &[0.0, 0.5, -0.5], 1e-3);
    let impossible = Tensor::constant(from_vec(vec![0i64], 1));
    let loss = cross_entropy(&logits, &impossible, IGNORE_INDEX, 0.0, Reduction::Mean).unwrap();
    assert_eq!(loss.item().unwrap(), f64::INFINITY);
}

#[test]
fn cross_entropy_rejects_targets_out_of_range_and_wrong_shapes_dtypes_and_smoothing() {
    let logits = tensor(&[0.0; 6], &[2, 3], DType::F32);
    let loss = |targets: Vec<i64>, target_dims: &[usize], smoothing| {
        cross_entropy(
            &logits,
            &Tensor::constant(from_vec(targets, target_dims)),
            IGNORE_INDEX,
            smoothing,
            Reduction::Mean,
        )
    };
    for (id, position) in [(3, 1), (-1, 0)] {
        let mut targets = vec![0; 2];
        targets[position] = id;
        let error = loss(targets, &[2], 0.0).unwrap_err();
        let message = error.to_string();
        assert!(matches!(error, Error::Index { .. }));
        assert!(
            message.contains(&format!("target {id} at position {position}")) && message.contains("< 3"),
            "{message}"
        );
    }
    assert!(matches!(loss(vec![0, 0], &[1, 2], 0.0), Err(Error::Shape { .. })));
    assert!(matches!(loss(vec![0, 0], &[2], 1.5), Err(Error::Argument { .. })));
    let float_targets = tensor(&[0.0; 2], &[2], DType::F32);
    assert!(matches!(
        cross_entropy(&logits, &float_targets, IGNORE_INDEX, 0.0, Reduction::Sum),
        Err(Error::DType { .. })
    ));
    let integer_logits = Tensor::zeros((2, 3), DType::I64, &Device::Cpu).unwrap();
    let ids = Tensor::zeros(2, DType::I64, &Device::Cpu).unwrap();
    assert!(matches!(
        cross_entropy(&integer_logits, &ids, IGNORE_INDEX, 0.0, Reduction::Sum),
        Err(Error::DType { .. })
    ));
}

#[test]
fn losses_of_differences_match_their_definitions() {
    // So many elements that the losses are summed in several ranges. The last range ends with an incomplete block and
    // an incomplete vector.
    let count = 70_003;
    let (a, b) = (numbers(count, 0, 2.0), numbers(count, 77, 2.0));
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-6)] {
        let (a, b) = (tensor(&a, &[count], dtype), tensor(&b, &[count], dtype));
        let differences: Vec<f64> = values(&a).iter().zip(values(&b)).map(|(a, b)| a - b).collect();
        let mean = |f: &dyn Fn(f64) -> f64| differences.iter().map(|&d| f(d)).sum::<f64>() / count as f64;
        // `slope` is the derivative of the loss of one difference.
        let check = |loss: &dyn Fn(&[Var]) -> Result<Tensor>, expected_loss: f64, slope: &dyn Fn(f64) -> f64| {
            let (found, gradients) = loss_and_gradients(&[&a, &b], loss);
            assert_close(&[found], &[expected_loss], tolerance);
            let expected: Vec<f64> = differences.iter().map(|&d| slope(d) / count as f64).collect();
            assert_close(&gradients[0], &expected, tolerance / count as f64);
            assert_close(&gradients[1], &expected.iter().map(|g| -g).collect::<Vec<_>>(), tolerance / count as f64);
        };
        check(&|x| mse_loss(&x[0], &x[1], Reduction::Mean), mean(&|d| d * d), &|d| 2.0 * d);
        check(&|x| l1_loss(&x[0], &x[1], Reduction::Mean), mean(&f64::abs), &f64::signum);
        let delta = 0.5f64;
        let huber = |d: f64| if d.abs() <= delta { d * d / 2.0 } else { delta * (d.abs() - delta / 2.0) };
        check(&|x| huber_loss(&x[0], &x[1], delta, Reduction::Mean), mean(&huber), &|d| d.clamp(-delta, delta));
        let smooth_l1 = |d: f64| huber(d) / delta;
        let smooth_l1_slope = |d: f64| (d / delta).clamp(-1.0, 1.0);
        check(&|x| smooth_l1_loss(&x[0], &x[1], delta, Reduction::Mean), mean(&smooth_l1), &smooth_l1_slope);
    }
}

#[test]
fn the_loss_of_bf16_values_is_rounded_once() {
    // The square of a bf16 number has up to 16 significant bits. If each of these equal squares were rounded to the 8
    // bits of bf16, all errors would have the same sign and add up.
    let count = 50_000;
    let a = Tensor::constant(from_vec(vec![bf16::from_f32(1.0 + 3.0 / 128.0); count], count));
    let b = Tensor::zeros(count, DType::BF16, &Device::Cpu).unwrap();
    let exact = (1.0f64 + 3.0 / 128.0).powi(2);
    assert_eq!(mse_loss(&a, &b, Reduction::Mean).unwrap().item().unwrap(), bf16::from_f64(exact).to_f64());
    let sum = mse_loss(&a, &b, Reduction::Sum).unwrap().item().unwrap();
    assert_eq!(sum, bf16::from_f64(exact * count as f64).to_f64());
}

#[test]
fn the_mse_loss_and_the_cross_entropy_do_not_depend_on_the_number_of_threads() {
    let x = tensor(&numbers(200_000, 0, 2.0), &[200_000], DType::F32);
    let zeros = Tensor::zeros(200_000, DType::F32, &Device::Cpu).unwrap();
    let (one, many) = with_1_and_n_threads(4, || mse_loss(&x, &zeros, Reduction::Sum).unwrap().item().unwrap());
    assert_eq!(one, many);
    let logits = x.reshape((200, 1000)).unwrap();
    let ids = Tensor::zeros(200, DType::I64, &Device::Cpu).unwrap();
    let (one, many) = with_1_and_n_threads(4, || {
        loss_and_gradients(&[&logits], |x| cross_entropy(&x[0], &ids, IGNORE_INDEX, 0.1, Reduction::Mean))
    });
    assert_eq!(one, many);
}

#[test]
fn the_l1_loss_of_equal_elements_and_its_gradient_are_zero() {
    let x = tensor(&[1.0, -2.0], &[2], DType::F32);
    let (loss, gradients) = loss_and_gradients(&[&x, &x], |v| l1_loss(&v[0], &v[1], Reduction::Sum));
    assert_eq!((loss, gradients), (0.0, vec![vec![0.0; 2]; 2]));
}

#[test]
fn without_elements_the_mean_is_nan_the_sum_is_zero_and_the_unreduced_losses_are_empty() {
    let x = tensor(&[], &[0, 3], DType::F32);
    assert!(mse_loss(&x, &x, Reduction::Mean).unwrap().item().unwrap().is_nan());
    assert_eq!(mse_loss(&x, &x, Reduction::Sum).unwrap().item().unwrap(), 0.0);
    assert_eq!(l1_loss(&x, &x, Reduction::None).unwrap().dims(), [0, 3]);
}

#[test]
fn wrong_arguments_of_losses_of_differences_are_errors() {
    let x = tensor(&[0.0; 2], &[2], DType::F32);
    assert!(matches!(mse_loss(&x, &tensor(&[0.0; 2], &[1, 2], DType::F32), Reduction::Mean), Err(Error::Shape { .. })));
    assert!(matches!(l1_loss(&x, &tensor(&[0.0; 2], &[2], DType::F64), Reduction::Mean), Err(Error::DType { .. })));
    let integers = Tensor::zeros(2, DType::I64, &Device::Cpu).unwrap();
    assert!(matches!(mse_loss(&integers, &integers, Reduction::Mean), Err(Error::DType { .. })));
    for delta in [0.0, -1.0, f64::NAN] {
        assert!(matches!(huber_loss(&x, &x, delta, Reduction::Mean), Err(Error::Argument { .. })));
    }
}

#[test]
fn a_known_reduction_is_parsed_and_an_unknown_one_is_an_error() {
    assert_eq!(Reduction::parse("mse_loss", "none").unwrap(), Reduction::None);
    assert!(Reduction::parse("mse_loss", "max").unwrap_err().to_string().starts_with("mse_loss: "));
}

#[test]
fn the_loss_of_a_head_in_chunks_of_rows_matches_the_loss_of_all_logits() {
    use super::linear_cross_entropy::in_chunks;
    let (rows, width, classes) = (7, 3, 11);
    let targets = [4, IGNORE_INDEX, 0, 10, 3, IGNORE_INDEX, 7];
    let ids = Tensor::constant(from_vec(targets.to_vec(), rows));
    // Ignored rows have weights, too, which have no effect.
    let row_weights = Tensor::constant(from_vec(vec![1f32, 5.0, 2.0, 0.5, 0.0, 5.0, 1.0], rows));
    let states = tensor(&numbers(rows * width, 3, 1.0), &[rows, width], DType::F64);
    let head = tensor(&numbers(classes * width, 8, 1.0), &[classes, width], DType::F64);
    let (expected, gradients) = loss_and_gradients(&[&states, &head], |x| {
        let losses = cross_entropy(&x[0].matmul(&x[1].t()?)?, &ids, IGNORE_INDEX, 0.0, Reduction::None)?;
        losses.mul(&row_weights.to_dtype(DType::F64)?)?.sum_all()
    });
    for chunk_rows in [1, 2, 5, 100] {
        let (found, found_gradients) =
            loss_and_gradients(&[&states, &head], |x| in_chunks(&x[0], &x[1], &ids, Some(&row_weights), chunk_rows));
        assert_close(&[found], &[expected], 1e-12);
        for (found, expected) in found_gradients.iter().zip(&gradients) {
            assert_close(found, expected, 1e-12);
        }
    }
    // In bf16, logits and gradients are rounded, but sums are not.
    let [states, head] = [&states, &head].map(|x| Tensor::constant(x.raw().to_dtype(DType::BF16).unwrap()));
    let (found, found_gradients) =
        loss_and_gradients(&[&states, &head], |x| in_chunks(&x[0], &x[1], &ids, Some(&row_weights), 2));
    assert_close(&[found], &[expected], 0.02);
    for (found, expected) in found_gradients.iter().zip(&gradients) {
        assert_close(found, expected, 0.03);
    }
}

#[test]
fn wrong_operands_of_a_head_are_errors() {
    // Two rows of three features, and a head of four classes.
    let (states, head) = (tensor(&[0.0; 6], &[2, 3], DType::F32), tensor(&[0.0; 12], &[4, 3], DType::F32));
    let ids = |values: &[i64]| Tensor::constant(from_vec(values.to_vec(), values.len()));
    let error = linear_cross_entropy(&states, &head, &ids(&[4, 0]), None).unwrap_err();
    assert!(matches!(error, Error::Index { .. }) && error.to_string().contains("target 4 at position 0"), "{error}");
    assert!(matches!(linear_cross_entropy(&states, &head, &ids(&[0]), None), Err(Error::Shape { .. })));
    let narrow_head = tensor(&[0.0; 8], &[4, 2], DType::F32);
    assert!(matches!(linear_cross_entropy(&states, &narrow_head, &ids(&[0, 0]), None), Err(Error::Shape { .. })));
    let f16_head = tensor(&[0.0; 12], &[4, 3], DType::F16);
    assert!(matches!(linear_cross_entropy(&states, &f16_head, &ids(&[0, 0]), None), Err(Error::DType { .. })));
    let three_weights = tensor(&[1.0; 3], &[3], DType::F32);
    assert!(matches!(
        linear_cross_entropy(&states, &head, &ids(&[0, 0]), Some(&three_weights)),
        Err(Error::Shape { .. })
    ));
    let trained_weights = Var::from_tensor(&tensor(&[1.0; 2], &[2], DType::F32)).unwrap();
    let result = linear_cross_entropy(&states, &head, &ids(&[0, 0]), Some(&trained_weights));
    assert!(matches!(result, Err(Error::NoBackward { .. })));
}

/// The head has so many elements that it is dequantized in several parts.
#[test]
fn a_large_quantized_head_gives_the_losses_and_gradients_of_its_dequantized_values() {
    let (classes, width) = (70_000, 64);
    let draw = |dims: (usize, usize)| Tensor::randn(0.0, 1.0, dims, DType::F32, &Device::Cpu).unwrap();
    let states = draw((4, width));
    for format in [Format::Int8, Format::Ggml(Ggml::Q8_0), Format::Nf4] {
        let weight = Quantized::new(&draw((classes, width)), format).unwrap();
        let dequantized = weight.dequantize(DType::F32).unwrap();
        let targets = Tensor::from_vec(vec![3i64, IGNORE_INDEX, 69_999, 40_000], 4, &Device::Cpu).unwrap();
        let results = |weight: WeightRef<'_>| {
            // Each call has a variable of its own: backward passes add to the gradient that a variable already has.
            let h = Var::from_tensor(&states).unwrap();
            let loss = linear_cross_entropy(&h, weight, &targets, None).unwrap();
            let gradient = loss.backward().unwrap().get(&h).unwrap();
            let log_probs = linear_log_probs(&h, weight, &targets).unwrap();
            [loss, gradient, log_probs].map(|tensor| tensor.to_vec::<f32>().unwrap())
        };
        for (found, expected) in results((&weight).into()).iter().zip(results((&dequantized).into())) {
            for (f, e) in found.iter().zip(expected) {
                assert!((f - e).abs() <= 2e-5 * e.abs().max(1.0), "{f}, expected {e}");
            }
        }
    }
}
