//! The code of builds with CUDA: the kernels, device memory, and stubs for the functions of the driver and of the CUDA libraries. A stub
//! has the name of a library's function and jumps to that function, so the program need not be linked to the libraries.

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
