// y[r, o] = norm(r) * sum_k W[o, k] * input[r, k] (+ bias[o]) (+ scale * sum_j B[o, j] * lora[r, segment(o) * rank + j]),
// then stored, added to the residual stream, or joined in pairs (SwiGLU). Twin: src/kernels/matmul.rs.
//
// | binding | name | access | meaning |
// | --- | --- | --- | --- |
// | 0 | params | uniform | sizes of this product (src/gpu/matmul.rs, Params) |
// | 1 | call | uniform | the call's header: T, adapter rows, choosing rows (src/model/call_rows.rs) |
// | 2 | weights | read | [n / 8 tiles][blocks][8 lanes] of 16 bytes (src/weights/packed.rs) |
// | 3 | scales | read | [n / 8 tiles][groups][8 lanes] scale and bias; affine formats |
// | 4 | input | read | [T, input_stride] f32 |
// | 5 | norm_input | read | H [T, hidden_stride] f32; with norm |
// | 6 | output | written | [rows, output_stride] f32 |
// | 7 | vectors | read | biases and gains; with bias or residual |
// | 8, 9 | lora_b, lora | read | B as weights are, [T, lora_stride] f32; with LoRA |
// | 10 | hidden | read, written | H [T, hidden_stride] f32; with residual |
//
// At most 8 storage buffers in any variant, 16 KB of workgroup memory, 256 invocations: WebGPU's default limits.
//
// Grid: x chunks of R rows (fastest, so that those that read the same weights run together), then y and z chunks of
// 8 * NO * COLUMNS outputs. A workgroup is COLUMNS slices of KL times 8 lanes. A thread owns output `lane` of NO tiles for
// R rows: it loads a block of each tile, unpacks four weights at a time and multiplies them into all its rows, so that
// neither memory nor unpacking grows with R; an input vector, once read, serves NO outputs. 8 lanes read 128 contiguous
// bytes, KL k-lanes the 128 next to them.
//
// Row invariance. All sums are f32, and what is fused is an explicit fma. Block b belongs to k-lane b % KL (with KL = 1 to the only one), which
// adds in rising k; partial sums are added in the order of the k-lanes. R, NO, COLUMNS and how inputs are read decide only
// which thread does it, so a row's bits depend on KL alone, and KL is one number per device. Rows beyond the last repeat
// it and are not written; the adapter is switched per row with select.
//
// Registers of a thread, counted: R * NO sums, 4 * NO weights, 4 * NO packed words, 2 * NO scales, 4 inputs and about ten
// addresses: 86 for 8 x 4, 66 for 16 x 2. That leaves 23 warps on an NVIDIA SM (65536 registers), 11 waves on an RDNA2 SIMD
// and 16 on RDNA3 (1024 and 1536 a lane); Xe compiles 8 x 4 as SIMD8 (128 a lane), 16 x 2 about fits SIMD16 (64). Twice as
// many sums would halve the loads per fma but spill on Xe and Mali. A thread has R * NO independent fma chains, so latency
// stays hidden at low occupancy. Loads per fma: an input vector serves 4 * NO of them, a block of q4 32 * R.

// Rows and tiles of 8 outputs of a thread; slices and k-lanes of a workgroup; rows whose partial sums are in workgroup
// memory at a time.
const R: u32 = 4u; // variant
const NO: u32 = 4u; // variant
const COLUMNS: u32 = 1u; // variant
const KL: u32 = 1u; // variant
const PASS_ROWS: u32 = 4u; // variant

// include matmul/common.wgsl

const WG: u32 = 8u * COLUMNS * KL;
const SLICE: u32 = 8u * KL;
const NORM_ROWS: u32 = R;
const PASS: u32 = PASS_ROWS * NO;
const_assert R % PASS_ROWS == 0u;
const_assert R * SLICE <= WG * PASS;

var<workgroup> partial: array<f32, WG * PASS>;
var<workgroup> inverse_rms: array<f32, R>;

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
                acc[r * NO + j] = scaled(vec4<f32>(acc[r * NO + j]), inverse_rms[r]).x;
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
