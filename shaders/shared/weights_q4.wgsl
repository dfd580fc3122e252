// 4-bit affine weights: a block holds 32 inputs, word j has inputs 8j..8j+4 in its low and 8j+4..8j+8 in its high nibbles.
const BLOCK_VECS: u32 = 8u;
const AFFINE: bool = true;

fn unpack(block: vec4<u32>, v: u32, affine: vec2<f32>) -> vec4<f32> {
    let q = vec4<f32>(unpack4xU8((block[v / 2u] >> (4u * (v % 2u))) & 0x0f0f0f0fu));
    return fma(q, vec4<f32>(affine.x), vec4<f32>(affine.y));
}
