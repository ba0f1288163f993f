//! The code of builds with CUDA: the kernels, device memory, and definitions of the functions of the driver and of the CUDA libraries,
//! which jump to the libraries' functions, so that the program is not linked to the libraries.

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
