//! Weight, adapter and training-state files of trainable-candle.

pub mod adapter_file;
mod atomic;
mod bitsandbytes;
mod eight_bits;
pub mod form;
mod gguf;
mod other_formats;
pub mod tensor_file;
mod tensor_writer;
mod weight_file;
mod weight_files;

pub use adapter_file::{
    AdapterFile, AdapterFormat, PartLayers, PartNames, SaveOptions, attach_adapter, load_adapter, prepare_adapters,
    read_adapters, save_adapters,
};
pub use atomic::write_atomically;
pub use bitsandbytes::nf4_entries;
pub use eight_bits::comfy_format;
pub use gguf::GgufFile;
pub use tensor_file::{TensorFile, load_tensors};
pub use tensor_writer::{EightBits, TensorEntry, save_entries, save_tensors};
pub use weight_file::WeightFile;
pub use weight_files::{WeightFiles, quantized};
