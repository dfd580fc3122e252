//! The demo model with its adapter: greedy ids against transformers', every schedule's text, what schedules save.
//!
//! The reference ids were made in f32 from the same quantised weights. Near ties may fall otherwise where keys and values
//! are f16, so a text is compared up to the first place where the reference's token is not the choice, and everywhere it
//! must lie within [`TIE`] of it.

mod checkpoints;

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use checkpoints::{demo_folder, ids, load, regrets, repository};
use forecall::decode::ScheduleKind;
use forecall::engine::{Backend, Generate, Generated, Model, Precision, Prompt};
use forecall::text::chat_template::ChatRequest;
use pollster::block_on;
use serde_json::Value;

/// Logits of this model range over about 40; f16 keys and values move them by some thousandths of that.
const TIE: f32 = 0.1;

fn cpu() -> MutexGuard<'static, Model> {
    static MODEL: OnceLock<Mutex<Model>> = OnceLock::new();
    let model = MODEL.get_or_init(|| Mutex::new(load(&demo_folder(), Backend::Cpu, Precision::Auto, Some(1024))));
    model.lock().unwrap_or_else(PoisonError::into_inner)
}

fn generate(model: &mut Model, prompt: &[u32], count: usize, schedule: &str) -> Generated {
    let request = Generate {
        max_tokens: count,
        schedule: Some(schedule.into()),
        reuse_cache: false,
        ..Generate::new(Prompt::Tokens(prompt.to_vec()))
    };
    block_on(model.generate(&request, &mut |_| true)).unwrap()
}

fn greedy() -> Vec<Value> {
    checkpoints::json(&repository("tests/data/smollm2/greedy.json")).as_array().expect("texts").clone()
}

fn held_out() -> Vec<Value> {
    let all = checkpoints::json(&repository("tests/data/heldout_prompts.json"));
    let all = all.as_array().expect("prompts");
    (0..8).map(|i| all[i * all.len() / 8].clone()).collect()
}

/// Whether `tokens` may be this model's greedy text; returns how many of them are the choice for certain.
fn check(model: &mut Model, prompt: &[u32], tokens: &[u32]) -> Result<usize, String> {
    let whole = [prompt, &tokens[..tokens.len() - 1]].concat();
    let logits = block_on(model.logits(&whole, None)).map_err(|e| e.to_string())?.causal;
    let regrets = regrets(&logits[prompt.len() - 1..], tokens);
    match regrets.iter().position(|r| *r > TIE) {
        Some(i) => Err(format!("token {i}, {}, lies {} below the choice", tokens[i], regrets[i])),
        None => Ok(regrets.iter().position(|r| *r > 0.0).unwrap_or(tokens.len())),
    }
}

#[test]
fn greedy_ids_are_transformers_on_the_cpu() {
    let mut model = cpu();
    let (mut compared, mut all) = (0, 0);
    for truth in greedy() {
        let prompt = Prompt::Chat(ChatRequest::user(truth["message"].as_str().unwrap()));
        let prompt_ids = ids(&truth["prompt_ids"]);
        assert_eq!(model.encode(&prompt).unwrap(), prompt_ids, "{}", truth["message"]);
        let tokens = ids(&truth["greedy_ids"]);
        let sure = check(&mut model, &prompt_ids, &tokens).unwrap_or_else(|e| panic!("{}: {e}", truth["message"]));
        println!("{sure} of {} ids, smallest gap {}: {}", tokens.len(), truth["smallest_top2_gap"], truth["message"]);
        if truth["smallest_top2_gap"].as_f64().unwrap() as f32 > TIE {
            assert_eq!(sure, tokens.len());
        }
        (compared, all) = (compared + sure, all + tokens.len());
        let done = generate(&mut model, &prompt_ids, tokens.len(), "packed");
        assert_eq!(done.tokens[..sure], tokens[..sure], "{}", truth["message"]);
        if sure == tokens.len() {
            let text = truth["text"].as_str().map(|text| text.trim_end_matches("<|im_end|>"));
            assert_eq!(done.text.as_deref(), text, "the end id is no part of the text");
        }
        // Control: another token is noticed.
        let mut wrong = tokens.clone();
        wrong[tokens.len() / 2] += 1;
        assert!(check(&mut model, &prompt_ids, &wrong).is_err());
    }
    assert!(compared * 10 >= all * 8, "{compared} of {all} ids were beyond doubt");
}

#[test]
fn every_schedule_writes_the_same_text_on_the_cpu() {
    let mut model = cpu();
    for prompt in held_out().iter().step_by(3) {
        let prompt = ids(&prompt["prompt_ids"]);
        let want = generate(&mut model, &prompt, 32, "autoregressive");
        for schedule in ScheduleKind::LOSSLESS {
            let done = generate(&mut model, &prompt, 32, schedule);
            assert_eq!((&done.tokens, &done.text), (&want.tokens, &want.text), "{schedule}");
            assert!(schedule == "autoregressive" || done.counts.accepted() > 0, "{schedule} accepted nothing");
            assert!(done.text.is_some_and(|text| text.len() > 20));
        }
    }
}

/// Counts do not depend on the machine but for near ties, so the bounds leave room only for those. README.md has the numbers of
/// 50 prompts of 128 tokens.
#[test]
fn packed_takes_fewer_calls_than_two_call_and_two_call_fewer_than_one_a_token() {
    let mut model = cpu();
    let mut per_call = |schedule: &str| {
        let (mut tokens, mut calls) = (0, 0);
        for prompt in held_out() {
            let done = generate(&mut model, &ids(&prompt["prompt_ids"]), 64, schedule);
            tokens += done.tokens.len() - 1;
            calls += done.counts.calls();
        }
        tokens as f64 / calls as f64
    };
    let (two_call, packed) = (per_call("two-call"), per_call("packed"));
    println!("tokens per call: two-call {two_call:.3}, packed {packed:.3}");
    assert!(packed > 1.1 * two_call && two_call > 1.1, "packed {packed}, two-call {two_call}");
}

/// lavapipe makes about five tokens a second, hence one short text.
#[test]
fn every_schedule_writes_transformers_text_on_the_gpu() {
    let mut model = load(&demo_folder(), Backend::Gpu, Precision::Auto, Some(512));
    let texts = greedy();
    let truth = texts.iter().min_by_key(|t| t["prompt_ids"].as_array().map(Vec::len)).unwrap();
    let (prompt, tokens) = (ids(&truth["prompt_ids"]), ids(&truth["greedy_ids"]));
    let count = tokens.len().min(12);
    let sure = check(&mut model, &prompt, &tokens[..count]).unwrap_or_else(|e| panic!("{}: {e}", truth["message"]));
    println!("{sure} of {count} ids: {}", truth["message"]);
    let want = generate(&mut model, &prompt, count, "autoregressive").tokens;
    assert!(sure * 2 >= count, "half of the text at least is beyond doubt");
    assert_eq!(want[..sure], tokens[..sure]);
    for schedule in ["packed", "two-call", "two-call-seed", "anchored", "quadratic", "quadratic-shared"] {
        let done = generate(&mut model, &prompt, count, schedule);
        assert_eq!(done.tokens, want, "{schedule}");
        println!("{}", done.summary());
    }
}
