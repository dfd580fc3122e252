use super::*;
use crate::weights::packed::ScaleFormat;

/// A small generator of test values: the same for the same seed.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// About -2 to 2.
    fn value(&mut self) -> f32 {
        self.next() as f32 / (1_u64 << 29) as f32 - 2.0
    }
}

/// Affine rows as a checkpoint stores them, and their values in f64.
struct Affine {
    stored: Stored,
    rows: usize,
    k: usize,
    values: Vec<u8>,
    scales: Vec<u8>,
    biases: Vec<u8>,
    want: Vec<f64>,
}

impl Affine {
    fn new(bits: u32, group: usize, scale: Float, rows: usize, k: usize, seed: u64) -> Self {
        let mut numbers = Numbers(seed);
        let mut write = |n: usize| -> (Vec<u8>, Vec<f64>) {
            let mut bytes = Vec::new();
            let mut kept = Vec::new();
            for _ in 0..n {
                let v = numbers.value();
                match scale {
                    Float::F32 => (bytes.extend(v.to_le_bytes()), kept.push(f64::from(v))),
                    Float::F16 => (bytes.extend(f16::from_f32(v).to_le_bytes()), kept.push(f16::from_f32(v).to_f64())),
                    Float::Bf16 => (bytes.extend(bf16::from_f32(v).to_le_bytes()), kept.push(bf16::from_f32(v).to_f64())),
                };
            }
            (bytes, kept)
        };
        let (scales, s) = write(rows * k / group);
        let (biases, b) = write(rows * k / group);
        let mut numbers = Numbers(seed + 1);
        let q: Vec<u64> = (0..rows * k).map(|_| numbers.next() % (1 << bits)).collect();
        let per_byte = 8 / bits as usize;
        let values = q.chunks(per_byte).map(|c| c.iter().rev().fold(0_u64, |byte, q| (byte << bits) | q) as u8).collect();
        let want = q.iter().enumerate().map(|(i, q)| s[i / group] * *q as f64 + b[i / group]).collect();
        Self { stored: Stored::Affine { bits, group, scale }, rows, k, values, scales, biases, want }
    }

    fn rows(&self) -> StoredRows<'_> {
        StoredRows {
            stored: self.stored,
            rows: self.rows,
            k: self.k,
            values: &self.values,
            scales: &self.scales,
            biases: &self.biases,
            factor: 1.0,
        }
    }
}

fn plain(float: Float, values: &[f32], rows: usize) -> (Vec<u8>, Stored, usize) {
    let bytes = match float {
        Float::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Float::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        Float::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
    };
    (bytes, Stored::Plain(float), values.len() / rows)
}

fn pack_plain(float: Float, values: &[f32], rows: usize, format: Format) -> Result<PackedRows> {
    let (bytes, stored, k) = plain(float, values, rows);
    let mut out = zeros(format, 0, rows, k);
    let source = StoredRows { stored, rows, k, values: &bytes, scales: &[], biases: &[], factor: 1.0 };
    write_rows(&mut out, &source, 0, 1, "a matrix")?;
    Ok(out)
}

/// Largest difference from `want`, row by row.
fn difference(packed: &PackedRows, want: &[f64]) -> f64 {
    let each = want.iter().enumerate().map(|(i, w)| (packed.get(i / packed.k, i % packed.k) - w).abs());
    each.fold(0.0, f64::max)
}

#[test]
fn affine_groups_are_kept_bit_for_bit() {
    for (bits, group, k) in [(4, 32, 96), (4, 64, 192), (4, 128, 128), (8, 32, 32), (8, 64, 192), (8, 128, 384)] {
        for (scale, kept) in [(Float::F16, ScaleFormat::F16), (Float::Bf16, ScaleFormat::Bf16)] {
            for rows in [1, 7, 8, 13] {
                let source = Affine::new(bits, group, scale, rows, k, 5);
                let mut out = zeros(Format::Affine { bits, group, scale: kept }, 0, rows, k);
                write_rows(&mut out, &source.rows(), 0, 1, "w").unwrap();
                assert_eq!(difference(&out, &source.want), 0.0, "{bits} bits, groups of {group}, {rows} x {k}");
                // Control: one bit of one word.
                out.data[1] ^= 1 << 9;
                assert!(difference(&out, &source.want) > 0.0);
            }
        }
    }
}

#[test]
fn affine_groups_widen_without_loss() {
    for (bits, group, to_bits, to_group) in [(4, 64, 8, 32), (4, 128, 4, 32), (4, 128, 8, 64), (8, 128, 8, 64)] {
        let source = Affine::new(bits, group, Float::Bf16, 9, 256, 11);
        let mut out = zeros(Format::Affine { bits: to_bits, group: to_group, scale: ScaleFormat::Bf16 }, 0, 9, 256);
        write_rows(&mut out, &source.rows(), 0, 1, "w").unwrap();
        assert_eq!(difference(&out, &source.want), 0.0, "{bits}/{group} as {to_bits}/{to_group}");
    }
    let narrower = Affine::new(8, 64, Float::F16, 8, 64, 1);
    for format in [
        Format::Affine { bits: 4, group: 64, scale: ScaleFormat::F16 },
        Format::Affine { bits: 8, group: 128, scale: ScaleFormat::F16 },
        Format::Affine { bits: 8, group: 64, scale: ScaleFormat::Bf16 },
    ] {
        let refused = write_rows(&mut zeros(format, 0, 8, 64), &narrower.rows(), 0, 1, "w");
        assert!(matches!(refused, Err(Error::Internal(_))), "{format:?} cannot hold it");
    }
}

#[test]
fn affine_groups_become_plain_values() {
    for (bits, scale) in [(4, Float::F32), (8, Float::F16), (4, Float::Bf16)] {
        let source = Affine::new(bits, 32, scale, 10, 96, 3);
        let mut out = zeros(Format::F32, 0, 10, 96);
        write_rows(&mut out, &source.rows(), 0, 1, "w").unwrap();
        // f32 arithmetic on values up to 510: a few units in the last place.
        assert!(difference(&out, &source.want) <= 510.0 * 2_f64.powi(-23));
        let mut out = zeros(Format::F16, 0, 10, 96);
        write_rows(&mut out, &source.rows(), 0, 1, "w").unwrap();
        let error = difference(&out, &source.want);
        assert!(error <= 512.0 * 2_f64.powi(-11) && error > 0.0);
    }
}

#[test]
fn plain_values_keep_their_bits_at_odd_sizes() {
    for (rows, k) in [(1, 1), (3, 5), (8, 8), (11, 33), (17, 130)] {
        let mut numbers = Numbers(rows as u64);
        let values: Vec<f32> = (0..rows * k).map(|_| numbers.value()).collect();
        let halves: Vec<f64> = values.iter().map(|v| f16::from_f32(*v).to_f64()).collect();
        let uppers: Vec<f64> = values.iter().map(|v| bf16::from_f32(*v).to_f64()).collect();
        let singles: Vec<f64> = values.iter().map(|v| f64::from(*v)).collect();
        for (float, format, want) in [
            (Float::F32, Format::F32, &singles),
            (Float::F16, Format::F32, &halves),
            (Float::Bf16, Format::F32, &uppers),
            (Float::F16, Format::F16, &halves),
            (Float::F32, Format::F16, &halves),
            (Float::Bf16, Format::F16, &uppers),
        ] {
            let packed = pack_plain(float, &values, rows, format).unwrap();
            // bf16 has fewer digits than f16, so only its tiny values can lose any.
            let bound = if (float, format) == (Float::Bf16, Format::F16) { 2_f64.powi(-25) } else { 0.0 };
            assert!(difference(&packed, want) <= bound, "{float:?} as {format:?}, {rows} x {k}");
            // Padding is zero: blocks beyond k and rows beyond n.
            let blocks = packed.blocks() * format.values_per_block();
            for row in 0..rows.next_multiple_of(8) {
                let from = if row < rows { k } else { 0 };
                assert!((from..blocks).all(|k| packed.get(row, k) == 0.0));
            }
        }
    }
}

#[test]
fn what_f16_cannot_hold_is_clamped() {
    let packed = pack_plain(Float::Bf16, &[1e30, -1e30, 65504.0, 1.0], 1, Format::F16).unwrap();
    let got: Vec<f64> = (0..4).map(|k| packed.get(0, k)).collect();
    assert_eq!(got, [65504.0, -65504.0, 65504.0, 1.0]);
}

#[test]
fn rows_interleave_and_scale() {
    let (gate, up) = (Affine::new(4, 32, Float::F16, 5, 64, 1), Affine::new(8, 64, Float::F16, 5, 64, 2));
    let mut out = zeros(Format::Affine { bits: 8, group: 32, scale: ScaleFormat::F16 }, 0, 10, 64);
    write_rows(&mut out, &gate.rows(), 0, 2, "gate").unwrap();
    write_rows(&mut out, &up.rows(), 1, 2, "up").unwrap();
    let rows = gate.want.chunks(64).zip(up.want.chunks(64)).flat_map(|(g, u)| [g, u]);
    assert_eq!(difference(&out, &rows.flatten().copied().collect::<Vec<_>>()), 0.0);

    let (bytes, stored, k) = plain(Float::F32, &[1.0, -2.0, 3.0], 1);
    let source = StoredRows { stored, rows: 1, k, values: &bytes, scales: &[], biases: &[], factor: 0.5 };
    // Narrower than the matrix: the rest stays zero.
    let mut out = zeros(Format::F32, 0, 2, 5);
    write_rows(&mut out, &source, 1, 1, "lora_B").unwrap();
    assert_eq!(difference(&out, &[0.0, 0.0, 0.0, 0.0, 0.0, 0.5, -1.0, 1.5, 0.0, 0.0]), 0.0);
}

#[test]
fn quantising_stays_within_half_a_step() {
    for (bits, group, k) in [(4, 32, 100), (4, 64, 64), (8, 32, 40), (8, 128, 300)] {
        for (seed, stretch, offset) in
            [(1, 1.0, 0.0), (2, 1e-3, 5.0), (3, 1e-7, 0.0), (4, 100.0, -300.0), (5, 0.0, 0.3), (6, 1.0, 1.9)]
        {
            let rows = 9;
            let mut numbers = Numbers(seed);
            let values: Vec<f32> = (0..rows * k).map(|_| numbers.value() * stretch + offset).collect();
            let packed = pack_plain(Float::F32, &values, rows, Format::Affine { bits, group, scale: ScaleFormat::F16 }).unwrap();
            let mut steps_used = 0.0_f64;
            for (row, values) in values.chunks(k).enumerate() {
                for (g, group_values) in values.chunks(group).enumerate() {
                    let (low, high) = group_values.iter().fold((f32::MAX, f32::MIN), |(l, h), v| (l.min(*v), h.max(*v)));
                    let pair = packed.scales[((row / 8) * packed.groups() + g) * 8 + row % 8];
                    let scale = f64::from(crate::weights::packed::unpack_scale(pair, ScaleFormat::F16).0);
                    // The scale itself is close to the range over the steps: a unit of f16 at the minimum and at the scale.
                    let steps = f64::from((1_u32 << bits) - 1);
                    let ulp = |x: f64| (x.abs() * 2_f64.powi(-10)).max(2_f64.powi(-24));
                    let ideal = f64::from(high - low) / steps;
                    let most = ideal + ulp(f64::from(low)) / steps;
                    assert!(scale <= most + ulp(most) && scale * steps >= f64::from(high - low) * 0.999_999);
                    for (i, v) in group_values.iter().enumerate() {
                        let error = (packed.get(row, g * group + i) - f64::from(*v)).abs();
                        assert!(error <= 0.5001 * scale + 1e-6 * f64::from(v.abs()), "{error} with steps of {scale}");
                        steps_used = steps_used.max(error / scale.max(1e-30));
                    }
                }
            }
            assert!(stretch != 1.0 || steps_used > 0.4, "the bound is reached, so the test sees it");
        }
    }
}

#[test]
fn what_cannot_be_quantised_is_refused() {
    let format = Format::Affine { bits: 4, group: 32, scale: ScaleFormat::F16 };
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let refused = pack_plain(Float::F32, &[0.0, bad, 1.0], 1, format);
        assert!(matches!(refused, Err(Error::BadWeights(m)) if m.contains("a matrix")));
    }
    assert!(pack_plain(Float::F32, &[0.0, 1e30, 1.0], 1, format).is_ok());
}

#[test]
fn sizes_that_contradict_each_other_are_refused() {
    let source = Affine::new(4, 32, Float::F16, 4, 64, 1);
    let format = Format::Affine { bits: 4, group: 32, scale: ScaleFormat::F16 };
    let refused = |edit: &dyn Fn(&mut StoredRows)| {
        let mut rows = source.rows();
        edit(&mut rows);
        matches!(write_rows(&mut zeros(format, 0, 8, 64), &rows, 0, 2, "w"), Err(Error::Internal(_)))
    };
    assert!(!refused(&|_| {}), "control");
    assert!(refused(&|r| r.rows = 5));
    assert!(refused(&|r| r.k = 96));
    assert!(refused(&|r| r.scales = &[]));
    assert!(refused(&|r| r.values = &r.values[1..]));
    assert!(matches!(write_rows(&mut zeros(format, 0, 8, 64), &source.rows(), 4, 2, "w"), Err(Error::Internal(_))));
}
