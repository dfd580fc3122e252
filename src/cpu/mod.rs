//! Running calls without a GPU.
//!
//! Two rooms under one roof: [`reference`] runs the kernels' f64 twins and is the judge; the rest is the fast path for
//! machines and pages without WebGPU. The fast path reads the same [`crate::model::program::Program`], turns the packed weights
//! into tiles of sixteen rows as they arrive, and works on sixteen lanes ([`simd`]) with AVX-512, AVX2, WebAssembly's SIMD128
//! or plain Rust, whichever is there, all with the same bits. A row's numbers never depend on the rows beside it.

mod activations;
mod cache;
mod elementwise;
mod matrix;
mod model;
mod product;
pub mod reference;
mod simd;
#[cfg(test)]
pub(crate) mod testing;
mod threads;

pub use model::{CpuModel, CpuOptions};
