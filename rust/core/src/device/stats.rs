//! What a CUDA device reports of its memory and its kernels.

/// Memory statistics of a CUDA device, in bytes, and counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// In tensors and workspaces.
    pub allocated: u64,
    /// The most that was, since the start or the last reset.
    pub peak_allocated: u64,
    /// Taken from the device, allocated or kept for later.
    pub reserved: u64,
    /// The most that was, since the start or the last reset.
    pub peak_reserved: u64,
    /// The part of the reserved bytes that captured graphs keep.
    pub graphs: u64,
    /// Blocks handed out since the start.
    pub allocations: u64,
    /// Times that memory was taken from the device.
    pub growths: u64,
    /// How often memory ran out and cached memory was released.
    pub retries: u64,
    /// Free on the device, for any process.
    pub free: u64,
    /// The device's memory.
    pub total: u64,
}

/// The time of a GPU for the launches of one kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    /// The kernel's name; of a matrix product its sizes.
    pub name: String,
    /// The number of launches.
    pub count: u64,
    /// The time of all launches.
    pub milliseconds: f64,
}
