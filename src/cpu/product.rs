//! `y = norm * (W x) + bias + LoRA` for one or many rows: the kernel that reads the weights.
//!
//! Output is tile by tile, `y[tile][row][lane]`, so that a tile's weights are read from memory once for all rows and threads
//! write apart. Rows take the *direct* way where registers hold the sums of all of them, or of eight at a time: a weight word
//! goes through registers into every row. Else they take the *buffered* way: a group of weights is unpacked into the
//! first-level cache once, then every row passes over it.
//! Both add the same numbers in the same order, so a row's result has the same bits whatever rows share the call:
//!
//! - affine: integer dot products per group (exact), then `y += (scale * step) * dot; y += bias * sum`, group by group;
//! - f16, f32: `y += w * x`, input by input.

use std::ops::Range;

use super::activations::{CHUNK, Panel, Quantised, Scale};
use super::matrix::{Matrix, Values};
use super::simd::{HalfLine, LANES, Line, Simd, high_half, low_half, simd_fn};
use crate::weights::packed::ScaleFormat;

/// Inputs of a product.
#[derive(Debug, Clone, Copy)]
pub(super) enum Input<'a> {
    /// For affine weights, in groups of the same size: rows from the given one on.
    Integers(&'a Quantised, usize),
    /// For f16 and f32 weights.
    Floats(&'a Panel),
}

/// The low-rank part, added to some of the rows.
#[derive(Debug, Clone)]
pub(super) struct LoraPart<'a> {
    /// B `[n, rank]`.
    pub b: &'a Matrix,
    /// Inner activations of the adapter rows, by segment.
    pub inner: Inner<'a>,
    /// Rows it is added to.
    pub rows: Range<usize>,
    /// Which segments its outputs read.
    pub segments: &'a Segments,
}

/// The segments of inner activations that a low-rank part's outputs read.
#[derive(Debug, Default)]
pub(super) struct Segments {
    /// An index into `kinds` for every tile.
    tiles: Vec<u16>,
    /// Segments of a kind of tile, each with its factor for every lane: zero in those that read another one.
    kinds: Vec<Vec<(usize, Line<f32>)>>,
}

impl Segments {
    /// Of `n` outputs that read segment `of(output)`, times `scale`.
    pub fn new(n: usize, scale: f32, of: impl Fn(usize) -> usize) -> Self {
        let (mut tiles, mut kinds, mut known) = (Vec::new(), Vec::new(), Vec::new());
        for first in (0..n).step_by(LANES) {
            // Lanes behind the end read what the last one does.
            let lanes: [usize; LANES] = std::array::from_fn(|lane| of((first + lane).min(n - 1)));
            let kind = known.iter().position(|k| *k == lanes).unwrap_or_else(|| {
                let mut segments = lanes.to_vec();
                segments.sort_unstable();
                segments.dedup();
                let factors = |s: usize| Line(lanes.map(|lane| if lane == s { scale } else { 0.0 }));
                kinds.push(segments.into_iter().map(|s| (s, factors(s))).collect());
                known.push(lanes);
                kinds.len() - 1
            });
            tiles.push(kind as u16);
        }
        Self { tiles, kinds }
    }

    /// How many segments there are.
    pub fn count(&self) -> usize {
        self.kinds.iter().flatten().map(|(segment, _)| segment + 1).max().unwrap_or(0)
    }

    fn of(&self, tile: usize) -> &[(usize, Line<f32>)] {
        self.tiles.get(tile).and_then(|kind| self.kinds.get(usize::from(*kind))).map_or(&[], Vec::as_slice)
    }
}

/// Inner activations in the form B wants.
#[derive(Debug, Clone, Copy)]
pub(super) enum Inner<'a> {
    /// For affine weights.
    Integers(&'a [Quantised]),
    /// For f16 and f32 weights.
    Floats(&'a [Panel]),
}

/// A product to compute.
#[derive(Debug, Clone)]
pub(super) struct Product<'a> {
    /// W.
    pub matrix: &'a Matrix,
    /// x.
    pub input: Input<'a>,
    /// How many rows.
    pub rows: usize,
    /// Factor of every row; empty for 1.
    pub norm: &'a [f32],
    /// Added to every row, `[tiles * 16]`; empty for none.
    pub bias: &'a [f32],
    /// Low-rank part.
    pub lora: Option<LoraPart<'a>>,
}

simd_fn! {
    /// Computes tiles `first ..` into `y [tiles][rows][16]`; `y` says how many.
    pub(super) fn product(op: &Product<'_>, first: usize, y: &mut [Line<f32>]) = product_tiles
}

/// Pairs per turn of the innermost loop.
const UNROLL: usize = 1;

#[inline(always)]
fn product_tiles<S: Simd>(s: S, op: &Product<'_>, first: usize, y: &mut [Line<f32>]) {
    let (m, lines, groups) = (op.matrix, op.matrix.lines(), op.matrix.groups());
    match (&m.values, op.input) {
        (Values::Affine { bits, group, scale, data, scales }, Input::Integers(x, first_row)) => {
            let rows = first_row..first_row + op.rows;
            let tiles = Tiles { data: &data[first * lines..], scales: &scales[first * groups..], lines, groups, format: *scale };
            match (bits, group) {
                (4, 32) => affine::<S, 4, 4, 16>(s, tiles, x, rows, y),
                (4, 64) => affine::<S, 4, 8, 32>(s, tiles, x, rows, y),
                (4, _) => affine::<S, 4, 16, 64>(s, tiles, x, rows, y),
                (_, 32) => affine::<S, 8, 8, 16>(s, tiles, x, rows, y),
                (_, 64) => affine::<S, 8, 16, 32>(s, tiles, x, rows, y),
                _ => affine::<S, 8, 32, 64>(s, tiles, x, rows, y),
            }
        }
        (Values::F16(data), Input::Floats(x)) => {
            for (y, data) in y.chunks_exact_mut(op.rows).zip(data[first * lines..].chunks_exact(lines)) {
                halves(s, data, x, y);
            }
        }
        (Values::F32(data), Input::Floats(x)) => {
            for (y, data) in y.chunks_exact_mut(op.rows).zip(data[first * lines..].chunks_exact(lines)) {
                singles(s, data, x, y);
            }
        }
        _ => unreachable!("the input is made for the matrix"),
    }
    let plain = op.norm.is_empty() && op.bias.is_empty();
    if plain && op.lora.is_none() {
        return;
    }
    let mut low_rank = Vec::new();
    for (i, y) in y.chunks_exact_mut(op.rows).enumerate() {
        let tile = first + i;
        for (y, &norm) in y.iter_mut().zip(op.norm) {
            for v in &mut y.0 {
                *v *= norm;
            }
        }
        if let Some(bias) = op.bias.get(tile * LANES..(tile + 1) * LANES) {
            for y in y.iter_mut() {
                for (y, b) in y.0.iter_mut().zip(bias) {
                    *y += b;
                }
            }
        }
        if let Some(lora) = &op.lora {
            add_lora(s, lora, tile, &mut low_rank, &mut y[lora.rows.clone()]);
        }
    }
}

/// Adds the low-rank part to the adapter rows of a tile.
#[inline(always)]
fn add_lora<S: Simd>(s: S, lora: &LoraPart<'_>, tile: usize, buffer: &mut Vec<Line<f32>>, y: &mut [Line<f32>]) {
    let lines = lora.b.lines();
    for (segment, factors) in lora.segments.of(tile) {
        match (&lora.b.values, lora.inner) {
            (Values::Affine { bits: 8, group: 32, scale, data, scales }, Inner::Integers(x)) => {
                let groups = lora.b.groups();
                let (data, scales) = (&data[tile * lines..][..lines], &scales[tile * groups..][..groups]);
                let weights = Weights { data: data.as_chunks::<8>().0, scales, format: *scale, words: lora.b.words() };
                let x = &x[*segment];
                let x = Rows { pairs: x.pairs.as_chunks::<16>().0, scales: &x.scales, stride: x.rows, first: 0 };
                let mut row = 0;
                while row < y.len() {
                    row += match (y.len() - row).min(S::DIRECT) {
                        4.. => low_rank::<S, 4>(s, weights, x, row, factors, y),
                        3 => low_rank::<S, 3>(s, weights, x, row, factors, y),
                        2 => low_rank::<S, 2>(s, weights, x, row, factors, y),
                        _ => low_rank::<S, 1>(s, weights, x, row, factors, y),
                    };
                }
                continue;
            }
            (Values::F16(b), Inner::Floats(x)) => {
                buffer.resize(y.len(), Line([0.0; LANES]));
                halves(s, &b[tile * lines..][..lines], &x[*segment], buffer);
            }
            (Values::F32(b), Inner::Floats(x)) => {
                buffer.resize(y.len(), Line([0.0; LANES]));
                singles(s, &b[tile * lines..][..lines], &x[*segment], buffer);
            }
            _ => unreachable!("the inner activations are made for the matrix"),
        }
        for (y, low_rank) in y.iter_mut().zip(buffer.iter()) {
            for ((y, v), factor) in y.0.iter_mut().zip(low_rank.0).zip(factors.0) {
                *y += v * factor;
            }
        }
    }
}

/// Adds a tile of B, times `factors`, to `R` rows from `row` on; returns `R`.
#[cfg_attr(target_arch = "wasm32", inline(never))]
#[cfg_attr(not(target_arch = "wasm32"), inline(always))]
fn low_rank<S: Simd, const R: usize>(
    s: S,
    w: Weights<'_, 8>,
    x: Rows<'_, 16>,
    row: usize,
    factors: &Line<f32>,
    y: &mut [Line<f32>],
) -> usize {
    for part in 0..S::PARTS {
        let sums = sums::<S, 8, 8, 16, R>(s, w, x, row, part);
        let factors = s.load_f(&factors.0, part);
        for r in 0..R {
            let y = &mut y[row + r].0;
            s.store_f(s.add_f(s.load_f(y, part), s.mul_f(sums[r], factors)), y, part);
        }
    }
    R
}

/// Tiles of an affine matrix.
#[derive(Clone, Copy)]
struct Tiles<'a> {
    data: &'a [Line<u32>],
    scales: &'a [Line<u32>],
    lines: usize,
    groups: usize,
    format: ScaleFormat,
}

#[inline(always)]
fn scale_and_bias<S: Simd>(s: S, pairs: &Line<u32>, format: ScaleFormat, part: usize) -> (S::F, S::F) {
    let pairs = s.load(&pairs.0, part);
    match format {
        ScaleFormat::F16 => (low_half(s, pairs), high_half(s, pairs)),
        ScaleFormat::Bf16 => (s.bits_to_f(s.shl::<16>(pairs)), s.bits_to_f(s.and(pairs, s.splat(0xFFFF_0000_u32 as i32)))),
    }
}

/// Rows of quantised inputs.
#[derive(Clone, Copy)]
struct Rows<'a, const PAIRS: usize> {
    /// `[groups, stride]`.
    pairs: &'a [[i32; PAIRS]],
    /// `[groups, stride]`.
    scales: &'a [Scale],
    /// Rows per group.
    stride: usize,
    /// The first that counts.
    first: usize,
}

/// `WORDS` words and `PAIRS` pairs of inputs make a group.
#[inline(always)]
fn affine<S: Simd, const BITS: usize, const WORDS: usize, const PAIRS: usize>(
    s: S,
    tiles: Tiles<'_>,
    x: &Quantised,
    rows: Range<usize>,
    y: &mut [Line<f32>],
) {
    let x = Rows { pairs: x.pairs.as_chunks::<PAIRS>().0, scales: &x.scales, stride: x.rows, first: rows.start };
    let (rows, words) = (rows.len(), tiles.lines / tiles.groups.max(1));
    let data = tiles.data.chunks_exact(tiles.lines).zip(tiles.scales.chunks_exact(tiles.groups));
    for ((data, scales), y) in data.zip(y.chunks_exact_mut(rows)) {
        let weights = Weights { data: data.as_chunks::<WORDS>().0, scales, format: tiles.format, words };
        if rows > S::DIRECT {
            buffered::<S, BITS, WORDS, PAIRS>(s, weights, x, y);
            continue;
        }
        let mut row = 0;
        while row < rows {
            // Passes as even as they can be.
            let left = rows - row;
            row += match left.div_ceil(left.div_ceil(S::ROWS)).min(S::DIRECT) {
                8.. => direct::<S, BITS, WORDS, PAIRS, 8>(s, weights, x, row, y),
                7 => direct::<S, BITS, WORDS, PAIRS, 7>(s, weights, x, row, y),
                6 => direct::<S, BITS, WORDS, PAIRS, 6>(s, weights, x, row, y),
                5 => direct::<S, BITS, WORDS, PAIRS, 5>(s, weights, x, row, y),
                4 => direct::<S, BITS, WORDS, PAIRS, 4>(s, weights, x, row, y),
                3 => direct::<S, BITS, WORDS, PAIRS, 3>(s, weights, x, row, y),
                2 => direct::<S, BITS, WORDS, PAIRS, 2>(s, weights, x, row, y),
                _ => direct::<S, BITS, WORDS, PAIRS, 1>(s, weights, x, row, y),
            };
        }
    }
}

/// A tile of an affine matrix, in groups of `WORDS` words.
#[derive(Clone, Copy)]
struct Weights<'a, const WORDS: usize> {
    data: &'a [[Line<u32>; WORDS]],
    scales: &'a [Line<u32>],
    format: ScaleFormat,
    /// `WORDS` as a number the compiler does not know.
    words: usize,
}

/// Computes a tile for `R` rows from `row` on; returns `R`.
#[cfg_attr(target_arch = "wasm32", inline(never))]
#[cfg_attr(not(target_arch = "wasm32"), inline(always))]
fn direct<S: Simd, const BITS: usize, const WORDS: usize, const PAIRS: usize, const R: usize>(
    s: S,
    w: Weights<'_, WORDS>,
    x: Rows<'_, PAIRS>,
    row: usize,
    y: &mut [Line<f32>],
) -> usize {
    for part in 0..S::PARTS {
        let sums = sums::<S, BITS, WORDS, PAIRS, R>(s, w, x, row, part);
        for r in 0..R {
            s.store_f(sums[r], &mut y[row + r].0, part);
        }
    }
    R
}

/// How many lines ahead weights are asked for, 16 KiB: the processor itself looks ahead within a page only, which leaves a third
/// of the memory's speed unused.
const AHEAD: usize = 256;

/// A part of a tile's products with `R` rows from `row` on.
#[inline(always)]
fn sums<S: Simd, const BITS: usize, const WORDS: usize, const PAIRS: usize, const R: usize>(
    s: S,
    w: Weights<'_, WORDS>,
    x: Rows<'_, PAIRS>,
    row: usize,
    part: usize,
) -> [S::F; R] {
    let mut out = [s.splat_f(0.0); R];
    let inputs = x.pairs.chunks_exact(x.stride).zip(x.scales.chunks_exact(x.stride));
    let row = x.first + row;
    for ((data, scale), (x, x_scale)) in w.data.iter().zip(w.scales).zip(inputs) {
        let (Some(x), Some(x_scale)) = (x[row..].first_chunk::<R>(), x_scale[row..].first_chunk::<R>()) else {
            return out;
        };
        for line in data {
            s.prefetch(std::ptr::from_ref(line).wrapping_add(AHEAD));
        }
        s.prefetch(std::ptr::from_ref(scale).wrapping_add(AHEAD / WORDS));
        let dots = match (BITS, R) {
            (4, ..=2) => direct4(s, data, x, part, w.words),
            (4, ..=6) => direct4_wide(s, data, x, part),
            (4, _) => direct4_widest(s, data, x, part),
            _ => direct8(s, data, x, part, w.words),
        };
        let scale = scale_and_bias(s, scale, w.format, part);
        for r in 0..R {
            out[r] = fold(s, out[r], scale, dots[r], x_scale[r]);
        }
    }
    out
}

/// Dot products of a group of 4-bit weights for so many rows that one sum each is enough.
#[inline(always)]
fn direct4_widest<S: Simd, const WORDS: usize, const PAIRS: usize, const R: usize>(
    s: S,
    data: &[Line<u32>; WORDS],
    x: &[[i32; PAIRS]; R],
    part: usize,
) -> [S::I; R] {
    let mask = s.splat(0x000F_000F);
    let mut sums = [s.splat(0); R];
    for i in 0..WORDS {
        let word = s.load(&data[i].0, part);
        let pairs =
            [s.and(word, mask), s.and(s.shr::<8>(word), mask), s.and(s.shr::<4>(word), mask), s.and(s.shr::<12>(word), mask)];
        for (j, pair) in pairs.into_iter().enumerate() {
            for r in 0..R {
                sums[r] = s.dot_splat(sums[r], pair, &x[r][4 * i + j]);
            }
        }
    }
    sums
}

/// Dot products of a group of 4-bit weights for several rows: two sums a row, so that a chain of products does not wait for
/// itself.
#[inline(always)]
fn direct4_wide<S: Simd, const WORDS: usize, const PAIRS: usize, const R: usize>(
    s: S,
    data: &[Line<u32>; WORDS],
    x: &[[i32; PAIRS]; R],
    part: usize,
) -> [S::I; R] {
    let mask = s.splat(0x000F_000F);
    let (mut even, mut odd) = ([s.splat(0); R], [s.splat(0); R]);
    for i in 0..WORDS {
        let word = s.load(&data[i].0, part);
        let (a, b) = (s.and(word, mask), s.and(s.shr::<8>(word), mask));
        let (c, d) = (s.and(s.shr::<4>(word), mask), s.and(s.shr::<12>(word), mask));
        for r in 0..R {
            even[r] = s.dot_splat(even[r], a, &x[r][4 * i]);
            odd[r] = s.dot_splat(odd[r], b, &x[r][4 * i + 1]);
            even[r] = s.dot_splat(even[r], c, &x[r][4 * i + 2]);
            odd[r] = s.dot_splat(odd[r], d, &x[r][4 * i + 3]);
        }
    }
    for r in 0..R {
        even[r] = s.add(even[r], odd[r]);
    }
    even
}

/// Dot products of a group of 4-bit weights, nibbles in place: those in the upper half of a byte count sixteenfold
/// and are set right once per group, which is exact and saves a shift per word.
#[inline(always)]
fn direct4<S: Simd, const WORDS: usize, const PAIRS: usize, const R: usize>(
    s: S,
    data: &[Line<u32>; WORDS],
    x: &[[i32; PAIRS]; R],
    part: usize,
    words: usize,
) -> [S::I; R] {
    let (low_mask, high_mask) = (s.splat(0x000F_000F), s.splat(0x00F0_00F0));
    let mut low = [s.splat(0); R];
    let mut high = [s.splat(0); R];
    for i in 0..turns::<S>(WORDS, words) {
        let word = s.load(&data[i].0, part);
        let shifted = s.shr::<8>(word);
        for r in 0..R {
            low[r] = s.dot_splat(low[r], s.and(word, low_mask), &x[r][4 * i]);
            low[r] = s.dot_splat(low[r], s.and(shifted, low_mask), &x[r][4 * i + 1]);
            high[r] = s.dot_splat(high[r], s.and(word, high_mask), &x[r][4 * i + 2]);
            high[r] = s.dot_splat(high[r], s.and(shifted, high_mask), &x[r][4 * i + 3]);
        }
    }
    for r in 0..R {
        low[r] = s.add(low[r], s.sar::<4>(high[r]));
    }
    low
}

#[inline(always)]
fn direct8<S: Simd, const WORDS: usize, const PAIRS: usize, const R: usize>(
    s: S,
    data: &[Line<u32>; WORDS],
    x: &[[i32; PAIRS]; R],
    part: usize,
    words: usize,
) -> [S::I; R] {
    let mask = s.splat(0x00FF_00FF);
    let (mut sum, mut odd) = ([s.splat(0); R], [s.splat(0); R]);
    for i in 0..turns::<S>(WORDS, words) {
        let word = s.load(&data[i].0, part);
        let (a, b) = (s.and(word, mask), s.and(s.shr::<8>(word), mask));
        for r in 0..R {
            sum[r] = s.dot_splat(sum[r], a, &x[r][2 * i]);
            odd[r] = s.dot_splat(odd[r], b, &x[r][2 * i + 1]);
        }
    }
    for r in 0..R {
        sum[r] = s.add(sum[r], odd[r]);
    }
    sum
}

/// How often a loop over the words of a group turns. Where registers are few it must stay a loop: unrolled, the compiler would
/// keep a group's inputs in registers that are not there.
#[inline(always)]
fn turns<S: Simd>(known: usize, counted: usize) -> usize {
    if S::PARTS == 1 { known } else { counted.min(known) }
}

/// `y += (scale * step) * dot; y += bias * sum`.
#[inline(always)]
fn fold<S: Simd>(s: S, y: S::F, (scale, bias): (S::F, S::F), dot: S::I, x: Scale) -> S::F {
    let y = s.add_f(y, s.mul_f(s.mul_f(scale, s.splat_f(x.step)), s.to_f(dot)));
    s.add_f(y, s.mul_f(bias, s.splat_f(x.sum)))
}

#[inline(always)]
fn buffered<S: Simd, const BITS: usize, const WORDS: usize, const PAIRS: usize>(
    s: S,
    w: Weights<'_, WORDS>,
    x: Rows<'_, PAIRS>,
    y: &mut [Line<f32>],
) {
    let rows = y.len();
    let mut pairs = [Line([0u32; LANES]); PAIRS];
    y.fill(Line([0.0; LANES]));
    let inputs = x.pairs.chunks_exact(x.stride).zip(x.scales.chunks_exact(x.stride));
    for ((data, scale), (pairs_of, scale_of)) in w.data.iter().zip(w.scales).zip(inputs) {
        let (x, x_scale) = (&pairs_of[x.first..], &scale_of[x.first..]);
        unpack::<S, BITS>(s, data, &mut pairs);
        let mut row = 0;
        while row < rows {
            let (x, x_scale, y) = (&x[row..], &x_scale[row..], &mut y[row..]);
            row += match (rows - row).min(S::ROWS) {
                8.. => pass::<S, PAIRS, 8>(s, &pairs, (scale, w.format), x, x_scale, y),
                4.. => pass::<S, PAIRS, 4>(s, &pairs, (scale, w.format), x, x_scale, y),
                2.. => pass::<S, PAIRS, 2>(s, &pairs, (scale, w.format), x, x_scale, y),
                _ => pass::<S, PAIRS, 1>(s, &pairs, (scale, w.format), x, x_scale, y),
            };
        }
    }
}

#[cfg_attr(target_arch = "wasm32", inline(never))]
#[cfg_attr(not(target_arch = "wasm32"), inline(always))]
fn unpack<S: Simd, const BITS: usize>(s: S, data: &[Line<u32>], pairs: &mut [Line<u32>]) {
    for part in 0..S::PARTS {
        if BITS == 4 {
            let mask = s.splat(0x000F_000F);
            for (line, to) in data.iter().zip(pairs.as_chunks_mut::<4>().0) {
                let word = s.load(&line.0, part);
                s.store(s.and(word, mask), &mut to[0].0, part);
                s.store(s.and(s.shr::<8>(word), mask), &mut to[1].0, part);
                s.store(s.and(s.shr::<4>(word), mask), &mut to[2].0, part);
                s.store(s.and(s.shr::<12>(word), mask), &mut to[3].0, part);
            }
        } else {
            let mask = s.splat(0x00FF_00FF);
            for (line, to) in data.iter().zip(pairs.as_chunks_mut::<2>().0) {
                let word = s.load(&line.0, part);
                s.store(s.and(word, mask), &mut to[0].0, part);
                s.store(s.and(s.shr::<8>(word), mask), &mut to[1].0, part);
            }
        }
    }
}

/// Adds an unpacked group to the first `R` rows of `y`; returns `R`.
#[cfg_attr(target_arch = "wasm32", inline(never))]
#[cfg_attr(not(target_arch = "wasm32"), inline(always))]
fn pass<S: Simd, const PAIRS: usize, const R: usize>(
    s: S,
    pairs: &[Line<u32>; PAIRS],
    (scale, format): (&Line<u32>, ScaleFormat),
    x: &[[i32; PAIRS]],
    x_scale: &[Scale],
    y: &mut [Line<f32>],
) -> usize {
    let (Some(x), Some(x_scale), Some(y)) = (x.first_chunk::<R>(), x_scale.first_chunk::<R>(), y.first_chunk_mut::<R>()) else {
        return R;
    };
    for part in 0..S::PARTS {
        let mut dots = [s.splat(0); R];
        for (p, w) in pairs.as_chunks::<UNROLL>().0.iter().enumerate() {
            for i in 0..UNROLL {
                let w = s.load(&w[i].0, part);
                for r in 0..R {
                    dots[r] = s.dot_splat(dots[r], w, &x[r][UNROLL * p + i]);
                }
            }
        }
        let scale = scale_and_bias(s, scale, format, part);
        for r in 0..R {
            let sum = fold(s, s.load_f(&y[r].0, part), scale, dots[r], x_scale[r]);
            s.store_f(sum, &mut y[r].0, part);
        }
    }
    R
}

/// `y[r] = sum_k w[k] * x[r, k]` for weights in f32.
#[inline(always)]
fn singles<S: Simd>(s: S, w: &[Line<f32>], x: &Panel, y: &mut [Line<f32>]) {
    y.fill(Line([0.0; LANES]));
    for (w, x) in w.as_chunks::<CHUNK>().0.iter().zip(x.chunks.chunks_exact(x.rows)) {
        chunk(s, w, x, y);
    }
}

/// The same for weights in f16.
#[inline(always)]
fn halves<S: Simd>(s: S, w: &[HalfLine], x: &Panel, y: &mut [Line<f32>]) {
    y.fill(Line([0.0; LANES]));
    let mut buffer = [Line([0.0; LANES]); CHUNK];
    for (w, x) in w.as_chunks::<CHUNK>().0.iter().zip(x.chunks.chunks_exact(x.rows)) {
        for part in 0..S::PARTS {
            for (to, from) in buffer.iter_mut().zip(w) {
                s.store_f(s.load_half(&from.0, part), &mut to.0, part);
            }
        }
        chunk(s, &buffer, x, y);
    }
}

#[inline(always)]
fn chunk<S: Simd>(s: S, w: &[Line<f32>; CHUNK], x: &[[f32; CHUNK]], y: &mut [Line<f32>]) {
    let mut row = 0;
    while row < y.len() {
        let (x, y) = (&x[row..], &mut y[row..]);
        row += match y.len().min(S::ROWS) {
            8.. => float_pass::<S, 8>(s, w, x, y),
            4.. => float_pass::<S, 4>(s, w, x, y),
            2.. => float_pass::<S, 2>(s, w, x, y),
            _ => float_pass::<S, 1>(s, w, x, y),
        };
    }
}

#[cfg_attr(target_arch = "wasm32", inline(never))]
#[cfg_attr(not(target_arch = "wasm32"), inline(always))]
fn float_pass<S: Simd, const R: usize>(s: S, w: &[Line<f32>; CHUNK], x: &[[f32; CHUNK]], y: &mut [Line<f32>]) -> usize {
    let (Some(x), Some(y)) = (x.first_chunk::<R>(), y.first_chunk_mut::<R>()) else {
        return R;
    };
    for part in 0..S::PARTS {
        let mut sums = [s.splat_f(0.0); R];
        for r in 0..R {
            sums[r] = s.load_f(&y[r].0, part);
        }
        for k in 0..CHUNK {
            let w = s.load_f(&w[k].0, part);
            for r in 0..R {
                sums[r] = s.add_f(sums[r], s.mul_f(w, s.splat_f(x[r][k])));
            }
        }
        for r in 0..R {
            s.store_f(sums[r], &mut y[r].0, part);
        }
    }
    R
}

#[cfg(test)]
mod tests {
    use super::super::simd::Level;
    use super::super::threads::Crew;
    use super::*;
    use crate::kernels::matmul::{self, Operands};
    use crate::kernels::testing::{Q4, Q8, Random, random};
    use crate::weights::packed::Format;

    struct Case {
        packed: crate::weights::packed::PackedRows,
        matrix: Matrix,
        x: Vec<f32>,
        stride: usize,
    }

    fn case(format: Format, n: usize, k: usize, rows: usize) -> Case {
        let packed = random(format, n, k, (n * k) as u64);
        let mut matrix = Matrix::zeros(format, n, k).unwrap();
        matrix.take(&packed).unwrap();
        let stride = k + 5;
        let mut x = Random(k as u64 + 7).values(rows * stride);
        x[3] *= 50.0; // an outlier, as activations have them
        Case { packed, matrix, x, stride }
    }

    fn run(level: Level, case: &Case, rows: Range<usize>) -> Vec<Line<f32>> {
        let x = &case.x[rows.start * case.stride..];
        let (mut quantised, mut panel) = (Quantised::default(), Panel::default());
        let input = match case.matrix.group() {
            Some(group) => {
                quantised.fill(&mut Crew::default(), level, x, case.stride, rows.len(), case.matrix.k, group);
                Input::Integers(&quantised, 0)
            }
            None => {
                panel.fill(x, case.stride, rows.len(), case.matrix.k);
                Input::Floats(&panel)
            }
        };
        let op = Product { matrix: &case.matrix, input, rows: rows.len(), norm: &[], bias: &[], lora: None };
        let mut y = vec![Line([f32::NAN; LANES]); case.matrix.tiles * rows.len()];
        product(level, &op, 0, &mut y);
        y
    }

    /// The stated bound: `2^-16` of the largest input of a group for each of its weights' magnitudes (none for float
    /// weights), and a few roundings of f32 in the sums.
    fn bound(case: &Case, row: usize, o: usize) -> f64 {
        let x = &case.x[row * case.stride..][..case.matrix.k];
        let group = case.matrix.group().unwrap_or(case.matrix.k);
        let mut total = 0.0;
        for (g, x) in x.chunks(group).enumerate() {
            let largest = x.iter().fold(0f64, |m, v| m.max(f64::from(v.abs())));
            let weights: f64 = (0..x.len()).map(|i| case.packed.get(o, g * group + i).abs()).sum();
            let grid = if case.matrix.group().is_some() { 2f64.powi(-16) } else { 0.0 };
            total += largest * weights * (grid + 2f64.powi(-20));
        }
        total
    }

    const FORMATS: [Format; 6] = [
        Q4,
        Q8,
        Format::Affine { bits: 4, group: 64, scale: ScaleFormat::Bf16 },
        Format::Affine { bits: 8, group: 128, scale: ScaleFormat::F16 },
        Format::F16,
        Format::F32,
    ];

    #[test]
    fn products_agree_with_the_twin_on_odd_shapes() {
        for format in FORMATS {
            for (n, k, rows) in [(1, 1, 1), (37, 75, 13), (16, 128, 2), (50, 333, 5)] {
                let case = case(format, n, k, rows);
                let op = Operands {
                    weight: &case.packed,
                    input: &case.x,
                    stride: case.stride,
                    rows: 0..rows,
                    norm: None,
                    bias: None,
                    lora: None,
                };
                let want = matmul::product(&op);
                for level in Level::all() {
                    let y = run(level, &case, 0..rows);
                    for r in 0..rows {
                        for o in 0..n {
                            let got = f64::from(y[o / LANES * rows + r].0[o % LANES]);
                            let (want, bound) = (want[r * n + o], bound(&case, r, o));
                            assert!(
                                (got - want).abs() <= bound,
                                "{format:?} {n}x{k} {} row {r} output {o}: {got} {want} {bound}",
                                level.name()
                            );
                        }
                    }
                }
                // Control: the bound is tight enough to notice one weight of one row that is off.
                let mut other = case.packed.clone();
                other.data[0] ^= if format == Format::F32 { 0x0040_0000 } else { 8 };
                let op = Operands { weight: &other, ..op };
                let changed = matmul::product(&op);
                if !matches!(format, Format::F16) {
                    assert!((changed[0] - want[0]).abs() > bound(&case, 0, 0), "{format:?} {n}x{k}");
                }
            }
        }
    }

    #[test]
    fn a_low_rank_part_is_added_where_its_segments_say() {
        // Stacked segments that end inside tiles, interleaved ones, and one alone; one group of inputs and two.
        let (n, k, rows, adapter, scale) = (53, 64, 6, 1..5, 0.75);
        let of: [(usize, fn(usize) -> usize); 3] =
            [(3, |o| usize::from(o >= 20) + usize::from(o >= 39)), (2, |o| o % 2), (1, |_| 0)];
        for (count, of) in of {
            for (format, rank) in [(Q4, 5), (Q4, 40), (Format::F16, 7), (Format::F32, 16)] {
                let base = case(if format == Q4 { Q4 } else { format }, n, k, rows);
                let b = case(if format == Q4 { Format::F32 } else { format }, n, rank, adapter.len() * count);
                let b_matrix = if format == Q4 { b.matrix.quantised(32).unwrap() } else { b.matrix.clone() };
                let segments = Segments::new(n, scale, of);
                assert_eq!(segments.count(), count);
                let (mut integers, mut floats) = (vec![Quantised::default(); count], vec![Panel::default(); count]);
                for level in Level::all() {
                    for g in 0..count {
                        let x = &b.x[g * b.stride..];
                        integers[g].fill(&mut Crew::default(), level, x, count * b.stride, adapter.len(), rank, 32);
                        floats[g].fill(x, count * b.stride, adapter.len(), rank);
                    }
                    let inner = if format == Q4 { Inner::Integers(&integers) } else { Inner::Floats(&floats) };
                    let (mut quantised, mut panel) = (Quantised::default(), Panel::default());
                    let input = match base.matrix.group() {
                        Some(group) => {
                            quantised.fill(&mut Crew::default(), level, &base.x, base.stride, rows, k, group);
                            Input::Integers(&quantised, 0)
                        }
                        None => {
                            panel.fill(&base.x, base.stride, rows, k);
                            Input::Floats(&panel)
                        }
                    };
                    let lora = LoraPart { b: &b_matrix, inner, rows: adapter.clone(), segments: &segments };
                    let op = Product { matrix: &base.matrix, input, rows, norm: &[], bias: &[], lora: Some(lora) };
                    let mut with = vec![Line([f32::NAN; LANES]); base.matrix.tiles * rows];
                    product(level, &op, 0, &mut with);
                    let mut without = with.clone();
                    product(level, &Product { lora: None, ..op.clone() }, 0, &mut without);
                    let mut weights = vec![0.0; rank];
                    for o in 0..n {
                        b_matrix.row(o, &mut weights);
                        for r in 0..rows {
                            let at = o / LANES * rows + r;
                            let got = with[at].0[o % LANES] - without[at].0[o % LANES];
                            if !adapter.contains(&r) {
                                assert_eq!(got, 0.0);
                                continue;
                            }
                            let dot = |segment: usize| {
                                let x = &b.x[((r - adapter.start) * count + segment) * b.stride..];
                                weights.iter().zip(x).map(|(w, x)| f64::from(w * x)).sum::<f64>() * f64::from(scale)
                            };
                            let size: f32 = without[at].0[o % LANES].abs() + 50.0;
                            let near = |want: f64| (f64::from(got) - want).abs() < f64::from(size) * 2e-5 * rank as f64;
                            assert!(near(dot(of(o))), "{format:?} rank {rank} {} row {r} output {o}", level.name());
                            if count > 1 && (dot((of(o) + 1) % count) - dot(of(o))).abs() > f64::from(size) * 4e-5 * rank as f64 {
                                assert!(!near(dot((of(o) + 1) % count)), "control");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_every_call_and_level() {
        for format in FORMATS {
            let case = case(format, 40, 140, 21);
            let wide = run(Level::best(), &case, 0..21);
            for level in Level::all() {
                for width in [1, 2, 3, 4, 7, 8, 15] {
                    let rows = 5..5 + width;
                    let y = run(level, &case, rows.clone());
                    for tile in 0..case.matrix.tiles {
                        for r in 0..width {
                            let (a, b) = (y[tile * width + r].0, wide[tile * 21 + 5 + r].0);
                            assert_eq!(a.map(f32::to_bits), b.map(f32::to_bits), "{format:?} {} width {width}", level.name());
                        }
                    }
                    // Control: the next row differs.
                    assert_ne!(y[0].0, wide[6].0);
                }
            }
        }
    }
}
