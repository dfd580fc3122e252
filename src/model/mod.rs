//! What a model is, as data, and its forward pass as a list of operations.

pub mod adapter;
pub mod arch;
pub mod call_rows;
pub mod config;
pub mod families;
pub mod fields;
pub mod forward;
pub mod load;
pub mod names;
pub mod nested;
pub mod program;
pub mod rope;
