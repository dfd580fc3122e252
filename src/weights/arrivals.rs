//! Checks weights as they arrive against what the program asked for.

use crate::error::{Error, Result};
use crate::model::program::{MatrixId, Program, VectorId};
use crate::weights::packed::{Format, PackedRows, TILE};

/// How far each matrix and vector of a program has come.
#[derive(Debug)]
pub(crate) struct Arrivals {
    rows: Vec<usize>,
    formats: Vec<Option<Format>>,
    vectors: Vec<bool>,
}

impl Arrivals {
    pub(crate) fn new(program: &Program) -> Self {
        Self {
            rows: vec![0; program.matrices.len()],
            formats: vec![None; program.matrices.len()],
            vectors: vec![false; program.vectors.len()],
        }
    }

    /// Admits the next chunk of a matrix.
    ///
    /// # Errors
    /// [`Error::Internal`] naming the matrix if the chunk is out of order, of another shape or format than the matrix,
    /// or its words do not fit its shape.
    pub(crate) fn matrix(&mut self, program: &Program, id: MatrixId, chunk: &PackedRows) -> Result<()> {
        let (Some(spec), Some(have), Some(format)) =
            (program.matrices.get(id.0), self.rows.get_mut(id.0), self.formats.get_mut(id.0))
        else {
            return Err(Error::Internal(format!("weights came for matrix {}, of which the program has none", id.0)));
        };
        let refuse = |what: String| Err(Error::Internal(format!("matrix {}: {what}", spec.label)));
        if chunk.k != spec.k || chunk.first_row != *have || *have + chunk.n > spec.n || *have % TILE != 0 {
            return refuse(format!(
                "a chunk holds rows {} to {} of {} inputs; rows from {have} on of [{}, {}] were due",
                chunk.first_row,
                chunk.first_row + chunk.n,
                chunk.k,
                spec.n,
                spec.k
            ));
        }
        if format.is_some_and(|f| f != chunk.format) {
            return refuse(format!("a chunk is in {:?} after others in {format:?}", chunk.format));
        }
        let tiles = chunk.n.div_ceil(TILE);
        let (data, scales) = (tiles * chunk.blocks() * TILE * 4, tiles * chunk.groups() * TILE);
        if chunk.data.len() != data || chunk.scales.len() != scales {
            return refuse(format!(
                "a chunk of {} rows has {} words and {} scales; {data} and {scales} were due",
                chunk.n,
                chunk.data.len(),
                chunk.scales.len()
            ));
        }
        *have += chunk.n;
        *format = Some(chunk.format);
        Ok(())
    }

    /// Admits a vector.
    ///
    /// # Errors
    /// [`Error::Internal`] naming the vector if its length is wrong.
    pub(crate) fn vector(&mut self, program: &Program, id: VectorId, values: &[f32]) -> Result<()> {
        let (Some(spec), Some(have)) = (program.vectors.get(id.0), self.vectors.get_mut(id.0)) else {
            return Err(Error::Internal(format!("values came for vector {}, of which the program has none", id.0)));
        };
        if values.len() != spec.n {
            return Err(Error::Internal(format!("vector {}: {} values came, {} were due", spec.label, values.len(), spec.n)));
        }
        *have = true;
        Ok(())
    }

    /// Whether every weight is complete.
    ///
    /// # Errors
    /// [`Error::Internal`] naming the first weight that is not.
    pub(crate) fn complete(&self, program: &Program) -> Result<()> {
        let matrix = program.matrices.iter().zip(&self.rows).find(|(spec, have)| spec.n != **have).map(|(spec, _)| &spec.label);
        let vector = program.vectors.iter().zip(&self.vectors).find(|(_, have)| !**have).map(|(spec, _)| &spec.label);
        match matrix.or(vector) {
            Some(label) => Err(Error::Internal(format!("a call was submitted before all of {label} had come"))),
            None => Ok(()),
        }
    }
}
