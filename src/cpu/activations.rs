//! Inputs of a product in the form its matrix wants: 16-bit integers ([`Quantised`]) for affine weights, f32 as they are
//! ([`Panel`]) for others.
//!
//! Why 16 bits and not 8: a multiplication of 16-bit pairs is what every SIMD set has (`pmaddwd`, `vpdpwssd`,
//! `i32x4.dot_i16x8_s`), so the 256 times finer grid costs nothing there, and the result is as good as f32's. With one scale
//! per weight group the error of an input is at most `2^-16` of the largest input of its group.

use std::ops::Range;

use super::simd::{Level, Simd, simd_fn};
use super::threads::{Crew, share};

/// Largest magnitude of a quantised input.
const LIMIT: f32 = 32767.0;
/// Adding and subtracting it rounds a small f32 to the nearest integer, ties to even.
const ROUND: f32 = 12_582_912.0;

/// Rows of activations, quantised per group of inputs. Groups come first, rows within them: what one pass over a group of
/// weights reads lies together.
///
/// Pairs of i16 in the order in which masks take them out of a weight word: inputs (0, 2), (1, 3), (4, 6), (5, 7) of
/// every eight. The last group is padded with zeros.
#[derive(Debug, Default, Clone)]
pub(super) struct Quantised {
    /// Inputs per scale.
    pub group: usize,
    /// How many rows.
    pub rows: usize,
    /// `[groups, rows, group / 2]`.
    pub pairs: Vec<i32>,
    /// `[groups, rows]`.
    pub scales: Vec<Scale>,
}

/// What turns a group's integers back into activations.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Scale {
    /// Value of one step.
    pub step: f32,
    /// Sum of the group's integers, times the step.
    pub sum: f32,
}

impl Quantised {
    /// Quantises the first `k` values of `rows` rows of `from`, which are `stride` apart.
    #[allow(clippy::too_many_arguments, reason = "they are one thing")]
    pub fn fill(&mut self, crew: &mut Crew, level: Level, from: &[f32], stride: usize, rows: usize, k: usize, group: usize) {
        let groups = k.div_ceil(group);
        (self.group, self.rows) = (group, rows);
        self.pairs.resize(groups * rows * group / 2, 0);
        self.scales.resize(groups * rows, Scale::default());
        let part = |inputs: Range<usize>, pairs: &mut [i32], scales: &mut [Scale]| {
            for (r, from) in from.chunks(stride).take(rows).enumerate() {
                quantise(level, &from[inputs.clone()], group, rows, &mut pairs[r * group / 2..], &mut scales[r..]);
            }
        };
        // Little work is not worth sharing.
        let size = share(groups);
        if size >= groups || rows * k < 4096 {
            return part(0..k, &mut self.pairs, &mut self.scales);
        }
        let places = self.pairs.chunks_mut(size * rows * group / 2).zip(self.scales.chunks_mut(size * rows));
        crew.pieces(&mut places.collect::<Vec<_>>(), 1, |i, places| {
            for (pairs, scales) in places {
                part(i * size * group..k.min((i + 1) * size * group), pairs, scales);
            }
        });
    }
}

simd_fn! {
    /// One row, into every `rows`th place.
    fn quantise(from: &[f32], group: usize, rows: usize, pairs: &mut [i32], scales: &mut [Scale]) = quantise_row
}

#[inline(always)]
fn quantise_row<S: Simd>(_: S, from: &[f32], group: usize, rows: usize, pairs: &mut [i32], scales: &mut [Scale]) {
    let places = pairs.chunks_mut(rows * group / 2).zip(scales.chunks_mut(rows));
    for (from, (pairs, scale)) in from.chunks(group).zip(places) {
        // As integers, magnitudes order like the numbers, with infinities and NaN above: they reach the step and so the output.
        let mut largest = 0;
        for v in from {
            let magnitude = v.to_bits() & 0x7FFF_FFFF;
            largest = if magnitude > largest { magnitude } else { largest };
        }
        let largest = f32::from_bits(largest);
        // A group of subnormals has no finite inverse; it counts as zero.
        let inverse = if largest < 1e-33 { 0.0 } else { LIMIT / largest };
        let mut sum = 0i32;
        let (eights, rest) = from.as_chunks::<8>();
        let mut last = [0.0; 8];
        last[..rest.len()].copy_from_slice(rest);
        let mut pairs = pairs[..group / 2].as_chunks_mut::<4>().0.iter_mut();
        for (eight, pairs) in eights.iter().chain((!rest.is_empty()).then_some(&last)).zip(&mut pairs) {
            let mut q = [0i32; 8];
            for i in 0..8 {
                q[i] = (eight[i] * inverse + ROUND).to_bits() as i32 - ROUND.to_bits() as i32;
                sum += q[i];
            }
            for i in 0..2 {
                pairs[i] = (q[i] & 0xFFFF) | (q[i + 2] << 16);
                pairs[i + 2] = (q[i + 4] & 0xFFFF) | (q[i + 6] << 16);
            }
        }
        pairs.for_each(|pairs| *pairs = [0; 4]);
        let step = largest / LIMIT;
        scale[0] = Scale { step, sum: sum as f32 * step };
    }
}

/// Inputs of a [`Panel`]'s chunk; matrices of floats are padded to it.
pub(super) const CHUNK: usize = 16;

/// Rows of activations as they are, cut into chunks of inputs: `[chunks, rows, 16]`, padded with zeros.
#[derive(Debug, Default, Clone)]
pub(super) struct Panel {
    /// How many rows.
    pub rows: usize,
    /// The chunks.
    pub chunks: Vec<[f32; CHUNK]>,
}

impl Panel {
    /// Takes the first `k` values of `rows` rows of `from`, which are `stride` apart.
    pub fn fill(&mut self, from: &[f32], stride: usize, rows: usize, k: usize) {
        self.rows = rows;
        self.chunks.resize(k.div_ceil(CHUNK) * rows, [0.0; CHUNK]);
        for (r, from) in from.chunks(stride).take(rows).enumerate() {
            for (to, from) in self.chunks[r..].iter_mut().step_by(rows).zip(from[..k].chunks(CHUNK)) {
                to[..from.len()].copy_from_slice(from);
                to[from.len()..].fill(0.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::Random;

    #[test]
    fn values_come_back_within_the_bound_in_order() {
        let (k, group, rows) = (75, 32, 3);
        let from = Random(3).values(rows * 80);
        for level in Level::all() {
            let mut x = Quantised::default();
            x.fill(&mut Crew::default(), level, &from, 80, rows, k, group);
            for r in 0..rows {
                let q = |i: usize| {
                    let (pair, high) = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)][i % 8];
                    let at = (i / group * rows + r) * group / 2 + i % group / 8 * 4 + pair;
                    (x.pairs[at] >> (16 * high)) as i16
                };
                for g in 0..3 {
                    let Scale { step, sum: want } = x.scales[g * rows + r];
                    let mut sum = 0.0;
                    for i in g * group..(g + 1) * group {
                        let v = if i < k { from[r * 80 + i] } else { 0.0 };
                        let largest = 32767.0 * step;
                        assert!((f32::from(q(i)) * step - v).abs() <= largest * 2f32.powi(-16) * 1.01, "row {r}, input {i}");
                        sum += f32::from(q(i)) * step;
                    }
                    assert!((sum - want).abs() < 1e-4);
                }
                // Control: the order matters.
                assert!((f32::from(q(1)) * x.scales[r].step - from[r * 80 + 2]).abs() > 1e-3);
            }
        }
    }

    #[test]
    fn a_nan_reaches_the_step() {
        let mut from = vec![1.0; 32];
        from[7] = f32::NAN;
        let mut x = Quantised::default();
        x.fill(&mut Crew::default(), Level::best(), &from, 32, 1, 32, 32);
        assert!(x.scales[0].step.is_nan());
        x.fill(&mut Crew::default(), Level::best(), &[0.0; 32], 32, 1, 32, 32);
        assert_eq!((x.scales[0].step, x.scales[0].sum), (0.0, 0.0));
    }
}
