//! Weights on the GPU. A matrix too large for one binding is cut along its outputs into parts of their own buffers.

use super::buffers::{Allocator, Kind};
use super::device::Gpu;
use crate::error::{Error, Result};
use crate::model::program::{MatrixId, MatrixSpec, Program, VectorId};
use crate::weights::arrivals::Arrivals;
use crate::weights::packed::{Format, PackedRows, TILE};

/// Parts begin at multiples of this many outputs: then outputs of 4 bytes, and halves of them, begin at multiples of the
/// 256 bytes that every device can bind at.
const PART_ROWS: usize = 128;
/// Uploads are handed to the device whenever this many bytes have gathered, so that copies in flight stay small.
const FLUSH_BYTES: u64 = 16 << 20;

/// Rows `first_row .. first_row + n` of a matrix in one buffer: blocks, then from `scales_at` on the scales.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) buffer: wgpu::Buffer,
    pub(super) first_row: usize,
    pub(super) n: usize,
    pub(super) data_bytes: u64,
    pub(super) scales_at: u64,
    pub(super) scales_bytes: u64,
}

impl Part {
    /// The blocks.
    pub(super) fn data(&self) -> wgpu::BufferBinding<'_> {
        binding(&self.buffer, 0, self.data_bytes)
    }

    /// The scales; the blocks' first bytes for formats that have none, since a binding cannot be empty.
    pub(super) fn scales(&self) -> wgpu::BufferBinding<'_> {
        match self.scales_bytes {
            0 => binding(&self.buffer, 0, 16),
            bytes => binding(&self.buffer, self.scales_at, bytes),
        }
    }
}

/// A range of a buffer.
pub(super) fn binding(buffer: &wgpu::Buffer, offset: u64, bytes: u64) -> wgpu::BufferBinding<'_> {
    wgpu::BufferBinding { buffer, offset, size: std::num::NonZeroU64::new(bytes) }
}

/// A matrix on the GPU.
#[derive(Debug)]
pub(super) struct Matrix {
    pub(super) format: Format,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) parts: Vec<Part>,
}

impl Matrix {
    /// A value without data that knows the layout's sizes.
    pub(super) fn shape(&self) -> PackedRows {
        PackedRows { format: self.format, first_row: 0, n: self.n, k: self.k, data: Vec::new(), scales: Vec::new() }
    }

    fn new(spec: &MatrixSpec, format: Format, gpu: &Gpu, allocator: &mut Allocator) -> Result<Self> {
        let mut matrix = Self { format, n: spec.n, k: spec.k, parts: Vec::new() };
        let shape = matrix.shape();
        let (tile_data, tile_scales) = ((shape.blocks() * TILE * 16) as u64, (shape.groups() * TILE * 4) as u64);
        let tiles = (spec.n.div_ceil(TILE)) as u64;
        let info = gpu.info();
        let per_part = tiles_per_part(&shape, &spec.label, info.max_storage_buffer_binding_size, info.max_buffer_size)?;
        let mut first = 0;
        while first < tiles {
            let count = per_part.min(tiles - first);
            let (data_bytes, scales_bytes) = (count * tile_data, count * tile_scales);
            let scales_at = data_bytes.next_multiple_of(256);
            let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST;
            let buffer = allocator.buffer(Kind::Weights, &spec.label, scales_at + scales_bytes, usage)?;
            let first_row = first as usize * TILE;
            let n = (count as usize * TILE).min(spec.n - first_row);
            matrix.parts.push(Part { buffer, first_row, n, data_bytes, scales_at, scales_bytes });
            first += count;
        }
        Ok(matrix)
    }
}

/// Tiles of a part of a matrix that is shaped like `shape` on a device of these limits: all of them if they fit.
///
/// # Errors
/// [`Error::Unsupported`] naming the limit if not even the smallest part fits.
pub(super) fn tiles_per_part(shape: &PackedRows, label: &str, most_bound: u64, most_held: u64) -> Result<u64> {
    let (tile_data, tile_scales) = ((shape.blocks() * TILE * 16) as u64, (shape.groups() * TILE * 4) as u64);
    let fits = |tiles: u64| {
        tiles * tile_data <= most_bound && (tiles * tile_data).next_multiple_of(256) + tiles * tile_scales <= most_held
    };
    let tiles = shape.n.div_ceil(TILE) as u64;
    let part_tiles = (PART_ROWS / TILE) as u64;
    if fits(tiles) {
        return Ok(tiles);
    }
    let most = (1..=tiles / part_tiles).rev().map(|parts| parts * part_tiles).find(|&t| fits(t));
    most.ok_or_else(|| {
        let bound = part_tiles * tile_data;
        let (bytes, what, most) = match bound > most_bound {
            true => (bound, "binds at most", format!("{most_bound} at once (maxStorageBufferBindingSize)")),
            false => (bound + part_tiles * tile_scales, "has buffers of at most", format!("{most_held} (maxBufferSize)")),
        };
        Error::Unsupported(format!("{PART_ROWS} rows of {label} take {bytes} bytes, but this GPU {what} {most}"))
    })
}

/// All weights of a program.
#[derive(Debug)]
pub(super) struct Weights {
    gpu: Gpu,
    arrivals: Arrivals,
    matrices: Vec<Option<Matrix>>,
    /// All vectors, one behind the other.
    pub(super) vectors: wgpu::Buffer,
    vectors_at: Vec<u32>,
    unflushed: u64,
}

impl Weights {
    pub(super) fn new(program: &Program, gpu: &Gpu, allocator: &mut Allocator) -> Result<Self> {
        let mut at = 0;
        let mut vectors_at = Vec::with_capacity(program.vectors.len());
        for spec in &program.vectors {
            vectors_at.push(at as u32);
            at += spec.n.next_multiple_of(4);
        }
        let vectors = allocator.storage(Kind::Weights, "norms and biases", at as u64 * 4, "a smaller model is needed")?;
        Ok(Self {
            gpu: gpu.clone(),
            arrivals: Arrivals::new(program),
            matrices: program.matrices.iter().map(|_| None).collect(),
            vectors,
            vectors_at,
            unflushed: 0,
        })
    }

    /// Takes a chunk of a matrix; the first one allocates all of it.
    pub(super) fn matrix(
        &mut self,
        program: &Program,
        id: MatrixId,
        chunk: &PackedRows,
        allocator: &mut Allocator,
    ) -> Result<()> {
        self.gpu.check()?;
        self.arrivals.matrix(program, id, chunk)?;
        let missing = || Error::Internal(format!("matrix {} is not one of the program's", id.0));
        let slot = self.matrices.get_mut(id.0).ok_or_else(missing)?;
        if slot.is_none() {
            let spec = program.matrices.get(id.0).ok_or_else(missing)?;
            *slot = Some(Matrix::new(spec, chunk.format, &self.gpu, allocator)?);
        }
        let matrix = slot.as_ref().ok_or_else(missing)?;
        let (data_words, scale_words) = (chunk.blocks() * TILE * 4, chunk.groups() * TILE);
        let first_tile = chunk.first_row / TILE;
        let end_tile = first_tile + chunk.n.div_ceil(TILE);
        for part in &matrix.parts {
            let part_tile = part.first_row / TILE;
            let from = first_tile.max(part_tile);
            let to = end_tile.min(part_tile + part.n.div_ceil(TILE));
            if from >= to {
                continue;
            }
            let piece = |words: &[u32], per_tile: usize, offset: u64| {
                let range = (from - first_tile) * per_tile..(to - first_tile) * per_tile;
                let bytes: &[u8] = bytemuck::cast_slice(words.get(range).unwrap_or_default());
                if !bytes.is_empty() {
                    let at = offset + ((from - part_tile) * per_tile * 4) as u64;
                    self.gpu.queue.write_buffer(&part.buffer, at, bytes);
                }
            };
            piece(&chunk.data, data_words, 0);
            piece(&chunk.scales, scale_words, part.scales_at);
        }
        self.sent((chunk.data.len() + chunk.scales.len()) as u64 * 4);
        self.gpu.check()
    }

    /// Takes a vector.
    pub(super) fn vector(&mut self, program: &Program, id: VectorId, values: &[f32]) -> Result<()> {
        self.gpu.check()?;
        self.arrivals.vector(program, id, values)?;
        if let Some(&at) = self.vectors_at.get(id.0) {
            self.gpu.queue.write_buffer(&self.vectors, u64::from(at) * 4, bytemuck::cast_slice(values));
        }
        self.sent(values.len() as u64 * 4);
        self.gpu.check()
    }

    fn sent(&mut self, bytes: u64) {
        self.unflushed += bytes;
        if self.unflushed >= FLUSH_BYTES {
            self.unflushed = 0;
            self.gpu.queue.submit([]);
        }
    }

    /// Whether every weight is complete.
    pub(super) fn complete(&self, program: &Program) -> Result<()> {
        self.arrivals.complete(program)
    }

    /// A matrix that has come.
    pub(super) fn get(&self, id: MatrixId) -> Result<&Matrix> {
        self.matrices
            .get(id.0)
            .and_then(Option::as_ref)
            .ok_or_else(|| Error::Internal(format!("matrix {} was used before it came", id.0)))
    }

    /// Where a vector begins in the vectors buffer; [`super::steps::NONE`] for none.
    pub(super) fn at(&self, id: Option<VectorId>) -> u32 {
        id.and_then(|id| self.vectors_at.get(id.0).copied()).unwrap_or(super::steps::NONE)
    }
}
