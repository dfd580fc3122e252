//! One file per operation of a [`crate::model::program::Program`], with its *twin*: the same steps and names in plain
//! loops over f64. A twin is the judge of every fast kernel (WGSL or SIMD) of that operation, so it is never optimised.
//!
//! Inputs are f32 slices when a kernel is judged and f64 slices when [`crate::cpu::reference`] runs a whole model, hence
//! the type parameter `T`; results are f64. Activations are `[rows, stride]` with the stride of
//! [`crate::model::program::Program::stride`]. Row, slot and token numbers come from [`crate::model::call_rows::encode`],
//! which has checked them; twins index with them directly.

pub mod argmax;
pub mod attention;
pub mod embed;
pub mod matmul;
pub mod rope_kv;

use std::ops::Range;

use crate::model::call_rows::{HEADER_WORDS, ROW_WORDS};

/// Reads the words that [`crate::model::call_rows::encode`] writes.
#[derive(Debug, Clone, Copy)]
pub struct CallRows<'a> {
    words: &'a [u32],
}

/// One row of a call, as kernels see it.
#[derive(Debug, Clone, PartialEq)]
pub struct CallRow {
    /// Token id, or [`crate::model::call_rows::MASK_EMBEDDING`].
    pub token: u32,
    /// Absolute position.
    pub position: usize,
    /// Slot its K/V is written to (scratch slots stand behind the context).
    pub slot: usize,
    /// Cache slots it sees.
    pub cache: Range<usize>,
    /// Scratch slots it sees, numbered like `slot`.
    pub scratch: Range<usize>,
    /// Factor of its query.
    pub query_scale: f32,
}

impl CallRow {
    /// The keys the row sees in a layer with this sliding window, in the order of reduction: cache slots above
    /// `position - window`, then its scratch slots. (A cache slot's number is the position of its key; a draft block is
    /// far shorter than any window, so scratch slots are never cut.)
    pub fn keys(&self, window: Option<u32>) -> impl Iterator<Item = usize> + Clone + use<> {
        self.cache_from(window).chain(self.scratch.clone())
    }

    /// The part of `cache` that the window leaves.
    #[must_use]
    pub fn cache_from(&self, window: Option<u32>) -> Range<usize> {
        let first = window.map_or(0, |w| (self.position + 1).saturating_sub(w as usize));
        self.cache.start.max(first)..self.cache.end
    }
}

impl<'a> CallRows<'a> {
    /// `words` as written by [`crate::model::call_rows::encode`].
    #[must_use]
    pub fn new(words: &'a [u32]) -> Self {
        Self { words }
    }

    /// T.
    #[must_use]
    pub fn len(&self) -> usize {
        self.words[0] as usize
    }

    /// Whether the call has no rows (no encoded call has none).
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Rows with the adapter on.
    #[must_use]
    pub fn adapter(&self) -> Range<usize> {
        self.words[1] as usize..self.words[2] as usize
    }

    /// Rows that choose.
    #[must_use]
    pub fn choose(&self) -> Range<usize> {
        self.words[3] as usize..self.words[4] as usize
    }

    /// Row `i < len()`.
    #[must_use]
    pub fn row(&self, i: usize) -> CallRow {
        let w = &self.words[HEADER_WORDS + i * ROW_WORDS..][..ROW_WORDS];
        CallRow {
            token: w[0],
            position: w[1] as usize,
            slot: w[2] as usize,
            cache: w[3] as usize..w[4] as usize,
            scratch: w[5] as usize..w[6] as usize,
            query_scale: f32::from_bits(w[7]),
        }
    }

    /// All rows in order.
    pub fn iter(&self) -> impl Iterator<Item = CallRow> + '_ {
        (0..self.len()).map(|i| self.row(i))
    }
}

/// Sizes of attention that the rotary and attention kernels share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Hq.
    pub query: usize,
    /// Hkv; query head `h` reads key head `h / (Hq / Hkv)`.
    pub key_value: usize,
    /// Dh.
    pub dim: usize,
}

#[cfg(test)]
pub(crate) mod testing {
    //! Packed matrices and call words for tests.

    use super::*;
    use crate::weights::packed::{Format, PackedRows, ScaleFormat, TILE};

    /// Deterministic values in -1..1 (xorshift).
    pub struct Random(pub u64);

    impl Random {
        pub fn word(&mut self) -> u32 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 >> 24) as u32
        }

        pub fn value(&mut self) -> f32 {
            (f64::from(self.word()) / f64::from(u32::MAX) * 2.0 - 1.0) as f32
        }

        pub fn values(&mut self, n: usize) -> Vec<f32> {
            (0..n).map(|_| self.value()).collect()
        }
    }

    /// A matrix of zeros in `format`.
    pub fn zeros(format: Format, n: usize, k: usize) -> PackedRows {
        let mut m = PackedRows { format, first_row: 0, n, k, data: vec![], scales: vec![] };
        let tiles = n.div_ceil(TILE);
        m.data = vec![0; tiles * m.blocks() * TILE * 4];
        m.scales = vec![0; tiles * m.groups() * TILE];
        m
    }

    /// Stores integer `q` (affine) or the value `v` (f16, f32) at `[row, k]`.
    pub fn set(m: &mut PackedRows, row: usize, k: usize, q: u32, v: f32) {
        let per_block = m.format.values_per_block();
        let at = ((row / TILE * m.blocks() + k / per_block) * TILE + row % TILE) * 4;
        let i = k % per_block;
        match m.format {
            Format::F32 => m.data[at + i] = v.to_bits(),
            Format::F16 => m.data[at + i / 2] |= u32::from(half::f16::from_f32(v).to_bits()) << (16 * (i % 2)),
            Format::Affine { bits: 4, .. } => m.data[at + i / 8] |= (q & 15) << (8 * (i % 4) + 4 * (i % 8 / 4)),
            Format::Affine { .. } => m.data[at + i / 4] |= (q & 255) << (8 * (i % 4)),
        }
    }

    /// Sets scale and bias of an affine group.
    pub fn set_scale(m: &mut PackedRows, row: usize, group: usize, s: f32, b: f32) {
        let Format::Affine { scale, .. } = m.format else { return };
        let bits = |v: f32| match scale {
            ScaleFormat::F16 => half::f16::from_f32(v).to_bits(),
            ScaleFormat::Bf16 => half::bf16::from_f32(v).to_bits(),
        };
        let at = (row / TILE * m.groups() + group) * TILE + row % TILE;
        m.scales[at] = u32::from(bits(s)) | u32::from(bits(b)) << 16;
    }

    /// A random matrix whose entries are of the order of `1 / sqrt(k)`.
    pub fn random(format: Format, n: usize, k: usize, seed: u64) -> PackedRows {
        let mut r = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let mut m = zeros(format, n, k);
        let size = 1.7 / (k as f32).sqrt();
        let levels = match format {
            Format::Affine { bits, .. } => ((1u32 << bits) - 1) as f32,
            _ => 1.0,
        };
        for row in 0..n {
            for g in 0..m.groups() {
                let s = size * 2.0 / levels * (1.0 + 0.3 * r.value());
                let b = -s * levels * (0.5 + 0.1 * r.value());
                set_scale(&mut m, row, g, s, b);
            }
            for c in 0..k {
                let (q, v) = (r.word(), r.value() * size);
                set(&mut m, row, c, q, v);
            }
        }
        m
    }

    /// What [`words`] takes of a row.
    pub type WordsOf = (u32, u32, u32, Range<u32>, Range<u32>);

    /// Words of a call: `(token, position, slot, cache, scratch)` per row, all with query scale 1.
    pub fn words(rows: &[WordsOf], adapter: Range<u32>, choose: Range<u32>) -> Vec<u32> {
        let mut out = vec![0; HEADER_WORDS];
        out[..5].copy_from_slice(&[rows.len() as u32, adapter.start, adapter.end, choose.start, choose.end]);
        for (token, position, slot, cache, scratch) in rows {
            let one = 1f32.to_bits();
            out.extend([*token, *position, *slot, cache.start, cache.end, scratch.start, scratch.end, one]);
        }
        out
    }

    /// Fails unless every entry agrees within `bound`.
    pub fn close(a: &[f64], b: &[f64], bound: f64) -> bool {
        a.len() == b.len() && a.iter().zip(b).all(|(x, y)| (x - y).abs() <= bound)
    }

    pub const Q4: Format = Format::Affine { bits: 4, group: 32, scale: ScaleFormat::F16 };
    pub const Q8: Format = Format::Affine { bits: 8, group: 64, scale: ScaleFormat::Bf16 };
}
