// Every thread reads the inputs it needs itself: neighbours read the same address, which GPUs answer with one broadcast.
const SHARED: bool = false;
const SHARE: u32 = BLOCK_VECS;
const HELD: u32 = 1u;

fn first_run(li: u32) -> u32 {
    return (li / 8u) % KL;
}

fn held_vec(v: u32, subgroup_lane: u32) -> u32 {
    return v;
}

fn from_neighbour(x: vec4<f32>, v: u32, subgroup_lane: u32) -> vec4<f32> {
    return x;
}

@compute @workgroup_size(WG)
fn main(
    @builtin(local_invocation_index) li: u32,
    @builtin(workgroup_id) wg: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
) {
    product(li, wg, grid, 0u);
}
