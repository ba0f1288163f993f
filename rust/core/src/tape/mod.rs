//! The autograd tape: operations record nodes, and a backward pass visits the nodes in reverse order of creation.
//!
//! Three rules keep it small and safe: a node saves only what its backward pass reads; a backward pass and a drop visit
//! the graph without recursion, so graphs may have any depth; reading a saved variable that was changed in place is an
//! error, never a wrong gradient.

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
