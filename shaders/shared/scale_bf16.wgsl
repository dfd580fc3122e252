// Scale (low half) and bias (high half) of an affine group, both bf16: the upper half of an f32.
fn unpack_affine(pair: u32) -> vec2<f32> {
    return vec2<f32>(bitcast<f32>(pair << 16u), bitcast<f32>(pair & 0xffff0000u));
}
