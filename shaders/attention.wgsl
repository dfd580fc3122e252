// attn[r, h] = sum_j p_j v_j, p = softmax over the keys row r sees of q_h . k_j / sqrt(Dh).
//
// | binding | name | access | shape | meaning |
// | --- | --- | --- | --- | --- |
// | 0 | qkv | read | [T, stride] | rotated queries first |
// | 1 | kv | read | [2, slots, Hkv, UNITS] | keys, then values, units of four dimensions |
// | 2 | attn | write | [T, attn_stride] | output |
// | 3 | call | read | words | rows of the call |
// | 4 | params | uniform | | sizes |
//
// A workgroup owns one row and HEADS query heads of one key head, which share every load of K and V. Keys come in tiles of
// KEYS: a thread owns four neighbouring keys while scores are made, and two units of every SPLIT-th key while values are
// summed (online softmax in f32). Tiles of the cache begin at multiples of KEYS of the absolute slot, those of the scratch
// range at its start, and what a thread owns depends on that alone, so that a row's result depends neither on the other
// rows of a call nor on when a key was written. Grid: (Hkv * chunks, T), chunks = ceil(Hq / Hkv / HEADS).
// Dh is at most 256. Workgroup memory: HEADS (16 UNITS + 1300) bytes. Twin: src/kernels/attention.rs.

// include shared/call.wgsl
// include shared/kv_f32.wgsl as kv
// include shared/reduce_workgroup.wgsl as reduce
const HEADS: u32 = 1u; // variant: query heads of a workgroup
const UNITS: u32 = 16u; // variant: ceil(Dh / 4)
const KEYS: u32 = 256u;
const HALF: u32 = (UNITS + 1u) / 2u; // a thread's two units are this far apart
const SPLIT: u32 = 64u / HALF;
const N: u32 = HEADS;
const LOWEST: f32 = -3.4e38;

struct Params {
    query_heads: u32, // Hq
    key_value_heads: u32, // Hkv
    dim: u32, // Dh
    stride: u32, // of qkv
    attn_stride: u32,
    slots: u32, // of the cache, scratch included
    window: u32, // keys a row sees of the cache, itself included; 0 for all
    scale: f32, // 1 / sqrt(Dh)
}

@group(0) @binding(0) var<storage, read> qkv: array<f32>;
@group(0) @binding(1) var<storage, read> kv: array<KvUnit>;
@group(0) @binding(2) var<storage, read_write> attn: array<f32>;
@group(0) @binding(3) var<storage, read> call: array<u32>;
@group(0) @binding(4) var<uniform> params: Params;

var<workgroup> query: array<vec4<f32>, HEADS * UNITS>;
// Softmax weights of a tile, [HEADS, KEYS]; at the end, parts of sums.
var<workgroup> weight: array<vec4<f32>, HEADS * 64u>;

fn dot4(a: vec4<f32>, b: vec4<f32>, sum: f32) -> f32 {
    return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, lane: Lane) {
    let row = group.y;
    let words = HEADER_WORDS + row * ROW_WORDS;
    let shared_by = params.query_heads / params.key_value_heads;
    let chunks = (shared_by + HEADS - 1u) / HEADS;
    let key_head = group.x / chunks;
    let chunk = group.x % chunks;
    let first_head = key_head * shared_by + chunk * HEADS;
    let heads = min(HEADS, shared_by - chunk * HEADS);

    for (var at = lane.index; at < HEADS * UNITS; at += 64u) {
        let h = at / UNITS;
        var value = vec4<f32>(0.0);
        for (var i = 0u; i < 4u; i++) { // unroll
            let d = at % UNITS * 4u + i;
            if (d < params.dim && h < heads) {
                value[i] = qkv[row * params.stride + (first_head + h) * params.dim + d] * params.scale;
            }
        }
        query[at] = value;
    }
    workgroupBarrier();

    var largest: array<f32, HEADS>;
    var total: array<f32, HEADS>;
    var low: array<vec4<f32>, HEADS>; // sums of the thread's first unit
    var high: array<vec4<f32>, HEADS>; // and of its second
    for (var h = 0u; h < HEADS; h++) { // unroll
        largest[h] = LOWEST;
        total[h] = 0.0;
        low[h] = vec4<f32>(0.0);
        high[h] = vec4<f32>(0.0);
    }
    let unit = lane.index % HALF;
    let turn = lane.index / HALF;
    let to_high = min(unit + HALF, UNITS - 1u) - unit;
    let per_slot = params.key_value_heads * UNITS;
    var first_seen = call[words + ROW_CACHE];
    if (params.window != 0u) {
        let end = call[words + ROW_POSITION] + 1u;
        first_seen = max(first_seen, end - min(end, params.window));
    }

    for (var range = 0u; range < 2u; range++) {
        let start = select(first_seen, call[words + ROW_SCRATCH], range == 1u);
        let end = select(call[words + ROW_CACHE + 1u], call[words + ROW_SCRATCH + 1u], range == 1u);
        for (var tile = select(start - start % KEYS, start, range == 1u); tile < end; tile += KEYS) {
            let keys = vec4<u32>(tile + lane.index * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
            let visible = (keys >= vec4<u32>(start)) & (keys < vec4<u32>(end));
            var score: array<vec4<f32>, HEADS>;
            var most: array<f32, HEADS>;
            for (var h = 0u; h < HEADS; h++) { // unroll
                score[h] = vec4<f32>(0.0);
                most[h] = LOWEST;
            }
            if (any(visible)) {
                let at = min(keys, vec4<u32>(end - 1u)) * per_slot + key_head * UNITS;
                for (var u = 0u; u < UNITS; u++) {
                    let k_0 = kv_unpack(kv[at.x + u]);
                    let k_1 = kv_unpack(kv[at.y + u]);
                    let k_2 = kv_unpack(kv[at.z + u]);
                    let k_3 = kv_unpack(kv[at.w + u]);
                    for (var h = 0u; h < HEADS; h++) { // unroll
                        let q = query[h * UNITS + u];
                        let s = score[h];
                        score[h] = vec4<f32>(dot4(q, k_0, s.x), dot4(q, k_1, s.y), dot4(q, k_2, s.z), dot4(q, k_3, s.w));
                    }
                }
                for (var h = 0u; h < HEADS; h++) { // unroll
                    score[h] = select(vec4<f32>(LOWEST), score[h], visible);
                    most[h] = max(max(score[h].x, score[h].y), max(score[h].z, score[h].w));
                }
            }
            // A tile holds at least one key that the row sees, so `most` is a score from here on.
            reduce_max(&most, lane);
            for (var h = 0u; h < HEADS; h++) { // unroll
                let now = max(largest[h], most[h]);
                let shrink = exp(largest[h] - now);
                largest[h] = now;
                low[h] *= shrink;
                high[h] *= shrink;
                var p = vec4<f32>(0.0);
                if (any(visible)) {
                    p = select(vec4<f32>(0.0), exp(score[h] - now), visible);
                }
                total[h] = fma(total[h], shrink, (p.x + p.y) + (p.z + p.w));
                weight[h * 64u + lane.index] = p;
            }
            workgroupBarrier();
            if (turn < SPLIT) {
                // The first key of this thread's turn that the row sees.
                let skip = max(start, tile) - tile;
                let first = turn + (skip + SPLIT - 1u - turn) / SPLIT * SPLIT;
                let count = min(end - tile, KEYS);
                let at = (params.slots + tile) * per_slot + key_head * UNITS + unit;
                for (var j = first; j < count; j += SPLIT) {
                    let v_low = kv_unpack(kv[at + j * per_slot]);
                    let v_high = kv_unpack(kv[at + j * per_slot + to_high]);
                    for (var h = 0u; h < HEADS; h++) { // unroll
                        let p = vec4<f32>(weight[h * 64u + j / 4u][j % 4u]);
                        low[h] = fma(p, v_low, low[h]);
                        high[h] = fma(p, v_high, high[h]);
                    }
                }
            }
        }
    }

    reduce_sum(&total, lane);
    for (var h = 0u; h < HEADS; h++) { // unroll
        low[h] /= total[h];
        high[h] /= total[h];
    }
    for (var side = 0u; side < 2u; side++) { // unroll
        workgroupBarrier();
        for (var h = 0u; h < HEADS; h++) { // unroll
            weight[h * 64u + lane.index] = select(low[h], high[h], side == 1u);
        }
        workgroupBarrier();
        for (var at = lane.index; at < heads * HALF; at += 64u) {
            let h = at / HALF;
            var value = weight[h * 64u + at % HALF];
            for (var s = 1u; s < SPLIT; s++) {
                value += weight[h * 64u + s * HALF + at % HALF];
            }
            for (var i = 0u; i < 4u; i++) { // unroll
                let d = (at % HALF + side * HALF) * 4u + i;
                if (d < params.dim) {
                    attn[row * params.attn_stride + (first_head + h) * params.dim + d] = value[i];
                }
            }
        }
    }
}
