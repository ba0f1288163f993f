//! Python bindings of trainable-candle.

/// The compiled part of trainable-candle; import `trainable_candle` instead.
#[pyo3::pymodule]
mod _core {
    /// Version of the package.
    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    /// Cargo profile of this build, `"release"` or `"debug"`.
    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const build_profile: &str = if cfg!(debug_assertions) {
        "debug"
    } else {
        "release"
    };
}
