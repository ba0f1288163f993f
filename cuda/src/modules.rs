//! The kernels, compiled: one module for each file of `kernels/`.

/// The machine code of one file of kernels, for every architecture that it was built for.
#[derive(Debug)]
pub struct Module {
    /// The file's name without its ending.
    pub name: &'static str,
    /// What the driver loads.
    pub image: &'static [u8],
}

macro_rules! modules {
    ($($module:ident $name:literal $doc:literal;)*) => {$(
        #[doc = $doc]
        pub static $module: Module =
            Module { name: $name, image: include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".fatbin")) };
    )*};
}

modules! {
    COPY "copy" "Copies, conversions and changes in place.";
    ELEMENTWISE "elementwise" "Elementwise functions.";
    RANDOM "random" "Random numbers.";
    REDUCE "reduce" "Reductions and running sums.";
}
