//! Weights: file formats in, packed matrices out. Pure: asks for bytes and is fed bytes.

pub(crate) mod arrivals;
pub mod index;
pub mod pack;
pub mod packed;
pub mod plan;
pub mod quantization;
pub mod safetensors_header;
pub mod source;
pub mod stored_block;

use crate::error::Result;
use crate::model::program::{MatrixId, VectorId};

/// Takes a model's weights as they stream in: the GPU, the CPU path and the f64 reference implement it.
pub trait WeightSink {
    /// Takes rows of matrix `id`. Chunks of a matrix come in ascending order without gaps, in the format announced.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], or [`crate::Error::Internal`] for a chunk out of order.
    fn matrix(&mut self, id: MatrixId, rows: packed::PackedRows) -> Result<()>;

    /// Takes vector `id`.
    ///
    /// # Errors
    /// As for [`WeightSink::matrix`].
    fn vector(&mut self, id: VectorId, values: Vec<f32>) -> Result<()>;
}
