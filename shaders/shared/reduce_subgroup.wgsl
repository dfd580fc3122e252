// Reductions over the 64 threads of a workgroup, N values at once, in a fixed order: within subgroups, then over them.
// Every thread gets the result. Threads of a subgroup are neighbours, as they are on every implementation for workgroups
// of one dimension. Begins with a barrier, since it ends on a read. Needs N from its includer.
var<workgroup> reduce_all: array<f32, N * 64u>;

struct Lane {
    @builtin(local_invocation_index) index: u32,
    @builtin(subgroup_invocation_id) in_subgroup: u32,
    @builtin(subgroup_size) subgroup: u32,
}

fn reduce_max(values: ptr<function, array<f32, N>>, lane: Lane) {
    workgroupBarrier();
    for (var n = 0u; n < N; n++) { // unroll
        let most = subgroupMax((*values)[n]);
        if (lane.in_subgroup == 0u) {
            reduce_all[n * 64u + lane.index / lane.subgroup] = most;
        }
    }
    workgroupBarrier();
    let subgroups = (63u + lane.subgroup) / lane.subgroup;
    for (var n = 0u; n < N; n++) { // unroll
        var most = reduce_all[n * 64u];
        for (var i = 1u; i < subgroups; i++) {
            most = max(most, reduce_all[n * 64u + i]);
        }
        (*values)[n] = most;
    }
}

fn reduce_sum(values: ptr<function, array<f32, N>>, lane: Lane) {
    workgroupBarrier();
    for (var n = 0u; n < N; n++) { // unroll
        let sum = subgroupAdd((*values)[n]);
        if (lane.in_subgroup == 0u) {
            reduce_all[n * 64u + lane.index / lane.subgroup] = sum;
        }
    }
    workgroupBarrier();
    let subgroups = (63u + lane.subgroup) / lane.subgroup;
    for (var n = 0u; n < N; n++) { // unroll
        var sum = reduce_all[n * 64u];
        for (var i = 1u; i < subgroups; i++) {
            sum += reduce_all[n * 64u + i];
        }
        (*values)[n] = sum;
    }
}
