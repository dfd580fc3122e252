// The same product as matmul.wgsl, bit for bit, for long inputs on GPUs: weights and inputs are staged in workgroup memory.
// Bindings, parameters and twin are those of matmul.wgsl.
//
// Grid: x chunks of 64 rows, y and z chunks of 64 outputs. A workgroup of 128 threads holds 16 inputs of its rows and of
// its outputs at a time (4 KB each); a thread owns 8 rows of 4 outputs. Per input a thread reads three vectors from
// workgroup memory for 32 fma, and each weight is unpacked once for 64 rows.
//
// Order of sums: that of matmul.wgsl with KL k-lanes, one lane after the other: all blocks of k-lane 0 in rising k, then
// those of k-lane 1, and so on, each lane's sum added to the total of those before it. That takes a second set of sums
// (64 registers in all, about 90 with what is loaded) and keeps a row's bits the same whichever kernel runs.

const KL: u32 = 8u; // variant
const R: u32 = 64u;

// include matmul/common.wgsl

const WG: u32 = 128u;
const SLICE: u32 = 8u * KL;
const NORM_ROWS: u32 = 512u / SLICE;
const_assert WG % SLICE == 0u && R % NORM_ROWS == 0u;

// Vectors of four neighbouring rows, then of four neighbouring outputs: [2][16 inputs][16].
var<workgroup> staged: array<vec4<f32>, 512>;
var<workgroup> partial: array<f32, 512>;
var<workgroup> inverse_rms: array<f32, R>;

fn total(item: u32, slice: u32, lane: u32) -> f32 {
    return partial[item * 64u + slice * 8u + lane];
}

// include shared/weights_q4.wgsl as weights
// include matmul/scales_affine.wgsl as scales
// include matmul/norm_none.wgsl as norm
// include matmul/bias_none.wgsl as bias
// include matmul/lora_none.wgsl as lora
// include matmul/output_store.wgsl as output

@compute @workgroup_size(WG)
fn main(
    @builtin(local_invocation_index) li: u32,
    @builtin(workgroup_id) wg: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
) {
    let begin = first_row();
    let end = end_row();
    let row0 = begin + wg.x * R;
    if row0 >= end {
        return;
    }
    let last_row = end - 1u;
    let o0 = (wg.y + wg.z * grid.y) * 64u;
    let last_tile = (params.n - 1u) / 8u;
    // What this thread multiplies: rows 8 * down .., outputs 4 * across ..
    let down = li / 16u;
    let across = li % 16u;
    // What it stages: the first 64 threads four rows, the others four outputs, of one vector of inputs.
    let group = li % 16u;
    let group_vec = li % 64u / 16u;
    let loads_weights = li >= 64u;
    let tile = min(o0 / 8u + group / 2u, last_tile);
    let w_at = tile * params.blocks * 8u + group % 2u * 4u;
    let s_at = tile * params.groups * 8u + group % 2u * 4u;

    var sums: array<vec4<f32>, 8>;
    var acc: array<vec4<f32>, 8>;
    var a: array<vec4<f32>, 2>;
    var m: array<vec4<f32>, 4>;
    norms(li, row0, last_row);
    for (var kl = 0u; kl < KL; kl++) {
        for (var i = 0u; i < 8u; i++) { // unroll
            acc[i] = vec4<f32>();
        }
        let vecs = (params.blocks + KL - 1u - kl) / KL * BLOCK_VECS;
        for (var s = 0u; s < vecs; s += 4u) {
            let vec = s + group_vec;
            let block = vec / BLOCK_VECS * KL + kl;
            for (var i = 0u; i < 4u; i++) { // unroll
                m[i] = vec4<f32>();
            }
            if vec < vecs && loads_weights {
                let affine_block = s_at + block / params.runs_per_group * 8u;
                for (var i = 0u; i < 4u; i++) { // unroll
                    m[i] = unpack(weights[w_at + block * 8u + i], vec % BLOCK_VECS, affine_at(affine_block + i));
                }
            } else if vec < vecs {
                for (var i = 0u; i < 4u; i++) { // unroll
                    let row = min(row0 + group * 4u + i, last_row);
                    m[i] = input[row * params.input_stride / 4u + block * BLOCK_VECS + vec % BLOCK_VECS];
                }
            }
            workgroupBarrier();
            for (var k = 0u; k < 4u; k++) { // unroll
                staged[li / 64u * 256u + group_vec * 64u + k * 16u + group] = vec4<f32>(m[0][k], m[1][k], m[2][k], m[3][k]);
            }
            workgroupBarrier();
            for (var k = 0u; k < 16u; k++) {
                let w = staged[256u + k * 16u + across];
                a[0] = staged[k * 16u + down * 2u];
                a[1] = staged[k * 16u + down * 2u + 1u];
                for (var i = 0u; i < 8u; i++) { // unroll
                    acc[i] = fma(w, vec4<f32>(a[i / 4u][i % 4u]), acc[i]);
                }
            }
        }
        if NORM {
            for (var i = 0u; i < 8u; i++) { // unroll
                acc[i] = scaled(acc[i], inverse_rms[down * 8u + i]);
            }
        }
        if LORA && row0 < call[0].z && row0 + R > call[0].y {
            for (var b = kl; b < params.lora_blocks; b += KL) {
                for (var v = 0u; v < LORA_VECS; v++) { // unroll
                    for (var c = 0u; c < 4u; c++) { // unroll
                        let o = o0 + across * 4u + c;
                        let lora_tile = min(o / 8u, last_tile);
                        let w = unpack_lora(lora_block((lora_tile * params.lora_blocks + b) * 8u + o % 8u), v) * params.lora_scale;
                        let part = select(segment(o), o % 2u, params.lora_interleaved != 0u) * params.lora_rank / 4u;
                        for (var i = 0u; i < 8u; i++) { // unroll
                            let row = row0 + down * 8u + i;
                            let at = min(row, last_row) * params.lora_stride / 4u;
                            let sum = dot4(w, lora_input(at + part + b * LORA_VECS + v), acc[i][c]);
                            acc[i][c] = select(acc[i][c], sum, row >= call[0].y && row < call[0].z);
                        }
                    }
                }
            }
        }
        for (var i = 0u; i < 8u; i++) { // unroll
            sums[i] = select(sums[i] + acc[i], acc[i], kl == 0u);
        }
    }

    // Every eighth row at a time through workgroup memory, to be written in pairs or with neighbours side by side.
    for (var i = 0u; i < 8u; i++) { // unroll
        workgroupBarrier();
        for (var c = 0u; c < 4u; c++) { // unroll
            partial[down * 64u + across * 4u + c] = sums[i][c];
        }
        workgroupBarrier();
        for (var at = li; at < 64u * LANES; at += WG) {
            let item = at / (8u * LANES);
            let o = o0 + at % (8u * LANES) * (8u / LANES);
            let row = row0 + item * 8u + i;
            if row < end && o < params.n {
                write(row, row - select(0u, begin, params.row_set == 2u), o, item, (o - o0) / 8u);
            }
        }
    }
}
