// LoRA with B in f32: a block holds 4 ranks.
const LORA: bool = true;
const LORA_VECS: u32 = 1u;

@group(0) @binding(8) var<storage, read> lora_b: array<vec4<u32>>;
@group(0) @binding(9) var<storage, read> lora: array<vec4<f32>>;

fn lora_block(at: u32) -> vec4<u32> {
    return lora_b[at];
}

fn lora_input(at: u32) -> vec4<f32> {
    return lora[at];
}

fn unpack_lora(block: vec4<u32>, v: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(block);
}
