//! The cheap operations between products: norms, residuals, SwiGLU, rotation, choosing a token. Written so that the
//! compiler vectorises them at every level; sums go over sixteen lanes in a fixed order, so that all levels agree.

use super::simd::{LANES, Line, Simd, simd_fn};
use crate::decode::plan::Choice;

/// `e^x` to within a few units of f32's last place; 0 below -87, infinite above 88, NaN for NaN.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0;
    let inside = if x > -87.3 { x } else { -87.3 };
    let inside = if inside < 88.7 { inside } else { 88.7 };
    // x = n ln 2 + r, ln 2 in two parts so that n ln 2 is exact.
    let shifted = inside * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = inside - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let p = p * (r * r) + r + 1.0;
    // 2^n in two halves: n may be 128.
    let n = shifted.to_bits() as i32 - ROUND.to_bits() as i32;
    let half = n >> 1;
    let power = |n: i32| f32::from_bits(((n + 127) << 23) as u32);
    let y = p * power(half) * power(n - half);
    if x > 88.7 {
        f32::INFINITY
    } else if x < -87.3 {
        0.0
    } else if x.is_nan() {
        x
    } else {
        y
    }
}

/// Sum of `f` over a row: sixteen partial sums, then a fixed tree.
#[inline(always)]
fn lane_sum(values: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let (whole, rest) = values.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for chunk in whole {
        for (sum, &v) in sums.iter_mut().zip(chunk) {
            *sum += f(v);
        }
    }
    for (sum, &v) in sums.iter_mut().zip(rest) {
        *sum += f(v);
    }
    tree(sums)
}

/// Sums sixteen lanes pairwise.
#[inline(always)]
pub(super) fn tree(mut lanes: [f32; LANES]) -> f32 {
    let mut n = LANES / 2;
    while n > 0 {
        for i in 0..n {
            lanes[i] += lanes[i + n];
        }
        n /= 2;
    }
    lanes[0]
}

simd_fn! {
    /// `1 / sqrt(mean(row^2) + eps)` of a row.
    pub(super) fn inverse_rms(row: &[f32], eps: f32) -> f32 = inverse_rms_of
}

#[inline(always)]
fn inverse_rms_of<S: Simd>(_: S, row: &[f32], eps: f32) -> f32 {
    1.0 / (lane_sum(row, |v| v * v) / row.len() as f32 + eps).sqrt()
}

/// A row of a product's tiles: line `tile * rows + row`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Column<'a> {
    /// `[tiles][rows][16]`.
    pub y: &'a [Line<f32>],
    /// Rows in `y`.
    pub rows: usize,
    /// Which one.
    pub row: usize,
}

impl Column<'_> {
    #[inline(always)]
    fn lines(&self) -> impl Iterator<Item = &[f32; LANES]> {
        self.y[self.row..].iter().step_by(self.rows).map(|line| &line.0)
    }
}

simd_fn! {
    /// `out = y`.
    pub(super) fn store(y: Column<'_>, out: &mut [f32]) = store_row
}

#[inline(always)]
fn store_row<S: Simd>(_: S, y: Column<'_>, out: &mut [f32]) {
    for (out, y) in out.chunks_mut(LANES).zip(y.lines()) {
        let n = out.len();
        out.copy_from_slice(&y[..n]);
    }
}

simd_fn! {
    /// `h += y`, `x = h * gain`.
    pub(super) fn residual(y: Column<'_>, gain: &[f32], h: &mut [f32], x: &mut [f32]) = residual_row
}

#[inline(always)]
fn residual_row<S: Simd>(_: S, y: Column<'_>, gain: &[f32], h: &mut [f32], x: &mut [f32]) {
    let rows = h.chunks_mut(LANES).zip(x.chunks_mut(LANES)).zip(gain.chunks(LANES));
    for (((h, x), gain), y) in rows.zip(y.lines()) {
        for (((h, x), gain), y) in h.iter_mut().zip(x).zip(gain).zip(y) {
            *h += y;
            *x = *h * gain;
        }
    }
}

simd_fn! {
    /// `out[j] = silu(y[2j]) * y[2j+1]`.
    pub(super) fn swiglu(y: Column<'_>, out: &mut [f32]) = swiglu_row
}

#[inline(always)]
fn swiglu_row<S: Simd>(_: S, y: Column<'_>, out: &mut [f32]) {
    // Two lines at a time, so that sixteen results are computed together.
    let mut lines = y.lines();
    for out in out.chunks_mut(LANES) {
        let (mut gate, mut up) = ([0.0; LANES], [0.0; LANES]);
        for half in [0, LANES / 2].into_iter().take(out.len().div_ceil(LANES / 2)) {
            let Some(y) = lines.next() else { return };
            for j in 0..LANES / 2 {
                (gate[half + j], up[half + j]) = (y[2 * j], y[2 * j + 1]);
            }
        }
        let mut result = [0.0; LANES];
        for j in 0..LANES {
            result[j] = gate[j] / (1.0 + exp(-gate[j])) * up[j];
        }
        let n = out.len();
        out.copy_from_slice(&result[..n]);
    }
}

simd_fn! {
    /// Rotates a head `[Dh]` by a row `[Dh / 2, 2]` of the rotary table (cosine, sine), then multiplies it by `factor`.
    pub(super) fn rotate(head: &mut [f32], table: &[f32], factor: f32) = rotate_head
}

#[inline(always)]
fn rotate_head<S: Simd>(_: S, head: &mut [f32], table: &[f32], factor: f32) {
    let (a, b) = head.split_at_mut(head.len() / 2);
    for ((a, b), turn) in a.iter_mut().zip(b).zip(table.as_chunks::<2>().0) {
        let [cos, sin] = *turn;
        (*a, *b) = ((*a * cos - *b * sin) * factor, (*b * cos + *a * sin) * factor);
    }
}

simd_fn! {
    /// The largest of the first `n` entries of a row (smallest id among equals) and its softmax probability. `banned` is
    /// never chosen and does not count.
    pub(super) fn argmax(y: Column<'_>, n: usize, banned: Option<u32>) -> Choice = argmax_row
}

/// How far below the largest logit a line is left out of the softmax: e^-32 = 1.3e-14 each.
const FAR: f32 = 32.0;

#[inline(always)]
fn argmax_row<S: Simd>(_: S, y: Column<'_>, n: usize, banned: Option<u32>) -> Choice {
    let banned = banned.map_or(usize::MAX, |id| id as usize);
    // Lanes behind the end and the banned id, seldom met: -infinity.
    let special = |i: usize| (i + 1) * LANES > n || banned / LANES == i;
    let cut = |i: usize, y: &[f32; LANES]| -> [f32; LANES] {
        let mut y = *y;
        for (lane, v) in y.iter_mut().enumerate() {
            if i * LANES + lane >= n || i * LANES + lane == banned {
                *v = f32::NEG_INFINITY;
            }
        }
        y
    };
    let mut best = [f32::NEG_INFINITY; LANES];
    let keep = |best: &mut [f32; LANES], y: &[f32; LANES]| {
        for (best, v) in best.iter_mut().zip(y) {
            *best = if v > best { *v } else { *best };
        }
    };
    for (i, y) in y.lines().enumerate() {
        if special(i) {
            keep(&mut best, &cut(i, y));
        } else {
            keep(&mut best, y);
        }
    }
    let largest = best.into_iter().fold(f32::NEG_INFINITY, f32::max);
    let mut token = None;
    let mut sums = [0.0; LANES];
    for (i, y) in y.lines().enumerate() {
        // Most lines lie so far below that a million of them would not be seen in the sum. (One with a NaN does not.)
        if y.iter().fold(true, |far, &v| far & (v < largest - FAR)) {
            continue;
        }
        let y = if special(i) { cut(i, y) } else { *y };
        for (sum, v) in sums.iter_mut().zip(y) {
            *sum += exp(v - largest);
        }
        if token.is_none() && y.contains(&largest) {
            let lane = (0..LANES).find(|&l| y[l] == largest && i * LANES + l < n && i * LANES + l != banned);
            token = lane.map(|lane| i * LANES + lane);
        }
    }
    Choice { token: token.unwrap_or(0) as u32, probability: 1.0 / tree(sums) }
}

#[cfg(test)]
mod tests {
    use super::super::simd::Level;
    use super::*;
    use crate::kernels;
    use crate::kernels::testing::Random;

    fn lines(values: &[f32]) -> Vec<Line<f32>> {
        values
            .chunks(LANES)
            .map(|c| {
                let mut line = Line([f32::NAN; LANES]);
                line.0[..c.len()].copy_from_slice(c);
                line
            })
            .collect()
    }

    #[test]
    fn exponentials_agree_with_std() {
        for i in -9000..9000 {
            let x = i as f32 * 0.01;
            let (got, want) = (exp(x), f64::from(x).exp());
            if x < -87.3 {
                assert_eq!(got, 0.0);
            } else if x <= 88.7 {
                assert!((f64::from(got) - want).abs() <= want * 3e-7, "e^{x}: {got}, not {want}");
            } else {
                assert_eq!(got, f32::INFINITY);
            }
        }
        assert_eq!((exp(0.0), exp(f32::NEG_INFINITY)), (1.0, 0.0));
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn rows_agree_with_the_twins() {
        let (n, d) = (75, 37);
        let y: Vec<f32> = Random(5).values(n).iter().map(|v| v * 8.0).collect();
        let y64: Vec<f64> = y.iter().map(|&v| f64::from(v)).collect();
        let tiles = lines(&y);
        let column = Column { y: &tiles, rows: 1, row: 0 };
        let near = |a: &[f32], b: &[f64]| a.iter().zip(b).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-5 * b.abs().max(1.0));
        for level in Level::all() {
            let rms = inverse_rms(level, &y, 1e-5);
            assert!((f64::from(rms) - kernels::matmul::inverse_rms(&y, 1e-5)).abs() < 1e-6);
            let mut out = vec![0.0; d];
            let mut want = vec![0.0; d];
            swiglu(level, column, &mut out);
            kernels::matmul::swiglu(&y64[..2 * d], 2 * d, d, &mut want);
            assert!(near(&out, &want));
            out[d - 1] += 1e-2;
            assert!(!near(&out, &want), "control");
            let (mut h, mut x) = (vec![1.0; n], vec![0.0; n]);
            residual(level, column, &y, &mut h, &mut x);
            let (mut h64, mut x64) = (vec![1.0; n], vec![0.0; n]);
            kernels::matmul::residual(&y64, n, &y, n, &mut h64, &mut x64);
            assert!(near(&h, &h64) && near(&x, &x64));
            let mut head = y[..8].to_vec();
            rotate(level, &mut head, &[0.0, 1.0, 1.0, 0.0, 0.6, 0.8, 1.0, 0.0], 2.0);
            let want = [-2.0 * y[4], 2.0 * y[1], 1.2 * y[2] - 1.6 * y[6], 2.0 * y[3]].map(f64::from);
            assert!(near(&head[..4], &want));
        }
    }

    #[test]
    fn choices_agree_with_the_twin() {
        let mut values: Vec<f32> = Random(8).values(333);
        values[40] = 5.0;
        values[41] = 5.0;
        values[330] = 4.0;
        let tiles = lines(&values);
        for level in Level::all() {
            for (n, banned) in [(333, None), (333, Some(40)), (41, Some(40)), (332, Some(7)), (40, None)] {
                let got = argmax(level, Column { y: &tiles, rows: 1, row: 0 }, n, banned);
                let want = kernels::argmax::argmax(&values[..n], banned);
                assert_eq!(got.token, want.token);
                assert!((got.probability - want.probability).abs() < 1e-6);
            }
        }
        // Control: two rows are told apart.
        let mut two: Vec<Line<f32>> = tiles.iter().flat_map(|&t| [t, t]).collect();
        two[1].0[3] = 9.0;
        let of = |row| argmax(Level::best(), Column { y: &two, rows: 2, row }, 333, None).token;
        assert_eq!((of(0), of(1)), (40, 3));
    }
}
