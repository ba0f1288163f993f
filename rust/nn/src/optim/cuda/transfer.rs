//! Copies states between the host and a device.

use std::ops::Range;

use half::bf16;
use trainable_candle_core::compute::{copy_into, zeros};
use trainable_candle_core::cuda::zeros_on_host;
use trainable_candle_core::{DType, Device, Raw, Result};

use crate::optim::state::{Number, StateData, StatePlace};

/// Copies the values of one variable's state into `host` from element `start` on. `host` holds this state of all variables; the
/// values of each variable are padded to whole blocks.
pub(super) fn place_in(host: &mut StateData, data: &StateData, start: usize) {
    match (host, data) {
        (StateData::BF16(host), StateData::BF16(data)) => host[start..start + data.len()].copy_from_slice(data),
        (StateData::F32(host), StateData::F32(data)) => host[start..start + data.len()].copy_from_slice(data),
        (StateData::U8(host), StateData::U8(data)) => host[start..start + data.len()].copy_from_slice(data),
        _ => {}
    }
}

/// A vector of zeros for states.
pub(super) fn vector(op: &'static str, place: StatePlace, len: usize, dtype: DType, device: &Device) -> Result<Raw> {
    match place {
        StatePlace::Device => zeros(&[len], dtype, device),
        StatePlace::Host => zeros_on_host(op, device, &[len], dtype),
    }
}

/// Zeros of the dtype of a state's buffer.
pub(super) fn host_zeros(dtype: DType, len: usize) -> StateData {
    match dtype {
        DType::U8 => StateData::U8(vec![0; len]),
        DType::BF16 => bf16::zeros(len),
        _ => f32::zeros(len),
    }
}

/// Copies the elements `part` of `data` to `device`.
pub(super) fn to_device(data: &StateData, part: Range<usize>, device: &Device) -> Result<Raw> {
    let len = part.len();
    Ok(match data {
        StateData::BF16(data) => Raw::from_slice(&data[part], len, device)?,
        StateData::F32(data) => Raw::from_slice(&data[part], len, device)?,
        StateData::F64(data) => Raw::from_slice(&data[part], len, device)?,
        StateData::U8(data) => Raw::from_slice(&data[part], len, device)?,
    })
}

/// Overwrites `buffer` part by part, so that device memory holds at most one part of the new values beside the buffer.
pub(super) fn overwrite(buffer: &Raw, values: impl Fn(Range<usize>) -> Result<Raw>) -> Result<()> {
    const PART: usize = 1 << 24;
    let len = buffer.elem_count();
    for start in (0..len).step_by(PART) {
        let part = start..len.min(start + PART);
        copy_into(&buffer.narrow(0, start, part.len())?, &values(part)?)?;
    }
    Ok(())
}
