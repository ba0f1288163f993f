//! Copies the memory of other libraries' arrays (numpy, DLPack) to new storage.

use half::{bf16, f16};
use tc::Raw;
use tc::raw::{check_allocation, from_vec};
use trainable_candle_core as tc;

/// The element type of another library's array.
#[derive(Clone, Copy, Debug)]
pub enum Element {
    Bool,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    F16,
    BF16,
    F32,
    F64,
}

impl Element {
    /// The number of bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::Bool | Self::I8 | Self::U8 => 1,
            Self::I16 | Self::U16 | Self::F16 | Self::BF16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    /// The dtype of tensors to which elements of this type are converted; it can represent all their values.
    const fn dtype(self) -> candle_core::DType {
        use candle_core::DType as D;
        match self {
            Self::Bool | Self::U8 => D::U8,
            Self::I8 | Self::I16 | Self::I32 | Self::I64 => D::I64,
            Self::U16 | Self::U32 => D::U32,
            Self::F16 => D::F16,
            Self::BF16 => D::BF16,
            Self::F32 => D::F32,
            Self::F64 => D::F64,
        }
    }
}

/// A strided array in the memory of another library.
pub struct Source {
    /// The address of the element with index 0 in every dimension.
    pub data: *const u8,
    pub dims: Vec<usize>,
    /// The distance in bytes between neighbouring elements along each dimension.
    pub strides: Vec<isize>,
    pub element: Element,
    /// Whether the byte order of the elements is the opposite of this machine's.
    pub swapped: bool,
}

impl Source {
    /// A tensor on the CPU with a copy of the values, in row-major order. `op` is the name of the operation for errors.
    ///
    /// # Safety
    /// Every element that `dims` and `strides` reach from `data` must be readable until `read` returns.
    ///
    /// # Errors
    /// [`tc::Error::OutOfMemory`] if the copy does not fit.
    pub unsafe fn read(&self, op: &'static str) -> tc::Result<Raw> {
        check_allocation(op, &self.dims, self.element.dtype())?;
        // SAFETY: the caller ensures that the elements are readable; in each arm, the argument of the closure or
        // function has as many bytes as an element.
        unsafe {
            Ok(match self.element {
                Element::Bool => self.gather(|[byte]: [u8; 1]| u8::from(byte != 0)),
                Element::U8 => self.gather(|[byte]: [u8; 1]| byte),
                Element::I8 => self.gather(|bytes| i64::from(i8::from_ne_bytes(bytes))),
                Element::I16 => self.gather(|bytes| i64::from(i16::from_ne_bytes(bytes))),
                Element::I32 => self.gather(|bytes| i64::from(i32::from_ne_bytes(bytes))),
                Element::I64 => self.gather(i64::from_ne_bytes),
                Element::U16 => self.gather(|bytes| u32::from(u16::from_ne_bytes(bytes))),
                Element::U32 => self.gather(u32::from_ne_bytes),
                Element::F16 => self.gather(f16::from_ne_bytes),
                Element::BF16 => self.gather(bf16::from_ne_bytes),
                Element::F32 => self.gather(f32::from_ne_bytes),
                Element::F64 => self.gather(f64::from_ne_bytes),
            })
        }
    }

    /// The elements in row-major order, each converted by `decode` from its `N` bytes in this machine's byte order.
    ///
    /// # Safety
    /// As [`read`](Self::read), and `N` must be the number of bytes of an element.
    unsafe fn gather<const N: usize, T: candle_core::WithDType>(&self, decode: impl Fn([u8; N]) -> T) -> Raw {
        let count = self.dims.iter().product();
        let mut values = Vec::with_capacity(count);
        if count > 0 && self.is_contiguous() && !self.swapped {
            // SAFETY: the array is contiguous, so `count` elements of N bytes follow one another from `data`. Byte
            // arrays need no alignment.
            let elements = unsafe { std::slice::from_raw_parts(self.data.cast::<[u8; N]>(), count) };
            values.extend(elements.iter().map(|&bytes| decode(bytes)));
        } else if count > 0 {
            // The index of the next element in each dimension, and its distance from `data` in bytes.
            let mut position = vec![0usize; self.dims.len()];
            let mut offset = 0isize;
            for _ in 0..count {
                // SAFETY: the element with the indices `position` is at `offset`. Byte arrays need no alignment.
                let mut bytes = unsafe { self.data.offset(offset).cast::<[u8; N]>().read() };
                if self.swapped {
                    bytes.reverse();
                }
                values.push(decode(bytes));
                // Go on along the last dimension. At its end, return to its start, and go on along the one before it.
                for dim in (0..self.dims.len()).rev() {
                    position[dim] += 1;
                    offset += self.strides[dim];
                    if position[dim] < self.dims[dim] {
                        break;
                    }
                    offset -= self.strides[dim] * self.dims[dim] as isize;
                    position[dim] = 0;
                }
            }
        }
        from_vec(values, self.dims.as_slice())
    }

    /// Whether the elements are in memory in row-major order without gaps.
    fn is_contiguous(&self) -> bool {
        let mut expected_stride = self.element.size() as isize;
        for (&size, &stride) in self.dims.iter().zip(&self.strides).rev() {
            if size != 1 && stride != expected_stride {
                return false;
            }
            expected_stride *= size as isize;
        }
        true
    }
}
