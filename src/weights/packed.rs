//! Matrices as kernels read them.
//!
//! A matrix `[n, k]` (outputs, inputs) is cut into tiles of [`TILE`] = 8 output rows. Within a tile, *blocks* of 16 bytes
//! (four u32) follow each other along k, and the 8 rows' blocks of the same k lie side by side, so that 8 neighbouring
//! lanes, one per output row, read 128 contiguous bytes:
//!
//! `data[((tile * blocks + block) * 8 + lane) * 4 .. + 4]`, `tile = row / 8`, `lane = row % 8`.
//!
//! | format | values per block | one u32 holds |
//! | --- | --- | --- |
//! | 4-bit affine | 32 | inputs `8j..8j+8`: byte `i` has input `8j+i` in its low and `8j+4+i` in its high nibble |
//! | 8-bit affine | 16 | inputs `4j..4j+4`, lowest byte first |
//! | f16 | 8 | inputs `2j` (low half), `2j+1` |
//! | f32 | 4 | one value |
//!
//! Affine weights are `w = scale * q + bias` per `group` inputs. Scale and bias share one u32, scale in the low half,
//! both f16 or both bf16 as the checkpoint has them, so nothing is rounded:
//! `scales[(tile * groups + group) * 8 + lane]`.
//!
//! Rows up to the next multiple of 8 and inputs up to the next whole block are zero blocks (their scales are zero too).

use half::{bf16, f16};

/// Output rows per tile.
pub const TILE: usize = 8;

/// How scale and bias of an affine group are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleFormat {
    /// IEEE half.
    F16,
    /// Upper half of an f32.
    Bf16,
}

/// How the values of a matrix are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// Affine groups along the inputs.
    Affine {
        /// 4 or 8.
        bits: u32,
        /// Inputs per scale: 32, 64 or 128.
        group: usize,
        /// Storage of scale and bias.
        scale: ScaleFormat,
    },
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
}

impl Format {
    /// Inputs in one 16-byte block.
    #[must_use]
    pub fn values_per_block(self) -> usize {
        match self {
            Self::Affine { bits: 4, .. } => 32,
            Self::Affine { .. } => 16,
            Self::F16 => 8,
            Self::F32 => 4,
        }
    }

    /// Inputs per scale; `None` for formats without.
    #[must_use]
    pub fn group(self) -> Option<usize> {
        match self {
            Self::Affine { group, .. } => Some(group),
            _ => None,
        }
    }

    /// Bytes of one packed tile-row of `k` inputs (an eighth of a tile), scales included.
    #[must_use]
    pub fn bytes_per_row(self, k: usize) -> usize {
        k.div_ceil(self.values_per_block()) * 16 + self.group().map_or(0, |g| k.div_ceil(g) * 4)
    }
}

/// Rows `first_row .. first_row + n` of a matrix in the layout of this module. `first_row` is a multiple of 8.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedRows {
    /// Storage of the values.
    pub format: Format,
    /// First output row held, in the whole matrix.
    pub first_row: usize,
    /// Output rows held.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// Blocks; `tiles * blocks_per_row * 8 * 4` words.
    pub data: Vec<u32>,
    /// Scale and bias pairs; empty for formats without. `tiles * groups_per_row * 8` words.
    pub scales: Vec<u32>,
}

impl PackedRows {
    /// Blocks along the inputs.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.k.div_ceil(self.format.values_per_block())
    }

    /// Groups along the inputs (0 for formats without).
    #[must_use]
    pub fn groups(&self) -> usize {
        self.format.group().map_or(0, |g| self.k.div_ceil(g))
    }

    /// The weight at output `row` (counted from `first_row`) and input `k`, as kernels compute it. Indices must be in range.
    #[must_use]
    pub fn get(&self, row: usize, k: usize) -> f64 {
        let per_block = self.format.values_per_block();
        let (tile, lane) = (row / TILE, row % TILE);
        let (block, inside) = (k / per_block, k % per_block);
        let at = ((tile * self.blocks() + block) * TILE + lane) * 4;
        match self.format {
            Format::F32 => f64::from(f32::from_bits(self.data[at + inside])),
            Format::F16 => {
                let word = self.data[at + inside / 2];
                f16::from_bits((word >> (16 * (inside % 2))) as u16).to_f64()
            }
            Format::Affine { bits, group, scale } => {
                let q = if bits == 4 {
                    let (word, i) = (self.data[at + inside / 8], inside % 8);
                    (word >> (8 * (i % 4) + 4 * (i / 4))) & 15
                } else {
                    (self.data[at + inside / 4] >> (8 * (inside % 4))) & 255
                };
                let pair = self.scales[(tile * self.groups() + k / group) * TILE + lane];
                let (s, b) = unpack_scale(pair, scale);
                f64::from(s) * f64::from(q) + f64::from(b)
            }
        }
    }
}

/// Scale and bias of a packed pair.
#[must_use]
pub fn unpack_scale(pair: u32, format: ScaleFormat) -> (f32, f32) {
    let (low, high) = (pair as u16, (pair >> 16) as u16);
    match format {
        ScaleFormat::F16 => (f16::from_bits(low).to_f32(), f16::from_bits(high).to_f32()),
        ScaleFormat::Bf16 => (bf16::from_bits(low).to_f32(), bf16::from_bits(high).to_f32()),
    }
}
