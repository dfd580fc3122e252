//! Forward passes and greedy texts against the golden vectors, on every backend.
//!
//! Errors are given over the range of the truth's logits (keys and values: over their own range). The bounds:
//!
//! | backend | storage | bound | why |
//! | --- | --- | --- | --- |
//! | reference | f64 | 1e-6 | the truth is stored as f32, logits are read as f32 |
//! | gpu, cpu | f32 K/V | 1e-4 | sums of f32 in another order; bf16 and f16 weights widened to f32 change nothing |
//! | cpu | f32 K/V, quantised weights | 5e-4 | inputs of products are 16-bit integers, a scale per weight group |
//! | gpu, cpu | f16 K/V | 3e-3 | keys and values have 11 bits |
//! | gpu, cpu | f16 K/V, bf16 weights as f16 or quantised while loading | 3e-3 | the truth is of the weights as kept: bf16 fits f16 but for the smallest |
//! | cpu | rows with the adapter, quantised weights | 4e-2 | the adapter, here as strong as the weights, is turned into 8-bit groups; such rows never become text unverified |

mod checkpoints;

use std::collections::BTreeMap;

use checkpoints::{BACKENDS, GOLDEN, Golden, distance, golden_folder, ids, load_as, regrets};
use forecall::decode::plan::{CallKind, CallPlan, Keep, Row, RowToken, Sees};
use forecall::decode::{CallCount, ScheduleKind, draft_rows, packed_rows};
use forecall::engine::{Backend, Generate, LoadOptions, Model, Precision, Prompt, Quantize};
use forecall::gpu::DeviceOptions;
use pollster::block_on;

const EXACT: f32 = 1e-6;
const SINGLE: f32 = 1e-4;
const INTEGER_INPUTS: f32 = 5e-4;
const HALF_CACHE: f32 = 3e-3;
const SMALL_ADAPTER: f32 = 4e-2;

fn is_f32(checkpoint: &str) -> bool {
    !is_half(checkpoint) && !matches!(checkpoint, "tiny-llama-q4" | "tiny-llama-q8-bf16" | "tiny-nemotron-q4")
}

/// Plain f16 or bf16.
fn is_half(checkpoint: &str) -> bool {
    matches!(checkpoint, "tiny-setdlm-f16" | "tiny-nemotron-bf16" | "tiny-setdlm-bf16")
}

fn bound(checkpoint: &str, backend: Backend, precision: Precision) -> f32 {
    match backend {
        Backend::Reference => EXACT,
        _ if is_f32(checkpoint) || is_half(checkpoint) && precision == Precision::F32 => SINGLE,
        Backend::Cpu if precision == Precision::F32 => INTEGER_INPUTS,
        _ if precision == Precision::F32 => SINGLE,
        _ => HALF_CACHE,
    }
}

/// Everything the truth has a tensor for, as the model computes it: tensor name to values.
fn outputs(model: &mut Model, golden: &Golden) -> BTreeMap<String, Vec<f32>> {
    let (prompt, draft) = (ids(&golden.json["prompt"]), ids(&golden.json["draft"]));
    let rules = model.draft_rules().expect("golden checkpoints can draft");
    let (&pending, before) = prompt.split_last().unwrap();
    let n = before.len() as u32;
    let mut out = BTreeMap::new();
    let causal = block_on(model.logits(&prompt, Some(7))).unwrap();
    out.insert("causal.logits".into(), causal.causal.concat());
    out.insert("draft.w7.logits".into(), causal.draft.unwrap().concat());
    let w3 = block_on(model.logits(&prompt, Some(3))).unwrap();
    out.insert("draft.w3.logits".into(), w3.draft.unwrap().concat());
    for (name, keys) in [("causal.keys", true), ("causal.values", false)] {
        let mut all = Vec::new();
        for layer in 0..model.layers() {
            let cache = block_on(model.kv_cache(layer)).unwrap();
            let per_layer: usize = golden.tensor(name).shape[1..].iter().product();
            let values = if keys { cache.keys } else { cache.values };
            all.extend(values.iter().take(per_layer).map(|&v| v as f32));
        }
        out.insert(name.into(), all);
    }
    let mut call = |rows: Vec<Row>| block_on(model.run_plan(&CallPlan::new(CallKind::Decode, rows))).unwrap().concat();
    if rules.adapter {
        let without_adapter = draft_rows(rules, n, pending, 7).into_iter().map(|row| Row { adapter: false, ..row });
        out.insert("draft_without_adapter.w7.logits".into(), call(without_adapter.collect()));
    }
    let verify: Vec<u32> = std::iter::once(pending).chain(draft.iter().copied()).collect();
    out.insert("packed.logits".into(), call(packed_rows(rules, n, &verify, &[0], 7)));
    out.insert("anchored.logits".into(), call(packed_rows(rules, n, &verify, &[0, 2], 7)));
    let far = ids(&golden.json["far"]);
    if let Some(&last) = far.last() {
        out.insert("far.logits".into(), call(far_rows(&prompt, &far, draft_rows(rules, n, pending, 7), last - n)));
    }
    out
}

/// The prompt's rows at the positions `far` in the first slots of the cache, and a draft block moved on by `by`.
fn far_rows(prompt: &[u32], far: &[u32], block: Vec<Row>, by: u32) -> Vec<Row> {
    let clean = prompt.iter().zip(far).zip(0..).map(|((&id, &position), slot)| Row {
        token: RowToken::Id(id),
        position,
        adapter: false,
        keep: Keep::Cache(slot),
        sees: Sees { cache: 0..slot + 1, scratch: 0..0 },
        choose: true,
    });
    clean.chain(block.into_iter().map(|row| Row { position: row.position + by, ..row })).collect()
}

/// How many values at a tensor's start are of rows without the adapter.
fn values_without_adapter(golden: &Golden, tensor: &str) -> usize {
    let rows = match tensor {
        "packed.logits" | "anchored.logits" => ids(&golden.json["draft"]).len() + 1,
        "far.logits" => ids(&golden.json["prompt"]).len(),
        "draft.w3.logits" | "draft.w7.logits" => 0,
        _ => return usize::MAX,
    };
    rows * golden.tensor("causal.logits").shape[1]
}

/// The range that errors in a tensor are measured in.
fn range(golden: &Golden, name: &str) -> f32 {
    if name.ends_with("logits") {
        return golden.logit_range();
    }
    let values = &golden.tensor(name).values;
    values.iter().copied().fold(f32::MIN, f32::max) - values.iter().copied().fold(f32::MAX, f32::min)
}

/// One backend and precision against the truth; returns the largest error of the logits.
fn compare(checkpoint: &str, (name, backend): (&str, Backend), precision: Precision) -> f32 {
    let options = LoadOptions { backend, precision, ..LoadOptions::default() };
    let golden = Golden::read(checkpoint);
    compare_model(checkpoint, name, &options, &mut open(checkpoint, &golden, &options), &golden)
}

/// The model, with a context that the truth needs.
fn open(checkpoint: &str, golden: &Golden, options: &LoadOptions) -> Model {
    let context_length = ids(&golden.json["far"]).last().map(|last| *last as usize + 1);
    load_as(&golden_folder(checkpoint), &LoadOptions { context_length, ..*options })
}

fn compare_model(checkpoint: &str, name: &str, options: &LoadOptions, model: &mut Model, golden: &Golden) -> f32 {
    let LoadOptions { backend, precision, .. } = *options;
    let bound = bound(checkpoint, backend, precision);
    let outputs = outputs(model, golden);
    let names: Vec<_> = golden.names().filter(|name| *name != "causal.hidden").collect();
    assert!(outputs.keys().map(String::as_str).eq(names), "{checkpoint}: {:?}", outputs.keys());
    let mut worst = 0f32;
    let mut line = format!("{checkpoint:20} {name:10} {precision:?}: bound {bound:.0e},");
    let small_adapter =
        backend == Backend::Cpu && !is_f32(checkpoint) && !is_half(checkpoint) && model.draft_rules().unwrap().adapter;
    let draft_bound = if small_adapter { SMALL_ADAPTER } else { bound };
    for (tensor, got) in &outputs {
        let (truth, range) = (&golden.tensor(tensor).values, range(golden, tensor));
        // Rows with the adapter come last.
        let (without, with) = got.split_at(values_without_adapter(golden, tensor).min(got.len()));
        for (is_draft, (got, bound)) in [(false, (without, bound)), (true, (with, draft_bound))] {
            if got.is_empty() {
                continue;
            }
            let truth = &truth[if is_draft { without.len() } else { 0 }..][..got.len()];
            let error = distance(got, truth, range);
            line += &format!(" {tensor} {error:.1e}");
            assert!(error < bound, "{line}: over the bound {bound:.0e}");
            // Controls: a value off by twice the bound is noticed, and so are a missing and an undefined one.
            let mut off = truth.to_vec();
            let middle = off.len() / 2;
            off[middle] += 2.0 * bound * range;
            assert!(distance(got, &off, range) > bound);
            off[middle] = f32::NAN;
            assert!(distance(got, &off, range) > bound);
            assert!(distance(&got[1..], truth, range) > bound);
            if tensor.ends_with("logits") && !(small_adapter && is_draft) {
                worst = worst.max(error);
            }
        }
        assert_eq!(got.len(), truth.len());
    }
    println!("{line}");
    // Controls: an adapter that is off, and a draft block of another width, are told apart.
    let range = golden.logit_range();
    let with = &outputs["draft.w7.logits"];
    if outputs.contains_key("draft_without_adapter.w7.logits") {
        assert!(distance(with, &golden.tensor("draft_without_adapter.w7.logits").values, range) > draft_bound);
    }
    let w3 = &golden.tensor("draft.w3.logits").values;
    let alike = distance(&with[..w3.len()], w3, range);
    // Masks that do not see each other do not notice how many they are.
    assert_eq!(alike > draft_bound, model.draft_rules().unwrap().bidirectional, "{checkpoint}: {alike}");
    if let Some(mask) = golden.mask_token() {
        let row = golden.tensor("causal.logits").shape[1];
        assert!(
            outputs["causal.logits"].iter().skip(mask).step_by(row).all(|logit| logit.is_finite()),
            "the mask's logit is raw"
        );
    }
    texts(checkpoint, model, golden, worst);
    worst
}

fn generate(model: &mut Model, golden: &Golden, prompt: &[u32], count: usize, schedule: &str) -> forecall::engine::Generated {
    let width = |name: &str| golden.json[name].as_u64().map(|width| width as usize);
    let request = Generate {
        max_tokens: count,
        schedule: Some(schedule.into()),
        verify_width: width("verify_width"),
        draft_width: width("draft_width"),
        ignore_eos: true,
        reuse_cache: false,
        ..Generate::new(Prompt::Tokens(prompt.to_vec()))
    };
    block_on(model.generate(&request, &mut |_| true)).unwrap()
}

/// Whether a greedy text may come from logits that are wrong by at most `error`: every token is the choice, or closer to it
/// than twice that.
fn check_text(model: &mut Model, mask: Option<usize>, prompt: &[u32], tokens: &[u32], error: f32) -> Result<usize, String> {
    let whole = [prompt, &tokens[..tokens.len() - 1]].concat();
    let mut logits = block_on(model.logits(&whole, None)).map_err(|e| e.to_string())?.causal;
    if let Some(mask) = mask {
        logits.iter_mut().for_each(|row| row[mask] = f32::NEG_INFINITY);
    }
    let regrets = regrets(&logits[prompt.len() - 1..], tokens);
    match regrets.iter().position(|r| *r > 2.0 * error) {
        Some(i) => {
            Err(format!("token {i} of the text, {}, lies {} below the choice; {} is allowed", tokens[i], regrets[i], 2.0 * error))
        }
        None => Ok(regrets.iter().position(|r| *r > 0.0).unwrap_or(tokens.len())),
    }
}

/// `[drafted, accepted]` of calls, as the truth lists them.
fn pairs(value: &serde_json::Value) -> Vec<(usize, usize)> {
    let number = |v: &serde_json::Value| v.as_u64().unwrap() as usize;
    value.as_array().unwrap().iter().map(|pair| (number(&pair[0]), number(&pair[1]))).collect()
}

/// Texts of every schedule, and what packed and two-call accept. `error` is what this backend's logits were found to be
/// wrong by, over the range.
fn texts(checkpoint: &str, model: &mut Model, golden: &Golden, error: f32) {
    let error = error.max(f32::EPSILON) * golden.logit_range();
    let vocab = golden.tensor("causal.logits").shape[1] as u32;
    let mut counted = 0;
    for (i, truth) in golden.json["greedy"].as_array().unwrap().iter().enumerate() {
        let (prompt, tokens) = (ids(&truth["prompt"]), ids(&truth["tokens"]));
        let sure = check_text(model, golden.mask_token(), &prompt, &tokens, error)
            .unwrap_or_else(|e| panic!("{checkpoint}, text {i}: {e}"));
        let mut wrong = tokens.clone();
        wrong[20] = (wrong[20] + 1) % vocab;
        assert!(
            check_text(model, golden.mask_token(), &prompt, &wrong, error).is_err(),
            "control: another token at place 20 is noticed"
        );
        let gap = |v: &serde_json::Value| v.as_f64().unwrap() as f32;
        let tight = gap(&truth["smallest_top2_gap"]) > 2.0 * error;
        assert!(!tight || sure == tokens.len());

        let autoregressive = generate(model, golden, &prompt, tokens.len(), "autoregressive");
        assert_eq!(autoregressive.tokens[..sure], tokens[..sure], "{checkpoint}, text {i}");
        for schedule in ScheduleKind::LOSSLESS {
            let done = generate(model, golden, &prompt, tokens.len(), schedule);
            assert_eq!(done.tokens, autoregressive.tokens, "{checkpoint}, text {i}, {schedule}");
            let calls: Vec<_> = done.counts.per_call.iter().map(|c: &CallCount| (c.drafted, c.accepted)).collect();
            let want = match schedule {
                "packed" => pairs(&truth["packed"]["per_call"]),
                // A round is a draft call, which verifies nothing, and a verify call.
                "two-call" => pairs(&truth["two_call"]["per_round"]).into_iter().flat_map(|pair| [(0, 0), pair]).collect(),
                "autoregressive" => vec![(0, 0); tokens.len() - 1],
                _ => continue,
            };
            let draft_gap = match schedule {
                "autoregressive" => f32::INFINITY,
                _ => gap(&truth[schedule.replace('-', "_")]["smallest_draft_gap"]),
            };
            if tight && draft_gap > 2.0 * error {
                assert_eq!(calls, want, "{checkpoint}, text {i}, {schedule}");
                counted += usize::from(schedule != "autoregressive");
                let last = want.len() - 1;
                assert_ne!(calls[..last], want[..last].iter().map(|c| (c.0, c.1 + 1)).collect::<Vec<_>>(), "control");
            }
        }
    }
    println!("{checkpoint}: accepted runs compared in {counted} texts");
    let least = golden.json["greedy"].as_array().unwrap().len();
    assert!(!is_f32(checkpoint) || counted >= least, "{checkpoint}: f32 arithmetic is good enough to compare accepted runs");
}

fn on(backend: usize) {
    for checkpoint in GOLDEN {
        compare(checkpoint, BACKENDS[backend], Precision::Auto);
    }
}

#[test]
fn the_reference_is_the_truth() {
    on(0);
}

#[test]
fn the_cpu_agrees_with_the_truth() {
    on(1);
}

#[test]
fn the_gpu_agrees_with_the_truth() {
    on(2);
}

#[test]
fn a_device_with_the_limits_that_every_one_has_agrees_with_the_truth() {
    let checkpoint = "tiny-llama-q4";
    let golden = Golden::read(checkpoint);
    let gpu = DeviceOptions { default_limits: true, plain: true, ..DeviceOptions::default() };
    let options = LoadOptions { backend: Backend::Gpu, gpu, ..LoadOptions::default() };
    let mut model = open(checkpoint, &golden, &options);
    let device = model.info()["device"].clone();
    for (limit, least) in [
        ("max_buffer_size", 256 << 20),
        ("max_storage_buffer_binding_size", 128 << 20),
        ("max_storage_buffers_per_shader_stage", 8),
        ("max_compute_workgroup_storage_size", 16 << 10),
        ("max_compute_invocations_per_workgroup", 256),
    ] {
        assert_eq!(device[limit], least, "{limit}");
    }
    compare_model(checkpoint, "gpu, default limits", &options, &mut model, &golden);
}

#[test]
fn quantised_checkpoints_with_f32_keys_and_values_agree_with_the_truth() {
    for checkpoint in GOLDEN.iter().filter(|c| !is_f32(c)) {
        compare(checkpoint, BACKENDS[1], Precision::F32);
        compare(checkpoint, BACKENDS[2], Precision::F32);
    }
}

/// A bf16 checkpoint quantised while loading, against the same weights quantised by Python and the forward pass of those in
/// float64; `quantized.safetensors` has that truth.
#[test]
fn bf16_checkpoints_quantised_while_loading_agree_with_the_truth() {
    for checkpoint in ["tiny-nemotron-bf16", "tiny-setdlm-bf16", "tiny-sdar-bf16", "tiny-fast-dllm-bf16"] {
        let (plain, quantized) = (Golden::read(checkpoint), Golden::read_quantized(checkpoint));
        let (prompt, range) = (ids(&plain.json["prompt"]), plain.logit_range());
        let precisions = [Precision::Auto, Precision::F32];
        for ((name, backend), precision) in BACKENDS.into_iter().flat_map(|backend| precisions.map(|p| (backend, p))) {
            for (quantize, bits, other) in [(Quantize::Q8, "q8", "q4"), (Quantize::Q4, "q4", "q8")] {
                let options = LoadOptions { backend, precision, quantize: Some(quantize), ..LoadOptions::default() };
                let mut model = load_as(&golden_folder(checkpoint), &options);
                let drafts = quantized.names().any(|tensor| tensor == "q4.draft.w7.logits");
                let logits = block_on(model.logits(&prompt, drafts.then_some(7))).unwrap();
                let bound = match (backend, precision) {
                    (Backend::Reference, _) => EXACT,
                    (_, Precision::Auto) => HALF_CACHE,
                    (Backend::Cpu, _) => INTEGER_INPUTS,
                    _ => SINGLE,
                };
                let adapter = drafts && model.draft_rules().unwrap().adapter;
                let mut line = format!("{checkpoint:20} {name:10} {precision:?} {bits}: bound {bound:.0e},");
                let got = [("causal", Some(logits.causal)), ("draft.w7", logits.draft)];
                for (tensor, got) in got.into_iter().filter_map(|(tensor, got)| Some((tensor, got?.concat()))) {
                    let of = |bits: &str| quantized.tensor(&format!("{bits}.{tensor}.logits"));
                    let error = distance(&got, &of(bits).values, range);
                    let unquantised = distance(&got, &plain.tensor(&format!("{tensor}.logits")).values, range);
                    line += &format!(" {tensor} {error:.1e} (from bf16 {unquantised:.1e})");
                    let small_adapter = tensor == "draft.w7" && adapter && backend == Backend::Cpu;
                    let bound = if small_adapter { SMALL_ADAPTER } else { bound };
                    assert!(error < bound, "{line}: over the bound {bound:.0e}");
                    assert!(unquantised < if bits == "q8" { 0.05 } else { 0.5 }, "{line}: nothing is left of the model");
                    // Controls: other bits and none at all are told apart.
                    assert!(small_adapter || distance(&got, &of(other).values, range) > bound, "{line}");
                    assert!(small_adapter || unquantised > bound, "{line}");
                }
                println!("{line}");
            }
        }
    }
}

#[test]
fn accepted_drafts_are_among_the_truths() {
    for checkpoint in ["tiny-llama-tied", "tiny-nemotron-trained", "tiny-setdlm-trained"] {
        let golden = Golden::read(checkpoint);
        let calls: Vec<_> =
            golden.json["greedy"].as_array().unwrap().iter().flat_map(|t| pairs(&t["packed"]["per_call"])).collect();
        let accepted: usize = calls.iter().map(|p| p.1).sum();
        assert!(accepted > 50, "{checkpoint}: the trained checkpoint's drafts are accepted: {accepted}");
        // Every kind of ending: nothing, a part, all of a draft.
        assert!(calls.iter().any(|(m, a)| *m > 0 && *a == 0), "{checkpoint}");
        assert!(calls.iter().any(|(m, a)| 0 < *a && a < m), "{checkpoint}");
        assert!(calls.iter().any(|(m, a)| *m > 0 && a == m), "{checkpoint}");
    }
}

#[test]
fn the_mask_token_would_be_chosen_were_it_not_banned() {
    for checkpoint in ["tiny-setdlm", "tiny-nemotron"] {
        let golden = Golden::read(checkpoint);
        let (mask, causal) = (golden.mask_token().unwrap(), golden.tensor("causal.logits"));
        let best = |row: &[f32]| row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(i, _)| i);
        assert!(causal.values.chunks(causal.shape[1]).any(|row| best(row) == Some(mask)), "{checkpoint}");
        for text in golden.json["greedy"].as_array().unwrap() {
            assert!(!ids(&text["tokens"]).contains(&(mask as u32)), "{checkpoint}");
        }
    }
}
