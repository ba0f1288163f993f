//! Checks that operations never lose a NaN: if an input element is NaN, every element of the value and of the gradients
//! that depends on the input element is NaN. [`is_passed_on`] checks one test case of an operation, taken from the
//! registry of operations. [`is_passed_on_at_edges`] checks a list of functions on tensors with rows of many lengths.

use trainable_candle_core::ops::Case;
use trainable_candle_core::ops::activation::Gelu;
use trainable_candle_core::ops::attention::scaled_dot_product_attention;
use trainable_candle_core::ops::gated::{geglu, swiglu};
use trainable_candle_core::ops::linear::linear;
use trainable_candle_core::ops::loss::{
    IGNORE_INDEX, Reduction, cross_entropy, huber_loss, l1_loss, mse_loss, smooth_l1_loss,
};
use trainable_candle_core::ops::norm::{add_layer_norm, group_norm, layer_norm, modulated_layer_norm, rms_norm};
use trainable_candle_core::raw::{from_vec, to_f64_vec};
use trainable_candle_core::{DType, Device, Result, Tensor};

use super::walk::{TOLERANCE, draw, text, value_and_gradients};

/// The result of a check; the error says what is wrong. `text` turns errors of the library into such strings.
type Checked = std::result::Result<(), String>;

/// Operations whose derivative has only a few values, such as 0 and 1. If the input is NaN, most of these derivatives
/// have one of these values and are not NaN, as in torch. So the gradients of these operations are not checked.
const PIECEWISE_LINEAR: [&str; 8] = ["relu", "clamp", "max", "min", "maximum", "minimum", "abs", "l1_loss"];

/// `x` with the element at `at` replaced by `value`, in `dtype`.
fn with_element(x: &Tensor, at: usize, value: f64, dtype: DType) -> Result<Tensor> {
    let mut values = to_f64_vec(x.raw())?;
    values[at] = value;
    Ok(Tensor::from_raw(&from_vec(values, x.shape().clone()).to_dtype(dtype)?))
}

/// The number of elements of the value, and a list: the elements of the value, then those of the gradients of all
/// inputs.
fn numbers(case: &Case, inputs: &[Tensor]) -> Result<(usize, Vec<f64>)> {
    let (value, gradients) = value_and_gradients(&*case.run, inputs)?;
    let mut numbers = to_f64_vec(value.raw())?;
    let count = numbers.len();
    numbers.extend(gradients.into_iter().flatten());
    Ok((count, numbers))
}

/// Sets each element of each input to NaN in turn, and checks the elements of the value and the gradients that depend
/// on it. An output element depends on an input element if another finite value of the input element changes the output
/// element, computed in f64 on the CPU.
pub fn is_passed_on(name: &str, case: &Case, device: &Device) -> Checked {
    // The inputs in f64.
    let wide = text(draw(case, DType::F64, /* strided: */ false))?;
    let (value_count, before) = text(numbers(case, &wide))?;
    let checked_count = if PIECEWISE_LINEAR.contains(&name) { value_count } else { before.len() };
    for (index, input) in wide.iter().enumerate() {
        let count = input.elem_count();
        // Of an input with more than 40 elements, only every seventh element and the last two are tested.
        for at in (0..count).filter(|at| count <= 40 || at % 7 == 0 || at + 3 > count) {
            let element = text(to_f64_vec(input.raw()))?[at];
            let replaced = |value: f64, dtype: DType| -> Result<Vec<Tensor>> {
                let mut inputs = wide.iter().map(|x| x.to_dtype(dtype)).collect::<Result<Vec<_>>>()?;
                inputs[index] = with_element(input, at, value, dtype)?;
                Ok(inputs)
            };
            let mut depends = vec![false; before.len()];
            // Small changes, and changes large enough to cross thresholds, such as the bounds of `clamp`.
            for change in [0.37, -0.41, 50.0, -50.0] {
                let (_, after) =
                    text(replaced(element + change, DType::F64).and_then(|inputs| numbers(case, &inputs)))?;
                for (i, (after, before)) in after.iter().zip(&before).enumerate() {
                    depends[i] |= (after - before).abs() > 1e-9 * before.abs().max(1.0);
                }
            }
            // `TOLERANCE` pairs the dtypes to test with tolerances, which this check does not need.
            for (dtype, _) in TOLERANCE {
                let inputs = text(replaced(f64::NAN, dtype))?;
                let inputs = text(inputs.iter().map(|x| x.to_device(device)).collect::<Result<Vec<_>>>())?;
                let (_, found) = text(numbers(case, &inputs))?;
                if let Some(lost) = (0..checked_count).find(|&i| depends[i] && !found[i].is_nan()) {
                    let part = if lost < value_count { "value" } else { "gradient" };
                    let found = found[lost];
                    let dtype = dtype.as_str();
                    return Err(format!(
                        "{dtype}: with NaN at element {at} of input {index}, number {lost} ({part}) is {found}, not NaN"
                    ));
                }
            }
        }
    }
    Ok(())
}

/// A function of a tensor (3, n), and the elements of its value that must be NaN if row 1 of the tensor has a NaN.
struct Function {
    name: &'static str,
    run: fn(&Tensor) -> Result<Tensor>,
    nan_at: NanAt,
    /// Whether all elements of row 1 of the gradient must be NaN as well. If false, the gradient is not checked.
    gradient: bool,
}

/// The elements of a function's value that are NaN.
#[derive(Clone, Copy, PartialEq)]
enum NanAt {
    /// All elements of row 1, and no element of another row.
    Row,
    /// The last element of row 1, and no element of another row. Other elements of row 1 may be NaN.
    Last,
    /// The elements of row 1 in the columns where the input is NaN, and no other element.
    Columns,
    /// All elements. The values of the functions below for which this holds are scalars.
    All,
}

// The arguments without names in the calls below:
// - reductions: the axes, and whether to keep them; `var` also takes the correction;
// - norms: the number of normalized axes (`layer_norm`) or of groups (`group_norm`), the weight, the bias, and eps.
//   `rms_norm` takes only the weight and eps, `modulated_layer_norm` the scale, the shift and eps. Tensors for
//   `group_norm` are (batch, positions, channels);
// - attention: after q, k and v, the mask, whether attention is causal, and the scale;
// - cross-entropy: the targets, the target to ignore, the label smoothing, and the reduction;
// - `huber_loss` and `smooth_l1_loss`: 0.5 is the threshold between the quadratic and the linear part.
const FUNCTIONS: &[Function] = &[
    Function { name: "sum", run: |x| x.sum(&[1], false), nan_at: NanAt::Row, gradient: false },
    Function { name: "mean", run: |x| x.mean(&[1], true), nan_at: NanAt::Row, gradient: false },
    Function { name: "max", run: |x| x.max(&[1], false), nan_at: NanAt::Row, gradient: false },
    Function { name: "min", run: |x| x.min(&[1], false), nan_at: NanAt::Row, gradient: false },
    Function { name: "var", run: |x| x.var(&[1], false, 0.0), nan_at: NanAt::Row, gradient: true },
    Function { name: "logsumexp", run: |x| x.logsumexp(&[1], false), nan_at: NanAt::Row, gradient: true },
    Function { name: "cumsum", run: |x| x.cumsum(1), nan_at: NanAt::Last, gradient: false },
    Function {
        name: "sum of columns",
        run: |x| x.t()?.contiguous()?.sum(&[0], false),
        nan_at: NanAt::Row,
        gradient: false,
    },
    Function {
        name: "max of columns",
        run: |x| x.t()?.contiguous()?.max(&[0], false),
        nan_at: NanAt::Row,
        gradient: false,
    },
    Function {
        name: "min of columns",
        run: |x| x.t()?.contiguous()?.min(&[0], false),
        nan_at: NanAt::Row,
        gradient: false,
    },
    Function { name: "sum of all", run: Tensor::sum_all, nan_at: NanAt::All, gradient: false },
    Function { name: "mean of all", run: Tensor::mean_all, nan_at: NanAt::All, gradient: false },
    Function { name: "max of all", run: Tensor::max_all, nan_at: NanAt::All, gradient: false },
    Function { name: "min of all", run: Tensor::min_all, nan_at: NanAt::All, gradient: false },
    Function { name: "softmax", run: |x| x.softmax(1), nan_at: NanAt::Row, gradient: true },
    Function { name: "log_softmax", run: |x| x.log_softmax(1), nan_at: NanAt::Row, gradient: true },
    Function { name: "softmax of columns", run: |x| x.t()?.softmax(0)?.t(), nan_at: NanAt::Row, gradient: true },
    Function { name: "layer_norm", run: |x| layer_norm(x, 1, None, None, 1e-5), nan_at: NanAt::Row, gradient: true },
    Function { name: "rms_norm", run: |x| rms_norm(x, None, 1e-5), nan_at: NanAt::Row, gradient: true },
    Function {
        name: "add_layer_norm",
        run: |x| add_layer_norm(x, &like(x)?, 1, None, None, 1e-5).map(|(_, y)| y),
        nan_at: NanAt::Row,
        gradient: true,
    },
    Function {
        name: "modulated_layer_norm",
        run: |x| modulated_layer_norm(&x.unsqueeze(1)?, &like(x)?, &like(x)?, 1e-5),
        nan_at: NanAt::Row,
        gradient: true,
    },
    Function {
        name: "group_norm of positions",
        run: |x| group_norm(&x.unsqueeze(2)?, 1, None, None, 1e-5),
        nan_at: NanAt::Row,
        gradient: true,
    },
    Function {
        name: "group_norm of channels",
        run: |x| group_norm(&x.unsqueeze(1)?, 1, None, None, 1e-5),
        nan_at: NanAt::Row,
        gradient: true,
    },
    Function {
        name: "mse_loss",
        run: |x| mse_loss(x, &like(x)?, Reduction::Mean),
        nan_at: NanAt::All,
        gradient: false,
    },
    Function { name: "l1_loss", run: |x| l1_loss(x, &like(x)?, Reduction::Sum), nan_at: NanAt::All, gradient: false },
    Function {
        name: "huber_loss",
        run: |x| huber_loss(x, &like(x)?, 0.5, Reduction::Mean),
        nan_at: NanAt::All,
        gradient: false,
    },
    Function {
        name: "smooth_l1_loss",
        run: |x| smooth_l1_loss(&like(x)?, x, 0.5, Reduction::Sum),
        nan_at: NanAt::All,
        gradient: false,
    },
    Function {
        name: "cross_entropy",
        run: |x| cross_entropy(x, &targets(x)?, IGNORE_INDEX, 0.0, Reduction::None),
        nan_at: NanAt::Row,
        gradient: true,
    },
    Function {
        name: "smoothed cross_entropy",
        run: |x| cross_entropy(x, &targets(x)?, IGNORE_INDEX, 0.1, Reduction::None),
        nan_at: NanAt::Row,
        gradient: true,
    },
    Function {
        name: "mean cross_entropy",
        run: |x| cross_entropy(x, &targets(x)?, IGNORE_INDEX, 0.0, Reduction::Mean),
        nan_at: NanAt::All,
        gradient: true,
    },
    Function { name: "product", run: |x| x.matmul(&like(x)?.t()?), nan_at: NanAt::Row, gradient: false },
    Function { name: "linear", run: |x| linear(x, &like(x)?, None), nan_at: NanAt::Row, gradient: false },
    Function {
        name: "keys of an attention",
        run: |x| attend(x, |q, x, v| scaled_dot_product_attention(q, x, v, None, false, None)),
        nan_at: NanAt::Row,
        gradient: true,
    },
    Function {
        name: "values of an attention",
        run: |x| attend(x, |q, x, k| scaled_dot_product_attention(q, k, x, None, false, None)),
        nan_at: NanAt::Row,
        gradient: false,
    },
    Function {
        name: "mask of an attention",
        run: |x| {
            let mask = x.reshape((3, 1, x.dims()[1]))?;
            attend(x, |q, _, v| scaled_dot_product_attention(q, v, v, Some(&mask), false, None))
        },
        nan_at: NanAt::Row,
        gradient: false,
    },
    Function { name: "exp", run: Tensor::exp, nan_at: NanAt::Columns, gradient: false },
    Function { name: "tanh", run: Tensor::tanh, nan_at: NanAt::Columns, gradient: false },
    Function { name: "sigmoid", run: Tensor::sigmoid, nan_at: NanAt::Columns, gradient: false },
    Function { name: "relu", run: Tensor::relu, nan_at: NanAt::Columns, gradient: false },
    Function { name: "clamp", run: |x| x.clamp(Some(-0.5), Some(0.5)), nan_at: NanAt::Columns, gradient: false },
    Function { name: "gelu", run: |x| x.gelu(Gelu::Exact), nan_at: NanAt::Columns, gradient: false },
    Function { name: "gelu tanh", run: |x| x.gelu(Gelu::Tanh), nan_at: NanAt::Columns, gradient: false },
    Function { name: "silu", run: Tensor::silu, nan_at: NanAt::Columns, gradient: false },
    Function { name: "maximum", run: |x| like(x)?.maximum(x), nan_at: NanAt::Columns, gradient: false },
    Function { name: "minimum", run: |x| x.minimum(&like(x)?), nan_at: NanAt::Columns, gradient: false },
    Function {
        name: "geglu",
        run: |x| geglu(&Tensor::cat(&[&like(x)?, x], 1)?),
        nan_at: NanAt::Columns,
        gradient: false,
    },
    Function {
        name: "swiglu",
        run: |x| swiglu(&Tensor::cat(&[x, &like(x)?], 1)?),
        nan_at: NanAt::Columns,
        gradient: false,
    },
];

/// Fixed numbers with the shape, the dtype and the device of `x`.
fn like(x: &Tensor) -> Result<Tensor> {
    let values: Vec<f64> = (0..x.elem_count()).map(|i| ((i * 7 + 3) % 13) as f64 / 8.0 - 0.75).collect();
    Tensor::from_raw(&from_vec(values, x.shape().clone()).to_dtype(x.dtype())?).to_device(x.device())
}

/// The target of every row is the last class, so a loop over the classes meets a NaN of an earlier class before the
/// target.
fn targets(x: &Tensor) -> Result<Tensor> {
    let last = x.dims()[1] as i64 - 1;
    Tensor::from_vec(vec![last; x.dims()[0]], x.dims()[0], x.device())
}

/// Calls `attention` for three sequences of n positions and width 16, one for each row of `x`. The arguments are: one
/// query of fixed numbers per sequence (3, 1, 16); the elements of the row, each repeated 16 times, as the keys or the
/// values (3, n, 16); fixed numbers of the same shape, for the other of the two.
fn attend(x: &Tensor, attention: impl Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let repeated = x.reshape((3, x.dims()[1], 1))?.broadcast_as((3, x.dims()[1], 16))?.contiguous()?;
    let query = like(&repeated.narrow(1, 0, 1)?.contiguous()?)?;
    attention(&query, &repeated, &like(&repeated)?)
}

/// Row lengths around the sizes of warps, vectorized loads and blocks of the kernels.
const LENGTHS: [usize; 15] = [1, 2, 31, 33, 63, 65, 127, 255, 257, 1023, 1024, 1025, 2049, 4097, 8193];

/// Writes single NaNs, and runs of consecutive NaNs, into row 1 of tensors (3, n) at the edges of warps and blocks, and
/// checks [`FUNCTIONS`].
pub fn is_passed_on_at_edges(device: &Device) -> Checked {
    let mut failures = Vec::new();
    for n in LENGTHS {
        let edges = [0, 15, 31, 32, 255, 256, 1023, 1024, 2047, 8191];
        // Ranges of columns.
        let mut places: Vec<_> =
            edges.iter().chain(&[n - 1, n.saturating_sub(2), n / 2]).map(|&at| at..at + 1).collect();
        places.extend([0..n - 1, 0..1024, 1024..2048, 1..n, 0..n]);
        places.retain(|place| place.start < place.end && place.end <= n);
        for place in places {
            // f64 and f16 are tested only at two lengths, f32 and bf16 at all lengths.
            let dtypes = TOLERANCE.map(|(dtype, _)| dtype).into_iter();
            for dtype in dtypes.filter(|dtype| [33, 1025].contains(&n) || [DType::F32, DType::BF16].contains(dtype)) {
                let values: Vec<f64> = (0..3 * n)
                    .map(|i| {
                        if i / n == 1 && place.contains(&(i % n)) {
                            f64::NAN
                        } else {
                            ((i * 5) % 11) as f64 / 8.0 - 0.5
                        }
                    })
                    .collect();
                let x = text(from_vec(values, (3, n)).to_dtype(dtype).map_err(Into::into))?;
                let x = text(Tensor::from_raw(&x).to_device(device))?;
                for function in FUNCTIONS {
                    if let Err(error) = function.check(&x, place.clone()) {
                        let (name, dtype) = (function.name, dtype.as_str());
                        failures.push(format!("{name} of {n} in {dtype} with NaN in {place:?}: {error}"));
                    }
                }
            }
        }
    }
    if failures.is_empty() { Ok(()) } else { Err(format!("{} failures\n{}", failures.len(), failures.join("\n"))) }
}

impl Function {
    /// Runs the function on `x`, whose row 1 has NaN in the columns `place`, and checks the value and the gradient.
    fn check(&self, x: &Tensor, place: std::ops::Range<usize>) -> Checked {
        let (value, gradients) = text(value_and_gradients(&|x| (self.run)(&x[0]), std::slice::from_ref(x)))?;
        let (value, n) = (text(to_f64_vec(value.raw()))?, x.dims()[1]);
        // The number of elements of the value for each of the 3 rows of `x`; 0 if the value is a scalar, which is
        // computed from all rows.
        let width = value.len() / 3;
        for (i, number) in value.iter().enumerate() {
            // A scalar has no row or column; `NanAt::All` reads neither.
            let (row, column) = i.checked_div(width).map_or((1, 0), |row| (row, i % width));
            // `None`: the element may be NaN or not.
            let expected = match self.nan_at {
                NanAt::All => Some(true),
                _ if row != 1 => Some(false),
                NanAt::Row => Some(true),
                NanAt::Last => (column + 1 == width).then_some(true),
                NanAt::Columns => Some(place.contains(&column)),
            };
            if expected.is_some_and(|expected| expected != number.is_nan()) {
                let wanted = if number.is_nan() { "no NaN" } else { "NaN" };
                return Err(format!("element {i} of the value is {number}, expected {wanted}"));
            }
        }
        // Row 1 of the gradient.
        let gradient = &gradients[0];
        match (n..2 * n).find(|&i| self.gradient && !gradient[i].is_nan()) {
            Some(i) => Err(format!("element {i} of the gradient is {}, expected NaN", gradient[i])),
            None => Ok(()),
        }
    }
}
