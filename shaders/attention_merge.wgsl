// Attention of a call that was split along the cache: merges a row's tiles in their order, as `attention.wgsl` does where
// it walks them itself.
//
// | binding | name | access | shape | meaning |
// | --- | --- | --- | --- | --- |
// | 0 | parts | read | [parts, 16, Hq, 1 + units, 4] | largest and total, then weighted sums |
// | 1 | attn | write | [T, attn_stride] | output |
// | 2 | call | read | words | rows of the call |
// | 3 | params | uniform | | sizes |
//
// A thread owns four dimensions of a head. Grid: (ceil(Hq units / 64), T). Twin: src/kernels/attention.rs.

// include shared/call.wgsl
// include shared/attention.wgsl

@group(0) @binding(0) var<storage, read> parts: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> attn: array<f32>;
@group(0) @binding(2) var<storage, read> call: array<u32>;
@group(0) @binding(3) var<uniform> params: Params;

fn part(index: u32, row: u32, head: u32, unit: u32) -> Softmax {
    let at = part_at(index, row, head);
    return Softmax(parts[at].x, parts[at].y, parts[at + 1u + unit]);
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let units = (params.dim + 3u) / 4u;
    let head = (group.x * 64u + lane) / units;
    let unit = (group.x * 64u + lane) % units;
    if (head >= params.query_heads) {
        return;
    }
    let keys = sees(group.y);
    var all = Softmax(LOWEST, 0.0, vec4<f32>(0.0));
    for (var tile = keys.x / KEYS; tile * KEYS < keys.y && keys.x < keys.y; tile++) {
        all = merged(all, part(1u + tile, group.y, head, unit));
    }
    if (keys.z < keys.w) {
        all = merged(all, part(0u, group.y, head, unit));
    }
    write(group.y, head, unit, all);
}
