//! A layer's keys and values, and attention over them.
//!
//! Keys lie in blocks of sixteen slots, `[Hkv][block][Dh][16]`: a lane per slot, so that one pass over a head's dimensions
//! gives sixteen scores. Values lie in columns of sixteen dimensions, `[Hkv][column][slot][16]`. Scratch slots begin at the
//! first block behind the context. f16, or f32 for f32 checkpoints; every row reads what was stored, so it does not matter
//! whether a key came with this call or long before. A row's reduction runs over its own slots in ascending order.

use std::ops::Range;

use half::f16;

use super::elementwise::{exp, tree};
use super::matrix::allocate;
use super::simd::{HalfLine, LANES, Level, Line, Simd, simd_fn};
use super::threads::threads;
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

/// Rows of a call that attend together: neighbours whose keys begin at the same slot, as many as the kernel takes at once
/// (`heads` queries of a row share a key head), or fewer where that leaves threads without work.
pub(super) fn shared(level: Level, rows: &[CallRow], window: Option<u32>, heads: usize, key_heads: usize) -> Vec<Range<usize>> {
    let most = level.queries() / heads.max(1);
    let most = if threads() > 1 { most.min(rows.len() * key_heads / (2 * threads())) } else { most };
    let mut groups = Vec::new();
    let mut first = 0;
    while first < rows.len() {
        let start = |row: &CallRow| row.cache_from(window).start;
        let same = rows[first..].iter().take_while(|row| start(row) == start(&rows[first])).count();
        let parts = same.div_ceil(most.max(1));
        groups.extend((0..parts).map(|i| first + i * same / parts..first + (i + 1) * same / parts));
        first += same;
    }
    groups
}

/// Slots that some of the rows see, in the order in which they are summed.
struct Span {
    /// Places in the cache.
    slots: Range<usize>,
    /// Rows.
    rows: Range<usize>,
    /// The first of its lines among a row's scores.
    line: usize,
}

impl Span {
    fn blocks(&self) -> Range<usize> {
        self.slots.start / LANES..self.slots.end.div_ceil(LANES)
    }
}

/// What rows see: first the cache slots common to all, then by runs of rows that see the same the others of the cache, and
/// scratch. The second result is every row's number of lines.
fn spans(cache: &LayerCache, rows: &[CallRow], window: Option<u32>) -> (Vec<Span>, Vec<usize>) {
    let ranges = |row: &CallRow| {
        [row.cache_from(window), row.scratch.clone()]
            .map(|r| if r.is_empty() { 0..0 } else { cache.place(r.start)..cache.place(r.end - 1) + 1 })
    };
    let all: Vec<[Range<usize>; 2]> = rows.iter().map(ranges).collect();
    let start = all.iter().map(|[seen, _]| seen.start).max().unwrap_or(0);
    let end = all.iter().map(|[seen, _]| seen.end).min().unwrap_or(0).max(start);
    let whole = all.iter().all(|[seen, _]| seen.start == start);
    let end = if whole { end } else { start };
    let (mut spans, mut lines) = (Vec::new(), vec![0; rows.len()]);
    let mut push = |slots: Range<usize>, rows: Range<usize>| {
        if !slots.is_empty() {
            let span = Span { slots, line: lines[rows.start], rows };
            lines[span.rows.clone()].iter_mut().for_each(|lines| *lines += span.blocks().len());
            spans.push(span);
        }
    };
    push(start..end, 0..rows.len());
    let mut first = 0;
    for run in all.chunk_by(|a, b| a == b) {
        let rows = first..first + run.len();
        let [seen, scratch] = run[0].clone();
        push(if whole { end..seen.end } else { seen }, rows.clone());
        push(scratch, rows.clone());
        first = rows.end;
    }
    (spans, lines)
}

/// Of a row's scratch slots: how many lines they are in, and the lane of the first.
fn scratch_lines(cache: &LayerCache, row: &CallRow) -> (usize, usize) {
    if row.scratch.is_empty() {
        return (0, 0);
    }
    let (first, last) = (cache.place(row.scratch.start), cache.place(row.scratch.end - 1));
    (last / LANES + 1 - first / LANES, first % LANES)
}

simd_fn! {
    /// Attention of the query heads that share key head `kv`, of a few rows: row `r`'s are at `q[r * stride ..]`, `out` is
    /// `[rows][Hq / Hkv, Dh]`. A row's result does not depend on the rows beside it.
    #[allow(clippy::too_many_arguments, reason = "one place calls it")]
    pub(super) fn attend(
        cache: &LayerCache,
        rows: &[CallRow],
        window: Option<u32>,
        kv: usize,
        q: &[f32],
        stride: usize,
        out: &mut [f32],
    ) = attend_rows
}

#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "one place calls it")]
fn attend_rows<S: Simd>(
    s: S,
    cache: &LayerCache,
    rows: &[CallRow],
    window: Option<u32>,
    kv: usize,
    q: &[f32],
    stride: usize,
    out: &mut [f32],
) {
    let dim = cache.heads.dim;
    let heads = cache.heads.query / cache.heads.key_value;
    let queries = rows.len() * heads;
    let (spans, lines) = spans(cache, rows, window);
    let most = lines.iter().copied().max().unwrap_or(0);
    // Queries side by side, [Dh][query].
    let mut turned = vec![0.0; dim * queries];
    for query in 0..queries {
        let q = &q[query / heads * stride + query % heads * dim..][..dim];
        for (to, v) in turned[query..].iter_mut().step_by(queries).zip(q) {
            *to = *v;
        }
    }
    let scale = 1.0 / (dim as f32).sqrt();
    // [query][line][16]
    let mut scores = vec![Line([0.0; LANES]); queries * most];
    for span in &spans {
        let (first, end) = (span.rows.start * heads, span.rows.end * heads);
        let mut block = span.blocks();
        while !block.is_empty() {
            let keys = (kv * cache.blocks + block.start) * dim;
            let at = span.line + block.start - span.slots.start / LANES;
            let mut query = first;
            let several = S::QUERIES > 4 && block.len() >= 4 && end - first <= 3;
            while query < end {
                let (q, to) = (&turned[query..], &mut scores[query * most + at..]);
                let of = Scoring { keys: &cache.keys, first: keys, dim, q, queries, scale, stride: most };
                query += match ((end - query).min(S::QUERIES), several) {
                    (3, true) => block_scores::<S, 3, 4>(s, of, to),
                    (2, true) => block_scores::<S, 2, 4>(s, of, to),
                    (1, true) => block_scores::<S, 1, 4>(s, of, to),
                    (12.., _) => block_scores::<S, 12, 1>(s, of, to),
                    (9.., _) => block_scores::<S, 9, 1>(s, of, to),
                    (6.., _) => block_scores::<S, 6, 1>(s, of, to),
                    (4.., _) => block_scores::<S, 4, 1>(s, of, to),
                    (3, _) => block_scores::<S, 3, 1>(s, of, to),
                    (2, _) => block_scores::<S, 2, 1>(s, of, to),
                    _ => block_scores::<S, 1, 1>(s, of, to),
                };
            }
            block.start += if several { 4 } else { 1 };
        }
        // Lanes outside, in the first and in the last line.
        let last = span.blocks().len() - 1;
        for line in [0, last].into_iter().take(last + 1) {
            let slot = (span.slots.start / LANES + line) * LANES;
            for lane in (0..LANES).filter(|lane| !span.slots.contains(&(slot + lane))) {
                for query in first..end {
                    scores[query * most + span.line + line].0[lane] = f32::NEG_INFINITY;
                }
            }
        }
    }
    // Softmax, but for the division.
    for (query, scores) in scores.chunks_exact_mut(most.max(1)).enumerate() {
        let scores = &mut scores[..lines[query / heads]];
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
    // Weights side by side, [line][16][query]: a slot's are read together.
    let mut weights = vec![0.0; most * LANES * queries];
    for (query, scores) in scores.chunks_exact(most.max(1)).enumerate() {
        for (to, v) in weights[query..].iter_mut().step_by(queries).zip(scores.iter().flat_map(|line| line.0)) {
            *to = v;
        }
    }
    let columns = dim.div_ceil(LANES);
    // [query][column][16]
    let mut sums = vec![Line([0.0; LANES]); queries * columns];
    for span in &spans {
        let end = span.rows.end * heads;
        let mut query = span.rows.start * heads;
        while query < end {
            let pass = (end - query).min(S::QUERIES);
            let mut done = 0;
            let mut column = 0;
            while column < columns {
                let weights = &weights[(span.line * LANES + span.slots.start % LANES) * queries..];
                let first = (kv * columns + column) * cache.blocks * LANES;
                let next = cache.blocks * LANES;
                let of = Weighing { values: &cache.values, first, next, slots: &span.slots, weights, queries, query };
                let to = &mut sums[query * columns + column..];
                let wide = S::QUERIES > 4 && columns - column >= 4;
                let pair = S::QUERIES > 4 && columns - column >= 2;
                let taken = match (pass, wide, pair) {
                    (12.., _, _) => weigh::<S, 12, 1>(s, of, to, columns),
                    (9.., _, _) => weigh::<S, 9, 1>(s, of, to, columns),
                    (6.., _, true) => weigh::<S, 6, 2>(s, of, to, columns),
                    (6.., _, _) => weigh::<S, 6, 1>(s, of, to, columns),
                    (4.., _, true) => weigh::<S, 4, 2>(s, of, to, columns),
                    (4.., _, _) => weigh::<S, 4, 1>(s, of, to, columns),
                    (3, true, _) => weigh::<S, 3, 4>(s, of, to, columns),
                    (3, ..) => weigh::<S, 3, 1>(s, of, to, columns),
                    (2, true, _) => weigh::<S, 2, 4>(s, of, to, columns),
                    (2, ..) => weigh::<S, 2, 1>(s, of, to, columns),
                    (_, true, _) => weigh::<S, 1, 4>(s, of, to, columns),
                    _ => weigh::<S, 1, 1>(s, of, to, columns),
                };
                (done, column) = (taken.0, column + taken.1);
            }
            query += done;
        }
    }
    for (query, out) in out.chunks_exact_mut(dim).enumerate() {
        let scores = &scores[query * most..][..lines[query / heads]];
        if scores.is_empty() {
            out.fill(f32::NAN); // a softmax over nothing
            continue;
        }
        // Scratch slots are counted from the first that the row sees: which ones it was given must not matter.
        let (behind, shift) = rows.get(query / heads).map_or((0, 0), |row| scratch_lines(cache, row));
        let mut total = [0.0; LANES];
        for (i, line) in scores.iter().enumerate() {
            let mut weights = line.0;
            if i + behind >= scores.len() {
                weights.rotate_left(shift);
            }
            for (total, v) in total.iter_mut().zip(weights) {
                *total += v;
            }
        }
        let inverse = 1.0 / tree(total);
        for (out, sums) in out.chunks_mut(LANES).zip(&sums[query * columns..]) {
            for (out, sum) in out.iter_mut().zip(sums.0) {
                *out = sum * inverse;
            }
        }
    }
}

/// What [`block_scores`] reads.
#[derive(Clone, Copy)]
struct Scoring<'a> {
    keys: &'a Lines,
    /// First line of the first block.
    first: usize,
    dim: usize,
    /// Queries `[Dh][query]`, from the first of the pass on.
    q: &'a [f32],
    queries: usize,
    scale: f32,
    /// Lines from one query's scores to the next's.
    stride: usize,
}

/// Scores of `B` blocks of sixteen slots for `R` queries; returns `R`.
#[cfg_attr(target_arch = "wasm32", inline(never))]
#[cfg_attr(not(target_arch = "wasm32"), inline(always))]
fn block_scores<S: Simd, const R: usize, const B: usize>(s: S, of: Scoring<'_>, to: &mut [Line<f32>]) -> usize {
    for part in 0..S::PARTS {
        let mut sums = [[s.splat_f(0.0); R]; B];
        match of.keys {
            Lines::F16(lines) => {
                for (d, q) in of.q.chunks(of.queries).take(of.dim).enumerate() {
                    let Some(q) = q.first_chunk::<R>() else { break };
                    for b in 0..B {
                        let line = &lines[of.first + b * of.dim + d];
                        s.prefetch(std::ptr::from_ref(line).wrapping_add(B * of.dim));
                        let k = s.load_half(&line.0, part);
                        for r in 0..R {
                            sums[b][r] = s.add_f(sums[b][r], s.mul_f(k, s.splat_f(q[r])));
                        }
                    }
                }
            }
            Lines::F32(lines) => {
                for (d, q) in of.q.chunks(of.queries).take(of.dim).enumerate() {
                    let Some(q) = q.first_chunk::<R>() else { break };
                    for b in 0..B {
                        let k = s.load_f(&lines[of.first + b * of.dim + d].0, part);
                        for r in 0..R {
                            sums[b][r] = s.add_f(sums[b][r], s.mul_f(k, s.splat_f(q[r])));
                        }
                    }
                }
            }
        }
        for b in 0..B {
            for r in 0..R {
                s.store_f(s.mul_f(sums[b][r], s.splat_f(of.scale)), &mut to[r * of.stride + b].0, part);
            }
        }
    }
    R
}

/// What [`weigh`] reads.
#[derive(Clone, Copy)]
struct Weighing<'a> {
    values: &'a Lines,
    /// Line of slot 0 in the first column.
    first: usize,
    /// Lines from one column to the next.
    next: usize,
    slots: &'a Range<usize>,
    /// Weights `[slot][query]` from the span's first slot on.
    weights: &'a [f32],
    queries: usize,
    /// The first query.
    query: usize,
}

/// Adds `C` columns of sixteen dimensions of a span's values, weighted, to `to [query][columns]` for `R` queries; returns
/// `(R, C)`.
#[cfg_attr(target_arch = "wasm32", inline(never))]
#[cfg_attr(not(target_arch = "wasm32"), inline(always))]
fn weigh<S: Simd, const R: usize, const C: usize>(
    s: S,
    of: Weighing<'_>,
    to: &mut [Line<f32>],
    columns: usize,
) -> (usize, usize) {
    for part in 0..S::PARTS {
        let mut sums = [[s.splat_f(0.0); R]; C];
        for c in 0..C {
            for r in 0..R {
                sums[c][r] = s.load_f(&to[r * columns + c].0, part);
            }
        }
        for (slot, weights) in of.slots.clone().zip(of.weights.chunks_exact(of.queries)) {
            let Some(weights) = weights[of.query..].first_chunk::<R>() else { break };
            for (c, sums) in sums.iter_mut().enumerate() {
                let at = of.first + c * of.next + slot;
                let v = match of.values {
                    Lines::F16(lines) => {
                        s.prefetch(std::ptr::from_ref(&lines[at]).wrapping_add(2 * LANES));
                        s.load_half(&lines[at].0, part)
                    }
                    Lines::F32(lines) => s.load_f(&lines[at].0, part),
                };
                for r in 0..R {
                    sums[r] = s.add_f(sums[r], s.mul_f(v, s.splat_f(weights[r])));
                }
            }
        }
        for c in 0..C {
            for r in 0..R {
                s.store_f(sums[c][r], &mut to[r * columns + c].0, part);
            }
        }
    }
    (R, C)
}

#[cfg(test)]
mod tests {
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
                attend(level, &cache, &[rows.row(0)], window, h, &q[at.clone()], 0, &mut out[at]);
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
        attend(Level::best(), &cache, &[shorter], window, 0, &q[..group], 0, &mut out);
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
    fn rows_that_attend_together_get_what_they_get_alone() {
        let heads = Heads { query: 6, key_value: 2, dim: 24 };
        let (context, scratch, size) = (70, 20, 48);
        for (half, window) in [(true, None), (false, Some(9))] {
            let mut random = Random(31);
            let mut cache = LayerCache::new(heads, context, scratch, half).unwrap();
            for slot in 0..context + scratch {
                cache.set(slot, &random.values(size), &random.values(size));
            }
            // Two draft rows of one block and one of another, verified rows, a row that begins later and one that sees scratch
            // alone.
            let seen = [(66, 0..66, 70..73), (67, 0..66, 70..73), (67, 0..67, 74..90), (66, 0..67, 0..0), (67, 0..68, 0..0)];
            let more = [(69, 5..70, 0..0), (69, 0..0, 75..77), (40, 0..41, 0..0), (41, 0..42, 0..0)];
            let rows: Vec<_> = seen.into_iter().chain(more).map(|(p, cache, scratch)| (0, p, p, cache, scratch)).collect();
            let words = words(&rows, 0..0, 0..0);
            let rows: Vec<CallRow> = CallRows::new(&words).iter().collect();
            let stride = heads.query * heads.dim + 7;
            let q = random.values(rows.len() * stride);
            let group = heads.query / heads.key_value * heads.dim;
            let run = |level, rows: &[CallRow], kv: usize, q: &[f32]| {
                let mut out = vec![f32::NAN; rows.len() * group];
                attend(level, &cache, rows, window, kv, &q[kv * group..], stride, &mut out);
                out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            for level in Level::all() {
                for kv in 0..heads.key_value {
                    let alone: Vec<u32> = (0..rows.len())
                        .flat_map(|r| run(Level::Portable(super::super::simd::Portable), &rows[r..=r], kv, &q[r * stride..]))
                        .collect();
                    // All at once, and as a call would group them.
                    assert_eq!(run(level, &rows, kv, &q), alone, "{}", level.name());
                    let groups = shared(level, &rows, window, 3, 2);
                    assert_eq!(groups.iter().cloned().flatten().collect::<Vec<_>>(), (0..rows.len()).collect::<Vec<_>>());
                    let grouped: Vec<u32> =
                        groups.iter().flat_map(|g| run(level, &rows[g.clone()], kv, &q[g.start * stride..])).collect();
                    assert_eq!(grouped, alone, "{}", level.name());
                    // Control: with the neighbour's keys it is another result.
                    let mut turned = rows.clone();
                    turned.rotate_left(1);
                    assert_ne!(run(level, &turned, kv, &q), alone);
                }
            }
        }
    }

    #[test]
    fn which_scratch_slots_a_row_was_given_does_not_matter() {
        let (heads, context) = (Heads { query: 2, key_value: 1, dim: 16 }, 32);
        let mut random = Random(9);
        let (keys, values) = (random.values(20 * 16), random.values(20 * 16));
        let (mut differ, q) = (0, random.values(32));
        for (seen, masks) in [(7, 1), (15, 1), (1, 1), (9, 4), (16, 18)] {
            let at = |start: u32, other: usize| {
                let mut cache = LayerCache::new(heads, context, 64, false).unwrap();
                for slot in 0..20 {
                    cache.set(slot, &keys[slot * 16..][..16], &values[slot * 16..][..16]);
                }
                for i in 0..masks as usize {
                    let from = (19 - i % 20 + other) % 20 * 16;
                    cache.set(context + start as usize + i, &keys[from..][..16], &values[from..][..16]);
                }
                let from = context as u32 + start;
                let words = words(&[(0, 19, 19, 0..seen, from..from + masks)], 0..0, 0..0);
                let mut out = vec![0.0f32; 32];
                attend(Level::best(), &cache, &[CallRows::new(&words).row(0)], None, 0, &q, 0, &mut out);
                out.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
            };
            let first = at(0, 0);
            for start in 1..40 {
                assert_eq!(at(start, 0), first, "{seen} slots and {masks} masks from scratch slot {start} on");
            }
            differ += usize::from(at(0, 1) != first);
        }
        assert_eq!(differ, 5, "control: other keys are noticed");
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
        attend(Level::best(), &cache, std::slice::from_ref(&row), None, 0, &[1.0; 32], 0, &mut out);
        assert!(out.iter().all(|v| (v - 2.0).abs() < 1e-6));
        let mut wider = row;
        wider.cache.end = 10;
        attend(Level::best(), &cache, &[wider], None, 0, &[1.0; 32], 0, &mut out);
        assert!(out.iter().all(|v| v.is_nan()), "control");
    }
}
