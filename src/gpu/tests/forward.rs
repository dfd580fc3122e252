//! Whole forward passes against the reference.

use pollster::block_on;

use super::gpu;
use crate::cpu::reference::Reference;
use crate::cpu::testing::{Tiny, block, clean, plan};
use crate::decode::plan::{CallPlan, Row};
use crate::decode::schedule::ModelCalls;
use crate::gpu::Gpu;
use crate::gpu::model::{GpuModel, ModelOptions};
use crate::kernels::testing::{Q4, Q8};
use crate::model::program::Act;
use crate::weights::packed::Format;

const CONTEXT: u32 = 64;

pub(super) fn load(gpu: &Gpu, tiny: &Tiny, half_cache: bool) -> GpuModel {
    load_with(gpu, tiny, half_cache, CONTEXT)
}

pub(super) fn load_with(gpu: &Gpu, tiny: &Tiny, half_cache: bool, context: u32) -> GpuModel {
    let program = tiny.program();
    let options = ModelOptions { context, half_cache };
    let mut model = GpuModel::new(gpu, program.clone(), options).unwrap();
    tiny.fill(&program, 5, &mut model);
    block_on(model.ready()).unwrap();
    model
}

pub(super) fn reference(tiny: &Tiny) -> Reference {
    reference_with(tiny, CONTEXT)
}

fn reference_with(tiny: &Tiny, context: u32) -> Reference {
    let program = tiny.program();
    let mut model = Reference::new(program.clone(), context);
    tiny.fill(&program, 5, &mut model);
    model
}

pub(super) fn logits(model: &mut impl ModelCalls, plan: &CallPlan) -> Vec<Vec<f32>> {
    let ticket = model.submit(plan).unwrap();
    block_on(model.answer(ticket)).unwrap();
    block_on(model.logits()).unwrap()
}

/// The largest difference over the range of the expected logits.
pub(super) fn distance(got: &[Vec<f32>], expected: &[Vec<f32>]) -> f32 {
    assert_eq!((got.len(), got[0].len()), (expected.len(), expected[0].len()));
    let all = || expected.iter().flatten().copied();
    let range = all().fold(f32::MIN, f32::max) - all().fold(f32::MAX, f32::min);
    let mut worst = 0f32;
    for (a, b) in got.iter().flatten().zip(all()) {
        let difference = (a - b).abs();
        if !(difference <= worst) {
            worst = difference; // NaN included
        }
        if difference.is_nan() {
            return f32::NAN;
        }
    }
    worst / range
}

fn tinies() -> Vec<Tiny> {
    vec![
        Tiny::new(Q4),
        Tiny { tied: false, bias: true, qk_norm: true, window: Some(3), ..Tiny::new(Q8) },
        Tiny { adapter_rank: 0, ..Tiny::new(Format::F32) },
        Tiny { hidden: 72, intermediate: 104, heads: (6, 2, 24), vocab: 4500, adapter_rank: 5, ..Tiny::new(Format::F16) },
        Tiny { heads: (3, 1, 18), ..Tiny::new(Q4) },
        Tiny { heads: (10, 1, 80), window: Some(7), ..Tiny::new(Q8) },
    ]
}

/// A prompt, then a packed call: verify rows and a draft block.
pub(super) fn calls(tiny: &Tiny) -> Vec<CallPlan> {
    let tokens = [3u32, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32];
    let prompt: Vec<Row> = tokens.iter().zip(0..).map(|(&t, p)| clean(t, p)).collect();
    let mut packed = vec![clean(11, 12), clean(12, 13), clean(13, 14)];
    if tiny.adapter_rank > 0 {
        packed.extend(block(11, 12, 5, 3));
    }
    vec![plan(prompt), plan(packed)]
}

#[test]
pub(super) fn logits_match_the_reference() {
    for plain in [true, false] {
        for (i, tiny) in tinies().iter().enumerate() {
            let mut expected = reference(tiny);
            // f32: rounding only. f16: K and V have 11 bits.
            for (half_cache, bound) in [(false, 2e-5), (true, 2e-3)] {
                let mut model = load(&gpu(plain), tiny, half_cache);
                for call in calls(tiny) {
                    let (got, want) = (logits(&mut model, &call), logits(&mut expected, &call));
                    let d = distance(&got, &want);
                    assert!(d < bound, "model {i}, plain {plain}, half {half_cache}: {d}");
                    // Control: one logit off by a thousandth of the range is noticed.
                    let mut off = got.clone();
                    let range = want.iter().flatten().fold(0f32, |m, v| m.max(v.abs()));
                    off[0][1] += range * 0.01;
                    assert!(!(distance(&off, &want) < bound));
                }
                let (keys, values) = block_on(model.cache(1)).unwrap();
                let want = expected.cache(1);
                let d = [(keys, want.keys), (values, want.values)].map(|(got, want)| {
                    let want: Vec<f32> = want.iter().map(|&v| v as f32).collect();
                    distance(&[got], &[want])
                });
                assert!(d.iter().all(|d| *d < 2.0 * bound), "cache of model {i}, half {half_cache}: {d:?}");
            }
        }
    }
}

#[test]
fn a_row_alone_equals_the_row_in_a_wide_call_bit_for_bit() {
    for plain in [true, false] {
        for tiny in tinies() {
            let mut wide = load(&gpu(plain), &tiny, true);
            let mut alone = load(&gpu(plain), &tiny, true);
            for call in calls(&tiny) {
                logits(&mut wide, &call);
                let rows = call.rows().len();
                let h = block_on(wide.activation(Act::H, rows)).unwrap();
                let all = block_on(wide.logits()).unwrap();
                for (device, row) in call.rows().iter().enumerate().filter(|(_, r)| !r.adapter) {
                    let one = logits(&mut alone, &plan(vec![row.clone()]));
                    let stride = h.len() / rows;
                    let own = block_on(alone.activation(Act::H, 1)).unwrap();
                    assert_eq!(own, h[device * stride..][..stride]);
                    assert_eq!(one[0], all[device - call.choose().start], "row {device}");
                }
            }
            let slots = 15 * tiny.heads.1 * tiny.heads.2;
            for layer in 0..2 {
                let (a, b) = (block_on(wide.cache(layer)).unwrap(), block_on(alone.cache(layer)).unwrap());
                assert_eq!(a.0[..slots], b.0[..slots]);
                assert_eq!(a.1[..slots], b.1[..slots]);
            }
        }
    }
}

/// What real GPUs run: calls behind a long cache in parts, wider ones in one, other matrix kernels.
#[test]
fn calls_split_along_the_cache_give_the_same_bits() {
    for (i, tiny) in [Tiny::new(Q4), Tiny { heads: (6, 2, 24), window: Some(900), ..Tiny::new(Q8) }].iter().enumerate() {
        for plain in [true, false] {
            let gpu = gpu(plain).taken_for_hardware();
            let mut model = load_with(&gpu, tiny, true, 1100);
            let mut expected = reference_with(tiny, 1100);
            let row = |position: u32| clean((position * 7 + 3) % 31, position);
            for first in (0..1000).step_by(250) {
                let mut rows: Vec<Row> = (first..first + 250).map(row).collect();
                rows.iter_mut().take(249).for_each(|row| row.choose = false);
                let prompt = plan(rows);
                logits(&mut model, &prompt);
                logits(&mut expected, &prompt);
            }
            let mut wide = (1000..1020).map(row).collect::<Vec<_>>();
            let together = logits(&mut model, &plan(wide.clone()));
            let unsplit = model.counters();
            let d = distance(&together, &logits(&mut expected, &plan(wide.clone())));
            assert!(d < 2e-3, "model {i}, plain {plain}: {d}");
            for at in [0, 7, 19] {
                let alone = logits(&mut model, &plan(vec![wide[at].clone()]));
                assert_eq!(alone[0], together[at], "model {i}, plain {plain}, row {at}");
            }
            let split = model.counters();
            assert_eq!(split.dispatches, unsplit.dispatches + 2, "one merge a layer");
            assert!(split.kv_bytes < unsplit.kv_bytes);
            wide.truncate(3);
            wide.extend(block(11, 1003, 5, 3));
            let packed = plan(wide);
            let (got, want) = (logits(&mut model, &packed), logits(&mut expected, &packed));
            let d = distance(&got, &want);
            assert!(d < 2e-3, "model {i}, plain {plain}, packed: {d}");
            // Control: a key more or less is noticed.
            let mut row = row(1019);
            row.sees.cache.end -= 1;
            let other = logits(&mut model, &plan(vec![row]));
            assert_ne!(other[0], together[19]);
        }
    }
}
