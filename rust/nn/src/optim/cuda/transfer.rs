//! Makes the buffers that hold states for a device, and copies states from the host to them.

use std::ops::Range;

use half::bf16;
use trainable_candle_core::compute::{copy_into, zeros};
use trainable_candle_core::cuda::zeros_on_host;
use trainable_candle_core::{DType, Device, Raw, Result};

use crate::optim::state::{Number, StateData, StatePlace};

/// Copies `data`, a state of one variable, into `all` from element `start` on. `all`, in host memory, holds this state
/// of all variables, each padded to whole blocks of `STATE_BLOCK` elements.
pub(super) fn copy_state_into(all: &mut StateData, data: &StateData, start: usize) {
    match (all, data) {
        (StateData::BF16(all), StateData::BF16(data)) => all[start..start + data.len()].copy_from_slice(data),
        (StateData::F32(all), StateData::F32(data)) => all[start..start + data.len()].copy_from_slice(data),
        (StateData::U8(all), StateData::U8(data)) => all[start..start + data.len()].copy_from_slice(data),
        // This never happens: both have the dtype of the state's buffer, and optimizers reject f64 variables on CUDA
        // devices.
        _ => {}
    }
}

/// Makes a buffer of `len` zeros for a state, in memory of `device` or in pinned memory of the host.
pub(super) fn state_buffer(
    op: &'static str,
    place: StatePlace,
    len: usize,
    dtype: DType,
    device: &Device,
) -> Result<Raw> {
    match place {
        StatePlace::Device => zeros(&[len], dtype, device),
        StatePlace::Host => zeros_on_host(op, device, &[len], dtype),
    }
}

/// Makes `len` zeros on the host. `dtype` is that of a state's buffer: u8, bf16 or f32.
pub(super) fn host_zeros(dtype: DType, len: usize) -> StateData {
    match dtype {
        DType::U8 => StateData::U8(vec![0; len]),
        DType::BF16 => bf16::zeros(len),
        _ => f32::zeros(len),
    }
}

/// Copies the elements of `data` in the range `part` to `device`. `data` comes from [`host_zeros`], so it is never
/// [`StateData::F64`]; the arm for it only completes the match.
pub(super) fn to_device(data: &StateData, part: Range<usize>, device: &Device) -> Result<Raw> {
    let len = part.len();
    Ok(match data {
        StateData::BF16(data) => Raw::from_slice(&data[part], len, device)?,
        StateData::F32(data) => Raw::from_slice(&data[part], len, device)?,
        StateData::F64(data) => Raw::from_slice(&data[part], len, device)?,
        StateData::U8(data) => Raw::from_slice(&data[part], len, device)?,
    })
}

/// Overwrites `buffer` part by part. `values` makes the new values of a range of elements. Besides the buffer, device
/// memory holds the new values of only one part at a time.
pub(super) fn overwrite(buffer: &Raw, values: impl Fn(Range<usize>) -> Result<Raw>) -> Result<()> {
    /// The largest number of elements of a part.
    const PART: usize = 1 << 24;
    let len = buffer.elem_count();
    for start in (0..len).step_by(PART) {
        let part = start..len.min(start + PART);
        copy_into(&buffer.narrow(0, start, part.len())?, &values(part)?)?;
    }
    Ok(())
}
