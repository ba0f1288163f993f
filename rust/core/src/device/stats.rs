//! Statistics of a CUDA device's memory and kernels.

/// Memory statistics of a CUDA device: numbers of bytes, and counts since the start of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Bytes in tensors and workspaces.
    pub allocated: u64,
    /// The peak of `allocated` since the start of the process or the last reset.
    pub peak_allocated: u64,
    /// Bytes taken from the device: those in `allocated`, and free ones that are cached for later allocations.
    pub reserved: u64,
    /// The peak of `reserved` since the start of the process or the last reset.
    pub peak_reserved: u64,
    /// The part of the reserved bytes that recorded CUDA graphs keep.
    pub graphs: u64,
    /// How often a block of memory was allocated for a tensor or a workspace.
    pub allocations: u64,
    /// How often memory was taken from the device.
    pub growths: u64,
    /// How often memory ran out and cached memory was released.
    pub retries: u64,
    /// Bytes that are free on the device, for any process.
    pub free: u64,
    /// All bytes of the device's memory.
    pub total: u64,
}

/// How long a GPU ran the launches of one kernel during a profile.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    /// The kernel's name. For a matrix product of cuBLAS, a name with the product's sizes and dtype.
    pub name: String,
    /// The number of launches.
    pub count: u64,
    /// The time of all launches together.
    pub milliseconds: f64,
}
