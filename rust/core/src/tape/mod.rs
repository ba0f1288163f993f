//! The autograd tape: nodes save what their backward pass needs, and a backward pass visits them in reverse order of
//! creation.
//!
//! Three rules keep it small and safe: a node saves only what its backward pass reads; nothing here recurses, so graphs
//! of any depth can be run and dropped; a saved variable that was changed in place is an error, never a wrong gradient.

pub(crate) mod backward;
mod leaf;
mod mode;
mod node;
mod pending;
mod record;
mod saved;

pub use backward::{BackwardContext, GradStore, grad};
pub use mode::{NoGrad, is_grad_enabled, no_grad, set_grad_enabled};
pub use node::{Again, Backward};
pub use record::{Cost, OpInfo, Saver, record, record_no_backward, record_view, record_with_aux};
pub use saved::Saved;

pub(crate) use leaf::Leaf;
pub(crate) use mode::{flags, set_recording};
pub(crate) use node::{Inputs, Node};
pub(crate) use record::Aux;
