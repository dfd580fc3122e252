// No bias.
fn with_bias(y: f32, o: u32) -> f32 {
    return y;
}
