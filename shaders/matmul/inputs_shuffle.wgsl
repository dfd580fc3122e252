// Neighbours of a subgroup read one input vector each and hand it round. All of a workgroup walks the same inputs
// (KL = 1), so it does not matter which invocations make up a subgroup.
const SUBGROUP: u32 = 8u; // variant
const SHARED: bool = true;
const SHARE: u32 = min(SUBGROUP, BLOCK_VECS);
const HELD: u32 = BLOCK_VECS / SHARE;
const_assert KL == 1u;

fn first_run(li: u32) -> u32 {
    return 0u;
}

fn held_vec(v: u32, subgroup_lane: u32) -> u32 {
    return v * SHARE + subgroup_lane % SHARE;
}

fn from_neighbour(x: vec4<f32>, v: u32, subgroup_lane: u32) -> vec4<f32> {
    return subgroupShuffle(x, subgroup_lane - subgroup_lane % SHARE + v % SHARE);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(local_invocation_index) li: u32,
    @builtin(workgroup_id) wg: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
) {
    product(li, wg, grid, subgroup_lane);
}
