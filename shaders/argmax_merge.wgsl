// Per row: the largest entry over all chunks of the vocabulary (smallest id among equals) and its softmax probability.
//
// | binding | name | access | shape | meaning |
// | --- | --- | --- | --- | --- |
// | 0 | parts | read | [rows, chunks, 4] | what argmax.wgsl wrote |
// | 1 | choices | write | [rows, 2] | token, probability (f32 bits; NaN if an entry was not a number) |
// | 2 | params | uniform | | sizes |
//
// A workgroup owns one row. Grid: (1, rows). Twin: src/kernels/argmax.rs.

// include shared/reduce_workgroup.wgsl as reduce
const N: u32 = 2u;
const LOWEST: f32 = -3.4e38;
const NO_ID: u32 = 0xffffffu;

struct Params {
    chunks: u32,
}

@group(0) @binding(0) var<storage, read> parts: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> choices: array<vec2<u32>>;
@group(0) @binding(2) var<uniform> params: Params;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, lane: Lane) {
    let at = group.y * params.chunks;
    var best = array<f32, N>(LOWEST, 0.0);
    for (var c = lane.index; c < params.chunks; c += 64u) {
        let part = parts[at + c];
        best[0] = max(best[0], bitcast<f32>(part.x));
        best[1] = max(best[1], f32(part.w));
    }
    reduce_max(&best, lane);
    var smallest = array<f32, N>(-f32(NO_ID), 0.0);
    var sum = array<f32, N>(0.0, 0.0);
    for (var c = lane.index; c < params.chunks; c += 64u) {
        let part = parts[at + c];
        if (bitcast<f32>(part.x) == best[0]) {
            smallest[0] = max(smallest[0], -f32(part.y));
        }
        sum[0] += bitcast<f32>(part.z) * exp(bitcast<f32>(part.x) - best[0]);
    }
    reduce_max(&smallest, lane);
    reduce_sum(&sum, lane);
    if (lane.index == 0u) {
        let id = u32(-smallest[0]);
        let certain = best[1] == 0.0 && id != NO_ID;
        choices[group.y] = vec2<u32>(select(id, 0u, id == NO_ID), select(0x7fc00000u, bitcast<u32>(1.0 / sum[0]), certain));
    }
}
