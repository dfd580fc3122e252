// Weights with a scale and a bias per group.
// include shared/scale_f16.wgsl as scale
@group(0) @binding(3) var<storage, read> scales: array<u32>;

fn affine_at(at: u32) -> vec2<f32> {
    return unpack_affine(scales[at]);
}
