//! Rows as checkpoints store them -> [`PackedRows`].
//!
//! What is exact: copies (f32, f16, affine groups of either size), 4-bit values widened to 8, a group's scale repeated for
//! smaller groups, f16 and bf16 widened to f32. What rounds:
//! - to f16: to the nearest, half a unit in the last place (2^-11 relative above 6.1e-5); values beyond 65504 become 65504;
//! - to affine groups: each value to the nearest of `2^bits` steps that start at the group's minimum, rounded down to f16,
//!   and are `scale` apart, `(max - start) / (2^bits - 1)` rounded up to f16: the error is at most `0.5001 * scale`
//!   while the group lies within ±65504.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::packed::{Format, PackedRows, ScaleFormat, TILE};
use crate::error::{Error, Result};

/// How plain values are stored in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Float {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// Upper half of an f32.
    Bf16,
}

impl Float {
    /// Bytes per value.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Decodes little-endian values; as many as both slices hold.
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Self::F32 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *o = f32::from_le_bytes(*b);
                }
            }
            Self::F16 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *o = f16::from_le_bytes(*b).to_f32();
                }
            }
            Self::Bf16 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *o = bf16::from_le_bytes(*b).to_f32();
                }
            }
        }
    }
}

/// How a matrix is stored in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// Rows of plain values.
    Plain(Float),
    /// MLX's affine groups: rows of packed words, rows of scales, rows of biases.
    Affine {
        /// 4 or 8.
        bits: u32,
        /// Inputs per scale.
        group: usize,
        /// How scales and biases are stored.
        scale: Float,
    },
}

impl Stored {
    /// Bytes of a row of `k` values, without scales.
    #[must_use]
    pub fn row_bytes(self, k: usize) -> usize {
        match self {
            Self::Plain(float) => k * float.bytes(),
            Self::Affine { bits, .. } => k * bits as usize / 8,
        }
    }

    /// Bytes of a row's scales, and of its biases.
    #[must_use]
    pub fn scale_bytes(self, k: usize) -> usize {
        match self {
            Self::Plain(_) => 0,
            Self::Affine { group, scale, .. } => k / group * scale.bytes(),
        }
    }
}

/// Consecutive rows of a checkpoint's matrix.
#[derive(Debug, Clone, Copy)]
pub struct StoredRows<'a> {
    /// How they are stored.
    pub stored: Stored,
    /// How many.
    pub rows: usize,
    /// Values per row.
    pub k: usize,
    /// The rows.
    pub values: &'a [u8],
    /// Scales of the rows' groups; empty for plain rows.
    pub scales: &'a [u8],
    /// Biases of the rows' groups; empty for plain rows.
    pub biases: &'a [u8],
    /// Multiplies every value (only plain rows may have another than 1).
    pub factor: f32,
}

/// Words of data and of scales that `n` packed rows of `k` inputs have.
#[must_use]
pub fn words(format: Format, n: usize, k: usize) -> (usize, usize) {
    let tiles = n.div_ceil(TILE);
    let rows = PackedRows { format, first_row: 0, n, k, data: Vec::new(), scales: Vec::new() };
    (tiles * rows.blocks() * TILE * 4, tiles * rows.groups() * TILE)
}

/// Rows of zeros, ready for [`write_rows`].
#[must_use]
pub fn zeros(format: Format, first_row: usize, n: usize, k: usize) -> PackedRows {
    let (data, scales) = words(format, n, k);
    PackedRows { format, first_row, n, k, data: vec![0; data], scales: vec![0; scales] }
}

/// Writes `source`'s rows into rows `first`, `first + step`, ... of `out`. `label` names the matrix in messages.
///
/// # Errors
/// [`Error::BadWeights`] for values that cannot be quantised (infinite or not a number); [`Error::Internal`] if the sizes
/// contradict each other.
pub fn write_rows(out: &mut PackedRows, source: &StoredRows, first: usize, step: usize, label: &str) -> Result<()> {
    let StoredRows { stored, rows, k, values, scales, biases, factor } = *source;
    let (row_bytes, scale_bytes) = (stored.row_bytes(k), stored.scale_bytes(k));
    let fits = rows == 0 || first + (rows - 1) * step < out.n.next_multiple_of(TILE);
    let widens = match (stored, out.format) {
        (Stored::Affine { bits, group, scale }, Format::Affine { bits: to_bits, group: to_group, scale: to_scale }) => {
            bits <= to_bits && group.is_multiple_of(to_group) && scale_format(scale) == Some(to_scale)
        }
        _ => true,
    };
    if !fits
        || !widens
        || k > out.k
        || values.len() != rows * row_bytes
        || [scales, biases].iter().any(|s| s.len() != rows * scale_bytes)
    {
        return Err(Error::Internal(format!("rows of {label} do not fit what was planned for them")));
    }
    let mut scratch = vec![0_f32; k];
    for row in 0..rows {
        let at = Place::of(out, first + row * step);
        let values = part(values, row_bytes, row);
        let (scales, biases) = (part(scales, scale_bytes, row), part(biases, scale_bytes, row));
        match (stored, out.format) {
            (Stored::Plain(Float::F32), Format::F32) | (Stored::Plain(Float::F16), Format::F16) if factor == 1.0 => {
                at.words(&mut out.data, words_of(values));
            }
            (Stored::Affine { bits: 8, .. }, Format::Affine { bits: 8, .. }) => at.words(&mut out.data, words_of(values)),
            (Stored::Affine { bits: 4, .. }, Format::Affine { bits: 4, .. }) => {
                at.words(&mut out.data, words_of(values).map(reorder_nibbles));
            }
            (Stored::Affine { bits: 4, .. }, Format::Affine { .. }) => {
                at.words(&mut out.data, words_of(values).flat_map(|w| [spread(w & 0xFFFF), spread(w >> 16)]));
            }
            (_, format) => {
                match stored {
                    Stored::Plain(float) => float.decode(values, &mut scratch),
                    Stored::Affine { bits, group, scale } => {
                        decode_affine(bits, group, scale, values, scales, biases, &mut scratch)
                    }
                }
                if factor != 1.0 {
                    scratch.iter_mut().for_each(|v| *v *= factor);
                }
                match format {
                    Format::F32 => at.words(&mut out.data, scratch.iter().map(|v| v.to_bits())),
                    Format::F16 => at.words(&mut out.data, half_words(&mut scratch)),
                    Format::Affine { bits, group, .. } => {
                        quantize(out, &at, bits, group, &scratch).map_err(|()| {
                            Error::BadWeights(format!(
                                "{label} holds a value that is infinite or not a number; it cannot be quantised"
                            ))
                        })?;
                    }
                }
            }
        }
        if let (Stored::Affine { group: from, .. }, Format::Affine { group: to, .. }) = (stored, out.format) {
            at.scale_pairs(&mut out.scales, scales, biases, from / to);
        }
    }
    Ok(())
}

fn part(bytes: &[u8], width: usize, row: usize) -> &[u8] {
    bytes.get(row * width..(row + 1) * width).unwrap_or_default()
}

fn words_of(bytes: &[u8]) -> impl Iterator<Item = u32> {
    let (whole, rest) = bytes.as_chunks();
    // Rows of an odd number of halves end in half a word.
    let last = match rest {
        [low, high] => Some(u32::from(u16::from_le_bytes([*low, *high]))),
        _ => None,
    };
    whole.iter().map(|b| u32::from_le_bytes(*b)).chain(last)
}

/// Four nibbles of the low half, one to a byte.
fn spread(x: u32) -> u32 {
    let x = (x | (x << 8)) & 0x00FF_00FF;
    (x | (x << 4)) & 0x0F0F_0F0F
}

/// MLX's order (lowest bits first) to the packed one (byte `i`: input `i` low, `4 + i` high).
fn reorder_nibbles(w: u32) -> u32 {
    spread(w & 0xFFFF) | (spread(w >> 16) << 4)
}

/// Values rounded to f16, two to a word.
fn half_words(values: &mut [f32]) -> impl Iterator<Item = u32> {
    const MAX: f32 = 65504.0;
    values.iter_mut().for_each(|v| *v = v.clamp(-MAX, MAX));
    values.chunks(8).flat_map(|values| {
        let mut halves = [f16::ZERO; 8];
        if let Some(halves) = halves.get_mut(..values.len()) {
            halves.convert_from_f32_slice(values);
        }
        let [a, b, c, d, e, f, g, h] = halves.map(|h| u32::from(h.to_bits()));
        [a | (b << 16), c | (d << 16), e | (f << 16), g | (h << 16)]
    })
}

fn decode_affine(bits: u32, group: usize, scale: Float, values: &[u8], scales: &[u8], biases: &[u8], out: &mut [f32]) {
    let (width, mask) = (scale.bytes(), (1_u32 << bits) - 1);
    let group_bytes = group * bits as usize / 8;
    let groups = values.chunks(group_bytes).zip(scales.chunks(width)).zip(biases.chunks(width));
    for (((values, s), b), out) in groups.zip(out.chunks_mut(group)) {
        let mut pair = [0.0; 2];
        scale.decode(s, &mut pair[..1]);
        scale.decode(b, &mut pair[1..]);
        let [s, b] = pair;
        let q = words_of(values).flat_map(|w| (0..32 / bits).map(move |i| (w >> (i * bits)) & mask));
        for (o, q) in out.iter_mut().zip(q) {
            *o = s * q as f32 + b;
        }
    }
}

/// Where a row is in the packed layout.
struct Place {
    /// First word of the row's first block.
    data: usize,
    /// First scale pair.
    scales: usize,
}

impl Place {
    fn of(rows: &PackedRows, row: usize) -> Self {
        let (tile, lane) = (row / TILE, row % TILE);
        Self { data: (tile * rows.blocks() * TILE + lane) * 4, scales: tile * rows.groups() * TILE + lane }
    }

    /// Writes a row's words, four to a block.
    fn words(&self, data: &mut [u32], mut words: impl Iterator<Item = u32>) {
        let blocks = data.get_mut(self.data..).unwrap_or_default().chunks_mut(TILE * 4);
        'row: for block in blocks {
            for slot in block.iter_mut().take(4) {
                let Some(word) = words.next() else { break 'row };
                *slot = word;
            }
        }
    }

    /// Writes a row's scale pairs as they are stored (two bytes each), each of them `repeat` times.
    fn scale_pairs(&self, out: &mut [u32], scales: &[u8], biases: &[u8], repeat: usize) {
        let pairs = scales.as_chunks().0.iter().zip(biases.as_chunks().0);
        let pairs = pairs.map(|(s, b)| u32::from(u16::from_le_bytes(*s)) | (u32::from(u16::from_le_bytes(*b)) << 16));
        let slots = out.get_mut(self.scales..).unwrap_or_default().iter_mut().step_by(TILE);
        for (slot, pair) in slots.zip(pairs.flat_map(|p| std::iter::repeat_n(p, repeat))) {
            *slot = pair;
        }
    }
}

/// Quantises one row; the error bound is in the module's doc.
fn quantize(out: &mut PackedRows, at: &Place, bits: u32, group: usize, row: &[f32]) -> Result<(), ()> {
    let per_word = 32 / bits as usize;
    let top = ((1_u32 << bits) - 1) as f32;
    let mut words = out.data.get_mut(at.data..).unwrap_or_default().chunks_mut(TILE * 4).flat_map(|b| b.iter_mut().take(4));
    let mut pairs = out.scales.get_mut(at.scales..).unwrap_or_default().iter_mut().step_by(TILE);
    for values in row.chunks(group) {
        let (mut low, mut high, mut finite) = (f32::INFINITY, f32::NEG_INFINITY, true);
        for v in values {
            (low, high, finite) = (low.min(*v), high.max(*v), finite && v.is_finite());
        }
        if !finite {
            return Err(());
        }
        let bias = f16_below(low);
        let scale = f16_above((f64::from(high) - bias.to_f64()) / f64::from(top));
        if let Some(pair) = pairs.next() {
            *pair = u32::from(scale.to_bits()) | (u32::from(bias.to_bits()) << 16);
        }
        let (start, inverse) = (bias.to_f32(), if scale == f16::ZERO { 0.0 } else { 1.0 / scale.to_f32() });
        for values in values.chunks(per_word) {
            let mut word = 0;
            for (i, v) in values.iter().enumerate() {
                let q = ((v - start) * inverse + 0.5).clamp(0.0, top) as u32;
                word |= q << if bits == 4 { 8 * (i % 4) + 4 * (i / 4) } else { 8 * i };
            }
            if let Some(slot) = words.next() {
                *slot = word;
            }
        }
    }
    Ok(())
}

/// The largest f16 not above `x`, or -65504.
fn f16_below(x: f32) -> f16 {
    let h = f16::from_f32(x.clamp(-65504.0, 65504.0));
    match h.to_bits() {
        _ if h.to_f32() <= x || h == f16::MIN => h,
        0 | 0x8000 => f16::from_bits(0x8001),
        bits if bits & 0x8000 == 0 => f16::from_bits(bits - 1),
        bits => f16::from_bits(bits + 1),
    }
}

/// The smallest f16 not below `x >= 0`, or 65504.
fn f16_above(x: f64) -> f16 {
    let h = f16::from_f64(x.clamp(0.0, 65504.0));
    match h.to_f64() < x && h != f16::MAX {
        true => f16::from_bits(h.to_bits() + 1),
        false => h,
    }
}

/// The storage of scales that keeps them exactly; `None` if [`PackedRows`] has none.
#[must_use]
pub fn scale_format(scale: Float) -> Option<ScaleFormat> {
    match scale {
        Float::F16 => Some(ScaleFormat::F16),
        Float::Bf16 => Some(ScaleFormat::Bf16),
        Float::F32 => None,
    }
}

#[cfg(test)]
#[path = "pack_tests.rs"]
mod tests;
