//! Runs a [`crate::model::program::Program`] on WebGPU; the only room that names wgpu.

pub mod matmul;
pub mod shader;
