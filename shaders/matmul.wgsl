// y[r, o] = norm(r) * sum_k W[o, k] * input[r, k] (+ bias[o]) (+ lora_scale * sum_j B[o, j] * lora[r, segment(o) * rank + j])
//
const R: u32 = 4u; // variant
const NO: u32 = 4u; // variant
const COLUMNS: u32 = 1u; // variant
const KL: u32 = 1u; // variant
const PASS_ROWS: u32 = 4u; // variant

struct Params {
    n: u32,
    blocks: u32,
    groups: u32,
    runs: u32,
    run_blocks: u32,
    runs_per_group: u32,
    input_stride: u32,
    output_stride: u32,
    row_set: u32,
    hidden: u32,
    hidden_stride: u32,
    eps: f32,
    bias_at: u32,
    gain_at: u32,
    lora_blocks: u32,
    lora_rank: u32,
    lora_stride: u32,
    lora_scale: f32,
    lora_interleaved: u32,
    segment_1: u32,
    segment_2: u32,
    pad_0: u32,
    pad_1: u32,
    pad_2: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> call: array<vec4<u32>, 4>;
@group(0) @binding(2) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> input: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> output: array<f32>;

const WG: u32 = 8u * COLUMNS * KL;
const SLICE: u32 = 8u * KL;
const PASS: u32 = PASS_ROWS * NO;
const_assert R % PASS_ROWS == 0u;
const_assert R * SLICE <= WG * PASS;

var<workgroup> partial: array<f32, WG * PASS>;
var<workgroup> inverse_rms: array<f32, R>;

fn dot4(w: vec4<f32>, x: vec4<f32>, sum: f32) -> f32 {
    return fma(w.w, x.w, fma(w.z, x.z, fma(w.y, x.y, fma(w.x, x.x, sum))));
}

fn first_row() -> u32 {
    return select(select(call[0].w, call[0].y, params.row_set == 1u), 0u, params.row_set == 0u);
}

fn end_row() -> u32 {
    return select(select(call[1].x, call[0].z, params.row_set == 1u), call[0].x, params.row_set == 0u);
}

fn total(item: u32, slice: u32, lane: u32) -> f32 {
    var sum = partial[item * WG + slice * SLICE + lane];
    for (var k = 1u; k < KL; k++) {
        sum += partial[item * WG + slice * SLICE + k * 8u + lane];
    }
    return sum;
}

// include shared/weights_q4.wgsl as weights
// include matmul/scales_affine.wgsl as scales
// include matmul/norm_none.wgsl as norm
// include matmul/bias_none.wgsl as bias
// include matmul/lora_none.wgsl as lora
// include matmul/output_store.wgsl as output
// include matmul/inputs_direct.wgsl as inputs

fn segment(o: u32) -> u32 {
    return select(0u, 1u, o >= params.segment_1) + select(0u, 1u, o >= params.segment_2);
}

fn product(li: u32, wg: vec3<u32>, grid: vec3<u32>, subgroup_lane: u32) {
    let lane = li % 8u;
    let slice = li / SLICE;
    let begin = first_row();
    let end = end_row();
    let row0 = begin + wg.x * R;
    let tile0 = ((wg.y + wg.z * grid.y) * COLUMNS + slice) * NO;
    let last_tile = (params.n - 1u) / 8u;
    if row0 >= end {
        return;
    }
    let last_row = end - 1u;
    var acc: array<f32, R * NO>;
    var at: array<u32, R>;
    var w_at: array<u32, NO>;
    var s_at: array<u32, NO>;
    var block: array<vec4<u32>, NO>;
    var w: array<vec4<f32>, NO>;
    var affine: array<vec2<f32>, NO>;
    var held: array<vec4<f32>, R * HELD>;
    if NORM {
        norms(li, row0, last_row);
    }
    for (var r = 0u; r < R; r++) { // unroll
        at[r] = min(row0 + r, last_row) * params.input_stride / 4u;
    }
    for (var j = 0u; j < NO; j++) { // unroll
        let tile = min(tile0 + j, last_tile);
        w_at[j] = tile * params.blocks * 8u + lane;
        s_at[j] = tile * params.groups * 8u + lane;
    }

    for (var run = first_run(li); run < params.runs; run += KL) {
        if AFFINE {
            for (var j = 0u; j < NO; j++) { // unroll
                affine[j] = affine_at(s_at[j] + run / params.runs_per_group * 8u);
            }
        }
        let stop = min((run + 1u) * params.run_blocks, params.blocks);
        for (var b = run * params.run_blocks; b < stop; b++) {
            for (var j = 0u; j < NO; j++) { // unroll
                block[j] = weights[w_at[j] + b * 8u];
            }
            let x_at = b * BLOCK_VECS;
            if SHARED {
                for (var r = 0u; r < R; r++) { // unroll
                    for (var v = 0u; v < HELD; v++) { // unroll
                        held[r * HELD + v] = input[at[r] + x_at + held_vec(v, subgroup_lane)];
                    }
                }
            }
            for (var v = 0u; v < BLOCK_VECS; v++) { // unroll
                for (var j = 0u; j < NO; j++) { // unroll
                    w[j] = unpack(block[j], v, affine[j]);
                }
                for (var r = 0u; r < R; r++) { // unroll
                    var x: vec4<f32>;
                    if SHARED {
                        x = from_neighbour(held[r * HELD + v / SHARE], v, subgroup_lane);
                    } else {
                        x = input[at[r] + x_at + v];
                    }
                    for (var j = 0u; j < NO; j++) { // unroll
                        acc[r * NO + j] = dot4(w[j], x, acc[r * NO + j]);
                    }
                }
            }
        }
    }

    if NORM {
        for (var r = 0u; r < R; r++) { // unroll
            for (var j = 0u; j < NO; j++) { // unroll
                acc[r * NO + j] *= inverse_rms[r];
            }
        }
    }

    if LORA && row0 < call[0].z && row0 + R > call[0].y {
        var low = segment(tile0 * 8u);
        var high = segment(min(tile0 + NO, last_tile + 1u) * 8u - 1u);
        if params.lora_interleaved != 0u {
            low = lane % 2u;
            high = low;
        }
        for (var r = 0u; r < R; r++) { // unroll
            at[r] = min(row0 + r, last_row) * params.lora_stride / 4u;
        }
        for (var j = 0u; j < NO; j++) { // unroll
            w_at[j] = min(tile0 + j, last_tile) * params.lora_blocks * 8u + lane;
        }
        for (var s = low; s <= high; s++) {
            for (var b = (li / 8u) % KL; b < params.lora_blocks; b += KL) {
                for (var j = 0u; j < NO; j++) { // unroll
                    block[j] = lora_block(w_at[j] + b * 8u);
                }
                for (var v = 0u; v < LORA_VECS; v++) { // unroll
                    for (var j = 0u; j < NO; j++) { // unroll
                        w[j] = unpack_lora(block[j], v) * params.lora_scale;
                    }
                    for (var r = 0u; r < R; r++) { // unroll
                        let drafts = row0 + r >= call[0].y && row0 + r < call[0].z;
                        let x = lora_input(at[r] + s * params.lora_rank / 4u + b * LORA_VECS + v);
                        for (var j = 0u; j < NO; j++) { // unroll
                            let mine = params.lora_interleaved != 0u || segment((tile0 + j) * 8u + lane) == s;
                            acc[r * NO + j] = select(acc[r * NO + j], dot4(w[j], x, acc[r * NO + j]), drafts && mine);
                        }
                    }
                }
            }
        }
    }

    // Partial sums of PASS_ROWS rows at a time: added in the order of their k-lanes, then written.
    for (var pass_row = 0u; pass_row < R; pass_row += PASS_ROWS) { // unroll
        workgroupBarrier();
        for (var i = 0u; i < PASS; i++) { // unroll
            partial[i * WG + li] = acc[pass_row * NO + i];
        }
        workgroupBarrier();
        for (var i = li / LANES; i < PASS * COLUMNS; i += WG / LANES) {
            let row = row0 + pass_row + i % PASS / NO;
            let o = (tile0 + (i / PASS - slice) * NO + i % NO) * 8u + li % LANES * (8u / LANES);
            if row < end && o < params.n {
                write(row, row - select(0u, begin, params.row_set == 2u), o, i % PASS, i / PASS);
            }
        }
    }
}
