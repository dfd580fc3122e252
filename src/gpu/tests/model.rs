//! What a loaded model promises beside its numbers: parts, calls in flight, counters, refusals.

use pollster::block_on;

use super::forward::{calls, distance, load, load_with, logits, reference};
use super::gpu;
use crate::cpu::testing::{Tiny, clean, plan};
use crate::decode::plan::RowToken;
use crate::decode::schedule::{Geometry, ModelCalls, Ticket};
use crate::decode::{ScheduleKind, ScheduleOptions};
use crate::error::Error;
use crate::gpu::Gpu;
use crate::gpu::device::DeviceOptions;
use crate::gpu::footprint::{Limits, footprint};
use crate::gpu::model::{GpuModel, ModelOptions, geometry};
use crate::kernels::testing::Q4;
use crate::model::arch::{Anchor, DraftRules, ModelRules, VerifyRows};
use crate::weights::WeightSink;
use crate::weights::packed::Format;

const OPTIONS: ModelOptions = ModelOptions { context: 64, half_cache: true };

#[test]
fn matrices_that_exceed_a_binding_are_split() {
    // Table, head, gate_up and down all exceed two megabytes, with and without bias, adapter included.
    let tiny = Tiny { hidden: 512, intermediate: 1100, vocab: 2700, bias: true, ..Tiny::new(Format::F32) };
    let small = with_default_limits().with_smaller_buffers(2 << 20);
    let mut split = load(&small, &tiny, false);
    let mut whole = load(&gpu(false), &tiny, false);
    let mut expected = reference(&tiny);
    for (i, mut call) in calls(&tiny).into_iter().enumerate() {
        if i == 0 {
            // Tokens of every part of the table.
            let rows = [5u32, 1100, 2699, 2047, 2048].iter().zip(0..).map(|(&t, p)| clean(t, p)).collect();
            call = plan(rows);
        }
        let (a, b, want) = (logits(&mut split, &call), logits(&mut whole, &call), logits(&mut expected, &call));
        assert_eq!(a, b, "parts change no bit");
        let d = distance(&a, &want);
        assert!(d < 2e-5, "{d}");
        assert!(split.counters().dispatches > whole.counters().dispatches + 4);
        assert_eq!(split.counters().weight_bytes, whole.counters().weight_bytes);
    }
}

/// A device that was asked for the limits of every WebGPU device, and checks that nobody goes beyond them.
fn with_default_limits() -> Gpu {
    let options = DeviceOptions { default_limits: true, ..DeviceOptions::default() };
    let gpu = block_on(Gpu::open(options)).expect("tests need a WebGPU adapter (Mesa's lavapipe will do)");
    assert_eq!(gpu.info().limits(), Limits::default());
    assert!(gpu.info().max_compute_invocations_per_workgroup == 256 && gpu.info().max_storage_buffers_per_shader_stage == 8);
    gpu
}

#[test]
fn a_table_larger_than_a_binding_of_every_device_is_split() {
    // 148 MB; head and table are one.
    let tiny = Tiny { hidden: 512, vocab: 72_300, ..Tiny::new(Format::F32) };
    assert!((tiny.hidden * tiny.vocab * 4) as u64 > Limits::default().max_storage_buffer_binding_size);
    let here = gpu(false);
    let mut split = load(&with_default_limits(), &tiny, false);
    let rows = [5u32, 72_299, 40_000, 65_535, 65_536].iter().zip(0..).map(|(&t, p)| clean(t, p)).collect();
    let call = plan(rows);
    let got = logits(&mut split, &call);
    assert!(got.iter().flatten().all(|logit| logit.is_finite()) && got[0].iter().any(|logit| *logit != got[0][0]));
    let dispatches = split.counters().dispatches;
    drop(split);
    if here.info().max_storage_buffer_binding_size > Limits::default().max_storage_buffer_binding_size {
        let mut whole = load(&here, &tiny, false);
        assert_eq!(got, logits(&mut whole, &call), "parts change no bit");
        assert!(dispatches > whole.counters().dispatches, "control: here it is one part");
    }
}

#[test]
fn dispatches_and_bytes_are_counted() {
    let tiny = Tiny::new(Q4);
    let mut model = load(&gpu(false), &tiny, true);
    let [prompt, packed] = calls(&tiny).try_into().unwrap();
    let program = tiny.program();
    let bytes = |lora: bool| -> u64 {
        let count = |m: &crate::model::program::MatrixSpec| {
            let is_lora = m.role == crate::model::program::Role::Lora;
            let format = if is_lora { Format::F16 } else { Q4 };
            // B is bound whether its rows are there or not: one kernel for all calls keeps their bits the same.
            let bound = lora || !m.label.ends_with("lora_A");
            if bound { (m.n.next_multiple_of(8) * format.bytes_per_row(m.k)) as u64 } else { 0 }
        };
        program.matrices.iter().map(count).sum()
    };
    logits(&mut model, &prompt);
    assert_eq!((model.counters().dispatches, model.counters().weight_bytes), (6 * 2 + 4, bytes(false)));
    logits(&mut model, &packed);
    assert_eq!((model.counters().dispatches, model.counters().weight_bytes), (10 * 2 + 4, bytes(true)));
    assert!(bytes(true) > bytes(false));
    // K and V of 13 slots, two key heads of 16 halves, two layers.
    logits(&mut model, &plan(vec![clean(11, 12)]));
    assert_eq!(model.counters().kv_bytes, 2 * 13 * 2 * 16 * 2 * 2);
    let memory = model.memory();
    let cache = 2 * (64 + 160) * 2 * 16 * 2; // per layer: K and V, slots, heads, dimensions, f16
    assert_eq!(memory.kv_cache, 2 * cache);
    assert!(memory.weights >= bytes(true) && memory.working > 0);

    // The same, known beforehand; only the dispatches' parameters are not counted.
    let of = |m: &crate::model::program::MatrixSpec| {
        if m.role == crate::model::program::Role::Lora { Format::F16 } else { Q4 }
    };
    let formats: Vec<_> = program.matrices.iter().map(of).collect();
    let before = |context| footprint(&program, &formats, context, 2, Limits::default()).unwrap().memory;
    let expected = before(64);
    assert_eq!((expected.weights, expected.kv_cache), (memory.weights, memory.kv_cache));
    assert!((0..64 << 10).contains(&(memory.working - expected.working)), "{memory:?} {expected:?}");
    assert_ne!(before(65).kv_cache, memory.kv_cache, "control: another context");
    // With a buffer for calls in parts.
    let (long, expected) = (load_with(&gpu(false), &tiny, true, 1100).memory(), before(1100));
    assert_eq!((expected.weights, expected.kv_cache), (long.weights, long.kv_cache));
    assert!((0..64 << 10).contains(&(long.working - expected.working)), "{long:?} {expected:?}");
}

#[test]
fn limits_that_fail_are_named_beforehand() {
    let tiny = Tiny { vocab: 5000, ..Tiny::new(Q4) };
    let program = tiny.program();
    let formats = vec![Q4; program.matrices.len()];
    let with = |binding: u64, buffer: u64| {
        let limits = Limits { max_storage_buffer_binding_size: binding, max_buffer_size: buffer };
        footprint(&program, &formats, 64, 2, limits)
    };
    let refused = |result: Result<_, Error>, about: [&str; 2]| match result {
        Err(Error::Unsupported(text)) => assert!(about.iter().all(|word| text.contains(word)), "{text}"),
        other => panic!("{other:?}"),
    };
    refused(with(100_000, 1 << 28), ["maxStorageBufferBindingSize", "100000"]);
    refused(with(1 << 28, 100_000), ["maxBufferSize", "100000"]);
    with(1 << 27, 1 << 28).unwrap();
}

#[test]
fn the_default_widths_fit_models_with_large_vocabularies() {
    let nemotron =
        DraftRules { logit_shift: 0, anchor: Anchor::InBlock, verify: VerifyRows::Clean, bidirectional: true, adapter: true };
    let setdlm =
        DraftRules { anchor: Anchor::Shared, verify: VerifyRows::Mask, bidirectional: false, adapter: false, ..nemotron };
    for (vocab, rules, horizon) in [(131_072, nemotron, None), (151_936, setdlm, None), (151_936, setdlm, Some(8))] {
        let program = Tiny { vocab, ..Tiny::new(Q4) }.program();
        let geometry = geometry(&program, 4096);
        let rules = ModelRules { draft: Some(rules), diffusion: None, horizon };
        let resolve = |kind: &str, geometry: &Geometry| {
            let options = ScheduleOptions { kind: Some(kind.parse().unwrap()), ..ScheduleOptions::default() };
            options.resolve(rules, geometry)
        };
        for kind in ScheduleKind::LOSSLESS {
            resolve(kind, &geometry).unwrap_or_else(|e| panic!("{kind} of {rules:?}: {e}"));
        }
        if horizon.is_none() {
            let refused = resolve("quadratic", &Geometry { max_choose: 80, ..geometry }).unwrap_err();
            assert!(refused.to_string().contains("needs 81 rows that choose"), "control: {refused}");
        }
        assert!(geometry.max_choose * vocab * 4 <= 64 << 20, "logits stay bounded: {geometry:?}");
    }
}

#[test]
fn two_calls_may_be_in_flight() {
    let tiny = Tiny::new(Q4);
    let mut model = load(&gpu(false), &tiny, true);
    let one = plan(vec![clean(3, 0), clean(4, 1)]);
    let two = plan(vec![clean(5, 2)]);
    let mut expected = Vec::new();
    for call in [&one, &two] {
        let ticket = model.submit(call).unwrap();
        expected.push(block_on(model.answer(ticket)).unwrap());
    }
    let (a, b) = (model.submit(&one).unwrap(), model.submit(&two).unwrap());
    assert!(matches!(model.submit(&two), Err(Error::Busy(_))));
    assert_eq!(block_on(model.answer(b)).unwrap(), expected[1]);
    let c = model.submit(&two).unwrap();
    assert_eq!(block_on(model.answer(a)).unwrap(), expected[0]);
    assert_eq!(block_on(model.answer(c)).unwrap(), expected[1]);
    assert!(matches!(block_on(model.answer(c)), Err(Error::Internal(_))), "a ticket is asked for once");
    assert!(matches!(block_on(model.answer(Ticket(99))), Err(Error::Internal(_))));
}

#[test]
fn kernels_are_compiled_ahead_and_once() {
    let tiny = Tiny::new(Q4);
    let mut model = load(&gpu(false), &tiny, true);
    let mut told = Vec::new();
    block_on(model.prepare(&[1, 3], |done, all| told.push((done, all)))).unwrap();
    let compiled = model.compiled_kernels();
    assert_eq!(told.last(), Some(&(compiled, compiled)));
    assert!(told.len() > 1 && told.windows(2).all(|w| w[1].0 == w[0].0 + 1));
    logits(&mut model, &plan(vec![clean(1, 0)]));
    logits(&mut model, &plan((0..3).map(|p| clean(p, p)).collect()));
    assert_eq!(model.compiled_kernels(), compiled);
    logits(&mut model, &plan((0..5).map(|p| clean(p, p)).collect()));
    assert!(model.compiled_kernels() > compiled, "another width needs another kernel here");
}

#[test]
fn what_cannot_run_is_refused_by_name() {
    let said = |result: crate::Result<GpuModel>| result.map(|_| ()).unwrap_err();
    let tiny = Tiny::new(Q4);
    let refused = |program, options| said(GpuModel::new(&gpu(false), program, options));

    let error = refused(tiny.program(), ModelOptions { context: 0, ..OPTIONS });
    assert!(matches!(error, Error::InvalidOption(_)), "{error}");
    let small = gpu(false).with_smaller_buffers(1 << 20);
    let error = said(GpuModel::new(&small, tiny.program(), ModelOptions { context: 100_000, ..OPTIONS }));
    assert!(
        matches!(&error, Error::Unsupported(m) if m.contains("maxStorageBufferBindingSize") && m.contains("at most 8032 positions")),
        "{error}"
    );
    // The context it names is one it takes, but for the rotary table, which is smaller.
    GpuModel::new(&small, tiny.program(), ModelOptions { context: 8032, ..OPTIONS }).unwrap();

    let mut program = tiny.program();
    program.arch.head_dim = 258;
    let error = refused(program, OPTIONS);
    assert!(matches!(&error, Error::Unsupported(m) if m.contains("258")), "{error}");

    // Weights that did not come.
    let mut model = GpuModel::new(&gpu(false), tiny.program(), OPTIONS).unwrap();
    model.vector(crate::model::program::VectorId(0), vec![0.0; 64]).unwrap();
    assert!(matches!(block_on(model.ready()), Err(Error::Internal(_))));
    assert!(matches!(model.vector(crate::model::program::VectorId(0), vec![0.0; 3]), Err(Error::Internal(_))));

    // A bad call leaves the model as it was.
    let mut model = load(&gpu(false), &tiny, true);
    let good = plan(vec![clean(1, 0)]);
    let before = logits(&mut model, &good);
    let mut row = clean(1, 0);
    row.token = RowToken::Id(50);
    assert!(matches!(model.submit(&plan(vec![row])), Err(Error::InvalidOption(_))));
    assert!(matches!(model.submit(&plan(vec![clean(1, 64)])), Err(Error::InvalidOption(_))));
    assert!(matches!(model.submit(&plan(vec![])), Err(Error::InvalidOption(_))));
    assert_eq!(logits(&mut model, &good), before);
}
