//! Matrices as the fast kernels read them: tiles of sixteen output rows, one row per lane.
//!
//! | format | a line (one 32-bit or 16-bit lane per output row) holds | lines per tile |
//! | --- | --- | --- |
//! | 4-bit affine | inputs `8j .. 8j+8`: byte `i` has input `8j+i` in its low and `8j+4+i` in its high nibble | `words` |
//! | 8-bit affine | inputs `4j .. 4j+4`, lowest byte first | `words` |
//! | f16, f32 | input `j` | `k` |
//!
//! It is the layout of [`crate::weights::packed`] with words instead of 16-byte blocks side by side; a matrix is turned
//! as its chunks arrive, and they are dropped. Tiles are padded with zero rows, whose scales are zero too, and with zero
//! inputs to whole groups (affine) or chunks of sixteen (f16, f32).

use half::f16;

use super::activations::CHUNK;
use super::simd::{HalfLine, LANES, Line};
use crate::error::{Error, Result};
use crate::weights::packed::{Format, PackedRows, ScaleFormat, TILE, unpack_scale};

/// The values of a [`Matrix`].
#[derive(Debug, Clone)]
pub(super) enum Values {
    /// Affine groups. `words` lines per tile; scale and bias pairs, `groups` lines per tile.
    Affine { bits: u32, group: usize, scale: ScaleFormat, data: Vec<Line<u32>>, scales: Vec<Line<u32>> },
    /// IEEE half, all finite.
    F16(Vec<HalfLine>),
    /// IEEE single.
    F32(Vec<Line<f32>>),
}

/// A matrix `[n, k]`.
#[derive(Debug, Clone)]
pub(super) struct Matrix {
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// Tiles of sixteen outputs.
    pub tiles: usize,
    /// Values.
    pub values: Values,
}

impl Matrix {
    /// A matrix of zeros, to be filled by [`Matrix::take`].
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn zeros(format: Format, n: usize, k: usize) -> Result<Self> {
        let tiles = n.div_ceil(LANES);
        let values = match format {
            Format::Affine { bits, group, scale } => Values::Affine {
                bits,
                group,
                scale,
                data: allocate(tiles * words(bits, group, k))?,
                scales: allocate(tiles * k.div_ceil(group))?,
            },
            Format::F16 => Values::F16(allocate(tiles * k.next_multiple_of(CHUNK))?),
            Format::F32 => Values::F32(allocate(tiles * k.next_multiple_of(CHUNK))?),
        };
        Ok(Self { n, k, tiles, values })
    }

    /// Lines of data per tile.
    pub fn lines(&self) -> usize {
        match &self.values {
            Values::Affine { bits, group, .. } => words(*bits, *group, self.k),
            _ => self.k.next_multiple_of(CHUNK),
        }
    }

    /// Lines of data per group of a tile; 0 for formats without groups.
    pub fn words(&self) -> usize {
        self.lines().checked_div(self.groups()).unwrap_or(0)
    }

    /// Inputs per scale; `None` for formats without.
    pub fn group(&self) -> Option<usize> {
        match &self.values {
            Values::Affine { group, .. } => Some(*group),
            _ => None,
        }
    }

    /// Scales per output row.
    pub fn groups(&self) -> usize {
        self.group().map_or(0, |g| self.k.div_ceil(g))
    }

    /// Turns a chunk, which was checked to belong to this matrix, into lines.
    ///
    /// # Errors
    /// [`Error::BadWeights`] for an f16 value or scale that is infinite or not a number.
    pub fn take(&mut self, chunk: &PackedRows) -> Result<()> {
        let (lines, groups, k) = (self.lines(), self.groups(), self.k);
        let blocks = chunk.blocks();
        // Tiles of a chunk are eight rows: half of one of ours.
        for tile in 0..chunk.n.div_ceil(TILE) {
            let first = chunk.first_row + tile * TILE;
            let (to, lane) = (first / LANES, first % LANES);
            let data = &chunk.data[tile * blocks * TILE * 4..][..blocks * TILE * 4];
            let word = |line: usize, row: usize| data[(line / 4 * TILE + row) * 4 + line % 4];
            match &mut self.values {
                Values::Affine { data, scales, scale, .. } => {
                    for (i, line) in data[to * lines..][..blocks * 4].iter_mut().enumerate() {
                        for row in 0..TILE {
                            line.0[lane + row] = word(i, row);
                        }
                    }
                    let from = &chunk.scales[tile * groups * TILE..][..groups * TILE];
                    for (line, from) in scales[to * groups..][..groups].iter_mut().zip(from.chunks_exact(TILE)) {
                        for (to, &pair) in line.0[lane..].iter_mut().zip(from) {
                            let (s, b) = unpack_scale(pair, *scale);
                            if !(s.is_finite() && b.is_finite()) {
                                return Err(not_finite());
                            }
                            *to = pair;
                        }
                    }
                }
                Values::F16(halves) => {
                    for (i, line) in halves[to * lines..][..k].iter_mut().enumerate() {
                        for row in 0..TILE {
                            let bits = (word(i / 2, row) >> (16 * (i % 2))) as u16;
                            if !f16::from_bits(bits).is_finite() {
                                return Err(not_finite());
                            }
                            line.0[lane + row] = bits;
                        }
                    }
                }
                Values::F32(singles) => {
                    for (i, line) in singles[to * lines..][..k].iter_mut().enumerate() {
                        for row in 0..TILE {
                            line.0[lane + row] = f32::from_bits(word(i, row));
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// The same matrix of floats in 8-bit groups of `group` inputs. No weight moves by more than half a step of its group, which is a
    /// 255th of the group's range or a hundredth more than that.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::BadWeights`] for values too far apart for f32.
    pub fn quantised(&self, group: usize) -> Result<Self> {
        let mut to = Self::zeros(Format::Affine { bits: 8, group, scale: ScaleFormat::Bf16 }, self.n, self.k)?;
        let (words, groups, lines) = (to.lines(), to.groups(), self.lines());
        let value = |line: usize, lane: usize| match &self.values {
            Values::F16(values) => f16::from_bits(values[line].0[lane]).to_f32(),
            Values::F32(values) => values[line].0[lane],
            Values::Affine { .. } => 0.0,
        };
        let Values::Affine { data, scales, .. } = &mut to.values else { return Ok(to) };
        for tile in 0..self.tiles {
            for (g, first) in (0..self.k).step_by(group).enumerate() {
                let inputs = first..self.k.min(first + group);
                for lane in 0..LANES {
                    let values = inputs.clone().map(|i| value(tile * lines + i, lane));
                    let (least, most) = values.clone().fold((f32::INFINITY, f32::NEG_INFINITY), |(a, b), v| (a.min(v), b.max(v)));
                    // Both rounded outwards, so that the grid reaches both ends.
                    let bias = f32::from_bits(bf16_up(-least) << 16);
                    let scale = f32::from_bits(bf16_up((most + bias) / 255.0) << 16);
                    if !(bias.is_finite() && scale.is_finite()) {
                        return Err(not_finite());
                    }
                    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
                    for (i, v) in inputs.clone().zip(values) {
                        let q = ((v + bias) * inverse).round().clamp(0.0, 255.0) as u32;
                        data[tile * words + i / 4].0[lane] |= q << (8 * (i % 4));
                    }
                    scales[tile * groups + g].0[lane] = (scale.to_bits() >> 16) | (-bias).to_bits() & 0xFFFF_0000;
                }
            }
        }
        Ok(to)
    }

    /// Writes output row `row` (an embedding), which is in range, to `out [k]`.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        let (tile, lane) = (row / LANES, row % LANES);
        match &self.values {
            Values::Affine { bits, group, scale, data, scales } => {
                let (data, scales) = (&data[tile * self.lines()..], &scales[tile * self.groups()..]);
                for (i, to) in out.iter_mut().enumerate() {
                    let q = match bits {
                        4 => (data[i / 8].0[lane] >> (8 * (i % 4) + 4 * (i % 8 / 4))) & 15,
                        _ => (data[i / 4].0[lane] >> (8 * (i % 4))) & 255,
                    };
                    let (s, b) = unpack_scale(scales[i / group].0[lane], *scale);
                    *to = s * q as f32 + b;
                }
            }
            Values::F16(lines) => {
                for (to, line) in out.iter_mut().zip(&lines[tile * self.lines()..]) {
                    *to = f16::from_bits(line.0[lane]).to_f32();
                }
            }
            Values::F32(lines) => {
                for (to, line) in out.iter_mut().zip(&lines[tile * self.lines()..]) {
                    *to = line.0[lane];
                }
            }
        }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        match &self.values {
            Values::Affine { data, scales, .. } => (data.len() + scales.len()) * size_of::<Line<u32>>(),
            Values::F16(lines) => lines.len() * size_of::<HalfLine>(),
            Values::F32(lines) => lines.len() * size_of::<Line<f32>>(),
        }
    }
}

/// 32-bit words per output row: whole groups.
fn words(bits: u32, group: usize, k: usize) -> usize {
    k.next_multiple_of(group) * bits as usize / 32
}

/// The bits of the smallest bf16 that is not below `v`.
fn bf16_up(v: f32) -> u32 {
    let bits = v.to_bits();
    let cut = bits & 0xFFFF != 0;
    (bits >> 16) + u32::from(cut && v > 0.0)
}

/// `len` zero values.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(super) fn allocate<T: Copy + Default>(len: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    let bytes = len.saturating_mul(size_of::<T>());
    values.try_reserve_exact(len).map_err(|_| {
        Error::OutOfMemory(format!("no {} MiB of memory left for weights or cache; take a smaller model or context", bytes >> 20))
    })?;
    values.resize(len, T::default());
    Ok(values)
}

fn not_finite() -> Error {
    Error::BadWeights(
        "a weight or scale stored in 16 bits is infinite or not a number; the file is damaged or badly converted".into(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{Q4, Q8, random};

    #[test]
    fn rows_survive_the_turn() {
        for format in [Q4, Q8, Format::F16, Format::F32] {
            let (n, k) = (43, 75);
            let packed = random(format, n, k, 11);
            let mut matrix = Matrix::zeros(format, n, k).unwrap();
            matrix.take(&packed).unwrap();
            let mut out = vec![0.0; k];
            for row in 0..n {
                matrix.row(row, &mut out);
                for (i, &v) in out.iter().enumerate() {
                    assert!((f64::from(v) - packed.get(row, i)).abs() < 1e-6);
                }
            }
            // Control: a neighbour's row differs.
            matrix.row(3, &mut out);
            assert!((0..k).any(|i| (f64::from(out[i]) - packed.get(4, i)).abs() > 1e-3));
        }
    }

    #[test]
    fn floats_become_groups_within_half_a_step() {
        for format in [Format::F16, Format::F32] {
            let (n, k) = (21, 75);
            let mut matrix = Matrix::zeros(format, n, k).unwrap();
            matrix.take(&random(format, n, k, 5)).unwrap();
            if let Values::F32(lines) = &mut matrix.values {
                lines[3].0[2] = 1e-30; // small and large beside each other
                lines[40].0 = [0.0; LANES];
            }
            let groups = matrix.quantised(32).unwrap();
            let (mut want, mut got) = (vec![0.0; k], vec![0.0; k]);
            for row in 0..n {
                matrix.row(row, &mut want);
                groups.row(row, &mut got);
                for (want, got) in want.chunks(32).zip(got.chunks(32)) {
                    let range =
                        want.iter().fold(f32::NEG_INFINITY, |m, v| m.max(*v)) - want.iter().fold(f32::INFINITY, |m, v| m.min(*v));
                    let largest = want.iter().fold(0f32, |m, v| m.max(v.abs()));
                    let bound = range / 510.0 * 1.02 + largest * 2e-5;
                    assert!(want.iter().zip(got).all(|(a, b)| (a - b).abs() <= bound), "{format:?} row {row}");
                    // Control: a step more is noticed.
                    assert!(want.iter().zip(got).any(|(a, b)| (a - b - range / 255.0).abs() > bound));
                }
            }
        }
        let mut wild = Matrix::zeros(Format::F32, 1, 2).unwrap();
        let Values::F32(lines) = &mut wild.values else { panic!("floats") };
        (lines[0].0[0], lines[1].0[0]) = (f32::MAX, f32::MIN);
        assert!(matches!(wild.quantised(32), Err(Error::BadWeights(_))));
    }

    #[test]
    fn refuses_values_that_are_not_finite() {
        let mut packed = random(Format::F16, 8, 8, 1);
        packed.data[0] = 0x7C00;
        assert!(matches!(Matrix::zeros(Format::F16, 8, 8).unwrap().take(&packed), Err(Error::BadWeights(_))));
    }
}
