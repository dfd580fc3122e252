// Reductions over the 64 threads of a workgroup, N values at once, in a fixed order: eight threads of eight, then all of
// eight. Every thread gets the result. Begins with a barrier, since it ends on a read.
// Needs N from its includer.
var<workgroup> reduce_all: array<f32, N * 64u>;
var<workgroup> reduce_eight: array<f32, N * 8u>;

struct Lane {
    @builtin(local_invocation_index) index: u32,
}

fn reduce_max(values: ptr<function, array<f32, N>>, lane: Lane) {
    workgroupBarrier();
    for (var n = 0u; n < N; n++) { // unroll
        reduce_all[n * 64u + lane.index] = (*values)[n];
    }
    workgroupBarrier();
    for (var at = lane.index; at < N * 8u; at += 64u) {
        var most = reduce_all[at * 8u];
        for (var i = 1u; i < 8u; i++) {
            most = max(most, reduce_all[at * 8u + i]);
        }
        reduce_eight[at] = most;
    }
    workgroupBarrier();
    for (var n = 0u; n < N; n++) { // unroll
        var most = reduce_eight[n * 8u];
        for (var i = 1u; i < 8u; i++) {
            most = max(most, reduce_eight[n * 8u + i]);
        }
        (*values)[n] = most;
    }
}

fn reduce_sum(values: ptr<function, array<f32, N>>, lane: Lane) {
    workgroupBarrier();
    for (var n = 0u; n < N; n++) { // unroll
        reduce_all[n * 64u + lane.index] = (*values)[n];
    }
    workgroupBarrier();
    for (var at = lane.index; at < N * 8u; at += 64u) {
        var sum = reduce_all[at * 8u];
        for (var i = 1u; i < 8u; i++) {
            sum += reduce_all[at * 8u + i];
        }
        reduce_eight[at] = sum;
    }
    workgroupBarrier();
    for (var n = 0u; n < N; n++) { // unroll
        var sum = reduce_eight[n * 8u];
        for (var i = 1u; i < 8u; i++) {
            sum += reduce_eight[n * 8u + i];
        }
        (*values)[n] = sum;
    }
}
