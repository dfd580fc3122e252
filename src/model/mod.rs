//! What a model is, as data, and its forward pass as a list of operations.

pub mod arch;
pub mod call_rows;
pub mod forward;
pub mod program;
