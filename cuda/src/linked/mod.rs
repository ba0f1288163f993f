//! The code that is compiled against CUDA: the functions that replace the libraries', the kernels, and memory.

pub mod download;
mod driver;
pub mod host;
pub mod kernels;
mod library;
pub mod mapped;
pub mod memory;
pub mod nccl;
pub mod peers;
mod pinned;
mod symbols;
pub mod upload;

pub use library::{check_device, load};
