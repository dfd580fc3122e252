//! Runs a [`crate::model::program::Program`] on WebGPU; the only room that names wgpu.
//!
//! A loaded model owns all its buffers, bind groups and pipelines; a call uploads its rows, replays one compute pass and
//! reads back a token and a probability per choosing row. Nothing is allocated on the way.

pub mod attention;
mod buffers;
pub mod device;
pub mod footprint;
pub mod matmul;
pub mod model;
mod pipelines;
mod readback;
pub mod shader;
mod steps;
#[cfg(test)]
mod tests;
pub mod variants;
mod weights;

pub use buffers::MemoryUse;
pub use device::{DeviceOptions, Gpu, GpuInfo};
pub use model::{GpuModel, ModelOptions};
