//! What all optimizers have in common.
