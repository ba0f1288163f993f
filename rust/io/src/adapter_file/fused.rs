//! Fused modules: one module of an adapter file that holds the adapters of several layers of the model. The weights of
//! these layers (for example the query, key and value projections) are one matrix in the original checkpoint.
//!
//! The rows (outputs) of the matrix are divided into equal *shares*. Each layer has one or several consecutive shares:
//! in its [`Form::Rows`], `of` is the number of shares of the matrix, `first` the layer's first share and `count` the
//! number of its shares. The LoRA factors of n layers of rank r become one pair of rank n · r: the layers' B factors
//! are the blocks of a block-diagonal B, and their A factors are stacked. If all layers have the same A, the module
//! stores this A once, with rank r. The two factor pairs of a LoHa are each joined like a LoRA's. DoRA's magnitudes are
//! stacked if there is one for each output, and so are OFT's blocks of outputs. Parameters that apply to all rows
//! (LoKr's factors, a magnitude for each input) cannot be joined; `grouping.rs` rejects them before they get here.

use std::collections::BTreeMap;

use trainable_candle_core::{DType, Device, Error, Result, Tensor};

use super::oft;
use crate::form::{Form, swapped};

const OP: &str = "adapter";
/// The parameters of one adapter under peft's names.
pub(super) type Parameters = BTreeMap<&'static str, Tensor>;

/// Up factors (out, r), with a row for each output.
const UPS: [&str; 3] = ["lora_B.weight", "hada_w1_a", "hada_w2_a"];
/// Down factors (r, in).
const DOWNS: [&str; 3] = ["lora_A.weight", "hada_w1_b", "hada_w2_b"];
/// DoRA's magnitudes: one for each output if the first dimension is the number of outputs, otherwise one for each
/// input.
const MAGNITUDES: [&str; 2] = ["lora_magnitude_vector.weight", "dora_scale"];
/// The left factors of LoKr's Kronecker product. Their row index is the slower digit of the output index: output =
/// left row · (number of right rows) + right row.
const SLOW_ROWS: [&str; 2] = ["lokr_w1", "lokr_w1_a"];
/// The right factors of LoKr's Kronecker product. Their row index is the faster digit of the output index.
const FAST_ROWS: [&str; 2] = ["lokr_w2", "lokr_w2_a"];

/// OFT's square matrices (blocks, size, size), one for each block of consecutive outputs.
const BLOCKS: &str = oft::BLOCKS;

/// Join the adapters of several layers into the parameters of one module. `members` has each layer's parameters, and
/// the form that tells which shares of the module are the layer's. The layers must have the same scale.
///
/// # Errors
/// [`Error::Argument`] if `members` is empty; [`Error::Shape`] if the rows of an up factor do not fit the layer's
/// shares, or if the layers' parameters cannot be concatenated.
pub(super) fn join(mut members: Vec<(Form, Parameters)>) -> Result<Parameters> {
    members.sort_by_key(|(form, _)| if let Form::Rows { first, .. } = form { *first } else { 0 });
    // If the module is not fused, its only layer has a form other than `Form::Rows`. This is `Form::Swapped` if the
    // file has the two halves of the rows in the other order.
    let Some((form, first_values)) = members.first() else {
        return Err(Error::argument(OP, "there is no layer to write"));
    };
    let Form::Rows { of, count, .. } = *form else {
        return if *form == Form::Swapped { swap(first_values) } else { Ok(first_values.clone()) };
    };
    let mut joined = Parameters::new();
    for name in first_values.keys().copied() {
        // The parameter `name` of each layer, with the layer's form.
        let parts: Vec<(Form, &Tensor)> =
            members.iter().filter_map(|(form, values)| Some((*form, values.get(name)?))).collect();
        let all: Vec<&Tensor> = parts.iter().map(|(_, value)| *value).collect();
        let same_downs = have_same_downs(&members)?;
        // The number of rows (for OFT: of blocks) of one share: the first layer has those of its `count` shares.
        let share_height = || all[0].dims()[0] / count;
        let value = if DOWNS.contains(&name) {
            if same_downs { all[0].clone() } else { Tensor::cat(&all, 0)? }
        } else if UPS.contains(&name) {
            diagonal(&parts, share_height(), of, same_downs)?
        } else if name == BLOCKS {
            stacked(&parts, share_height(), of)?
        } else {
            Tensor::cat(&all, 0)?
        };
        joined.insert(name, value);
    }
    Ok(joined)
}

/// Whether there are several layers, and all of them have the same down factors.
fn have_same_downs(members: &[(Form, Parameters)]) -> Result<bool> {
    let numbers = |values: &Parameters, name: &str| match values.get(name) {
        Some(value) => Ok(Some((value.dims().to_vec(), value.to_dtype(DType::F32)?.contiguous()?.to_vec::<f32>()?))),
        None => Ok::<_, Error>(None),
    };
    for name in DOWNS {
        let first = numbers(&members[0].1, name)?;
        for (_, values) in &members[1..] {
            if numbers(values, name)? != first {
                return Ok(false);
            }
        }
    }
    Ok(members.len() > 1)
}

/// The up factor of a module with `of` shares of `share_rows` rows each, from the up factors of its layers. If
/// `same_downs`, the module has one down factor, so all layers use the same columns; otherwise each layer has columns
/// of its own. The rows of shares that belong to no layer are zero.
fn diagonal(parts: &[(Form, &Tensor)], share_rows: usize, of: usize, same_downs: bool) -> Result<Tensor> {
    let ranks: Vec<usize> = parts.iter().map(|(_, value)| value.dims()[1]).collect();
    let width: usize = if same_downs { ranks[0] } else { ranks.iter().sum() };
    let dtype = parts[0].1.dtype();
    let zeros = |rows: usize, columns: usize| Tensor::zeros((rows, columns), dtype, &Device::Cpu);
    // `blocks` has the module's rows from the top, `share` is the first share without rows in `blocks`, and `column` is
    // the first column of the next layer.
    let (mut blocks, mut share, mut column) = (Vec::new(), 0, 0);
    for ((form, value), rank) in parts.iter().zip(&ranks) {
        let Form::Rows { first, count, .. } = *form else { continue };
        let rows = count * share_rows;
        if value.dims()[0] != rows {
            let message = format!("an up factor has {} rows for {count} shares, expected {rows}", value.dims()[0]);
            return Err(Error::shape(OP, message));
        }
        if first > share {
            blocks.push(zeros((first - share) * share_rows, width)?);
        }
        if same_downs {
            blocks.push((*value).clone());
        } else {
            let (left, right) = (zeros(rows, column)?, zeros(rows, width - column - rank)?);
            let padded: Vec<&Tensor> = [&left, *value, &right].into_iter().filter(|part| part.dims()[1] > 0).collect();
            blocks.push(Tensor::cat(&padded, 1)?);
            column += rank;
        }
        share = first + count;
    }
    if share < of {
        blocks.push(zeros((of - share) * share_rows, width)?);
    }
    Tensor::cat(&blocks.iter().collect::<Vec<_>>(), 0)
}

/// OFT's stacked blocks: `share_blocks` blocks for each of the module's `of` shares. Shares that belong to no layer get
/// blocks of zeros, which stand for no rotation.
fn stacked(parts: &[(Form, &Tensor)], share_blocks: usize, of: usize) -> Result<Tensor> {
    let (size, dtype) = (parts[0].1.dims()[1], parts[0].1.dtype());
    let zeros = |shares: usize| Tensor::zeros((shares * share_blocks, size, size), dtype, &Device::Cpu);
    // `share` is the first share without blocks in `blocks`.
    let (mut blocks, mut share) = (Vec::new(), 0);
    for (form, value) in parts {
        let Form::Rows { first, count, .. } = *form else { continue };
        if first > share {
            blocks.push(zeros(first - share)?);
        }
        blocks.push((*value).clone());
        share = first + count;
    }
    if share < of {
        blocks.push(zeros(of - share)?);
    }
    Tensor::cat(&blocks.iter().collect::<Vec<_>>(), 0)
}

/// The parameters of one layer of a module. The module has `rows` outputs, and `form` tells which of these outputs
/// belong to the layer. `None` if the module does not change the layer.
///
/// # Errors
/// [`Error::Config`] if the module has a parameter that cannot be divided because it applies to all outputs together,
/// [`Error::Shape`] if the rows of a parameter cannot be divided into equal shares.
pub(super) fn split(module: &BTreeMap<&'static str, Tensor>, form: Form, rows: usize) -> Result<Option<Parameters>> {
    let Form::Rows { first, count, of } = form else {
        return if form == Form::Swapped { swap(module).map(Some) } else { Ok(Some(module.clone())) };
    };
    let mut parameters = Parameters::new();
    // The number of rows of LoKr's left factor.
    let left_rows = SLOW_ROWS.iter().find_map(|name| module.get(name)).map(|value| value.dims()[0]);
    for (name, value) in module {
        let height = value.dims().first().copied().unwrap_or(0);
        // Whether the rows of this parameter belong to outputs. The layer then gets only its shares of the rows.
        let per_row = UPS.contains(name)
            || MAGNITUDES.contains(name) && height == rows
            // Each row of LoKr's left factor belongs to consecutive outputs, so a share of these rows is a share of
            // the outputs. The right factor then goes to every layer unchanged.
            || SLOW_ROWS.contains(name) && height % of == 0
            || *name == BLOCKS && height % of == 0
            // If LoKr's left factor has one row, its right factor has one row for each output of the module.
            || FAST_ROWS.contains(name) && left_rows == Some(1) && height % of == 0;
        // Whether the parameter applies to all outputs together, so that it cannot be divided. Parameters of neither
        // sort, such as down factors, go to every layer unchanged.
        let applies_to_all = (MAGNITUDES.contains(name) || *name == BLOCKS) && !per_row
            || SLOW_ROWS.contains(name) && !per_row && left_rows != Some(1)
            || FAST_ROWS.contains(name) && left_rows == Some(1) && !per_row;
        if per_row && (height == 0 || height % of != 0) {
            let message = format!("{name} has shape {:?}, expected rows in {of} equal shares", value.dims());
            return Err(Error::shape(OP, message));
        }
        if applies_to_all {
            return Err(Error::Config(format!(
                "{name} (shape {:?}) applies to all outputs of a fused module, but the module's layers are separate \
                 in this model; use an adapter without this parameter",
                value.dims()
            )));
        }
        parameters.insert(name, if per_row { form.read(value)? } else { value.clone() });
    }
    // `join` writes blocks of zeros for shares that belong to no layer. But if all blocks are zero, the module is an
    // untrained adapter of every layer.
    if let (Some(module_blocks), Some(layer_blocks)) = (module.get(BLOCKS), parameters.get(BLOCKS))
        && is_zero(layer_blocks)?
        && !is_zero(module_blocks)?
    {
        return Ok(None);
    }
    let Some(runs) = own_columns(module, (first, count, of))? else { return Ok(Some(parameters)) };
    if runs.is_empty() {
        return Ok(None);
    }
    for (name, value) in &mut parameters {
        // The rank is the number of columns of an up factor, and of rows of a down factor.
        let dim = if UPS.contains(name) { 1 } else { 0 };
        if UPS.contains(name) || DOWNS.contains(name) {
            let parts: Vec<Tensor> =
                runs.iter().map(|&(start, length)| value.narrow(dim, start, length)).collect::<Result<_>>()?;
            *value = Tensor::cat(&parts.iter().collect::<Vec<_>>(), dim)?;
        }
    }
    Ok(Some(parameters))
}

/// The columns of the module's up factors that only this layer uses, as runs (start, length). (In the modules that
/// [`join`] and kohya's trainers write, every column belongs to one layer, unless all layers have the same down
/// factors.) A column is used by a share if it is not zero in the share's rows. `None` if the layer keeps all columns.
/// This is so if the module has no up factor, if another layer uses a column of this layer too, if all columns are
/// zero, or if the module has a magnitude and this layer uses no column (a magnitude changes the layer without them).
/// Of a LoHa's two up factors only the first is examined: [`join`] divides the columns of both in the same way.
fn own_columns(module: &Parameters, (first, count, of): (usize, usize, usize)) -> Result<Option<Vec<(usize, usize)>>> {
    let Some(up) = UPS.iter().find_map(|name| module.get(name)).filter(|up| up.rank() == 2) else { return Ok(None) };
    let (rows, rank) = (up.dims()[0], up.dims()[1]);
    let values = up.to_dtype(DType::F32)?.contiguous()?.to_vec::<f32>()?;
    let share_rows = (rows / of).max(1);
    let used = |share: usize, column: usize| {
        (share * share_rows..((share + 1) * share_rows).min(rows)).any(|row| values[row * rank + column] != 0.0)
    };
    // For each column: the first share of those that use the column; None if none does.
    let mut owners: Vec<Option<usize>> = Vec::with_capacity(rank);
    for column in 0..rank {
        let mut owner = None;
        for share in (0..of).filter(|&share| used(share, column)) {
            // All shares of this layer count as its first share.
            let share = if (first..first + count).contains(&share) { first } else { share };
            if owner.is_some_and(|other| other != share) {
                // A column that two other layers share does not matter here.
                let both_others = owner != Some(first) && share != first;
                if !both_others {
                    return Ok(None);
                }
            }
            owner = owner.or(Some(share));
        }
        // A column of zeros gets the owner of the column before it, so that a layer's columns stay together.
        owners.push(owner.or_else(|| owners.last().copied().flatten()));
    }
    if owners.iter().all(Option::is_none)
        || MAGNITUDES.iter().any(|name| module.contains_key(name)) && !owners.contains(&Some(first))
    {
        return Ok(None);
    }
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for column in (0..rank).filter(|&column| owners[column] == Some(first)) {
        match runs.last_mut() {
            Some((start, length)) if *start + *length == column => *length += 1,
            _ => runs.push((column, 1)),
        }
    }
    Ok(Some(runs))
}

/// Whether all elements of `value` are 0.
fn is_zero(value: &Tensor) -> Result<bool> {
    Ok(value.to_dtype(DType::F32)?.contiguous()?.to_vec::<f32>()?.iter().all(|x| *x == 0.0))
}

/// Exchange, for [`Form::Swapped`], the first and the second half of the rows of every parameter whose rows are
/// outputs.
fn swap(values: &Parameters) -> Result<Parameters> {
    // The number of rows of LoKr's left factor.
    let left_rows = SLOW_ROWS.iter().find_map(|name| values.get(name)).map(|value| value.dims()[0]);
    values
        .iter()
        .map(|(name, value)| {
            let height = value.dims().first().copied().unwrap_or(0);
            // Magnitudes for the inputs have one row.
            let per_row = UPS.contains(name)
                || MAGNITUDES.contains(name) && height > 1
                || SLOW_ROWS.contains(name) && height % 2 == 0
                || FAST_ROWS.contains(name) && left_rows == Some(1) && height % 2 == 0;
            let per_row = per_row || *name == BLOCKS;
            // A left factor of more than one row must have two halves, too: an odd number of its rows is an error.
            let needs_halves = SLOW_ROWS.contains(name) && height > 1 || per_row;
            if needs_halves && (height == 0 || height % 2 == 1) {
                return Err(Error::shape(
                    OP,
                    format!("{name} has shape {:?}, expected an even number of rows", value.dims()),
                ));
            }
            Ok((*name, if per_row { swapped(value)? } else { value.clone() }))
        })
        .collect()
}
