//! OFT in adapter files.
//!
//! OFT rotates blocks of consecutive inputs or outputs of a layer. A skew-symmetric matrix Q determines the rotation of
//! each block.
//!
//! If OFT rotates outputs, the alpha of a module in the file limits ‖Q‖, the Frobenius norm of all Q of the module
//! together. `LyCORIS` and sd-scripts train with the limit alpha · (number of the module's outputs). `ComfyUI` uses the
//! limit alpha. Reading a file applies the limit of `LyCORIS` and sd-scripts once. Training that continues from the
//! file has no limit.
//!
//! Follows <https://github.com/KohakuBlueleaf/LyCORIS/blob/01ca138aead1b5d2e5c4b1b22c3ba6ba274e7d14/lycoris/modules/diag_oft.py#L93> and
//! <https://github.com/comfyanonymous/ComfyUI/blob/3684cff31bb470fc106b2c843224e69780266cca/comfy/weight_adapter/oft.py#L120>.

use trainable_candle_core::{DType, Result, Tensor};
use trainable_candle_nn::adapter::{AdaptedLayer, OftSide};

use super::modules::Stored;

/// The parameter of OFT that rotates outputs. A file stores a square matrix M for each block, and Q = M - Mᵀ.
pub(super) const BLOCKS: &str = OftSide::Output.parameter();
/// The parameter of OFT that rotates inputs. A file stores the strict upper triangle of Q for each block.
pub(super) const TRIANGLES: &str = OftSide::Input.parameter();

/// The alpha of OFT in written files. It is so large that ‖Q‖ never reaches the limit. An alpha of 0 would mean no
/// limit to `ComfyUI` and `LyCORIS`, but no rotation at all to sd-scripts and A1111.
pub(super) const NO_LIMIT: f64 = 1e4;

/// The side that a layer's adapter rotates, if it is OFT.
pub(super) fn side(layer: &AdaptedLayer<'_>) -> Option<OftSide> {
    OftSide::of(layer.parameters.iter().map(|(name, _)| *name))
}

/// Whether `blocks` has the shape (blocks, size, size).
fn are_square(blocks: &Tensor) -> bool {
    matches!(*blocks.dims(), [_, rows, columns] if rows == columns)
}

/// ‖Q‖ of a module that rotates outputs, and the module's number of outputs.
fn norm(blocks: &Tensor) -> Result<(f64, usize)> {
    let blocks = blocks.to_dtype(DType::F32)?;
    let q = blocks.sub(&blocks.transpose(1, 2)?)?;
    Ok((q.sqr()?.sum_all()?.item()?.sqrt(), blocks.dims()[0] * blocks.dims()[1]))
}

/// If ‖Q‖ of a module exceeds alpha · (number of outputs), multiply the module's blocks so that ‖Q‖ equals this limit,
/// as `LyCORIS` and sd-scripts do. Does nothing for a module without blocks, or without an alpha above 0.
pub(super) fn apply_limit(stored: &mut Stored) -> Result<()> {
    let Some(alpha) = stored.alpha.filter(|alpha| *alpha > 0.0) else { return Ok(()) };
    let Some(blocks) = stored.parameters.get_mut(BLOCKS).filter(|blocks| are_square(blocks)) else { return Ok(()) };
    let (norm, outputs) = norm(blocks)?;
    let limit = alpha * outputs as f64;
    if norm > limit {
        *blocks = blocks.to_dtype(DType::F32)?.mul_scalar(limit / norm)?;
    }
    Ok(())
}

/// Whether ‖Q‖ of a module exceeds `ComfyUI`'s limit alpha, so that `ComfyUI` rotates less than the trained adapter.
pub(super) fn is_limited(stored: &Stored) -> Result<bool> {
    let (Some(alpha), Some(blocks)) = (stored.alpha.filter(|alpha| *alpha > 0.0), stored.parameters.get(BLOCKS)) else {
        return Ok(false);
    };
    Ok(are_square(blocks) && norm(blocks)?.0 > alpha)
}
