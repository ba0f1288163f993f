//! The length of the storage of candle's CUDA tensors.

use candle_core::cuda_backend::{CudaStorage, CudaStorageSlice};

/// The number of elements in a storage. For the dtypes that candle stores as raw bytes (F6E2M3, F6E3M2, F4 and F8E8M0),
/// the number of bytes.
pub fn storage_len(storage: &CudaStorage) -> usize {
    match &storage.slice {
        CudaStorageSlice::U8(slice) => slice.len(),
        CudaStorageSlice::U32(slice) => slice.len(),
        CudaStorageSlice::I16(slice) => slice.len(),
        CudaStorageSlice::I32(slice) => slice.len(),
        CudaStorageSlice::I64(slice) => slice.len(),
        CudaStorageSlice::BF16(slice) => slice.len(),
        CudaStorageSlice::F16(slice) => slice.len(),
        CudaStorageSlice::F32(slice) => slice.len(),
        CudaStorageSlice::F64(slice) => slice.len(),
        CudaStorageSlice::F8E4M3(slice) => slice.len(),
        CudaStorageSlice::F6E2M3(slice)
        | CudaStorageSlice::F6E3M2(slice)
        | CudaStorageSlice::F4(slice)
        | CudaStorageSlice::F8E8M0(slice) => slice.len(),
    }
}
