// K/V in f32. A unit is four neighbouring dimensions of a head.
alias KvUnit = vec4<f32>;

fn kv_unpack(unit: KvUnit) -> vec4<f32> {
    return unit;
}

fn kv_pack(values: vec4<f32>) -> KvUnit {
    return values;
}
