//! Tensor maps: descriptions of tensors for the copy engine (TMA) of compute capability 9.0. One copy takes a box of a
//! tensor, or the same channels of several pixels of an image, into shared memory.

use std::ffi::c_void;
use std::mem::MaybeUninit;

use candle_core::DType;
use candle_core::cuda_backend::cudarc::driver::DriverError;
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUresult, CUtensorMap, CUtensorMapDataType_enum as Element, CUtensorMapFloatOOBfill_enum as Outside,
    CUtensorMapInterleave_enum as Interleave, CUtensorMapL2promotion_enum as Promotion,
    CUtensorMapSwizzle_enum as Swizzle, cuTensorMapEncodeIm2col, cuTensorMapEncodeTiled,
};
use trainable_candle_cuda::structs::{Address, TensorMap};

use super::error::driver_error;
use crate::Result;

/// The base pixels that the copy engine visits in an image. At each position of a convolution's window, the base pixel
/// is the one at offset (0, 0) in the window. Pairs are (height, width).
#[derive(Clone, Copy)]
pub struct Windows {
    /// The first base pixel; it is negative if it lies in the padding.
    pub lower: [i64; 2],
    /// The last pixel that may be a base pixel, minus the last pixel of the image.
    pub upper: [i64; 2],
    /// The distance between neighbouring base pixels, in pixels.
    pub stride: [u32; 2],
}

/// A placeholder for a map that the kernel does not read.
pub const NO_MAP: TensorMap = TensorMap { opaque: [0; 16] };

/// Makes tensor maps. Shapes list the densest dimension first.
pub struct Encoder {
    op: &'static str,
    element: Element,
    element_bytes: u64,
}

impl Encoder {
    /// An encoder for tensors of `dtype`: f16, bf16, or u8 for codes of 8 bits.
    ///
    /// # Errors
    /// [`Error::DType`](crate::Error::DType) for other dtypes.
    pub fn new(op: &'static str, dtype: DType) -> Result<Self> {
        let element = match dtype {
            DType::F16 => Element::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            DType::BF16 => Element::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            DType::U8 => Element::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            other => return Err(crate::cpu::elem::unsupported_dtype(op, other)),
        };
        Ok(Self { op, element, element_bytes: dtype.size_in_bytes() as u64 })
    }

    /// For a dense tensor of `shape`, densest dimension first: the strides in bytes of all dimensions but the first,
    /// then the bytes of the whole tensor.
    fn distances<const N: usize>(&self, shape: &[u64; N]) -> [u64; N] {
        let mut bytes = self.element_bytes;
        shape.map(|size| {
            bytes *= size;
            bytes
        })
    }

    /// The map that a call of the driver has filled, or the error of the call.
    ///
    /// # Safety
    /// `status` is the result of a call that fills `map` if it succeeds.
    unsafe fn finish(&self, status: CUresult, map: MaybeUninit<CUtensorMap>) -> Result<TensorMap> {
        if status != CUresult::CUDA_SUCCESS {
            return Err(driver_error(self.op, DriverError(status)));
        }
        // SAFETY: the caller's promise.
        let map = unsafe { map.assume_init() };
        Ok(TensorMap { opaque: map.opaque })
    }

    /// A map of boxes of a dense tensor. A box has `extent` elements in each dimension.
    ///
    /// # Errors
    /// As [`strided`](Self::strided).
    pub fn boxes(&self, start: Address, shape: [u64; 3], extent: [u32; 3]) -> Result<TensorMap> {
        let [row, matrix, _] = self.distances(&shape);
        self.strided(start, shape, &[row, matrix], extent)
    }

    /// A map of boxes, with `extent` elements in each dimension, of a tensor whose rows are dense. `distances` are the
    /// strides in bytes of all dimensions but the first.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) if the driver reports an error, for example because the address `start`
    /// or a distance is not a multiple of 16 bytes.
    pub fn strided<const N: usize>(
        &self,
        start: Address,
        shape: [u64; N],
        distances: &[u64],
        extent: [u32; N],
    ) -> Result<TensorMap> {
        debug_assert_eq!(distances.len() + 1, N);
        // A box takes every element of its extent.
        let element_strides = [1u32; N];
        let mut map = MaybeUninit::<CUtensorMap>::uninit();
        // SAFETY: the arrays have the sizes that the driver expects for `N` dimensions, and the driver fills the map.
        unsafe {
            let status = cuTensorMapEncodeTiled(
                map.as_mut_ptr(),
                self.element,
                N as u32,
                start as *mut c_void,
                shape.as_ptr(),
                distances.as_ptr(),
                extent.as_ptr(),
                element_strides.as_ptr(),
                Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                Outside::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            );
            self.finish(status, map)
        }
    }

    /// A map of dense images; `image` has their sizes (batch, height, width, channels). A copy takes `pixels` base
    /// pixels and `channels_at_once` channels of each.
    ///
    /// # Errors
    /// As [`strided`](Self::strided).
    pub fn windows(
        &self,
        start: Address,
        image: [u32; 4],
        windows: Windows,
        channels_at_once: usize,
        pixels: usize,
    ) -> Result<TensorMap> {
        let [batch, height, width, channels] = image.map(u64::from);
        let shape = [channels, width, height, batch];
        // The driver reads the strides of three dimensions, and not the size of the tensor after them.
        let distances = self.distances(&shape);
        // The driver expects (width, height).
        let corner = |[y, x]: [i64; 2]| [x as i32, y as i32];
        let (lower, upper) = (corner(windows.lower), corner(windows.upper));
        let element_strides = [1, windows.stride[1], windows.stride[0], 1];
        let mut map = MaybeUninit::<CUtensorMap>::uninit();
        // SAFETY: as in `strided`; for four dimensions, a corner has two numbers.
        unsafe {
            let status = cuTensorMapEncodeIm2col(
                map.as_mut_ptr(),
                self.element,
                shape.len() as u32,
                start as *mut c_void,
                shape.as_ptr(),
                distances.as_ptr(),
                lower.as_ptr(),
                upper.as_ptr(),
                channels_at_once as u32,
                pixels as u32,
                element_strides.as_ptr(),
                Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                Outside::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            );
            self.finish(status, map)
        }
    }
}
