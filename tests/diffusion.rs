//! Decoding by diffusion against the records of `tools/golden`: what every call sees, guesses and reveals, on every backend;
//! and the forward pass of the families that do nothing else.
//!
//! A record is followed call by call: the model's guesses are compared with the record's, then the record's are handed on,
//! so that one close decision does not end the comparison. Where the record's decisions are further apart than the backend's
//! error on the way, the model decodes the same text by itself.
//!
//! The bounds of logits are those of `tests/golden.rs`; a probability may be off by half of what logits may.

mod checkpoints;

use std::collections::BTreeSet;

use checkpoints::{BACKENDS, Golden, distance, golden_folder, ids, json, load};
use forecall::decode::plan::{CallKind, CallPlan, Choice, Keep, Row, RowToken, Sees};
use forecall::decode::schedule::ModelCalls;
use forecall::decode::{BlockOptions, Generation, ScheduleKind, ScheduleOptions, StopRules};
use forecall::engine::{Backend, Generate, Model, Precision, Prompt};
use forecall::model::arch::DiffusionLayout;
use pollster::block_on;
use serde_json::Value;

/// Checkpoints with a record of block diffusion.
const RECORDED: [&str; 14] = [
    "tiny-nemotron",
    "tiny-nemotron-trained",
    "tiny-nemotron-q4",
    "tiny-setdlm",
    "tiny-setdlm-trained",
    "tiny-setdlm-f16",
    "tiny-sdar-trained",
    "tiny-sdar-q8",
    "tiny-fast-dllm-trained",
    "tiny-fast-dllm-f16",
    "tiny-nemotron-bf16",
    "tiny-setdlm-bf16",
    "tiny-sdar-bf16",
    "tiny-fast-dllm-bf16",
];
/// Those that fill blocks and do nothing else.
const ONLY_BLOCKS: [&str; 6] = [
    "tiny-sdar-trained",
    "tiny-sdar-q8",
    "tiny-sdar-bf16",
    "tiny-fast-dllm-trained",
    "tiny-fast-dllm-f16",
    "tiny-fast-dllm-bf16",
];

fn is_f32(checkpoint: &str) -> bool {
    !(is_half(checkpoint) || checkpoint.ends_with("-q4") || checkpoint.ends_with("-q8"))
}

/// Plain f16 or bf16.
fn is_half(checkpoint: &str) -> bool {
    checkpoint.ends_with("-f16") || checkpoint.ends_with("-bf16")
}

/// Of logits, over their range.
fn bound(checkpoint: &str, backend: Backend, precision: Precision) -> f32 {
    match backend {
        Backend::Reference => 1e-6,
        _ if is_f32(checkpoint) || is_half(checkpoint) && precision == Precision::F32 => 1e-4,
        Backend::Cpu if precision == Precision::F32 => 5e-4,
        _ if precision == Precision::F32 => 1e-4,
        _ => 3e-3,
    }
}

fn open(checkpoint: &str, backend: Backend, precision: Precision) -> Model {
    load(&golden_folder(checkpoint), backend, precision, Some(256))
}

fn number(value: &Value, name: &str) -> Option<u32> {
    value[name].as_u64().map(|n| n as u32)
}

fn options(text: &Value) -> ScheduleOptions {
    let block = BlockOptions {
        length: number(text, "block_length"),
        threshold: text["threshold"].as_f64().map(|t| t as f32),
        steps: number(text, "steps"),
    };
    ScheduleOptions { kind: Some(ScheduleKind::BlockDiffusion), block, ..ScheduleOptions::default() }
}

/// `[position, token, probability]` of a call's guesses.
fn guesses(call: &Value) -> Vec<(u32, Choice)> {
    let of = |guess: &Value| {
        let choice = Choice { token: guess[1].as_u64().unwrap() as u32, probability: guess[2].as_f64().unwrap() as f32 };
        (guess[0].as_u64().unwrap() as u32, choice)
    };
    call["guesses"].as_array().unwrap().iter().map(of).collect()
}

/// Ids with -1 for masks.
fn block(call: &Value) -> Vec<i64> {
    call["block"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect()
}

/// How wrong a backend may be, in logits and in probabilities.
#[derive(Clone, Copy)]
struct Allowed {
    logit: f32,
    probability: f32,
}

/// Follows a record; says how far probabilities were off, or what differs.
fn follow(model: &mut Model, text: &Value, allowed: Allowed) -> Result<f32, String> {
    let rules = model.rules();
    let (prompt, tokens) = (ids(&text["prompt"]), ids(&text["tokens"]));
    let diffusion = rules.diffusion.ok_or("the model does not decode by diffusion")?;
    let window = diffusion.layout == DiffusionLayout::Window;
    let sure = text["smallest_logit_gap"].as_f64().unwrap() as f32 > 2.0 * allowed.logit;
    let calls = model.calls();
    let geometry = calls.geometry();
    let stop = StopRules { max_tokens: Some(tokens.len()), ignore_eos: true, ..StopRules::default() };
    let (mut generation, mut plan) =
        Generation::start(&prompt, 0, rules, &options(text), &geometry, stop).map_err(|e| e.to_string())?;
    let mut recorded = text["calls"].as_array().unwrap().iter();
    let (mut got, mut worst, mut count) = (Vec::new(), 0f32, 0);
    loop {
        let ticket = calls.submit(&plan).map_err(|e| e.to_string())?;
        let mut choices = block_on(calls.answer(ticket)).map_err(|e| e.to_string())?;
        if !plan.choose().is_empty() {
            count += 1;
            let call = recorded.next().ok_or_else(|| format!("call {count} is not in the record"))?;
            let differs = |what: &str| Err(format!("call {count}: {what} in {plan:?}, the record says {call}"));
            let mut scratch: Vec<&Row> = plan.rows().iter().filter(|row| matches!(row.keep, Keep::Scratch(_))).collect();
            scratch.sort_by_key(|row| row.position);
            let id = |row: &&Row| if let RowToken::Id(id) = row.token { i64::from(id) } else { -1 };
            if !window && scratch.iter().map(id).collect::<Vec<_>>() != block(call) {
                return differs("the block");
            }
            let fresh: Vec<Value> = plan
                .rows()
                .iter()
                .filter(|row| window && plan.kind() == CallKind::Decode && matches!(row.keep, Keep::Cache(_)))
                .map(|row| serde_json::json!([row.position, id(&row)]))
                .collect();
            if Value::Array(fresh) != call["fresh"] {
                return differs("what is kept");
            }
            let guesses = guesses(call);
            if guesses.len() != choices.len() {
                return differs("the number of guesses");
            }
            let choosing = plan.rows().iter().skip(plan.choose().start);
            for (row, choice) in choosing.zip(&mut choices) {
                let (position, kept) = match row.keep {
                    Keep::Cache(slot) => (slot + 1, slot + 1),
                    Keep::Scratch(_) => (row.position + diffusion.logit_shift, row.sees.cache.end),
                };
                let Some(&(_, truth)) = guesses.iter().find(|guess| guess.0 == position) else {
                    return differs("a guessed position");
                };
                let off = (choice.probability - truth.probability).abs();
                worst = worst.max(off);
                if Some(kept) != number(call, "kept") || off > allowed.probability || (sure && choice.token != truth.token) {
                    return differs(&format!("position {position}, {choice:?}"));
                }
                *choice = truth;
            }
        }
        let output = plan.answer(&choices).map_err(|e| e.to_string())?;
        let progress = generation.advance(&output).map_err(|e| e.to_string())?;
        got.extend(progress.tokens);
        match progress.next {
            Some(next) => plan = next,
            None => break,
        }
    }
    match recorded.next() {
        Some(call) => Err(format!("the record goes on with {call}")),
        None if got != tokens => Err(format!("the text is {got:?}, the record has {tokens:?}")),
        None => Ok(worst),
    }
}

fn generate(model: &mut Model, text: &Value, schedule: Option<&str>) -> Vec<u32> {
    let size = |name| number(text, name).map(|n| n as usize);
    let request = Generate {
        max_tokens: ids(&text["tokens"]).len(),
        schedule: schedule.map(str::to_owned),
        block_length: size("block_length"),
        threshold: text["threshold"].as_f64().map(|t| t as f32),
        steps: size("steps"),
        ignore_eos: true,
        ..Generate::new(Prompt::Tokens(ids(&text["prompt"])))
    };
    block_on(model.generate(&request, &mut |_| true)).unwrap().tokens
}

fn compare(checkpoint: &str, (name, backend): (&str, Backend), precision: Precision) {
    let mut model = open(checkpoint, backend, precision);
    let range = json(&golden_folder(checkpoint).join("golden.json"))["logit_range"].as_f64().unwrap() as f32;
    let logit = bound(checkpoint, backend, precision) * range;
    let allowed = Allowed { logit, probability: 0.5 * logit + 1e-6 };
    let record = json(&golden_folder(checkpoint).join("diffusion.json"));
    let texts = record["texts"].as_array().unwrap();
    let (mut alone, mut several, mut noticed) = (0, 0, 0);
    for (i, text) in texts.iter().enumerate() {
        let worst = follow(&mut model, text, allowed).unwrap_or_else(|e| panic!("{checkpoint} on {name}, text {i}: {e}"));
        println!("{checkpoint:24} {name:10} {precision:?} text {i}: {worst:.1e} of {:.1e}", allowed.probability);
        let gap = |name: &str| text[name].as_f64().unwrap() as f32;
        // Probabilities were found to be off by `worst` where the call was the same.
        if gap("smallest_logit_gap") > 2.0 * allowed.logit && gap("smallest_probability_gap") > 4.0 * worst + 1e-6 {
            assert_eq!(generate(&mut model, text, Some("block-diffusion")), ids(&text["tokens"]), "{checkpoint}, text {i}");
            alone += 1;
        }
        let calls = text["calls"].as_array().unwrap();
        several += usize::from(calls.iter().any(|call| call["revealed"].as_array().unwrap().len() > 1));

        // Controls: another probability, another token in a block, another guess and another threshold are noticed.
        let mut wrong = text.clone();
        let place = calls.len() / 2;
        let p = &mut wrong["calls"][place]["guesses"][0][2];
        *p = serde_json::json!(p.as_f64().unwrap() + 2.0 * f64::from(allowed.probability));
        assert!(follow(&mut model, &wrong, allowed).is_err(), "{checkpoint}: a probability");
        let mut wrong = text.clone();
        let last = calls.last().map(guesses).unwrap()[0].1.token;
        *wrong["tokens"].as_array_mut().unwrap().last_mut().unwrap() = serde_json::json!(last + 1);
        let known = (0..calls.len()).find(|&c| block(&calls[c]).iter().skip(1).any(|&id| id >= 0));
        if let Some(c) = known {
            let at = block(&calls[c]).iter().rposition(|&id| id >= 0).unwrap();
            wrong["calls"][c]["block"][at] = serde_json::json!(1);
        }
        assert!(follow(&mut model, &wrong, allowed).is_err(), "{checkpoint}: a token");
        let mut wrong = text.clone();
        wrong["threshold"] = serde_json::json!(1.5);
        wrong["steps"] = Value::Null;
        noticed += usize::from(follow(&mut model, &wrong, allowed).is_err());
    }
    assert!(
        several > 0 && noticed >= several,
        "{checkpoint}: {several} texts revealed several masks in a call, {noticed} noticed"
    );
    assert!(!is_f32(checkpoint) || alone > 0, "{checkpoint} on {name}: no text was decoded without the record's help");
}

#[test]
fn the_reference_follows_the_records() {
    for checkpoint in RECORDED {
        compare(checkpoint, BACKENDS[0], Precision::Auto);
    }
}

#[test]
fn the_cpu_follows_the_records() {
    for checkpoint in RECORDED {
        compare(checkpoint, BACKENDS[1], Precision::Auto);
    }
}

#[test]
fn the_gpu_follows_the_records() {
    for checkpoint in RECORDED {
        compare(checkpoint, BACKENDS[2], Precision::Auto);
    }
}

/// A block of `length` behind `start` kept tokens: what the prompt still has, then masks, all of them choosing.
fn block_call(prompt: &[u32], start: u32, length: u32) -> CallPlan {
    let row = |at: u32| Row {
        token: prompt.get((start + at) as usize).map_or(RowToken::Mask, |&id| RowToken::Id(id)),
        position: start + at,
        adapter: false,
        keep: Keep::Scratch(at),
        sees: Sees { cache: 0..start, scratch: 0..length },
        choose: true,
    };
    CallPlan::new(CallKind::Decode, (0..length).map(row).collect())
}

#[test]
fn kept_rows_and_blocks_are_the_truths() {
    for checkpoint in ONLY_BLOCKS {
        let golden = Golden::read(checkpoint);
        let (prompt, length) = (ids(&golden.json["prompt"]), number(&golden.json, "block_length").unwrap());
        let start = (prompt.len() as u32) / length * length;
        for ((name, backend), precision) in
            BACKENDS.into_iter().zip([Precision::Auto; 3]).chain([(BACKENDS[1], Precision::F32), (BACKENDS[2], Precision::F32)])
        {
            let bound = bound(checkpoint, backend, precision);
            let mut model = open(checkpoint, backend, precision);
            assert_eq!(model.rules().diffusion.unwrap().block_length, length);
            let causal = block_on(model.logits(&prompt, None)).unwrap().causal.concat();
            let mut cache = (Vec::new(), Vec::new());
            for layer in 0..model.layers() {
                let values = block_on(model.kv_cache(layer)).unwrap();
                let count: usize = golden.tensor("causal.keys").shape[1..].iter().product();
                cache.0.extend(values.keys.iter().take(count).map(|&v| v as f32));
                cache.1.extend(values.values.iter().take(count).map(|&v| v as f32));
            }
            let blocks = block_on(model.run_plan(&block_call(&prompt, start, length))).unwrap().concat();
            let mut line = format!("{checkpoint:24} {name:10} {precision:?}: bound {bound:.0e},");
            for (tensor, got) in
                [("causal.logits", &causal), ("causal.keys", &cache.0), ("causal.values", &cache.1), ("block.logits", &blocks)]
            {
                let truth = &golden.tensor(tensor).values;
                let of = |fold: fn(f32, f32) -> f32, from| truth.iter().copied().fold(from, fold);
                let range = if tensor.ends_with("logits") {
                    golden.logit_range()
                } else {
                    of(f32::max, f32::MIN) - of(f32::min, f32::MAX)
                };
                let error = distance(got, truth, range);
                line += &format!(" {tensor} {error:.1e}");
                assert!(error < bound, "{line}: over the bound");
                let mut off = truth.clone();
                off[truth.len() / 2] += 2.0 * bound * range;
                assert!(distance(got, &off, range) > bound, "control");
            }
            println!("{line}");
            // Control: rows that do not see their block's end are told apart.
            let mut causally = Vec::new();
            for (position, &id) in (0..).zip(&prompt) {
                let keep = Keep::Cache(position);
                let sees = Sees { cache: 0..position + 1, scratch: 0..0 };
                causally.push(Row { token: RowToken::Id(id), position, adapter: false, keep, sees, choose: true });
            }
            let causally = block_on(model.run_plan(&CallPlan::new(CallKind::Prefill, causally))).unwrap().concat();
            assert!(distance(&causally, &golden.tensor("causal.logits").values, golden.logit_range()) > bound);
        }
    }
}

/// Tokens per call counts what decode calls brought: some layouts get a token from the prompt's calls, others none.
#[test]
fn tokens_per_call_are_those_of_decode_calls() {
    let mut by_prefill = BTreeSet::new();
    for checkpoint in ["tiny-nemotron-trained", "tiny-setdlm-trained", "tiny-sdar-trained", "tiny-fast-dllm-trained"] {
        let mut model = open(checkpoint, Backend::Cpu, Precision::Auto);
        for schedule in ["block-diffusion", "autoregressive"] {
            let request = Generate {
                schedule: Some(schedule.into()),
                max_tokens: 13,
                ignore_eos: true,
                ..Generate::new(Prompt::Tokens((40..50).collect()))
            };
            let (mut calls, mut tokens, mut before) = (0, 0, 0);
            let done = block_on(model.generate(&request, &mut |part| {
                let decodes = usize::from(!part.prefill);
                calls += decodes;
                tokens += decodes * part.tokens.len();
                before += (1 - decodes) * part.tokens.len();
                true
            }));
            let Ok(done) = done else {
                assert_eq!((schedule, model.rules().diffusion.unwrap().only), ("autoregressive", true), "{checkpoint}: {done:?}");
                continue;
            };
            assert_eq!((tokens + before, calls), (done.tokens.len(), done.counts.calls()));
            assert_eq!(done.tokens_per_call(), tokens as f64 / calls as f64, "{checkpoint}, {schedule}");
            assert!(schedule != "autoregressive" || (before, tokens) == (1, calls), "{checkpoint}: {before}, {tokens}");
            by_prefill.insert(before);
        }
    }
    assert_eq!(by_prefill, BTreeSet::from([0, 1]), "control: the two cases that differ are among them");
}

#[test]
fn families_that_fill_blocks_do_that_by_default_and_refuse_the_rest() {
    for checkpoint in ["tiny-sdar-trained", "tiny-fast-dllm-trained"] {
        let mut model = open(checkpoint, Backend::Cpu, Precision::Auto);
        let record = json(&golden_folder(checkpoint).join("diffusion.json"));
        let text = &record["texts"][0];
        assert_eq!(generate(&mut model, text, None), ids(&text["tokens"]));
        assert_eq!(model.info()["default_schedule"], "block-diffusion");
        for schedule in ScheduleKind::LOSSLESS {
            let request = Generate { schedule: Some(schedule.into()), ..Generate::new(Prompt::Tokens(vec![1, 2, 3])) };
            let error = block_on(model.generate(&request, &mut |_| true)).unwrap_err();
            assert_eq!(error.code(), "InvalidOption");
            assert!(error.to_string().contains("choose the schedule block-diffusion"), "{error}");
        }
    }
    // And a model without: says what it would take.
    let mut plain = open("tiny-llama", Backend::Cpu, Precision::Auto);
    let request = Generate { schedule: Some("block-diffusion".into()), ..Generate::new(Prompt::Tokens(vec![1])) };
    let error = block_on(plain.generate(&request, &mut |_| true)).unwrap_err();
    assert!(error.to_string().contains("made for it"), "{error}");
}

#[test]
fn the_mask_would_be_chosen_were_it_not_banned() {
    // The raw head often favours it; no text holds it.
    let mut model = open("tiny-nemotron", Backend::Reference, Precision::Auto);
    let record = json(&golden_folder("tiny-nemotron").join("diffusion.json"));
    let mask = number(&record, "mask_token").unwrap();
    let prompt = ids(&record["texts"][0]["prompt"]);
    let start = prompt.len() as u32;
    block_on(model.logits(&prompt, None)).unwrap();
    let rows = block_on(model.run_plan(&block_call(&prompt, start, 8))).unwrap();
    let best = |row: &Vec<f32>| row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(i, _)| i as u32);
    assert!(rows.iter().any(|row| best(row) == Some(mask)));
    for checkpoint in RECORDED {
        let record = json(&golden_folder(checkpoint).join("diffusion.json"));
        let mask = number(&record, "mask_token").unwrap();
        for text in record["texts"].as_array().unwrap() {
            assert!(!ids(&text["tokens"]).contains(&mask), "{checkpoint}");
        }
    }
}
