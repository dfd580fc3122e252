// SHARE neighbours of a subgroup read one vector each and hand it round.
const SHARE: u32 = 8u; // variant: the subgroup size

struct Lane {
    @builtin(local_invocation_index) index: u32,
    @builtin(subgroup_invocation_id) in_subgroup: u32,
}

fn own(lane: Lane) -> u32 {
    return lane.in_subgroup % SHARE;
}

fn from_neighbour(x: vec4<f32>, lane: Lane, i: u32) -> vec4<f32> {
    return subgroupShuffle(x, i);
}
