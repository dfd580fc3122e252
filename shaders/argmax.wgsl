// Per row of logits and chunk of the vocabulary: the largest entry, its id, and sum of exp(entry - largest).
//
// | binding | name | access | shape | meaning |
// | --- | --- | --- | --- | --- |
// | 0 | logits | read | [rows, stride] | the head's output |
// | 1 | parts | write | [rows, chunks, 4] | largest (f32 bits), id, sum (f32 bits), 1 if an entry is not a number |
// | 2 | params | uniform | | sizes |
//
// A workgroup owns CHUNK entries of one row. Grid: (chunks, rows). The smallest id wins among equals; entries that are not
// numbers are never chosen. Twin: src/kernels/argmax.rs; the second pass is argmax_merge.wgsl.

// include shared/reduce_workgroup.wgsl as reduce
const CHUNK: u32 = 4096u;
const N: u32 = 2u;
const LOWEST: f32 = -3.4e38;
const NO_ID: u32 = 0xffffffu; // ids stay below, and are exact in f32

struct Params {
    vocab: u32, // V
    stride: u32, // of logits
    banned: u32, // an id that is left out, or NO_ID
}

@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read_write> parts: array<vec4<u32>>;
@group(0) @binding(2) var<uniform> params: Params;

// By its bits, since compilers may assume that a number equals itself.
fn is_number(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) <= 0x7f800000u;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, lane: Lane) {
    let at = group.y * params.stride;
    let first = group.x * CHUNK;
    let end = min(first + CHUNK, params.vocab);
    var id = NO_ID;
    var best = array<f32, N>(LOWEST, 0.0); // largest, whether there is something that is not a number
    for (var i = first + lane.index; i < end; i += 64u) {
        let x = logits[at + i];
        if (i != params.banned) {
            if (!is_number(x)) {
                best[1] = 1.0;
            } else if (x > best[0] || id == NO_ID) {
                best[0] = max(x, LOWEST);
                id = i;
            }
        }
    }
    let own = best[0];
    reduce_max(&best, lane);
    // The smallest id among the threads that hold the largest entry.
    var smallest = array<f32, N>(-f32(NO_ID), 0.0);
    if (own == best[0] && id != NO_ID) {
        smallest[0] = -f32(id);
    }
    reduce_max(&smallest, lane);
    var sum = array<f32, N>(0.0, 0.0);
    for (var i = first + lane.index; i < end; i += 64u) {
        let x = logits[at + i];
        if (i != params.banned && is_number(x)) {
            sum[0] += exp(max(x, LOWEST) - best[0]);
        }
    }
    reduce_sum(&sum, lane);
    if (lane.index == 0u) {
        parts[group.y * groups.x + group.x] =
            vec4<u32>(bitcast<u32>(best[0]), u32(-smallest[0]), bitcast<u32>(sum[0]), u32(best[1]));
    }
}
