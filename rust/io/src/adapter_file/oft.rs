//! OFT in files.
//!
//! OFT rotates blocks of a layer's inputs or outputs. A skew-symmetric matrix Q determines the rotation of a block.
//!
//! In files of rotated outputs, a module's alpha limits ‖Q‖, the norm over all blocks of the module. `LyCORIS` and
//! sd-scripts, which train with this limit, limit ‖Q‖ to alpha times the number of the module's outputs. `ComfyUI` limits
//! ‖Q‖ to alpha. Reading a file applies the limit that the file was trained with; further training has no limit.
//!
//! Follows <https://github.com/KohakuBlueleaf/LyCORIS/blob/01ca138aead1b5d2e5c4b1b22c3ba6ba274e7d14/lycoris/modules/diag_oft.py#L93> and
//! <https://github.com/comfyanonymous/ComfyUI/blob/3684cff31bb470fc106b2c843224e69780266cca/comfy/weight_adapter/oft.py#L120>.

use trainable_candle_core::{DType, Result, Tensor};
use trainable_candle_nn::adapter::{AdaptedLayer, OftSide};

use super::modules::Stored;

/// The parameter of OFT that rotates outputs: in files, a square matrix for each block. The matrix minus its transpose is
/// Q.
pub(super) const BLOCKS: &str = OftSide::Output.parameter();
/// The parameter of OFT that rotates inputs: the strict upper triangle of Q for each block.
pub(super) const TRIANGLES: &str = OftSide::Input.parameter();

/// The alpha of written files, which is so large that no rotation reaches the limit. `ComfyUI` and `LyCORIS` would read 0
/// as no limit, but sd-scripts and A1111 read 0 as no rotation at all.
pub(super) const NO_LIMIT: f64 = 1e4;

/// The side that a layer's adapter rotates, if it is OFT.
pub(super) fn side(layer: &AdaptedLayer<'_>) -> Option<OftSide> {
    OftSide::of(layer.parameters.iter().map(|(name, _)| *name))
}

fn are_square(blocks: &Tensor) -> bool {
    matches!(*blocks.dims(), [_, rows, columns] if rows == columns)
}

/// ‖Q‖ of a module that rotates outputs, and the number of its outputs.
fn norm(blocks: &Tensor) -> Result<(f64, usize)> {
    let blocks = blocks.to_dtype(DType::F32)?;
    let q = blocks.sub(&blocks.transpose(1, 2)?)?;
    Ok((q.sqr()?.sum_all()?.item()?.sqrt(), blocks.dims()[0] * blocks.dims()[1]))
}

/// Scale the blocks of a module down to the limit that its alpha sets, as the tools that train with the limit do.
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

/// Whether `ComfyUI` would limit the rotations of a module further than [`apply_limit`] does.
pub(super) fn is_limited(stored: &Stored) -> Result<bool> {
    let (Some(alpha), Some(blocks)) = (stored.alpha.filter(|alpha| *alpha > 0.0), stored.parameters.get(BLOCKS)) else {
        return Ok(false);
    };
    Ok(are_square(blocks) && norm(blocks)?.0 > alpha)
}
