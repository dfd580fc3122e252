// Weights without scales.
fn affine_at(at: u32) -> vec2<f32> {
    return vec2<f32>(1.0, 0.0);
}
