//! A layer's keys and values, and attention over them.
//!
//! Keys lie in blocks of sixteen slots, `[Hkv][block][Dh][16]`: a lane per slot, so that one pass over a head's dimensions
//! gives sixteen scores. Values lie in columns of sixteen dimensions, `[Hkv][column][slot][16]`. Scratch slots begin at the
//! first block behind the context. f16, or f32 for f32 checkpoints; every row reads what was stored, so it does not matter
//! whether a key came with this call or long before. A row's reduction runs over its own slots in ascending order.

use half::f16;

use super::elementwise::{exp, tree};
use super::matrix::allocate;
use super::simd::{HalfLine, LANES, Line, Simd, simd_fn};
use crate::error::Result;
use crate::kernels::{CallRow, Heads};

/// Keys or values of all layers, in lines of sixteen.
#[derive(Debug)]
pub(super) enum Lines {
    /// IEEE half.
    F16(Vec<HalfLine>),
    /// IEEE single.
    F32(Vec<Line<f32>>),
}

impl Lines {
    fn zeros(half: bool, len: usize) -> Result<Self> {
        Ok(if half { Self::F16(allocate(len)?) } else { Self::F32(allocate(len)?) })
    }

    fn get(&self, line: usize, lane: usize) -> f32 {
        match self {
            Self::F16(lines) => f16::from_bits(lines[line].0[lane]).to_f32(),
            Self::F32(lines) => lines[line].0[lane],
        }
    }

    /// Stores values, each at the line and lane that `at` gives for its index.
    fn set(&mut self, values: &[f32], at: impl Fn(usize) -> (usize, usize)) {
        match self {
            Self::F16(lines) => {
                for (from, first) in values.chunks(LANES).zip((0..).step_by(LANES)) {
                    // A whole line at once, which the compiler can do in vectors.
                    let mut block = [0.0; LANES];
                    block[..from.len()].copy_from_slice(from);
                    let mut bits = [0; LANES];
                    for (to, v) in bits.iter_mut().zip(block) {
                        *to = half_bits(v);
                    }
                    for (i, bits) in bits.into_iter().take(from.len()).enumerate() {
                        let (line, lane) = at(first + i);
                        lines[line].0[lane] = bits;
                    }
                }
            }
            Self::F32(lines) => {
                for (i, &v) in values.iter().enumerate() {
                    let (line, lane) = at(i);
                    lines[line].0[lane] = v;
                }
            }
        }
    }
}

/// The bits of the nearest f16, ties to even. What is larger than f16 can hold becomes its largest number; NaN stays NaN.
#[inline(always)]
fn half_bits(v: f32) -> u16 {
    let (sign, magnitude) = ((v.to_bits() >> 16) & 0x8000, v.to_bits() & 0x7FFF_FFFF);
    let kept = magnitude.min(65504f32.to_bits());
    // Exponent from bias 127 to 15, and just under half of the last place that stays, or half where that is odd.
    let normal = kept.wrapping_add(0xC800_0FFF + ((kept >> 13) & 1)) >> 13;
    // Below 2^-14 the places end at 2^-24, as those of an f32 at a half do.
    let small = (f32::from_bits(kept) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let bits = if kept < 0x3880_0000 { small } else { normal };
    (sign | if magnitude > 0x7F80_0000 { 0x7E00 } else { bits }) as u16
}

/// Keys and values of one layer.
#[derive(Debug)]
pub(super) struct LayerCache {
    keys: Lines,
    values: Lines,
    heads: Heads,
    context: usize,
    /// Blocks of sixteen slots, scratch included.
    blocks: usize,
}

impl LayerCache {
    /// An empty cache of `context` slots and `scratch` behind them.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn new(heads: Heads, context: usize, scratch: usize, half: bool) -> Result<Self> {
        let blocks = context.div_ceil(LANES) + scratch.div_ceil(LANES);
        Ok(Self {
            keys: Lines::zeros(half, heads.key_value * blocks * heads.dim)?,
            values: Lines::zeros(half, heads.key_value * heads.dim.div_ceil(LANES) * blocks * LANES)?,
            heads,
            context,
            blocks,
        })
    }

    /// A slot's place: scratch slots move up to the next whole block.
    fn place(&self, slot: usize) -> usize {
        if slot < self.context { slot } else { slot - self.context + self.context.next_multiple_of(LANES) }
    }

    /// Where key dimension `d` and value dimension `d` of head `h` lie for a slot's place: lines and lanes.
    fn at(&self, place: usize, h: usize, d: usize) -> [(usize, usize); 2] {
        let (dim, columns) = (self.heads.dim, self.heads.dim.div_ceil(LANES));
        let key = (h * self.blocks + place / LANES) * dim + d;
        let value = (h * columns + d / LANES) * self.blocks * LANES + place;
        [(key, place % LANES), (value, d % LANES)]
    }

    /// Keys and values of all slots, the scratch slots last: `[slots, Hkv Dh]` each.
    pub fn read(&self, scratch: usize) -> (Vec<f32>, Vec<f32>) {
        let dimensions = || (0..self.heads.key_value).flat_map(|h| (0..self.heads.dim).map(move |d| (h, d)));
        let places = (0..self.context + scratch).map(|slot| self.place(slot));
        places
            .flat_map(|place| dimensions().map(move |(h, d)| (place, h, d)))
            .map(|(place, h, d)| {
                let [key, value] = self.at(place, h, d);
                (self.keys.get(key.0, key.1), self.values.get(value.0, value.1))
            })
            .unzip()
    }

    /// Stores a slot's key and value `[Hkv Dh]`.
    pub fn set(&mut self, slot: usize, key: &[f32], value: &[f32]) {
        let (slot, dim, columns) = (self.place(slot), self.heads.dim, self.heads.dim.div_ceil(LANES));
        for (h, (key, value)) in key.chunks_exact(dim).zip(value.chunks_exact(dim)).enumerate() {
            let block = (h * self.blocks + slot / LANES) * dim;
            self.keys.set(key, |d| (block + d, slot % LANES));
            let column = |d: usize| (h * columns + d / LANES) * self.blocks * LANES + slot;
            self.values.set(value, |d| (column(d), d % LANES));
        }
    }
}

simd_fn! {
    /// Attention of one row's query heads that share key head `kv`: `q` and `out` are `[Hq / Hkv, Dh]`.
    pub(super) fn attend(cache: &LayerCache, row: &CallRow, window: Option<u32>, kv: usize, q: &[f32], out: &mut [f32]) = attend_row
}

#[inline(always)]
fn attend_row<S: Simd>(s: S, cache: &LayerCache, row: &CallRow, window: Option<u32>, kv: usize, q: &[f32], out: &mut [f32]) {
    let dim = cache.heads.dim;
    let ranges = [row.cache_from(window), row.scratch.clone()].map(|r| {
        let r = if r.is_empty() { 0..0 } else { r };
        if r.is_empty() { 0..0 } else { cache.place(r.start)..cache.place(r.end - 1) + 1 }
    });
    let blocks = |r: &std::ops::Range<usize>| r.start / LANES..r.end.div_ceil(LANES);
    let count: usize = ranges.iter().map(|r| blocks(r).len()).sum();
    if count == 0 {
        out.fill(f32::NAN); // a softmax over nothing
        return;
    }
    let heads = q.len() / dim;
    let scale = 1.0 / (dim as f32).sqrt();
    // [head][block][16]
    let mut scores = vec![Line([0.0; LANES]); heads * count];
    let mut at = 0;
    for range in &ranges {
        for block in blocks(range) {
            let keys = (kv * cache.blocks + block) * dim;
            let mut head = 0;
            while head < heads {
                let pass = (heads - head).min(S::ROWS);
                let q = &q[head * dim..];
                let to = &mut scores[head * count + at..];
                head += match pass {
                    4.. => block_scores::<S, 4>(s, &cache.keys, keys, dim, q, scale, to, count),
                    3 => block_scores::<S, 3>(s, &cache.keys, keys, dim, q, scale, to, count),
                    2 => block_scores::<S, 2>(s, &cache.keys, keys, dim, q, scale, to, count),
                    _ => block_scores::<S, 1>(s, &cache.keys, keys, dim, q, scale, to, count),
                };
            }
            for lane in (0..LANES).filter(|l| !range.contains(&(block * LANES + l))) {
                for head in 0..heads {
                    scores[head * count + at].0[lane] = f32::NEG_INFINITY;
                }
            }
            at += 1;
        }
    }
    // Softmax, but for the division.
    for scores in scores.chunks_exact_mut(count) {
        let mut best = [f32::NEG_INFINITY; LANES];
        for line in scores.iter() {
            for (best, &v) in best.iter_mut().zip(&line.0) {
                *best = if v > *best { v } else { *best };
            }
        }
        let largest = best.into_iter().fold(f32::NEG_INFINITY, f32::max);
        for line in scores.iter_mut() {
            for v in &mut line.0 {
                *v = exp(*v - largest);
            }
        }
    }
    let columns = dim.div_ceil(LANES);
    for column in 0..columns {
        let lines = (kv * columns + column) * cache.blocks * LANES;
        let width = (dim - column * LANES).min(LANES);
        let mut head = 0;
        while head < heads {
            let weights = &scores[head * count..];
            let out = &mut out[head * dim + column * LANES..];
            let pass = (heads - head).min(S::ROWS);
            head += match pass {
                4.. => weigh::<S, 4>(s, &cache.values, lines, &ranges, weights, count, out, dim, width),
                3 => weigh::<S, 3>(s, &cache.values, lines, &ranges, weights, count, out, dim, width),
                2 => weigh::<S, 2>(s, &cache.values, lines, &ranges, weights, count, out, dim, width),
                _ => weigh::<S, 1>(s, &cache.values, lines, &ranges, weights, count, out, dim, width),
            };
        }
    }
    for (scores, out) in scores.chunks_exact(count).zip(out.chunks_exact_mut(dim)) {
        let mut sums = [0.0; LANES];
        for line in scores {
            for (sum, v) in sums.iter_mut().zip(line.0) {
                *sum += v;
            }
        }
        let inverse = 1.0 / tree(sums);
        for v in out {
            *v *= inverse;
        }
    }
}

/// Scores of sixteen slots for `R` query heads; returns `R`.
#[cfg_attr(target_arch = "wasm32", inline(never))]
#[cfg_attr(not(target_arch = "wasm32"), inline(always))]
#[allow(clippy::too_many_arguments, reason = "one place calls it")]
fn block_scores<S: Simd, const R: usize>(
    s: S,
    keys: &Lines,
    first: usize,
    dim: usize,
    q: &[f32],
    scale: f32,
    to: &mut [Line<f32>],
    stride: usize,
) -> usize {
    for part in 0..S::PARTS {
        let mut sums = [s.splat_f(0.0); R];
        match keys {
            Lines::F16(lines) => {
                for (d, line) in lines[first..first + dim].iter().enumerate() {
                    let k = s.load_half(&line.0, part);
                    for r in 0..R {
                        sums[r] = s.add_f(sums[r], s.mul_f(k, s.splat_f(q[r * dim + d])));
                    }
                }
            }
            Lines::F32(lines) => {
                for (d, line) in lines[first..first + dim].iter().enumerate() {
                    let k = s.load_f(&line.0, part);
                    for r in 0..R {
                        sums[r] = s.add_f(sums[r], s.mul_f(k, s.splat_f(q[r * dim + d])));
                    }
                }
            }
        }
        for r in 0..R {
            s.store_f(s.mul_f(sums[r], s.splat_f(scale)), &mut to[r * stride].0, part);
        }
    }
    R
}

/// Weighted sums of sixteen dimensions of the values, for `R` query heads; returns `R`.
#[cfg_attr(target_arch = "wasm32", inline(never))]
#[cfg_attr(not(target_arch = "wasm32"), inline(always))]
#[allow(clippy::too_many_arguments, reason = "one place calls it")]
fn weigh<S: Simd, const R: usize>(
    s: S,
    values: &Lines,
    first: usize,
    ranges: &[std::ops::Range<usize>; 2],
    weights: &[Line<f32>],
    stride: usize,
    out: &mut [f32],
    dim: usize,
    width: usize,
) -> usize {
    for part in 0..S::PARTS {
        let mut sums = [s.splat_f(0.0); R];
        let mut before = 0;
        for range in ranges {
            let base = range.start / LANES;
            for slot in range.clone() {
                let v = match values {
                    Lines::F16(lines) => s.load_half(&lines[first + slot].0, part),
                    Lines::F32(lines) => s.load_f(&lines[first + slot].0, part),
                };
                let (block, lane) = (before + slot / LANES - base, slot % LANES);
                for r in 0..R {
                    sums[r] = s.add_f(sums[r], s.mul_f(v, s.splat_f(weights[r * stride + block].0[lane])));
                }
            }
            before += range.end.div_ceil(LANES) - base;
        }
        for r in 0..R {
            let mut line = [0.0; LANES];
            s.store_f(sums[r], &mut line, part);
            let lanes = LANES / S::PARTS;
            let (from, to) = (part * lanes, width.min((part + 1) * lanes));
            if from < to {
                out[r * dim + from..r * dim + to].copy_from_slice(&line[from..to]);
            }
        }
    }
    R
}

#[cfg(test)]
mod tests {
    use super::super::simd::Level;
    use super::*;
    use crate::kernels::CallRows;
    use crate::kernels::attention::{KeyValues, attention};
    use crate::kernels::testing::{Random, words};

    /// Attention of one row by the twin and by every level, over the same (f16) keys and values.
    fn compare(heads: Heads, row: (u32, std::ops::Range<u32>, std::ops::Range<u32>), window: Option<u32>, half: bool) {
        let (context, scratch) = (37, 20);
        let size = heads.key_value * heads.dim;
        let mut random = Random(77);
        let round = |v: f32| if half { f16::from_f32(v).to_f32() } else { v };
        let mut fill =
            |scale: f32| -> Vec<f32> { random.values((context + scratch) * size).iter().map(|v| round(v * scale)).collect() };
        let (keys, values) = (fill(3.0), fill(1.0));
        let mut cache = LayerCache::new(heads, context, scratch, half).unwrap();
        for slot in 0..context + scratch {
            cache.set(slot, &keys[slot * size..][..size], &values[slot * size..][..size]);
        }
        let q = Random(5).values(heads.query * heads.dim);
        let words = words(&[(0, row.0, row.0, row.1, row.2)], 0..0, 0..0);
        let rows = CallRows::new(&words);
        let mut want = vec![0.0; q.len()];
        let kv = KeyValues { keys: &keys, values: &values };
        attention(rows, heads, window, &q, q.len(), kv, &mut want, q.len());
        let group = heads.query / heads.key_value * heads.dim;
        let mut first: Option<Vec<u32>> = None;
        for level in Level::all() {
            let mut out = vec![f32::NAN; q.len()];
            for h in 0..heads.key_value {
                let at = h * group..(h + 1) * group;
                attend(level, &cache, &rows.row(0), window, h, &q[at.clone()], &mut out[at]);
            }
            for (i, (got, want)) in out.iter().zip(&want).enumerate() {
                assert!((f64::from(*got) - want).abs() < 1e-5, "{} {i}: {got} {want}", level.name());
            }
            let bits: Vec<u32> = out.iter().map(|v| v.to_bits()).collect();
            assert_eq!(*first.get_or_insert(bits.clone()), bits, "levels differ");
        }
        // Control: one slot less is noticed.
        let mut shorter = rows.row(0);
        shorter.cache.end -= 1;
        let mut out = vec![0.0; group];
        attend(Level::best(), &cache, &shorter, window, 0, &q[..group], &mut out);
        assert!(out.iter().zip(&want).any(|(a, b)| (f64::from(*a) - b).abs() > 1e-4));
    }

    #[test]
    fn halves_are_rounded_as_they_should_be() {
        let check = |v: f32| {
            let want = f16::from_f32(v.clamp(-65504.0, 65504.0));
            let got = f16::from_bits(half_bits(v));
            assert!(got.to_bits() == want.to_bits() || (got.is_nan() && v.is_nan()), "{v}: {got}, not {want}");
        };
        for bits in 0..=u16::MAX {
            let v = f16::from_bits(bits).to_f32();
            // The number itself, halfway to the next, and a little to both sides of that.
            let next = f16::from_bits(bits.wrapping_add(1)).to_f32();
            let middle = (v + next) / 2.0;
            for v in [v, middle, f32::from_bits(middle.to_bits() + 1), f32::from_bits(middle.to_bits().wrapping_sub(1))] {
                check(v);
            }
        }
        for v in [1e9, -1e9, f32::INFINITY, f32::NAN, 65519.0, 65521.0, 1e-30, f32::MIN_POSITIVE] {
            check(v);
        }
        assert_ne!(half_bits(1.0), half_bits(1.001), "control");
    }

    #[test]
    fn attention_agrees_with_the_twin() {
        let heads = |query, key_value, dim| Heads { query, key_value, dim };
        for half in [true, false] {
            compare(heads(9, 3, 64), (30, 0..31, 0..0), None, half);
            compare(heads(4, 4, 20), (36, 0..37, 37..57), None, half);
            compare(heads(10, 2, 8), (20, 3..21, 40..45), None, half);
            compare(heads(6, 1, 16), (30, 0..31, 50..57), Some(7), half);
            compare(heads(4, 2, 18), (16, 0..17, 0..0), Some(100), half);
        }
    }

    #[test]
    fn what_a_row_does_not_see_does_not_reach_it() {
        let heads = Heads { query: 2, key_value: 1, dim: 16 };
        let mut cache = LayerCache::new(heads, 32, 16, false).unwrap();
        let nan = [f32::NAN; 16];
        for slot in 0..48 {
            cache.set(slot, &nan, &nan);
        }
        for slot in 4..9 {
            cache.set(slot, &[0.5; 16], &[2.0; 16]);
        }
        let words = words(&[(0, 8, 8, 4..9, 0..0)], 0..0, 0..0);
        let row = CallRows::new(&words).row(0);
        let mut out = [0.0; 32];
        attend(Level::best(), &cache, &row, None, 0, &[1.0; 32], &mut out);
        assert!(out.iter().all(|v| (v - 2.0).abs() < 1e-6));
        let mut wider = row;
        wider.cache.end = 10;
        attend(Level::best(), &cache, &wider, None, 0, &[1.0; 32], &mut out);
        assert!(out.iter().all(|v| v.is_nan()), "control");
    }
}
