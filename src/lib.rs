//! Forecall: language models in a web page on WebGPU, decoded one call ahead.

pub mod cpu;
pub mod decode;
pub mod engine;
pub mod error;
pub mod fetch;
pub mod gpu;
pub mod kernels;
pub mod model;
pub mod text;
#[cfg(target_arch = "wasm32")]
pub mod web;
pub mod weights;

pub use error::{Error, Result};
