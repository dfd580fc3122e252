//! What building Forecall needs beyond cargo: [`wasm`] makes the browser module, [`demo_model`] the demo's checkpoint.

pub mod affine;
pub mod demo_model;
pub mod externref_table;
pub mod gguf;
pub mod wasm;
