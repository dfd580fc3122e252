// H[r] = table[token of r], or the mask embedding; X[r] = H[r] * gain.
//
// | binding | name | access | shape | meaning |
// | --- | --- | --- | --- | --- |
// | 0 | data | read | part of packed [V, D] | table, one part of it (src/weights/packed.rs) |
// | 1 | scales | read | [tiles, groups, 8] | its scales (any buffer for formats without) |
// | 2 | vectors | read | all vectors | gain, mask embedding |
// | 3 | call | read | words | rows of the call |
// | 4 | h | write | [T, stride] | residual stream |
// | 5 | x | write | [T, stride] | residual stream times gain |
// | 6 | params | uniform | | sizes |
//
// A thread owns four neighbouring dimensions of one row; rows whose token is in another part are left alone, mask rows
// belong to the part of table row 0. Grid: (ceil(D / 256), T). Twin: src/kernels/embed.rs.

// include shared/call.wgsl
// include shared/weights_q4.wgsl as weights
// include shared/scale_f16.wgsl as scale

struct Params {
    width: u32, // D
    stride: u32, // of h and x
    first_row: u32, // of the part
    rows: u32, // in the part
    blocks: u32, // per table row
    groups: u32, // per table row
    group: u32, // inputs per scale; 1 for formats without
    gain_at: u32, // in vectors
    mask_at: u32, // in vectors, or NONE
}

@group(0) @binding(0) var<storage, read> data: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> scales: array<u32>;
@group(0) @binding(2) var<storage, read> vectors: array<f32>;
@group(0) @binding(3) var<storage, read> call: array<u32>;
@group(0) @binding(4) var<storage, read_write> h: array<f32>;
@group(0) @binding(5) var<storage, read_write> x: array<f32>;
@group(0) @binding(6) var<uniform> params: Params;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let d = id.x * 4u;
    let row = id.y;
    if (d >= params.width) {
        return;
    }
    let token = call[HEADER_WORDS + row * ROW_WORDS + ROW_TOKEN];
    var value = vec4<f32>(0.0);
    if (token == MASK_EMBEDDING) {
        if (params.first_row != 0u || params.mask_at == NONE) {
            return;
        }
        for (var i = 0u; i < 4u; i++) { // unroll
            if (d + i < params.width) {
                value[i] = vectors[params.mask_at + d + i];
            }
        }
    } else {
        if (token < params.first_row || token >= params.first_row + params.rows) {
            return;
        }
        let local = token - params.first_row;
        let tile = local / 8u;
        let lane = local % 8u;
        var affine = vec2<f32>(1.0, 0.0);
        if (AFFINE) {
            affine = unpack_affine(scales[(tile * params.groups + d / params.group) * 8u + lane]);
        }
        let block = data[(tile * params.blocks + d / 4u / BLOCK_VECS) * 8u + lane];
        value = unpack(block, d / 4u % BLOCK_VECS, affine);
    }
    for (var i = 0u; i < 4u; i++) { // unroll
        if (d + i < params.width) {
            let at = row * params.stride + d + i;
            h[at] = value[i];
            x[at] = value[i] * vectors[params.gain_at + d + i];
        }
    }
}
