//! Inputs of a product in the form its matrix wants: 16-bit integers for affine weights, f32 as they are for others.
//!
//! Why 16 bits and not 8: a multiplication of 16-bit pairs is what every SIMD set has (`pmaddwd`, `vpdpwssd`,
//! `i32x4.dot_i16x8_s`), so the 256 times finer grid costs nothing there, and the result is as good as f32's. With one scale
//! per weight group the error of an input is at most `2^-16` of the largest input of its group.

use super::simd::{Level, Simd, simd_fn};

/// Largest magnitude of a quantised input.
const LIMIT: f32 = 32767.0;
/// Adding and subtracting it rounds a small f32 to the nearest integer, ties to even.
const ROUND: f32 = 12_582_912.0;

/// Rows of activations, quantised per group of inputs.
///
/// Pairs of i16 in the order in which masks take them out of a weight word: inputs (0, 2), (1, 3), (4, 6), (5, 7) of
/// every eight. The last group is padded with zeros.
#[derive(Debug, Default, Clone)]
pub(super) struct Quantised {
    /// Inputs per scale.
    pub group: usize,
    /// Groups per row.
    pub groups: usize,
    /// `[rows, groups * group / 2]`.
    pub pairs: Vec<i32>,
    /// `[rows, groups]`: value of one step.
    pub steps: Vec<f32>,
    /// `[rows, groups]`: sum of the group's quantised inputs, times the step.
    pub sums: Vec<f32>,
}

impl Quantised {
    /// Quantises the first `k` values of `rows` rows of `from`, which are `stride` apart.
    pub fn fill(&mut self, level: Level, from: &[f32], stride: usize, rows: usize, k: usize, group: usize) {
        self.group = group;
        self.groups = k.div_ceil(group);
        self.pairs.resize(rows * self.groups * group / 2, 0);
        self.steps.resize(rows * self.groups, 0.0);
        self.sums.resize(rows * self.groups, 0.0);
        let per_row = self.groups * group / 2;
        let pairs = self.pairs.chunks_exact_mut(per_row.max(1));
        let scales = self.steps.chunks_exact_mut(self.groups.max(1)).zip(self.sums.chunks_exact_mut(self.groups.max(1)));
        for ((pairs, (steps, sums)), from) in pairs.zip(scales).zip(from.chunks(stride)) {
            quantise(level, &from[..k], group, pairs, steps, sums);
        }
    }

    /// Pairs of a row.
    #[inline(always)]
    pub fn row(&self, row: usize) -> &[i32] {
        let n = self.groups * self.group / 2;
        &self.pairs[row * n..][..n]
    }
}

simd_fn! {
    /// One row.
    fn quantise(from: &[f32], group: usize, pairs: &mut [i32], steps: &mut [f32], sums: &mut [f32]) = quantise_row
}

#[inline(always)]
fn quantise_row<S: Simd>(_: S, from: &[f32], group: usize, pairs: &mut [i32], steps: &mut [f32], sums: &mut [f32]) {
    let groups = from.chunks(group).zip(pairs.chunks_exact_mut(group / 2));
    for ((from, pairs), (step, total)) in groups.zip(steps.iter_mut().zip(sums)) {
        // As integers, magnitudes order like the numbers, with infinities and NaN above: they reach the step and so the output.
        let largest = from.iter().map(|v| v.to_bits() & 0x7FFF_FFFF).fold(0, u32::max);
        let largest = f32::from_bits(largest);
        let inverse = if largest > 0.0 { LIMIT / largest } else { 0.0 };
        // A group of subnormals has no finite inverse; it counts as zero.
        let inverse = if largest < 1e-33 { 0.0 } else { inverse };
        let mut sum = 0i32;
        let mut eights = [0f32; 8];
        for (pairs, from) in pairs.chunks_exact_mut(4).zip(from.chunks(8).chain(std::iter::repeat(&[][..]))) {
            if from.len() == 8 {
                eights.copy_from_slice(from);
            } else {
                eights = [0.0; 8];
                eights[..from.len()].copy_from_slice(from);
            }
            let q = eights.map(|v| (v * inverse + ROUND).to_bits() as i32 - ROUND.to_bits() as i32);
            sum += q.iter().sum::<i32>();
            for (to, (low, high)) in pairs.iter_mut().zip([(0, 2), (1, 3), (4, 6), (5, 7)]) {
                *to = (q[low] & 0xFFFF) | (q[high] << 16);
            }
        }
        *step = largest / LIMIT;
        *total = sum as f32 * *step;
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
            x.fill(level, &from, 80, rows, k, group);
            for r in 0..rows {
                let pairs = x.row(r);
                let q = |i: usize| {
                    let (pair, high) = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)][i % 8];
                    (pairs[i / 8 * 4 + pair] >> (16 * high)) as i16
                };
                for g in 0..3 {
                    let step = x.steps[r * 3 + g];
                    let mut sum = 0.0;
                    for i in g * group..(g + 1) * group {
                        let v = if i < k { from[r * 80 + i] } else { 0.0 };
                        let largest = 32767.0 * step;
                        assert!((f32::from(q(i)) * step - v).abs() <= largest * 2f32.powi(-16) * 1.01, "row {r}, input {i}");
                        sum += f32::from(q(i)) * step;
                    }
                    assert!((sum - x.sums[r * 3 + g]).abs() < 1e-4);
                }
                // Control: the order matters.
                assert!((f32::from(q(1)) * x.steps[r * 3] - from[r * 80 + 2]).abs() > 1e-3);
            }
        }
    }

    #[test]
    fn a_nan_reaches_the_step() {
        let mut from = vec![1.0; 32];
        from[7] = f32::NAN;
        let mut x = Quantised::default();
        x.fill(Level::best(), &from, 32, 1, 32, 32);
        assert!(x.steps[0].is_nan());
        x.fill(Level::best(), &[0.0; 32], 32, 1, 32, 32);
        assert_eq!((x.steps[0], x.sums[0]), (0.0, 0.0));
    }
}
