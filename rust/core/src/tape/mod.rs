//! The autograd tape: operations record nodes, and a backward pass visits the nodes in reverse order of creation. The
//! nodes from which a tensor was computed are its graph.
//!
//! Three rules keep the tape small and safe. A node saves only the values that its backward pass reads. A backward
//! pass, and the drop of a graph, visit the nodes without recursion, so graphs may have any depth. If a saved variable
//! was changed in place, a backward pass that reads it returns an error, never a wrong gradient.

pub(crate) mod backward;
mod grad_store;
mod leaf;
mod mode;
mod node;
mod pending;
mod record;
mod saved;

pub use backward::{BackwardContext, grad};
pub use grad_store::GradStore;
pub use mode::{NoGrad, is_grad_enabled, no_grad, set_grad_enabled};
pub use node::{Again, Backward};
pub use record::{Cost, OpInfo, Saver, record, record_no_backward, record_view, record_with_aux};
pub use saved::Saved;

pub(crate) use leaf::Leaf;
pub(crate) use mode::{flags, set_recording};
pub(crate) use node::{Inputs, Node};
pub(crate) use record::Aux;
