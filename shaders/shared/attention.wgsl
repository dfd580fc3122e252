// What attention and the merging of its parts have in common: both must give a row the same bits.
const KEYS: u32 = 256u; // of a tile
const PART_ROWS: u32 = 16u; // most rows of a call that is split
const LOWEST: f32 = -3.4e38;

struct Params {
    query_heads: u32, // Hq
    key_value_heads: u32, // Hkv
    dim: u32, // Dh
    stride: u32, // of qkv
    attn_stride: u32,
    slots: u32, // of the cache, scratch included
    window: u32, // keys a row sees of the cache, itself included; 0 for all
    scale: f32, // 1 / sqrt(Dh)
}

// Softmax over some keys: the largest score, sum of exp(score - largest), and that sum weighted with a unit of the values.
struct Softmax {
    largest: f32,
    total: f32,
    sum: vec4<f32>,
}

// Exact where one of the two is over no keys. Factors of 1 are not left to exp.
fn merged(a: Softmax, b: Softmax) -> Softmax {
    let largest = max(a.largest, b.largest);
    let keep = select(exp(a.largest - largest), 1.0, a.largest == largest);
    let add = select(exp(b.largest - largest), 1.0, b.largest == largest);
    return Softmax(largest, fma(b.total, add, a.total * keep), fma(b.sum, vec4<f32>(add), a.sum * keep));
}

// Slots a row sees: start and end in the cache, start and end in the scratch range.
fn sees(row: u32) -> vec4<u32> {
    let at = HEADER_WORDS + row * ROW_WORDS;
    var first = call[at + ROW_CACHE];
    if (params.window != 0u) {
        let end = call[at + ROW_POSITION] + 1u;
        first = max(first, end - min(end, params.window));
    }
    return vec4<u32>(first, call[at + ROW_CACHE + 1u], call[at + ROW_SCRATCH], call[at + ROW_SCRATCH + 1u]);
}

// Where the parts of a unit are: part 0 is the scratch range, part 1 + t tile t of the cache. A head has a vector with
// `largest` and `total` before its units.
fn part_at(part: u32, row: u32, head: u32) -> u32 {
    return ((part * PART_ROWS + row) * params.query_heads + head) * ((params.dim + 3u) / 4u + 1u);
}

fn write(row: u32, head: u32, unit: u32, all: Softmax) {
    for (var i = 0u; i < 4u; i++) { // unroll
        let d = unit * 4u + i;
        if (d < params.dim) {
            // A zero has no sign: it would tell of keys that the row does not see.
            let value = all.sum[i] / all.total;
            attn[row * params.attn_stride + head * params.dim + d] = select(value, 0.0, value == 0.0);
        }
    }
}
