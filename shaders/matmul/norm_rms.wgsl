// Inputs are divided by the root mean square of their rows of H.
const NORM: bool = true;

@group(0) @binding(5) var<storage, read> norm_input: array<vec4<f32>>;

// A row's sum of squares has SLICE partial sums whatever the tile is; NORM_ROWS rows at a time, so that they fit `partial`.
fn norms(li: u32, row0: u32, last_row: u32) {
    let first = li % SLICE;
    for (var base = 0u; base < R; base += NORM_ROWS) {
        for (var r = li / SLICE; r < NORM_ROWS; r += WG / SLICE) {
            let at = min(row0 + base + r, last_row) * params.hidden_stride / 4u;
            var sum = 0.0;
            for (var i = first; i < (params.hidden + 3u) / 4u; i += SLICE) {
                let h = norm_input[at + i];
                sum = dot4(h, h, sum);
            }
            partial[r * SLICE + first] = sum;
        }
        workgroupBarrier();
        for (var r = li; r < NORM_ROWS; r += WG) {
            var sum = partial[r * SLICE];
            for (var i = 1u; i < SLICE; i++) {
                sum += partial[r * SLICE + i];
            }
            inverse_rms[base + r] = inverseSqrt(sum / f32(params.hidden) + params.eps);
        }
        workgroupBarrier();
    }
}
