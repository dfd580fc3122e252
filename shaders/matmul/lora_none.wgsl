// No LoRA.
const LORA: bool = false;
const LORA_VECS: u32 = 1u;

fn lora_block(at: u32) -> vec4<u32> {
    return vec4<u32>();
}

fn lora_input(at: u32) -> vec4<f32> {
    return vec4<f32>();
}

fn unpack_lora(block: vec4<u32>, v: u32) -> vec4<f32> {
    return vec4<f32>();
}
