// What both matmul kernels share: parameters, the call's header, inputs and outputs, the order of one fma chain.
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
    zero: f32,
    pad_1: u32,
    pad_2: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> call: array<vec4<u32>, 4>;
@group(0) @binding(2) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> input: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> output: array<f32>;

fn dot4(w: vec4<f32>, x: vec4<f32>, sum: f32) -> f32 {
    return fma(w.w, x.w, fma(w.z, x.z, fma(w.y, x.y, fma(w.x, x.x, sum))));
}

// x * factor, rounded. Compilers may join a product and the sum behind it into one fma, and whether they do would depend on
// the kernel; the sum in this fma is a zero that they cannot see.
fn scaled(x: vec4<f32>, factor: f32) -> vec4<f32> {
    return fma(x, vec4<f32>(factor), vec4<f32>(params.zero));
}

fn first_row() -> u32 {
    return select(select(call[0].w, call[0].y, params.row_set == 1u), 0u, params.row_set == 0u);
}

fn end_row() -> u32 {
    return select(select(call[1].x, call[0].z, params.row_set == 1u), call[0].x, params.row_set == 0u);
}

fn segment(o: u32) -> u32 {
    return select(0u, 1u, o >= params.segment_1) + select(0u, 1u, o >= params.segment_2);
}
