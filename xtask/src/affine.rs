//! Affine group quantisation as the MLX community publishes it, made from GGUF blocks without losing a bit.
//!
//! A matrix `X` of `[out, in]` becomes three tensors: `X.weight` u32 `[out, in * bits / 32]` (lowest bits first, along the
//! inputs), `X.scales` and `X.biases` f16 `[out, in / 32]`, with `w = scale * q + bias`.
//!
//! * Q4_1 is that already, but for the order of its nibbles: `bias` is its minimum.
//! * Q8_0 is `scale * q` with signed q; as affine: `q + 128`, `bias = -128 * scale`. Multiplying an f16 by a power of two
//!   is exact unless it overflows, which is an error here, not a rounding.

use half::f16;

use crate::gguf::{BLOCK, Tensor, TensorType};

/// Why a tensor cannot be written as affine groups.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum AffineError {
    /// Unquantised or otherwise stored.
    #[error("tensor {name} is {kind:?}, expected {expected:?}")]
    WrongType {
        /// The tensor.
        name: String,
        /// Its type.
        kind: TensorType,
        /// The type called for.
        expected: TensorType,
    },
    /// A scale or minimum that is infinite or not a number.
    #[error("tensor {name}, row {row}, block {block}: {what} is {value}")]
    NotFinite {
        /// The tensor.
        name: String,
        /// Output row.
        row: usize,
        /// Block within the row.
        block: usize,
        /// Which number.
        what: &'static str,
        /// Its value.
        value: f32,
    },
    /// `-128 * scale` is beyond f16.
    #[error("tensor {name}, row {row}, block {block}: -128 times the scale {scale} has no exact f16")]
    BiasNotExact {
        /// The tensor.
        name: String,
        /// Output row.
        row: usize,
        /// Block within the row.
        block: usize,
        /// The scale.
        scale: f32,
    },
}

/// One matrix as affine groups of 32.
#[derive(Debug, Clone, PartialEq)]
pub struct Affine {
    /// Bits per value: 4 or 8.
    pub bits: usize,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// `[rows, cols * bits / 32]`.
    pub weight: Vec<u32>,
    /// `[rows, cols / 32]`.
    pub scales: Vec<f16>,
    /// `[rows, cols / 32]`.
    pub biases: Vec<f16>,
}

impl Affine {
    /// Converts a matrix of type `expected` (Q4_1 or Q8_0). Output row `r` is taken from row `source_row(r)`.
    ///
    /// # Errors
    /// [`AffineError`] when the tensor is of another type or one of its numbers cannot be kept exactly.
    pub fn from_gguf(
        tensor: &Tensor<'_>,
        expected: TensorType,
        source_row: impl Fn(usize) -> usize,
    ) -> Result<Self, AffineError> {
        let wrong_type = || AffineError::WrongType { name: tensor.name.clone(), kind: tensor.kind, expected };
        let bits = match expected {
            TensorType::Q4_1 => 4,
            TensorType::Q8_0 => 8,
            TensorType::F32 => return Err(wrong_type()),
        };
        if tensor.kind != expected {
            return Err(wrong_type());
        }
        let (rows, cols) = (tensor.rows, tensor.cols);
        let (groups, block_bytes) = (cols / BLOCK, expected.block().1);
        let mut affine = Self {
            bits,
            rows,
            cols,
            weight: Vec::with_capacity(rows * cols * bits / 32),
            scales: Vec::with_capacity(rows * groups),
            biases: Vec::with_capacity(rows * groups),
        };
        for row in 0..rows {
            let from = source_row(row) * groups * block_bytes;
            for (block, bytes) in tensor.data[from..from + groups * block_bytes].chunks_exact(block_bytes).enumerate() {
                let finite = |what, at: usize| {
                    let value = f16::from_le_bytes([bytes[at], bytes[at + 1]]);
                    if value.is_finite() {
                        Ok(value)
                    } else {
                        Err(AffineError::NotFinite { name: tensor.name.clone(), row, block, what, value: value.to_f32() })
                    }
                };
                let scale = finite("the scale", 0)?;
                affine.scales.push(scale);
                affine.biases.push(match expected {
                    TensorType::Q4_1 => {
                        affine.weight.extend(q4_1_words(&bytes[4..]));
                        finite("the minimum", 2)?
                    }
                    _ => {
                        affine.weight.extend(q8_0_words(&bytes[2..]));
                        let exact = scale.to_f32() * -128.0;
                        let bias = f16::from_f32(exact);
                        if bias.to_f32() != exact {
                            return Err(AffineError::BiasNotExact {
                                name: tensor.name.clone(),
                                row,
                                block,
                                scale: scale.to_f32(),
                            });
                        }
                        bias
                    }
                });
            }
        }
        Ok(affine)
    }
}

/// Four words of eight 4-bit values. Input `i < 16` is the low nibble of byte `i`, input `16 + i` its high one.
fn q4_1_words(nibbles: &[u8]) -> impl Iterator<Item = u32> {
    let word = |half: &[u8], shift: u32| half.iter().rev().fold(0u32, |word, byte| (word << 4) | u32::from((byte >> shift) & 15));
    let (first, second) = nibbles.split_at(BLOCK / 4);
    [word(first, 0), word(second, 0), word(first, 4), word(second, 4)].into_iter()
}

/// Eight words of four 8-bit values, `q + 128`.
fn q8_0_words(values: &[u8]) -> impl Iterator<Item = u32> + '_ {
    // Adding 128 to a signed byte is flipping its top bit.
    values.chunks_exact(4).map(|four| u32::from_le_bytes([four[0], four[1], four[2], four[3]]) ^ 0x8080_8080)
}

/// The values of one row of an affine matrix by its definition, in f32 arithmetic. `weight`, `scales` and `biases` are that
/// row's parts.
#[must_use]
pub fn dequantise_row(bits: usize, weight: &[u32], scales: &[f16], biases: &[f16]) -> Vec<f32> {
    let per_word = 32 / bits;
    let mask = (1u32 << bits) - 1;
    let values = weight.iter().flat_map(|word| (0..per_word).map(move |i| (word >> (i * bits)) & mask));
    let groups = scales.iter().zip(biases).flat_map(|group| std::iter::repeat_n(group, BLOCK));
    values.zip(groups).map(|(q, (scale, bias))| scale.to_f32() * q as f32 + bias.to_f32()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks with varied bytes. `scale(block)` gives each block's f16 scale.
    fn tensor_bytes(kind: TensorType, rows: usize, cols: usize, scale: impl Fn(usize) -> f32) -> Vec<u8> {
        let mut seed = 12345u32;
        let mut random = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 24) as u8
        };
        let mut bytes = Vec::new();
        for block in 0..rows * cols / BLOCK {
            bytes.extend(f16::from_f32(scale(block)).to_le_bytes());
            if kind == TensorType::Q4_1 {
                bytes.extend(f16::from_f32(-3.7 * scale(block)).to_le_bytes());
            }
            let quants = kind.block().1 - if kind == TensorType::Q4_1 { 4 } else { 2 };
            bytes.extend((0..quants).map(|_| random()));
        }
        bytes
    }

    fn rows_of(affine: &Affine) -> Vec<Vec<f32>> {
        let (words, groups) = (affine.cols * affine.bits / 32, affine.cols / BLOCK);
        (0..affine.rows)
            .map(|r| {
                dequantise_row(
                    affine.bits,
                    &affine.weight[r * words..][..words],
                    &affine.scales[r * groups..][..groups],
                    &affine.biases[r * groups..][..groups],
                )
            })
            .collect()
    }

    #[test]
    fn both_types_keep_every_value() {
        for kind in [TensorType::Q4_1, TensorType::Q8_0] {
            let scale = |block: usize| 0.001 * (block as f32 - 4.0) * 1.37f32.powi(block as i32 % 9);
            let data = tensor_bytes(kind, 6, 96, scale);
            let tensor = Tensor { name: "t".into(), kind, rows: 6, cols: 96, data: &data };
            let affine = Affine::from_gguf(&tensor, kind, |row| 5 - row).unwrap();
            assert_eq!(affine.weight.len(), 6 * 96 * affine.bits / 32);
            for (row, values) in rows_of(&affine).into_iter().enumerate() {
                assert_eq!(values, tensor.row(5 - row), "{kind:?} row {row}");
            }
        }
    }

    #[test]
    fn the_comparison_sees_one_wrong_nibble() {
        let data = tensor_bytes(TensorType::Q4_1, 1, 32, |_| 0.1);
        let tensor = Tensor { name: "t".into(), kind: TensorType::Q4_1, rows: 1, cols: 32, data: &data };
        let mut affine = Affine::from_gguf(&tensor, TensorType::Q4_1, |row| row).unwrap();
        affine.weight[2] ^= 1 << 12;
        let wrong = rows_of(&affine)[0].iter().zip(tensor.row(0)).filter(|(a, b)| **a != *b).count();
        assert_eq!(wrong, 1);
    }

    #[test]
    fn words_hold_the_lowest_inputs_in_the_lowest_bits() {
        // Nibble i of the block has value i % 16: low nibbles 0..15, high nibbles 0..15.
        let mut data = vec![0, 0x3c, 0, 0]; // scale 1, minimum 0
        data.extend((0..16u8).map(|i| i | (i << 4)));
        let tensor = Tensor { name: "t".into(), kind: TensorType::Q4_1, rows: 1, cols: 32, data: &data };
        let affine = Affine::from_gguf(&tensor, TensorType::Q4_1, |row| row).unwrap();
        assert_eq!(affine.weight, [0x7654_3210, 0xfedc_ba98, 0x7654_3210, 0xfedc_ba98]);
    }

    #[test]
    fn what_cannot_be_kept_exactly_is_refused() {
        let kind = TensorType::Q8_0;
        let refuse = |scale: f32| {
            let data = tensor_bytes(kind, 1, 64, |block| if block == 1 { scale } else { 1.0 });
            let tensor = Tensor { name: "embd".into(), kind, rows: 1, cols: 64, data: &data };
            Affine::from_gguf(&tensor, kind, |row| row).unwrap_err()
        };
        assert_eq!(refuse(600.0), AffineError::BiasNotExact { name: "embd".into(), row: 0, block: 1, scale: 600.0 });
        assert!(refuse(f32::NAN).to_string().starts_with("tensor embd, row 0, block 1: the scale is NaN"));
        // The smallest f16 there is still has an exact 128-fold.
        let data = tensor_bytes(kind, 1, 32, |_| f16::from_bits(1).to_f32());
        let tensor = Tensor { name: "t".into(), kind, rows: 1, cols: 32, data: &data };
        assert_eq!(rows_of(&Affine::from_gguf(&tensor, kind, |row| row).unwrap())[0], tensor.row(0));
        let error = Affine::from_gguf(&tensor, TensorType::Q4_1, |row| row).unwrap_err();
        assert_eq!(error.to_string(), "tensor t is Q8_0, expected Q4_1");
    }
}
