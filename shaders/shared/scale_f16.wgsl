// Scale (low half) and bias (high half) of an affine group, both f16.
fn unpack_affine(pair: u32) -> vec2<f32> {
    return unpack2x16float(pair);
}
