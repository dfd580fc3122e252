// q, k = rope(norm(q, k)), q *= query scale; k and v go to the row's slot of the layer's cache.
//
// | binding | name | access | shape | meaning |
// | --- | --- | --- | --- | --- |
// | 0 | qkv | read, write | [T, stride] | q heads, k heads, v heads; q is rotated in place |
// | 1 | kv | write | [2, slots, Hkv, UNITS] | keys, then values; UNITS = ceil(Dh / 4) units of four dimensions |
// | 2 | vectors | read | all vectors | gains of q's and k's norm |
// | 3 | rotary | read | [positions, Dh / 2] | cosine and sine |
// | 4 | call | read | words | rows of the call |
// | 5 | params | uniform | | sizes |
//
// A workgroup owns one head of one row. Grid: (Hq + 2 Hkv, T). Dimension i pairs with i + Dh / 2. Dh is even, at most
// 256. Twin: src/kernels/rope_kv.rs.

// include shared/call.wgsl
// include shared/kv_f32.wgsl as kv
// include shared/reduce_workgroup.wgsl as reduce
const N: u32 = 1u;

struct Params {
    query_heads: u32, // Hq
    key_value_heads: u32, // Hkv
    dim: u32, // Dh
    stride: u32, // of qkv
    slots: u32, // of the cache, scratch included
    q_norm_at: u32, // in vectors, or NONE
    k_norm_at: u32, // in vectors, or NONE
    rotate: u32, // 1 or 0
    eps: f32,
}

@group(0) @binding(0) var<storage, read_write> qkv: array<f32>;
@group(0) @binding(1) var<storage, read_write> kv: array<KvUnit>;
@group(0) @binding(2) var<storage, read> vectors: array<f32>;
@group(0) @binding(3) var<storage, read> rotary: array<vec2<f32>>;
@group(0) @binding(4) var<storage, read> call: array<u32>;
@group(0) @binding(5) var<uniform> params: Params;

var<workgroup> head: array<f32, 256>;

// The rotated value of dimension d.
fn rotated(d: u32, position: u32, rotate: bool) -> f32 {
    if (!rotate) {
        return head[d];
    }
    let half = params.dim / 2u;
    let i = d % half;
    let turn = rotary[position * half + i];
    let a = head[i];
    let b = head[i + half];
    return select(b * turn.x + a * turn.y, a * turn.x - b * turn.y, d < half);
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, lane: Lane) {
    let row = group.y;
    let words = HEADER_WORDS + row * ROW_WORDS;
    let is_query = group.x < params.query_heads;
    let is_value = group.x >= params.query_heads + params.key_value_heads;
    let at = row * params.stride + group.x * params.dim;
    var squares = array<f32, N>(0.0);
    for (var d = lane.index; d < params.dim; d += 64u) {
        let value = qkv[at + d];
        head[d] = value;
        squares[0] += value * value;
    }
    var norm_at = select(params.k_norm_at, params.q_norm_at, is_query);
    if (is_value) {
        norm_at = NONE;
    }
    if (norm_at != NONE) {
        reduce_sum(&squares, lane);
        let norm = inverseSqrt(squares[0] / f32(params.dim) + params.eps);
        for (var d = lane.index; d < params.dim; d += 64u) {
            head[d] = head[d] * norm * vectors[norm_at + d];
        }
    }
    workgroupBarrier();
    let position = call[words + ROW_POSITION];
    let rotate = params.rotate != 0u && !is_value;
    if (is_query) {
        let scale = bitcast<f32>(call[words + ROW_QUERY_SCALE]);
        for (var d = lane.index; d < params.dim; d += 64u) {
            qkv[at + d] = rotated(d, position, rotate) * scale;
        }
        return;
    }
    let units = (params.dim + 3u) / 4u;
    let region = select(0u, params.slots, is_value) + call[words + ROW_SLOT];
    let head_index = (group.x - params.query_heads) % params.key_value_heads;
    for (var u = lane.index; u < units; u += 64u) {
        var value = vec4<f32>(0.0);
        for (var i = 0u; i < 4u; i++) { // unroll
            if (u * 4u + i < params.dim) {
                value[i] = rotated(u * 4u + i, position, rotate);
            }
        }
        kv[(region * params.key_value_heads + head_index) * units + u] = kv_pack(value);
    }
}
