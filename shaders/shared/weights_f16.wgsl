// f16 weights: a block holds 8 inputs, two a word, the first in the low half.
const BLOCK_VECS: u32 = 2u;
const AFFINE: bool = false;

fn unpack(block: vec4<u32>, v: u32, affine: vec2<f32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(block[2u * v]), unpack2x16float(block[2u * v + 1u]));
}
