//! `y[r, o] = norm(r) * sum_k W[o, k] * input[r, k] (+ bias[o]) (+ LoRA)`, and what becomes of `y`.

use std::ops::Range;

use crate::model::program::{Arrangement, LoraB};
use crate::weights::packed::PackedRows;

/// The residual stream, when a product is to be divided by its root mean square.
#[derive(Debug, Clone, Copy)]
pub struct Norm<'a, T> {
    /// H `[T, stride]`.
    pub h: &'a [T],
    /// Row stride of `h`.
    pub stride: usize,
    /// D.
    pub width: usize,
    /// Added to the mean square.
    pub eps: f64,
}

/// The low-rank part.
#[derive(Debug, Clone)]
pub struct Lora<'a, T> {
    /// Rank, scale and segments.
    pub spec: LoraB,
    /// B `[n, rank]`.
    pub b: &'a PackedRows,
    /// Inner activations `[T, stride]`.
    pub inner: &'a [T],
    /// Row stride of `inner`.
    pub stride: usize,
    /// Rows it is added to.
    pub adapter: Range<usize>,
}

/// Operands of a product.
#[derive(Debug, Clone)]
pub struct Operands<'a, T> {
    /// W `[n, k]`.
    pub weight: &'a PackedRows,
    /// `[T, stride]`, of which `0..k` of a row is read.
    pub input: &'a [T],
    /// Row stride of `input`.
    pub stride: usize,
    /// Rows of the call to compute.
    pub rows: Range<usize>,
    /// RMSNorm of the residual stream.
    pub norm: Option<Norm<'a, T>>,
    /// `[n]`.
    pub bias: Option<&'a [f32]>,
    /// Low-rank part.
    pub lora: Option<Lora<'a, T>>,
}

/// `1 / sqrt(mean(row^2) + eps)`.
pub fn inverse_rms<T: Copy + Into<f64>>(row: &[T], eps: f64) -> f64 {
    let mut sum = 0.0;
    for &v in row {
        let v: f64 = v.into();
        sum += v * v;
    }
    1.0 / (sum / row.len() as f64 + eps).sqrt()
}

/// Segment of the LoRA's inner activations that output `o` reads.
#[must_use]
pub fn segment(lora: &LoraB, o: usize) -> usize {
    match lora.arrangement {
        Arrangement::Interleaved => o % 2,
        Arrangement::Stacked => lora.segment_starts.iter().filter(|&&start| o >= start).count(),
    }
}

/// Twin of the matrix product: `y [rows, n]`, stride `n`, before anything is done with it.
#[must_use]
pub fn product<T: Copy + Into<f64>>(op: &Operands<'_, T>) -> Vec<f64> {
    let (n, k) = (op.weight.n, op.weight.k);
    let count = op.rows.len();
    let norms: Vec<f64> = op
        .rows
        .clone()
        .map(|r| op.norm.map_or(1.0, |norm| inverse_rms(&norm.h[r * norm.stride..][..norm.width], norm.eps)))
        .collect();
    let mut y = vec![0.0; count * n];
    for o in 0..n {
        let weights: Vec<f64> = (0..k).map(|i| op.weight.get(o, i)).collect();
        for (i, r) in op.rows.clone().enumerate() {
            let input = &op.input[r * op.stride..][..k];
            let mut sum = 0.0;
            for (w, &v) in weights.iter().zip(input) {
                sum += w * v.into();
            }
            let mut value = norms[i] * sum;
            if let Some(bias) = op.bias {
                value += f64::from(bias[o]);
            }
            if let Some(lora) = op.lora.as_ref().filter(|l| l.adapter.contains(&r)) {
                let inner = &lora.inner[r * lora.stride + segment(&lora.spec, o) * lora.spec.rank..];
                let mut sum = 0.0;
                for (j, &v) in inner.iter().take(lora.spec.rank).enumerate() {
                    sum += lora.b.get(o, j) * v.into();
                }
                value += f64::from(lora.spec.scale) * sum;
            }
            y[i * n + o] = value;
        }
    }
    y
}

/// [`crate::model::program::Output::Store`]: row `i` of `y` becomes row `first_row + i` of `act [rows, stride]`.
pub fn store(y: &[f64], n: usize, first_row: usize, stride: usize, act: &mut [f64]) {
    for (i, row) in y.chunks_exact(n).enumerate() {
        act[(first_row + i) * stride..][..n].copy_from_slice(row);
    }
}

/// [`crate::model::program::Output::Residual`]: `H += y`, `X = H * gain`, for rows `0..` of `h` and `x`.
pub fn residual(y: &[f64], n: usize, gain: &[f32], stride: usize, h: &mut [f64], x: &mut [f64]) {
    for (r, row) in y.chunks_exact(n).enumerate() {
        for (o, value) in row.iter().enumerate() {
            let sum = h[r * stride + o] + value;
            h[r * stride + o] = sum;
            x[r * stride + o] = sum * f64::from(gain[o]);
        }
    }
}

/// [`crate::model::program::Output::SwiGlu`]: `act[r, j] = silu(y[2j]) * y[2j+1]`.
pub fn swiglu(y: &[f64], n: usize, stride: usize, act: &mut [f64]) {
    for (r, row) in y.chunks_exact(n).enumerate() {
        for (j, pair) in row.chunks_exact(2).enumerate() {
            let (gate, up) = (pair[0], pair[1]);
            act[r * stride + j] = gate / (1.0 + (-gate).exp()) * up;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Q8, close, random, set, set_scale, zeros};
    use super::*;
    use crate::model::program::MatrixId;
    use crate::weights::packed::Format;

    fn plain<'a>(weight: &'a PackedRows, input: &'a [f32], rows: Range<usize>) -> Operands<'a, f32> {
        Operands { weight, input, stride: 32, rows, norm: None, bias: None, lora: None }
    }

    #[test]
    fn norm_bias_and_lora_by_hand() {
        let mut w = zeros(Format::F32, 2, 2);
        for (o, k, v) in [(0, 0, 1.0), (0, 1, 2.0), (1, 0, 3.0), (1, 1, 4.0)] {
            set(&mut w, o, k, 0, v);
        }
        let mut b = zeros(Format::F32, 2, 1);
        set(&mut b, 0, 0, 0, 10.0);
        set(&mut b, 1, 0, 0, 100.0);
        let mut input = vec![0f32; 64];
        input[..2].copy_from_slice(&[5.0, 6.0]);
        input[32..34].copy_from_slice(&[7.0, 8.0]);
        let mut h = vec![0f32; 64];
        h[..2].copy_from_slice(&[3.0, 4.0]); // mean square 12.5, + 3.5 = 16
        h[32..34].copy_from_slice(&[0.0, 1.0]); // 0.5 + 3.5 = 4
        let inner = [0f32, 0.0, 2.0, 3.0];
        let spec = LoraB { b: MatrixId(0), rank: 1, scale: 0.5, segment_starts: [1, 2], arrangement: Arrangement::Stacked };
        let mut op = plain(&w, &input, 0..2);
        op.norm = Some(Norm { h: &h, stride: 32, width: 2, eps: 3.5 });
        op.bias = Some(&[0.25, 0.5]);
        op.lora = Some(Lora { spec, b: &b, inner: &inner, stride: 2, adapter: 1..2 });
        // row 0: 17/4 + 0.25, 39/4 + 0.5; row 1: 23/2 + 0.25 + 0.5*10*2, 53/2 + 0.5 + 0.5*100*3
        assert!(close(&product(&op), &[4.5, 10.25, 21.75, 177.0], 1e-12));
        // Interleaved: output o reads segment o % 2, which is the same here; one segment makes both read the first.
        op.lora.as_mut().unwrap().spec.segment_starts = [2, 2];
        assert!(close(&product(&op), &[4.5, 10.25, 21.75, 127.0], 1e-12));
        // Control: the adapter on the other row is noticed.
        op.lora.as_mut().unwrap().adapter = 0..1;
        assert!(!close(&product(&op), &[4.5, 10.25, 21.75, 127.0], 1e-3));
    }

    #[test]
    fn affine_weights_by_hand() {
        let mut w = zeros(Q8, 9, 70);
        set_scale(&mut w, 8, 0, 0.25, -2.0);
        set_scale(&mut w, 8, 1, 2.0, 1.0);
        set(&mut w, 8, 3, 200, 0.0); // 48
        set(&mut w, 8, 69, 5, 0.0); // 11
        let mut input = vec![0f32; 96];
        input[3] = 2.0;
        input[4] = 1.0; // -2
        input[69] = 3.0;
        let y = product(&Operands { stride: 96, ..plain(&w, &input, 0..1) });
        assert!(close(&y[8..], &[96.0 - 2.0 + 33.0], 1e-12));
    }

    #[test]
    fn outputs_by_hand() {
        let y = [1.0, 2.0, 0.0, 4.0];
        let (mut h, mut x) = (vec![10.0; 4], vec![0.0; 4]);
        residual(&y, 2, &[1.0, 3.0], 2, &mut h, &mut x);
        assert_eq!((h, x), (vec![11.0, 12.0, 10.0, 14.0], vec![11.0, 36.0, 10.0, 42.0]));
        let mut ff = vec![0.0; 2];
        swiglu(&y, 2, 1, &mut ff);
        assert!(close(&ff, &[2.0 / (1.0 + (-1f64).exp()), 0.0], 1e-15));
        let mut act = vec![0.0; 9];
        store(&y, 2, 1, 3, &mut act);
        assert_eq!(act, [0.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 4.0, 0.0]);
    }

    #[test]
    fn a_row_does_not_depend_on_its_neighbours() {
        let w = random(Q8, 11, 64, 3);
        let input = super::super::testing::Random(9).values(64 * 5);
        let op = |rows| Operands { stride: 64, ..plain(&w, &input, rows) };
        let wide = product(&op(0..5));
        assert_eq!(product(&op(3..4)), wide[3 * 11..4 * 11]);
        assert_ne!(product(&op(2..3)), wide[3 * 11..4 * 11]);
    }
}
