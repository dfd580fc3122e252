// K/V in f16 without the shader-f16 feature. A unit is four neighbouring dimensions of a head.
alias KvUnit = vec2<u32>;

fn kv_unpack(unit: KvUnit) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(unit.x), unpack2x16float(unit.y));
}

// Values beyond f16's range are cut to it: an infinity in a slot would outlive the call.
fn kv_pack(values: vec4<f32>) -> KvUnit {
    let v = clamp(values, vec4<f32>(-65504.0), vec4<f32>(65504.0));
    return vec2<u32>(pack2x16float(v.xy), pack2x16float(v.zw));
}
