// The model's f32 vectors, one behind the other.
@group(0) @binding(7) var<storage, read> vectors: array<f32>;
