//! The kernels, compiled: one module for each file of `kernels/`.

/// The machine code of one file of kernels, for every architecture that it was built for.
#[derive(Debug)]
pub struct Module {
    /// The file's name without its ending.
    pub name: &'static str,
    /// What the driver loads. Empty if the file is for an architecture that the build leaves out.
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
    ADDRESSES "addresses" "Tables of addresses for batched products.";
    ATTENTION "attention" "Scaled dot-product attention.";
    CONV "conv" "Two-dimensional convolution.";
    CONV_HOPPER "conv_hopper" "Two-dimensional convolution on compute capability 9.0 alone.";
    COPY "copy" "Copies, conversions and changes in place.";
    CROSS_ENTROPY "cross_entropy" "Cross-entropy.";
    DROPOUT "dropout" "Dropout.";
    ELEMENTWISE "elementwise" "Elementwise functions.";
    GATED "gated" "Gated linear units.";
    GRADIENT "gradient" "Norms of gradients and their clipping.";
    GROUP_NORM "group_norm" "Group norm.";
    INDEX "index" "Picking by ids.";
    LOW_RANK "low_rank" "Low-rank products of adapted linear maps.";
    NORM "norm" "Layer and RMS norm.";
    OPTIM "optim" "Optimizers.";
    OPTIM_8BIT "optim_8bit" "Optimizers with 8-bit states.";
    RANDOM "random" "Random numbers.";
    REDUCE "reduce" "Reductions and running sums.";
    REGRESSION "regression" "Losses of differences.";
    RMS_NORM_ROPE "rms_norm_rope" "RMS norm and rotary position embedding.";
    ROPE "rope" "Rotary position embedding.";
    SOFTMAX "softmax" "Softmax and its logarithm.";
    UPSAMPLE "upsample" "Resizing of images.";
}
