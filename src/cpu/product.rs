//! `y = norm * (W x) + bias + LoRA` for one or many rows: the kernel that reads the weights.
//!
//! Output is tile by tile, `y[tile][row][lane]`, so that a tile's weights are read once for all rows and threads write
//! apart. Few rows take the *direct* way: a weight word goes from memory through registers into all of them. Many rows
//! take the *buffered* way: a group of weights is unpacked into the first-level cache once, then every row passes over it.
//! Both add the same numbers in the same order, so a row's result has the same bits whatever rows share the call:
//!
//! - affine: integer dot products per group (exact), then `y += (scale * step) * dot; y += bias * sum`, group by group;
//! - f16, f32: `y += w * x`, input by input.

use std::ops::Range;

use super::activations::Quantised;
use super::matrix::{Matrix, Values};
use super::simd::{HalfLine, LANES, Line, Simd, high_half, low_half, simd_fn};
use crate::weights::packed::ScaleFormat;

/// Inputs of a product.
#[derive(Debug, Clone, Copy)]
pub(super) enum Input<'a> {
    /// For affine weights, in groups of the same size.
    Integers(&'a Quantised),
    /// For f16 and f32 weights: `[rows, stride]`.
    Floats { values: &'a [f32], stride: usize },
}

/// The low-rank part, added to some of the rows.
#[derive(Debug, Clone)]
pub(super) struct LoraPart<'a> {
    /// B `[n, rank]`, f16 or f32.
    pub b: &'a Matrix,
    /// Inner activations `[rows, stride]`.
    pub inner: &'a [f32],
    /// Row stride of `inner`.
    pub stride: usize,
    /// Rows it is added to.
    pub rows: Range<usize>,
    /// Its factor.
    pub scale: f32,
    /// Segment of `inner` that every output reads, by lane `[tiles * 16]`.
    pub segments: &'a [u8],
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

/// Most rows of the direct way.
const DIRECT: usize = 2;
/// Inputs unpacked at a time; the largest group.
const CHUNK: usize = 128;

#[inline(always)]
fn product_tiles<S: Simd>(s: S, op: &Product<'_>, first: usize, y: &mut [Line<f32>]) {
    let mut low_rank = vec![Line([0.0; LANES]); op.lora.as_ref().map_or(0, |l| l.rows.len())];
    for (i, y) in y.chunks_exact_mut(op.rows.max(1)).enumerate() {
        let tile = first + i;
        let (m, lines) = (op.matrix, op.matrix.lines());
        match (&m.values, op.input) {
            (Values::Affine { bits, scale, data, scales, .. }, Input::Integers(x)) => {
                let groups = m.groups();
                let tile =
                    Tile { data: &data[tile * lines..][..lines], scales: &scales[tile * groups..][..groups], format: *scale };
                if *bits == 4 { affine::<S, 4>(s, tile, x, y) } else { affine::<S, 8>(s, tile, x, y) }
            }
            (Values::F16(data), Input::Floats { values, stride }) => {
                floats(s, Floats::Halves(&data[tile * lines..][..lines]), values, stride, y);
            }
            (Values::F32(data), Input::Floats { values, stride }) => {
                floats(s, Floats::Singles(&data[tile * lines..][..lines]), values, stride, y);
            }
            _ => unreachable!("the input is made for the matrix"),
        }
        for (y, &norm) in y.iter_mut().zip(op.norm) {
            y.0 = y.0.map(|v| v * norm);
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
fn add_lora<S: Simd>(s: S, lora: &LoraPart<'_>, tile: usize, low_rank: &mut [Line<f32>], y: &mut [Line<f32>]) {
    let rank = lora.b.k;
    let segments = &lora.segments[tile * LANES..][..LANES];
    let (least, most) = segments.iter().fold((u8::MAX, 0), |(least, most), &g| (least.min(g), most.max(g)));
    for segment in least..=most {
        let inner = &lora.inner[lora.rows.start * lora.stride + usize::from(segment) * rank..];
        let b = match &lora.b.values {
            Values::F16(lines) => Floats::Halves(&lines[tile * rank..][..rank]),
            Values::F32(lines) => Floats::Singles(&lines[tile * rank..][..rank]),
            Values::Affine { .. } => unreachable!("low-rank matrices are never quantised"),
        };
        floats(s, b, inner, lora.stride, low_rank);
        for (y, low_rank) in y.iter_mut().zip(low_rank.iter()) {
            for ((y, v), &of) in y.0.iter_mut().zip(low_rank.0).zip(segments) {
                *y += if of == segment { v * lora.scale } else { 0.0 };
            }
        }
    }
}

/// Sixteen rows of an affine matrix.
#[derive(Clone, Copy)]
struct Tile<'a> {
    data: &'a [Line<u32>],
    scales: &'a [Line<u32>],
    format: ScaleFormat,
}

#[inline(always)]
fn scale_and_bias<S: Simd>(s: S, pairs: &Line<u32>, format: ScaleFormat) -> (S::F, S::F) {
    let pairs = s.load(&pairs.0);
    match format {
        ScaleFormat::F16 => (low_half(s, pairs), high_half(s, pairs)),
        ScaleFormat::Bf16 => (s.bits_to_f(s.shl::<16>(pairs)), s.bits_to_f(s.and(pairs, s.splat(0xFFFF_0000_u32 as i32)))),
    }
}

#[inline(always)]
fn affine<S: Simd, const BITS: usize>(s: S, tile: Tile<'_>, x: &Quantised, y: &mut [Line<f32>]) {
    match y.len() {
        1 => direct::<S, BITS, 1>(s, tile, x, y),
        DIRECT => direct::<S, BITS, DIRECT>(s, tile, x, y),
        _ => buffered::<S, BITS>(s, tile, x, y),
    }
}

#[inline(always)]
fn direct<S: Simd, const BITS: usize, const R: usize>(s: S, tile: Tile<'_>, x: &Quantised, y: &mut [Line<f32>]) {
    let words = x.group * BITS / 32;
    let mut out = [s.splat_f(0.0); R];
    let rows: [&[i32]; R] = std::array::from_fn(|r| x.row(r));
    for (g, (data, scale)) in tile.data.chunks(words).zip(tile.scales).enumerate() {
        let x_group: [&[i32]; R] = rows.map(|row| &row[g * x.group / 2..][..x.group / 2]);
        let dots = if BITS == 4 { direct4(s, data, x_group) } else { direct8(s, data, x_group) };
        let (scale, bias) = scale_and_bias(s, scale, tile.format);
        for r in 0..R {
            let at = r * x.groups + g;
            out[r] = fold(s, out[r], scale, bias, dots[r], x.steps[at], x.sums[at]);
        }
    }
    for (y, out) in y.iter_mut().zip(out) {
        s.store_f(out, &mut y.0);
    }
}

/// Dot products of a group of 4-bit weights, nibbles in place: those in the upper half of a byte count sixteenfold
/// and are set right once per group, which is exact and saves a shift per word.
#[inline(always)]
fn direct4<S: Simd, const R: usize>(s: S, data: &[Line<u32>], x: [&[i32]; R]) -> [S::I; R] {
    let (low_mask, high_mask) = (s.splat(0x000F_000F), s.splat(0x00F0_00F0));
    let mut low = [s.splat(0); R];
    let mut high = [s.splat(0); R];
    let x = x.map(|x| &x.as_chunks::<4>().0[..data.len()]);
    for i in 0..data.len() {
        let word = s.load(&data[i].0);
        let shifted = s.shr::<8>(word);
        let (a, b) = (s.and(word, low_mask), s.and(shifted, low_mask));
        let (c, d) = (s.and(word, high_mask), s.and(shifted, high_mask));
        for r in 0..R {
            let x = &x[r][i];
            low[r] = s.dot(low[r], a, s.splat(x[0]));
            low[r] = s.dot(low[r], b, s.splat(x[1]));
            high[r] = s.dot(high[r], c, s.splat(x[2]));
            high[r] = s.dot(high[r], d, s.splat(x[3]));
        }
    }
    std::array::from_fn(|r| s.add(low[r], s.sar::<4>(high[r])))
}

#[inline(always)]
fn direct8<S: Simd, const R: usize>(s: S, data: &[Line<u32>], x: [&[i32]; R]) -> [S::I; R] {
    let mask = s.splat(0x00FF_00FF);
    let mut sum = [s.splat(0); R];
    let x = x.map(|x| &x.as_chunks::<2>().0[..data.len()]);
    for i in 0..data.len() {
        let word = s.load(&data[i].0);
        let (a, b) = (s.and(word, mask), s.and(s.shr::<8>(word), mask));
        for r in 0..R {
            let x = &x[r][i];
            sum[r] = s.dot(sum[r], a, s.splat(x[0]));
            sum[r] = s.dot(sum[r], b, s.splat(x[1]));
        }
    }
    sum
}

/// `y += (scale * step) * dot; y += bias * sum`.
#[inline(always)]
fn fold<S: Simd>(s: S, y: S::F, scale: S::F, bias: S::F, dot: S::I, step: f32, sum: f32) -> S::F {
    let y = s.add_f(y, s.mul_f(s.mul_f(scale, s.splat_f(step)), s.to_f(dot)));
    s.add_f(y, s.mul_f(bias, s.splat_f(sum)))
}

#[inline(always)]
fn buffered<S: Simd, const BITS: usize>(s: S, tile: Tile<'_>, x: &Quantised, y: &mut [Line<f32>]) {
    let words = x.group * BITS / 32;
    let mut buffer = [Line([0u32; LANES]); CHUNK / 2];
    y.fill(Line([0.0; LANES]));
    for (g, (data, scale)) in tile.data.chunks(words).zip(tile.scales).enumerate() {
        let pairs = &mut buffer[..data.len() * 16 / BITS];
        unpack::<S, BITS>(s, data, pairs);
        let scale = scale_and_bias(s, scale, tile.format);
        let group = Group { pairs, scale, x, g };
        let mut row = 0;
        while row < y.len() {
            row += match (y.len() - row).min(S::ROWS) {
                8.. => group.pass::<S, 8>(s, row, y),
                4.. => group.pass::<S, 4>(s, row, y),
                2.. => group.pass::<S, 2>(s, row, y),
                _ => group.pass::<S, 1>(s, row, y),
            };
        }
    }
}

#[inline(always)]
fn unpack<S: Simd, const BITS: usize>(s: S, data: &[Line<u32>], pairs: &mut [Line<u32>]) {
    if BITS == 4 {
        let mask = s.splat(0x000F_000F);
        for (line, to) in data.iter().zip(pairs.as_chunks_mut::<4>().0) {
            let word = s.load(&line.0);
            s.store(s.and(word, mask), &mut to[0].0);
            s.store(s.and(s.shr::<8>(word), mask), &mut to[1].0);
            s.store(s.and(s.shr::<4>(word), mask), &mut to[2].0);
            s.store(s.and(s.shr::<12>(word), mask), &mut to[3].0);
        }
    } else {
        let mask = s.splat(0x00FF_00FF);
        for (line, to) in data.iter().zip(pairs.as_chunks_mut::<2>().0) {
            let word = s.load(&line.0);
            s.store(s.and(word, mask), &mut to[0].0);
            s.store(s.and(s.shr::<8>(word), mask), &mut to[1].0);
        }
    }
}

/// An unpacked group of a tile.
struct Group<'a, F> {
    pairs: &'a [Line<u32>],
    scale: (F, F),
    x: &'a Quantised,
    g: usize,
}

impl<F: Copy> Group<'_, F> {
    /// Adds the group to `R` rows of `y` from `row` on; returns `R`.
    #[inline(always)]
    fn pass<S: Simd<F = F>, const R: usize>(&self, s: S, row: usize, y: &mut [Line<f32>]) -> usize {
        let Self { pairs, scale, x, g } = *self;
        let rows: [&[i32]; R] = std::array::from_fn(|r| &x.row(row + r)[g * x.group / 2..][..pairs.len()]);
        let mut dots = [s.splat(0); R];
        for p in 0..pairs.len() {
            let w = s.load(&pairs[p].0);
            for r in 0..R {
                dots[r] = s.dot(dots[r], w, s.splat(rows[r][p]));
            }
        }
        for (r, (y, dot)) in y[row..].iter_mut().zip(dots).enumerate() {
            let at = (row + r) * x.groups + g;
            let sum = fold(s, s.load_f(&y.0), scale.0, scale.1, dot, x.steps[at], x.sums[at]);
            s.store_f(sum, &mut y.0);
        }
        R
    }
}

/// Sixteen rows of a matrix that is not quantised, a line per input.
#[derive(Clone, Copy)]
enum Floats<'a> {
    Halves(&'a [HalfLine]),
    Singles(&'a [Line<f32>]),
}

/// `y[r] = sum_k w[k] * x[r, k]`.
#[inline(always)]
fn floats<S: Simd>(s: S, w: Floats<'_>, x: &[f32], stride: usize, y: &mut [Line<f32>]) {
    y.fill(Line([0.0; LANES]));
    let x = |at: usize| &x[at..];
    match w {
        Floats::Singles(lines) => {
            for (c, lines) in lines.chunks(CHUNK).enumerate() {
                float_chunk(s, lines, x(c * CHUNK), stride, y);
            }
        }
        Floats::Halves(lines) => {
            let mut buffer = [Line([0.0; LANES]); CHUNK];
            for (c, lines) in lines.chunks(CHUNK).enumerate() {
                let singles = &mut buffer[..lines.len()];
                for (to, from) in singles.iter_mut().zip(lines) {
                    s.store_f(s.load_half(&from.0), &mut to.0);
                }
                float_chunk(s, singles, x(c * CHUNK), stride, y);
            }
        }
    }
}

#[inline(always)]
fn float_chunk<S: Simd>(s: S, w: &[Line<f32>], x: &[f32], stride: usize, y: &mut [Line<f32>]) {
    let mut row = 0;
    while row < y.len() {
        row += match (y.len() - row).min(S::ROWS) {
            8.. => float_pass::<S, 8>(s, w, x, stride, row, y),
            4.. => float_pass::<S, 4>(s, w, x, stride, row, y),
            2.. => float_pass::<S, 2>(s, w, x, stride, row, y),
            _ => float_pass::<S, 1>(s, w, x, stride, row, y),
        };
    }
}

#[inline(always)]
fn float_pass<S: Simd, const R: usize>(
    s: S,
    w: &[Line<f32>],
    x: &[f32],
    stride: usize,
    row: usize,
    y: &mut [Line<f32>],
) -> usize {
    let rows: [&[f32]; R] = std::array::from_fn(|r| &x[(row + r) * stride..][..w.len()]);
    let y = &mut y[row..row + R];
    let mut sums: [S::F; R] = std::array::from_fn(|r| s.load_f(&y[r].0));
    for k in 0..w.len() {
        let w = s.load_f(&w[k].0);
        for r in 0..R {
            sums[r] = s.add_f(sums[r], s.mul_f(w, s.splat_f(rows[r][k])));
        }
    }
    for (y, sum) in y.iter_mut().zip(sums) {
        s.store_f(sum, &mut y.0);
    }
    R
}

#[cfg(test)]
mod tests {
    use super::super::simd::Level;
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
        let mut quantised = Quantised::default();
        let input = match case.matrix.group() {
            Some(group) => {
                quantised.fill(level, x, case.stride, rows.len(), case.matrix.k, group);
                Input::Integers(&quantised)
            }
            None => Input::Floats { values: x, stride: case.stride },
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
