// 8-bit affine weights: a block holds 16 inputs, four a word, lowest byte first.
const BLOCK_VECS: u32 = 4u;
const AFFINE: bool = true;

fn unpack(block: vec4<u32>, v: u32, affine: vec2<f32>) -> vec4<f32> {
    let q = vec4<f32>(unpack4xU8(block[v]));
    return fma(q, vec4<f32>(affine.x), vec4<f32>(affine.y));
}
