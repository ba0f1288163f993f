//! The architectures that the kernels are compiled for, and the GPUs that can run this code. The build script includes this file too.
//!
//! Machine code for a compute capability runs on GPUs with the same major version and at least the same minor version. Machine code for a
//! capability with the suffix `a`, such as 9.0a, may use features that only GPUs of exactly this capability have, and runs only on these.
//! PTX for a capability runs on GPUs of this capability and of every later one, because the driver compiles the PTX for the GPU. PTX for a
//! capability with `a` runs only on GPUs of exactly this capability.

use std::fmt;

/// A compute capability, as (major, minor).
pub type Capability = (i32, i32);

/// The architectures that the kernels are compiled for unless `TRAINABLE_CANDLE_CUDA_ARCHS` lists others. There is machine code for
/// Ampere (8.0, 8.6), Ada (8.9), Hopper (9.0) and the consumer Blackwells (12.0; GPUs of 12.1 run this code too). For other GPUs, such as
/// those of 10.0, 10.3 and 11.0, the driver compiles the PTX when the kernels are first used. The PTX is for the lowest capability, so it
/// runs on all supported GPUs; with PTX for 12.0 instead, GPUs of 10.0, 10.3 and 11.0 would have no code.
pub const ARCHITECTURES: &str = "80+ptx,86,89,90a,120";

/// An item of a list like [`ARCHITECTURES`]: a capability without the dot, then perhaps `a` for features of exactly this capability,
/// then perhaps `+ptx`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Architecture {
    capability: Capability,
    /// Whether the code runs only on GPUs of exactly this capability (`a`).
    is_exact: bool,
    /// Whether there is PTX besides the machine code.
    pub has_ptx: bool,
}

impl Architecture {
    /// Parse a comma-separated list of items. Empty items are ignored. Returns None if an item is malformed.
    pub fn parse_list(list: &str) -> Option<Vec<Self>> {
        list.split(',').map(str::trim).filter(|item| !item.is_empty()).map(Self::parse).collect()
    }

    fn parse(item: &str) -> Option<Self> {
        let (name, has_ptx) = item.strip_suffix("+ptx").map_or((item, false), |name| (name, true));
        let (number, is_exact) = name.strip_suffix('a').map_or((name, false), |number| (number, true));
        let number = number.parse::<i32>().ok().filter(|number| (10..1000).contains(number))?;
        Some(Self { capability: (number / 10, number % 10), is_exact, has_ptx })
    }

    /// Whether a GPU of capability `gpu` can run the machine code, or, if `has_ptx`, code that the driver compiles from the PTX.
    pub fn runs_on(self, gpu: Capability) -> bool {
        if self.is_exact {
            return gpu == self.capability;
        }
        gpu >= self.capability && (self.has_ptx || gpu.0 == self.capability.0)
    }
}

/// The name that nvcc uses, such as `90a`.
impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.capability;
        write!(f, "{major}{minor}{}", if self.is_exact { "a" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether one of the architectures of `list` has code that a GPU of capability `gpu` can run.
    fn serves(list: &str, gpu: Capability) -> bool {
        Architecture::parse_list(list).unwrap().iter().any(|architecture| architecture.runs_on(gpu))
    }

    /// `gpus` has the capabilities in NVIDIA's list (<https://developer.nvidia.com/cuda-gpus>) from the lowest supported one on, and
    /// (13, 0) for a future GPU.
    #[test]
    fn every_supported_gpu_has_code() {
        let gpus = [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1), (13, 0)];
        for gpu in gpus {
            assert!(serves(ARCHITECTURES, gpu), "{gpu:?}");
        }
        assert!(!serves(ARCHITECTURES, (7, 5)));
    }

    #[test]
    fn machine_code_stays_within_a_major_version_and_ptx_does_not() {
        let served = |list: &str| {
            let gpus = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)];
            gpus.into_iter().filter(|&gpu| serves(list, gpu)).collect::<Vec<_>>()
        };
        assert_eq!(served("80"), [(8, 0), (8, 6), (8, 9)]);
        assert_eq!(served("86"), [(8, 6), (8, 9)]);
        assert_eq!(served("90a"), [(9, 0)]);
        assert_eq!(served("90a+ptx"), [(9, 0)]);
        assert_eq!(served("120"), [(12, 0), (12, 1)]);
        assert_eq!(served("89+ptx, 120"), [(8, 9), (9, 0), (10, 0), (12, 0), (12, 1)]);
    }

    #[test]
    fn lists_are_parsed_and_malformed_items_are_rejected() {
        let list = Architecture::parse_list(" 80+ptx, 90a,").unwrap();
        assert_eq!(list.iter().map(ToString::to_string).collect::<Vec<_>>(), ["80", "90a"]);
        assert_eq!(list.iter().map(|architecture| architecture.has_ptx).collect::<Vec<_>>(), [true, false]);
        for wrong in ["8.0", "sm_80", "80+sass", "a", "80ptx", "-80", "8"] {
            assert!(Architecture::parse_list(wrong).is_none(), "{wrong}");
        }
    }
}
