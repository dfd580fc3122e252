// act[r, o / 2] = silu(y[o]) * y[o + 1] for even o: a thread writes one of each pair of lanes.
const LANES: u32 = 4u;

fn write(row: u32, act_row: u32, o: u32, item: u32, slice: u32) {
    let gate = with_bias(total(item, slice, o % 8u), o);
    let up = with_bias(total(item, slice, o % 8u + 1u), o + 1u);
    output[act_row * params.output_stride + o / 2u] = gate / (1.0 + exp(-gate)) * up;
}
