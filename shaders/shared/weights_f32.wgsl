// f32 weights: a block holds 4 inputs.
const BLOCK_VECS: u32 = 1u;
const AFFINE: bool = false;

fn unpack(block: vec4<u32>, v: u32, affine: vec2<f32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(block);
}
