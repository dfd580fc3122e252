//! Per row and head: RMSNorm over Dh where there is one, RoPE, query scaling; q stays in `Qkv`, k and v go to the row's
//! slot of the cache.
//!
//! Rotary angles are `position * frequency[i]`, `i < Dh / 2`, dimension `i` pairing with `i + Dh / 2`. Frequencies are those
//! of [`crate::model::rope`].

use super::matmul::inverse_rms;
use super::{CallRows, Heads};
use crate::model::arch::Rope;
use crate::model::rope::{attention_factor, inv_freq};

/// Rotary frequencies of a model and the factor of their cosines and sines.
#[derive(Debug, Clone, PartialEq)]
pub struct Frequencies {
    /// Radians per position, `[Dh / 2]`.
    pub per_position: Vec<f64>,
    /// Multiplier of cos and sin; 1 but for YaRN.
    pub attention_factor: f64,
}

impl Frequencies {
    /// The frequencies of `rope` for heads of `head_dim`.
    #[must_use]
    pub fn new(rope: &Rope, head_dim: usize) -> Self {
        Self { per_position: inv_freq(rope, head_dim), attention_factor: attention_factor(&rope.scaling) }
    }

    /// `(cos, sin)` of dimension `i` at `position`, times the attention factor.
    #[must_use]
    pub fn rotation(&self, position: usize, i: usize) -> (f64, f64) {
        let (sin, cos) = (position as f64 * self.per_position[i]).sin_cos();
        (cos * self.attention_factor, sin * self.attention_factor)
    }

    /// The table fast kernels read: `[positions, Dh / 2, 2]`, cosine then sine.
    #[must_use]
    pub fn table(&self, positions: usize) -> Vec<f32> {
        let half = self.per_position.len();
        (0..positions * half)
            .flat_map(|at| {
                let (cos, sin) = self.rotation(at / half, at % half);
                [cos as f32, sin as f32]
            })
            .collect()
    }
}

/// Operands of the kernel that are the model's.
#[derive(Debug, Clone, Copy)]
pub struct RopeKv<'a> {
    /// Sizes.
    pub heads: Heads,
    /// `rms_norm_eps`.
    pub eps: f64,
    /// Gain `[Dh]` of q's norm.
    pub q_norm: Option<&'a [f32]>,
    /// Gain `[Dh]` of k's norm.
    pub k_norm: Option<&'a [f32]>,
    /// `None` in layers without RoPE.
    pub rope: Option<&'a Frequencies>,
}

/// Twin. `qkv` is `[T, stride]`; `keys` and `values` are a layer's `[slots, Hkv Dh]`.
pub fn rope_kv(rows: CallRows<'_>, op: &RopeKv<'_>, stride: usize, qkv: &mut [f64], keys: &mut [f64], values: &mut [f64]) {
    let Heads { query, key_value, dim } = op.heads;
    let kv_size = key_value * dim;
    for (r, row) in rows.iter().enumerate() {
        let qkv = &mut qkv[r * stride..][..(query + 2 * key_value) * dim];
        for (h, head) in qkv.chunks_exact_mut(dim).take(query + key_value).enumerate() {
            if let Some(gain) = if h < query { op.q_norm } else { op.k_norm } {
                let norm = inverse_rms(head, op.eps);
                for (v, &g) in head.iter_mut().zip(gain) {
                    *v *= norm * f64::from(g);
                }
            }
            if let Some(rope) = op.rope {
                for i in 0..dim / 2 {
                    let (cos, sin) = rope.rotation(row.position, i);
                    let (a, b) = (head[i], head[i + dim / 2]);
                    head[i] = a * cos - b * sin;
                    head[i + dim / 2] = b * cos + a * sin;
                }
            }
            if h < query {
                for v in head.iter_mut() {
                    *v *= f64::from(row.query_scale);
                }
            }
        }
        let (k, v) = qkv[query * dim..].split_at(kv_size);
        keys[row.slot * kv_size..][..kv_size].copy_from_slice(k);
        values[row.slot * kv_size..][..kv_size].copy_from_slice(v);
    }
}

#[cfg(test)]
mod tests {
    use std::f64::consts::PI;

    use super::super::testing::{close, words};
    use super::*;
    use crate::model::arch::RopeScaling;

    const HEADS: Heads = Heads { query: 1, key_value: 1, dim: 2 };

    fn run(op: &RopeKv<'_>, position: u32, scale: f32, qkv: &[f64]) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let mut words = words(&[(0, position, 1, 0..2, 0..0)], 0..0, 0..0);
        *words.last_mut().unwrap() = scale.to_bits();
        let (mut qkv, mut k, mut v) = (qkv.to_vec(), vec![9.0; 4], vec![9.0; 4]);
        rope_kv(CallRows::new(&words), op, 6, &mut qkv, &mut k, &mut v);
        (qkv, k, v)
    }

    #[test]
    fn rotation_and_slots_by_hand() {
        let rope = Frequencies { per_position: vec![PI / 4.0], attention_factor: 1.0 };
        let op = RopeKv { heads: HEADS, eps: 0.0, q_norm: None, k_norm: None, rope: Some(&rope) };
        // A quarter turn at position 2: (a, b) -> (-b, a).
        let (q, k, v) = run(&op, 2, 1.0, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert!(close(&q[..2], &[-2.0, 1.0], 1e-12));
        assert!(close(&k, &[9.0, 9.0, -4.0, 3.0], 1e-12));
        assert!(close(&v, &[9.0, 9.0, 5.0, 6.0], 0.0));
        // Control: another position, another answer.
        assert!(!close(&run(&op, 3, 1.0, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).0[..2], &[-2.0, 1.0], 1e-3));
    }

    #[test]
    fn norm_and_query_scale_by_hand() {
        let op = RopeKv { heads: HEADS, eps: 3.5, q_norm: Some(&[1.0, 2.0]), k_norm: None, rope: None };
        let (q, k, _) = run(&op, 2, 8.0, &[3.0, 4.0, 3.0, 4.0, 5.0, 6.0]); // mean square 12.5 + 3.5 = 16
        assert!(close(&q[..2], &[6.0, 16.0], 1e-12));
        assert!(close(&k[2..], &[3.0, 4.0], 0.0), "the query's norm and scale leave k alone");
    }

    #[test]
    fn stretched_frequencies_by_hand() {
        let at = |scaling| Frequencies::new(&Rope { theta: 10_000.0, scaling }, 8);
        let plain = at(RopeScaling::Default);
        assert!(close(&plain.per_position, &[1.0, 0.1, 0.01, 0.001], 1e-15));
        assert!(close(&at(RopeScaling::Linear { factor: 2.0 }).per_position, &[0.5, 0.05, 0.005, 0.0005], 1e-15));
        // Wavelengths 6.28, 62.8, 628, 6283: with original 1000 and factors 1 and 8 the bounds are 1000 and 125.
        let llama = RopeScaling::Llama3 { factor: 4.0, low_freq_factor: 1.0, high_freq_factor: 8.0, original: 1000.0 };
        let smooth = (1000.0 / (200.0 * PI) - 1.0) / 7.0;
        let middle = 0.01 * (smooth + (1.0 - smooth) / 4.0);
        assert!(close(&at(llama).per_position, &[1.0, 0.1, middle, 0.000_25], 1e-12));
        // Corrections: 8 ln(4096 / (r 2 pi)) / (2 ln 10^4): 1.309 at r = 32, 2.814 at r = 1; truncated to 1 and 3.
        let yarn = |truncate| RopeScaling::Yarn {
            factor: 4.0,
            original: 4096.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 1.5,
            truncate,
        };
        let stretched = at(yarn(true));
        assert!(close(&stretched.per_position, &[1.0, 0.1, 0.01 * (0.5 + 0.125), 0.000_25], 1e-12));
        assert_eq!(stretched.rotation(0, 0), (1.5, 0.0));
        assert!(!close(&at(yarn(false)).per_position, &stretched.per_position, 1e-6));
    }

    #[test]
    fn the_table_is_the_rotation_in_f32() {
        let rope = Frequencies::new(&Rope { theta: 10_000.0, scaling: RopeScaling::Default }, 4);
        let table = rope.table(3);
        assert_eq!(table.len(), 3 * 2 * 2);
        let (cos, sin) = rope.rotation(2, 1);
        assert_eq!(table[(2 * 2 + 1) * 2..], [cos as f32, sin as f32]);
    }
}
