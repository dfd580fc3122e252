// A bias for every output.
// include shared/vectors.wgsl
fn with_bias(y: f32, o: u32) -> f32 {
    return y + vectors[params.bias_at + o];
}
