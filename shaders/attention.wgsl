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
// KEYS: a thread owns KEYS / 64 keys while scores are made, and four dimensions of every SPLIT-th key while values are
// summed (online softmax in f32). Tiles of the cache begin at multiples of KEYS of the absolute slot, those of the scratch
// range at its start, and what a thread owns depends on that alone, so that a row's result depends neither on the other
// rows of a call nor on when a key was written. Grid: (Hkv * chunks, T), chunks = ceil(Hq / Hkv / HEADS).
// Dh is at most 256, HEADS at most 8. Twin: src/kernels/attention.rs.

// include shared/call.wgsl
// include shared/kv_f32.wgsl as kv
// include shared/reduce_workgroup.wgsl as reduce
const HEADS: u32 = 1u; // variant: query heads of a workgroup
const UNITS: u32 = 16u; // variant: ceil(Dh / 4)
const TURNS: u32 = 2u;
const KEYS: u32 = 64u * TURNS;
const SPLIT: u32 = 64u / UNITS;
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
var<workgroup> weight: array<f32, HEADS * KEYS>;
var<workgroup> parts: array<vec4<f32>, 64>;

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
    var sum: array<vec4<f32>, HEADS>;
    for (var h = 0u; h < HEADS; h++) { // unroll
        largest[h] = LOWEST;
        total[h] = 0.0;
        sum[h] = vec4<f32>(0.0);
    }
    let unit = lane.index % UNITS;
    let turn = lane.index / UNITS;
    var first_seen = call[words + ROW_CACHE];
    if (params.window != 0u) {
        let end = call[words + ROW_POSITION] + 1u;
        first_seen = max(first_seen, end - min(end, params.window));
    }

    for (var range = 0u; range < 2u; range++) {
        let start = select(first_seen, call[words + ROW_SCRATCH], range == 1u);
        let end = select(call[words + ROW_CACHE + 1u], call[words + ROW_SCRATCH + 1u], range == 1u);
        for (var tile = select(start - start % KEYS, start, range == 1u); tile < end; tile += KEYS) {
            var score: array<array<f32, HEADS>, TURNS>;
            var most: array<f32, HEADS>;
            for (var h = 0u; h < HEADS; h++) { // unroll
                most[h] = LOWEST;
            }
            for (var t = 0u; t < TURNS; t++) { // unroll
                let key = tile + t * 64u + lane.index;
                for (var h = 0u; h < HEADS; h++) { // unroll
                    score[t][h] = 0.0;
                }
                if (key >= start && key < end) {
                    let at = (key * params.key_value_heads + key_head) * UNITS;
                    for (var u = 0u; u < UNITS; u++) {
                        let k = kv_unpack(kv[at + u]);
                        for (var h = 0u; h < HEADS; h++) { // unroll
                            score[t][h] += dot(query[h * UNITS + u], k);
                        }
                    }
                    for (var h = 0u; h < HEADS; h++) { // unroll
                        most[h] = max(most[h], score[t][h]);
                    }
                }
            }
            // A tile holds at least one key that the row sees, so `most` is a score from here on.
            reduce_max(&most, lane);
            for (var h = 0u; h < HEADS; h++) { // unroll
                let now = max(largest[h], most[h]);
                let shrink = exp(largest[h] - now);
                largest[h] = now;
                sum[h] *= shrink;
                total[h] *= shrink;
                for (var t = 0u; t < TURNS; t++) { // unroll
                    let key = tile + t * 64u + lane.index;
                    let p = select(0.0, exp(score[t][h] - now), key >= start && key < end);
                    total[h] += p;
                    weight[h * KEYS + t * 64u + lane.index] = p;
                }
            }
            workgroupBarrier();
            if (turn < SPLIT) {
                // The first key of this thread's turn that the row sees.
                let skip = max(start, tile) - tile;
                let first = turn + (skip + SPLIT - 1u - turn) / SPLIT * SPLIT;
                let count = min(end - tile, KEYS);
                for (var j = first; j < count; j += SPLIT) {
                    let at = ((params.slots + tile + j) * params.key_value_heads + key_head) * UNITS;
                    let v = kv_unpack(kv[at + unit]);
                    for (var h = 0u; h < HEADS; h++) { // unroll
                        sum[h] += weight[h * KEYS + j] * v;
                    }
                }
            }
        }
    }

    reduce_sum(&total, lane);
    for (var h = 0u; h < HEADS; h++) { // unroll
        workgroupBarrier();
        parts[lane.index] = sum[h];
        workgroupBarrier();
        if (turn == 0u && h < heads) {
            var value = parts[unit];
            for (var s = 1u; s < SPLIT; s++) {
                value += parts[s * UNITS + unit];
            }
            value /= total[h];
            for (var i = 0u; i < 4u; i++) { // unroll
                let d = unit * 4u + i;
                if (d < params.dim) {
                    attn[row * params.attn_stride + (first_head + h) * params.dim + d] = value[i];
                }
            }
        }
    }
}
