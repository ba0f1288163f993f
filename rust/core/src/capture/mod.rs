//! The effects of a captured function on the host. Replays of the function's graph repeat these effects.
//!
//! A function is captured when a call of it is recorded as a CUDA graph. The graph repeats the device's work only. So a
//! capture also records what a call changes on the host, and a replay repeats these changes. A change that a replay
//! could not repeat is an error while a function is recorded. Each kind of host state has a type here. The methods of
//! the type are the only access to the value, and they record what captures need to know. Some types have two methods
//! to read. The owner of the state calls the method that records (such as [`HostState::read`]) if queued work depends
//! on the value, and the method that records nothing (such as [`HostState::get`]) if only the host uses the value.
//!
//! | state | type |
//! |---|---|
//! | a value that queued work depends on, or that each call changes | [`HostState`] |
//! | a value that no captured function may change | [`Fixed`] |
//! | a gradient: whether there is one, and where its storage is | `GradientSlot` |
//! | how often a variable was changed in place | `Version` |
//! | whether a value derived from a variable is up to date | [`Follower`] |
//! | the seed and the position of a random generator | `Generator` |
//!
//! Work that must be done before every replay, outside of the graph, is registered with [`before_replay`].

mod effects;
mod fixed;
mod generator;
mod host;
mod slot;
mod version;

// `is_running` is also true while a function runs eagerly before its capture. `refuse` is for operations that a graph
// cannot contain.
pub use effects::{before_replay, is_capturing, is_running, refuse};
pub use fixed::Fixed;
pub use host::HostState;
pub use version::Follower;

// Identifies the storage of a gradient.
pub(crate) use effects::Place;
// A run of a function that records its effects on the host, and these effects.
#[cfg_attr(not(feature = "cuda"), allow(unused_imports, reason = "graphs exist on CUDA alone"))]
pub(crate) use effects::{Effects, Run};
pub(crate) use generator::Generator;
// `Settle` is the trait with the operations that captures need from a gradient, such as moving it to a fixed buffer.
pub(crate) use slot::{GradientSlot, Settle};
pub(crate) use version::Version;

// A function and its recorded graph.
pub use crate::cuda::Captured;

/// A function of tensors that can be captured.
pub type Function = Box<dyn Fn(&[crate::Tensor]) -> crate::Result<Vec<crate::Tensor>> + Send + Sync>;
