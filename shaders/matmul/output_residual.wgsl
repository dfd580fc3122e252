// H[r, o] += y; X[r, o] = H[r, o] * gain[o].
// include shared/vectors.wgsl
const LANES: u32 = 8u;

@group(0) @binding(10) var<storage, read_write> hidden: array<f32>;

fn write(row: u32, act_row: u32, o: u32, item: u32, slice: u32) {
    let at = row * params.hidden_stride + o;
    let h = hidden[at] + with_bias(total(item, slice, o % 8u), o);
    hidden[at] = h;
    output[act_row * params.output_stride + o] = h * vectors[params.gain_at + o];
}
