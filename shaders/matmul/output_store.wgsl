// act[r, o] = y; rows that choose are counted from the first of them.
const LANES: u32 = 8u;

fn write(row: u32, act_row: u32, o: u32, item: u32, slice: u32) {
    output[act_row * params.output_stride + o] = with_bias(total(item, slice, o % 8u), o);
}
