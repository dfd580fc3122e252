//! Per row and head: softmax over the keys the row sees, times their values, into `Attn`.

use super::{CallRows, Heads};

/// A layer's keys and values `[slots, Hkv Dh]`, scratch slots behind the cache.
#[derive(Debug, Clone, Copy)]
pub struct KeyValues<'a, T> {
    /// Keys, rotated.
    pub keys: &'a [T],
    /// Values.
    pub values: &'a [T],
}

/// Twin: `attn[r, h] = sum_j p_j v_j`, `p = softmax(q_h . k_j / sqrt(Dh))` over [`super::CallRow::keys`] in their order.
/// `qkv` is `[T, stride]` with rotated queries first, `attn` is `[T, attn_stride]`.
#[allow(clippy::too_many_arguments, reason = "the kernel's bindings, one by one")]
pub fn attention<T: Copy + Into<f64>, K: Copy + Into<f64>>(
    rows: CallRows<'_>,
    heads: Heads,
    window: Option<u32>,
    qkv: &[T],
    stride: usize,
    cache: KeyValues<'_, K>,
    attn: &mut [f64],
    attn_stride: usize,
) {
    let Heads { query, key_value, dim } = heads;
    let kv_size = key_value * dim;
    for (r, row) in rows.iter().enumerate() {
        for h in 0..query {
            let q = &qkv[r * stride + h * dim..][..dim];
            let at = |slot: usize| slot * kv_size + h / (query / key_value) * dim;
            let scores: Vec<f64> = row
                .keys(window)
                .map(|slot| {
                    let mut dot = 0.0;
                    for (&a, &b) in q.iter().zip(&cache.keys[at(slot)..][..dim]) {
                        dot += a.into() * b.into();
                    }
                    dot / (dim as f64).sqrt()
                })
                .collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let mut total = 0.0;
            let mut out = vec![0.0; dim];
            for (slot, score) in row.keys(window).zip(&scores) {
                let weight = (score - largest).exp();
                total += weight;
                for (sum, &v) in out.iter_mut().zip(&cache.values[at(slot)..][..dim]) {
                    *sum += weight * v.into();
                }
            }
            for (to, sum) in attn[r * attn_stride + h * dim..][..dim].iter_mut().zip(&out) {
                *to = sum / total;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{close, words};
    use super::*;

    /// One head of one dimension: score = q * k, values chosen so that weights can be read off.
    fn run(cache: std::ops::Range<u32>, scratch: std::ops::Range<u32>, window: Option<u32>) -> f64 {
        let words = words(&[(0, 3, 3, cache, scratch)], 0..0, 0..0);
        let heads = Heads { query: 1, key_value: 1, dim: 1 };
        let ln = f64::ln;
        let keys = [ln(1.0), ln(2.0), ln(3.0), ln(4.0), ln(5.0), f64::NAN];
        let values = [1.0, 10.0, 100.0, 1000.0, 10_000.0, f64::NAN];
        let mut out = [f64::NAN];
        let cache = KeyValues { keys: &keys, values: &values };
        attention(CallRows::new(&words), heads, window, &[1f32], 1, cache, &mut out, 1);
        out[0]
    }

    #[test]
    fn ranges_and_window_by_hand() {
        assert!(close(&[run(0..3, 0..0, None)], &[(1.0 + 20.0 + 300.0) / 6.0], 1e-10));
        assert!(close(&[run(1..2, 4..5, None)], &[(20.0 + 50_000.0) / 7.0], 1e-10));
        // The row stands at position 3; a window of 2 leaves slots 2 and 3, and its scratch.
        assert!(close(&[run(0..4, 4..5, Some(2))], &[(300.0 + 4000.0 + 50_000.0) / 12.0], 1e-10));
        // Controls: one slot more or less is noticed.
        assert!(!close(&[run(0..4, 0..0, None)], &[(1.0 + 20.0 + 300.0) / 6.0], 1e-3));
        assert!(run(0..3, 5..6, None).is_nan());
    }

    #[test]
    fn query_heads_share_key_heads() {
        // Four query heads on two key heads of dimension 2; a single key, so the output is its value.
        let words = words(&[(0, 0, 0, 0..1, 0..0)], 0..0, 0..0);
        let heads = Heads { query: 4, key_value: 2, dim: 2 };
        let values = [1f32, 2.0, 3.0, 4.0];
        let mut out = [0.0; 8];
        let cache = KeyValues { keys: &[0.5f32; 4], values: &values };
        attention(CallRows::new(&words), heads, None, &[1f32; 16], 16, cache, &mut out, 8);
        assert_eq!(out, [1.0, 2.0, 1.0, 2.0, 3.0, 4.0, 3.0, 4.0]);
    }

    #[test]
    fn scores_are_scaled_by_the_root_of_the_head_size() {
        let words = words(&[(0, 1, 1, 0..2, 0..0)], 0..0, 0..0);
        let heads = Heads { query: 1, key_value: 1, dim: 4 };
        let (mut keys, mut values) = ([0.0; 8], [0.0; 8]);
        keys[4] = 2.0 * 3f64.ln(); // q . k / 2 = ln 3
        values[4] = 1.0;
        let mut out = [0.0; 4];
        let cache = KeyValues { keys: &keys, values: &values };
        attention(CallRows::new(&words), heads, None, &[1.0, 0.0, 0.0, 0.0], 4, cache, &mut out, 4);
        assert!(close(&out, &[0.75, 0.0, 0.0, 0.0], 1e-12));
    }
}
