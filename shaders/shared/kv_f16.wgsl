// K/V in f16 with the shader-f16 feature. A unit is four neighbouring dimensions of a head.
alias KvUnit = vec4<f16>;

fn kv_unpack(unit: KvUnit) -> vec4<f32> {
    return vec4<f32>(unit);
}

// Values beyond f16's range are cut to it: an infinity in a slot would outlive the call.
fn kv_pack(values: vec4<f32>) -> KvUnit {
    return vec4<f16>(clamp(values, vec4<f32>(-65504.0), vec4<f32>(65504.0)));
}
