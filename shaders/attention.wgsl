// attn[r, h] = sum_j p_j v_j, p = softmax over the keys row r sees of q_h . k_j / sqrt(Dh).
//
// | binding | name | access | shape | meaning |
// | --- | --- | --- | --- | --- |
// | 0 | qkv | read | [T, stride] | rotated queries first |
// | 1 | kv | read | [2, slots, Hkv, UNITS] | keys, then values, units of four dimensions |
// | 2 | attn | write | [T, attn_stride] | output |
// | 3 | call | read | words | rows of the call |
// | 4 | params | uniform | | sizes |
// | 5 | parts | write | [parts, 16, Hq, 1 + UNITS, 4] | output where the grid has parts |
//
// A workgroup owns ROWS rows and HEADS query heads of one key head: N queries that share every load of K and V. Keys come
// in tiles of KEYS: a thread owns four neighbouring keys while scores are made, and a unit of every SPLIT-th four keys
// while values are summed. Each tile has a softmax of its own, in f32; they are merged in order. Tiles of the cache begin
// at multiples of KEYS of the absolute slot, that of a scratch range at its start, and a key that a row does not see adds
// an exact zero, so that a row's result depends neither on other rows nor on ROWS nor on when a key was written.
// Grid: (Hkv * chunks, ceil(T / ROWS), 1), chunks = ceil(Hq / Hkv / HEADS); or with 1 + tiles along z, each workgroup one
// part of that walk (T <= 16), for `attention_merge.wgsl` to merge to the same bits.
// Dh is at most 256. Workgroup memory: N (16 UNITS + 1056) bytes. Twin: src/kernels/attention.rs.

// include shared/call.wgsl
// include shared/kv_f32.wgsl as kv
// include shared/lanes_alone.wgsl as lanes
// include shared/attention.wgsl
const HEADS: u32 = 1u; // variant: query heads of a workgroup
const ROWS: u32 = 1u; // variant: rows of a workgroup
const UNITS: u32 = 16u; // variant: ceil(Dh / 4)
const N: u32 = ROWS * HEADS;
const SPLIT: u32 = 64u / UNITS;
const OWN: u32 = (N * UNITS + 63u) / 64u; // output units of a thread

@group(0) @binding(0) var<storage, read> qkv: array<f32>;
@group(0) @binding(1) var<storage, read> kv: array<KvUnit>;
@group(0) @binding(2) var<storage, read_write> attn: array<f32>;
@group(0) @binding(3) var<storage, read> call: array<u32>;
@group(0) @binding(4) var<uniform> params: Params;
@group(0) @binding(5) var<storage, read_write> parts: array<vec4<f32>>;

var<workgroup> query: array<vec4<f32>, N * UNITS>;
// Of a tile: each thread's largest score, then softmax weights [N, KEYS], then each thread's sums.
var<workgroup> weight: array<vec4<f32>, N * 64u>;
var<workgroup> peak: array<f32, N * 4u>; // largest scores of a quarter of the threads
var<workgroup> share: array<f32, N * 4u>; // sums of a quarter of the weights

fn dot4(a: vec4<f32>, b: vec4<f32>, sum: f32) -> f32 {
    return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}

fn largest_of(n: u32) -> f32 {
    return max(max(peak[n * 4u], peak[n * 4u + 1u]), max(peak[n * 4u + 2u], peak[n * 4u + 3u]));
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, lane: Lane) {
    let shared_by = params.query_heads / params.key_value_heads;
    let chunks = (shared_by + HEADS - 1u) / HEADS;
    let key_head = group.x / chunks;
    let chunk = group.x % chunks;
    let first_head = key_head * shared_by + chunk * HEADS;
    let heads = min(HEADS, shared_by - chunk * HEADS);
    let first_row = group.y * ROWS;
    let rows = min(ROWS, call[0] - first_row);

    for (var at = lane.index; at < N * UNITS; at += 64u) {
        let row = at / UNITS / HEADS;
        let h = at / UNITS % HEADS;
        var value = vec4<f32>(0.0);
        for (var i = 0u; i < 4u; i++) { // unroll
            let d = at % UNITS * 4u + i;
            if (d < params.dim && h < heads && row < rows) {
                value[i] = qkv[(first_row + row) * params.stride + (first_head + h) * params.dim + d] * params.scale;
            }
        }
        query[at] = value;
    }

    var kept: array<Softmax, OWN>;
    for (var i = 0u; i < OWN; i++) { // unroll
        kept[i] = Softmax(LOWEST, 0.0, vec4<f32>(0.0));
    }
    let unit = lane.index % UNITS;
    let turn = lane.index / UNITS;
    let per_slot = params.key_value_heads * UNITS;
    let keys_at = key_head * UNITS;
    let values_at = params.slots * per_slot + keys_at + unit;

    var seen: array<vec4<u32>, ROWS>;
    var sweeps = 0u; // up to the last row that sees some of the scratch range
    for (var r = 0u; r < ROWS; r++) { // unroll
        seen[r] = vec4<u32>(0u);
        if (r < rows) {
            seen[r] = sees(first_row + r);
        }
        sweeps = select(sweeps, r + 1u, seen[r].z < seen[r].w);
    }
    // First the cache, then the scratch range of each row, with all rows whose range begins there.
    for (var sweep = 0u; sweep <= sweeps; sweep++) {
        var base = 0u;
        for (var r = 0u; r < ROWS; r++) { // unroll
            base = select(base, seen[r].z, r + 1u == sweep);
        }
        var low: array<u32, ROWS>;
        var high: array<u32, ROWS>;
        var start = 0xffffffffu;
        var end = 0u;
        var again = false;
        for (var r = 0u; r < ROWS; r++) { // unroll
            let keys = select(seen[r].xy, seen[r].zw, sweep > 0u);
            let some = keys.x < keys.y && (sweep == 0u || keys.x == base);
            low[r] = select(0u, keys.x, some);
            high[r] = select(0u, keys.y, some);
            start = min(start, select(start, keys.x, some));
            end = max(end, high[r]);
            again = again || (r + 1u < sweep && seen[r].z == base);
        }
        if (again || (groups.z > 1u && (sweep == 0u) == (group.z == 0u))) {
            end = 0u;
        }
        if (groups.z > 1u && sweep == 0u) {
            start = max(start, (group.z - 1u) * KEYS);
            end = min(end, group.z * KEYS);
        }
        for (var tile = start - select(start % KEYS, 0u, sweep > 0u); tile < end; tile += KEYS) {
            let here = max(start, tile);
            let stop = min(end, tile + KEYS);
            let keys = vec4<u32>(tile + lane.index * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
            let at = clamp(keys, vec4<u32>(here), vec4<u32>(stop - 1u)) * per_slot + keys_at;
            let group_at = tile + (lane.index - own(lane)) * 4u;
            let near = group_at < stop && group_at + SHARE * 4u > here; // some key of those who share is needed
            var score: array<vec4<f32>, N>;
            var held: array<vec4<f32>, N>;
            for (var n = 0u; n < N; n++) { // unroll
                score[n] = vec4<f32>(0.0);
            }
            workgroupBarrier();
            for (var first = 0u; near && first < UNITS; first += SHARE) {
                for (var n = 0u; n < N; n++) { // unroll
                    held[n] = query[n * UNITS + first + own(lane)];
                }
                for (var i = 0u; i < SHARE; i++) {
                    let k_0 = kv_unpack(kv[at.x + first + i]);
                    let k_1 = kv_unpack(kv[at.y + first + i]);
                    let k_2 = kv_unpack(kv[at.z + first + i]);
                    let k_3 = kv_unpack(kv[at.w + first + i]);
                    for (var n = 0u; n < N; n++) { // unroll
                        let q = from_neighbour(held[n], lane, i);
                        let s = score[n];
                        score[n] = vec4<f32>(dot4(q, k_0, s.x), dot4(q, k_1, s.y), dot4(q, k_2, s.z), dot4(q, k_3, s.w));
                    }
                }
            }
            var whole = true; // whether every row sees every key from `here` to `stop`
            for (var r = 0u; r < ROWS; r++) { // unroll
                whole = whole && (r >= rows || (low[r] <= here && high[r] >= stop));
                for (var h = 0u; h < HEADS; h++) { // unroll
                    let s = select(vec4<f32>(LOWEST), score[r * HEADS + h], (keys >= vec4<u32>(low[r])) & (keys < vec4<u32>(high[r])));
                    score[r * HEADS + h] = s;
                    weight[(r * HEADS + h) * 64u + lane.index] = vec4<f32>(max(max(s.x, s.y), max(s.z, s.w)));
                }
            }
            workgroupBarrier();
            for (var q = lane.index; q < N * 4u; q += 64u) {
                var most = LOWEST;
                for (var i = q % 4u; i < 64u; i += 4u) {
                    most = max(most, weight[q / 4u * 64u + i].x);
                }
                peak[q] = most;
            }
            workgroupBarrier();
            for (var r = 0u; r < ROWS; r++) { // unroll
                let visible = (keys >= vec4<u32>(low[r])) & (keys < vec4<u32>(high[r]));
                for (var h = 0u; h < HEADS; h++) { // unroll
                    let p = exp(score[r * HEADS + h] - largest_of(r * HEADS + h));
                    weight[(r * HEADS + h) * 64u + lane.index] = select(vec4<f32>(0.0), p, visible);
                }
            }
            workgroupBarrier();
            for (var q = lane.index; q < N * 4u; q += 64u) {
                var sum = 0.0;
                for (var i = q % 4u; i < 64u; i += 4u) {
                    let p = weight[q / 4u * 64u + i];
                    sum += (p.x + p.y) + (p.z + p.w);
                }
                share[q] = sum;
            }
            var sum: array<vec4<f32>, N>;
            for (var n = 0u; n < N; n++) { // unroll
                sum[n] = vec4<f32>(0.0);
            }
            let turns = ((stop - tile + 3u) / 4u + SPLIT - 1u) / SPLIT; // fours of keys of each thread
            for (var first = 0u; first < turns; first += SHARE) {
                let mine = turn + (first + own(lane)) * SPLIT;
                for (var n = 0u; n < N; n++) { // unroll
                    held[n] = select(vec4<f32>(0.0), weight[n * 64u + min(mine, 63u)], mine < 64u);
                }
                for (var i = 0u; i < min(SHARE, turns - first); i++) {
                    let four = vec4<u32>(tile + (turn + (first + i) * SPLIT) * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
                    let at = clamp(four, vec4<u32>(here), vec4<u32>(stop - 1u)) * per_slot + values_at;
                    var v_0 = kv_unpack(kv[at.x]);
                    var v_1 = kv_unpack(kv[at.y]);
                    var v_2 = kv_unpack(kv[at.z]);
                    var v_3 = kv_unpack(kv[at.w]);
                    if (!whole) {
                        // Times a weight of 0 it must be 0, whatever a slot holds that only other rows see.
                        v_0 = select(vec4<f32>(LOWEST), v_0, abs(v_0) <= vec4<f32>(-LOWEST));
                        v_1 = select(vec4<f32>(LOWEST), v_1, abs(v_1) <= vec4<f32>(-LOWEST));
                        v_2 = select(vec4<f32>(LOWEST), v_2, abs(v_2) <= vec4<f32>(-LOWEST));
                        v_3 = select(vec4<f32>(LOWEST), v_3, abs(v_3) <= vec4<f32>(-LOWEST));
                    }
                    for (var n = 0u; n < N; n++) { // unroll
                        let p = from_neighbour(held[n], lane, i);
                        let s = fma(vec4<f32>(p.y), v_1, fma(vec4<f32>(p.x), v_0, sum[n]));
                        sum[n] = fma(vec4<f32>(p.w), v_3, fma(vec4<f32>(p.z), v_2, s));
                    }
                }
            }
            workgroupBarrier();
            for (var n = 0u; n < N; n++) { // unroll
                weight[n * 64u + lane.index] = sum[n];
            }
            workgroupBarrier();
            for (var i = 0u; i < OWN; i++) { // unroll
                let mine = lane.index + i * 64u;
                if (mine < N * UNITS) {
                    let n = mine / UNITS;
                    var value = weight[n * 64u + mine % UNITS];
                    for (var s = 1u; s < SPLIT; s++) {
                        value += weight[n * 64u + s * UNITS + mine % UNITS];
                    }
                    let total = (share[n * 4u] + share[n * 4u + 1u]) + (share[n * 4u + 2u] + share[n * 4u + 3u]);
                    kept[i] = merged(kept[i], Softmax(largest_of(n), total, value));
                }
            }
        }
    }

    for (var i = 0u; i < OWN; i++) { // unroll
        let mine = lane.index + i * 64u;
        let row = mine / UNITS / HEADS;
        let h = mine / UNITS % HEADS;
        if (row < rows && h < heads) {
            if (groups.z > 1u) {
                let at = part_at(group.z, first_row + row, first_head + h);
                parts[at + 1u + mine % UNITS] = kept[i].sum;
                if (mine % UNITS == 0u) {
                    parts[at] = vec4<f32>(kept[i].largest, kept[i].total, 0.0, 0.0);
                }
            } else {
                write(first_row + row, first_head + h, mine % UNITS, kept[i]);
            }
        }
    }
}
