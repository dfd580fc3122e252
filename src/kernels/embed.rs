//! `H[r] = embedding of row r`, `X[r] = H[r] * gain`.

use super::CallRows;
use crate::model::call_rows::MASK_EMBEDDING;
use crate::weights::packed::PackedRows;

/// Twin of the embedding kernel. `table` is `[V, D]`, `mask` `[D]` is what stands at rows whose token is
/// [`MASK_EMBEDDING`], `gain` is `[D]`; `h` and `x` are `[T, stride]`, of which `0..D` of every row is written.
pub fn embed(
    rows: CallRows<'_>,
    table: &PackedRows,
    mask: Option<&[f32]>,
    gain: &[f32],
    stride: usize,
    h: &mut [f64],
    x: &mut [f64],
) {
    for (r, row) in rows.iter().enumerate() {
        for d in 0..table.k {
            let value = match (row.token, mask) {
                (MASK_EMBEDDING, Some(mask)) => f64::from(mask[d]),
                _ => table.get(row.token as usize, d),
            };
            h[r * stride + d] = value;
            x[r * stride + d] = value * f64::from(gain[d]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Q4, close, set, set_scale, words, zeros};
    use super::*;

    #[test]
    fn tokens_and_masks_by_hand() {
        let mut table = zeros(Q4, 3, 32);
        set_scale(&mut table, 2, 0, 0.5, -1.0);
        set(&mut table, 2, 0, 3, 0.0); // 0.5 * 3 - 1 = 0.5
        set(&mut table, 2, 5, 15, 0.0); // 6.5
        let mut mask = vec![0.0; 32];
        mask[1] = 4.0;
        let mut gain = vec![1.0; 32];
        gain[5] = 2.0;
        let words = words(&[(2, 0, 0, 0..1, 0..0), (MASK_EMBEDDING, 1, 1, 0..2, 0..0)], 0..0, 0..0);
        let (mut h, mut x) = (vec![f64::NAN; 64], vec![f64::NAN; 64]);
        embed(CallRows::new(&words), &table, Some(&mask), &gain, 32, &mut h, &mut x);
        assert!(close(&h[..6], &[0.5, -1.0, -1.0, -1.0, -1.0, 6.5], 0.0));
        assert!(close(&x[..6], &[0.5, -1.0, -1.0, -1.0, -1.0, 13.0], 0.0));
        assert!(close(&h[32..35], &[0.0, 4.0, 0.0], 0.0));
        // Control: another gain is noticed.
        gain[5] = 2.5;
        let before = x.clone();
        embed(CallRows::new(&words), &table, Some(&mask), &gain, 32, &mut h, &mut x);
        assert!(!close(&x, &before, 1e-3));
    }
}
