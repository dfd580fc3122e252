//! Lossless, bit for bit: drafts of known worth are injected into the real forward pass, and neither the text nor a bit of
//! the cache may tell that there were any.
//!
//! The driver runs the real schedules and the real model, but replaces what draft rows chose: right up to a tokens behind
//! the prefix that the next call verifies, wrong from there on, with confidences that place the anchors where they are
//! wanted.

mod checkpoints;

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use checkpoints::{BACKENDS, golden_folder, load};
use forecall::decode::options::Anchors;
use forecall::decode::plan::{CallKind, CallPlan, Choice, Keep, Row, RowToken};
use forecall::decode::schedule::{Geometry, ModelCalls, PREFILL_CHUNK, Ticket};
use forecall::decode::{Counts, Generation, ScheduleKind, ScheduleOptions, StopRules};
use forecall::engine::{Backend, Generate, Generated, LayerKeyValues, Model, Precision, Prompt, row_invariance};
use forecall::model::arch::{Anchor, DraftRules, VerifyRows};
use pollster::block_on;

/// K.
const VERIFY: u32 = 4;
/// New tokens of a run.
const TOKENS: usize = 22;
const CONTEXT: usize = 96;

/// What the injected drafts are worth.
#[derive(Debug, Clone, Copy)]
struct Injection<'a> {
    /// a, call by call, repeated.
    right: &'a [usize],
    /// The confidences say that acceptance ends here.
    ends_at: usize,
}

/// What a run came to.
struct Run {
    tokens: Vec<u32>,
    counts: Counts,
    /// (drafted, accepted, largest anchor not beyond the accepted run) of every call that verified a draft and made one.
    seen: BTreeSet<(usize, usize, usize)>,
}

fn is_draft_row(row: &Row, rules: &DraftRules) -> bool {
    // A mask row that verifies sees every clean row below it.
    let verifies = rules.verify == VerifyRows::Mask && row.sees.cache.end == row.position;
    matches!(row.keep, Keep::Scratch(_)) && !verifies
}

/// The positions of a call's clean rows with their tokens, rising.
fn clean_rows(plan: &CallPlan) -> Vec<(usize, u32)> {
    let clean = |row: &Row| match (row.keep, row.token) {
        (Keep::Cache(_), RowToken::Id(id)) => Some((row.position as usize, id)),
        _ => None,
    };
    let mut rows: Vec<_> = plan.rows().iter().filter_map(clean).collect();
    rows.sort_unstable();
    rows
}

/// Runs a schedule over `prompt`. With an injection, `text` is the prompt and its greedy continuation, long enough.
fn run(
    calls: &mut impl ModelCalls,
    rules: DraftRules,
    kind: ScheduleKind,
    widths: (u32, u32),
    prompt: &[u32],
    count: usize,
    injected: Option<(&[u32], Injection)>,
) -> Result<Run, String> {
    let geometry = calls.geometry();
    let options = ScheduleOptions {
        kind: Some(kind),
        verify_width: Some(widths.0),
        draft_width: Some(widths.1),
        ..ScheduleOptions::default()
    };
    let stop = StopRules { max_tokens: Some(count), ignore_eos: true, ..StopRules::default() };
    let plain_two_call = kind == ScheduleKind::TwoCall { seed_row: false };
    let fail = |e: forecall::Error| e.to_string();
    let (mut generation, mut plan) = Generation::start(prompt, 0, Some(rules), &options, &geometry, stop).map_err(fail)?;
    let (mut tokens, mut seen, mut planned, mut call) = (Vec::new(), BTreeSet::new(), None, 0usize);
    loop {
        let ticket = calls.submit(&plan).map_err(fail)?;
        let mut choices = block_on(calls.answer(ticket)).map_err(fail)?;
        let blocks: BTreeSet<usize> =
            plan.rows().iter().filter(|row| is_draft_row(row, &rules)).map(|row| row.sees.cache.end as usize).collect();
        if let Some((text, injection)) = injected {
            // The prefix that the next call verifies behind: what is text once this call's drafts are judged.
            let clean = clean_rows(&plan);
            let known = clean.iter().take_while(|(position, id)| text.get(*position) == Some(id)).last().map(|(p, _)| *p);
            let anchor = plan.rows().iter().filter(|row| is_draft_row(row, &rules)).map(|row| row.position as usize).min();
            let next = match (known, anchor) {
                (Some(known), Some(_)) if plain_two_call => known,
                (Some(known), _) => known + 1,
                (None, Some(anchor)) => anchor,
                (None, None) => 0,
            };
            let right = injection.right[call % injection.right.len()];
            let choosing = plan.rows().iter().skip(plan.choose().start);
            for (choice, row) in choices.iter_mut().zip(choosing).filter(|(_, row)| is_draft_row(row, &rules)) {
                let offset = ((row.position + rules.logit_shift) as usize).saturating_sub(next);
                let truth = text.get(next + offset).copied().unwrap_or(0);
                let wrong = (truth + 1) % geometry.vocab_size as u32;
                choice.token = if offset <= right { truth } else { wrong };
                choice.probability = match offset.cmp(&(injection.ends_at + 1)) {
                    std::cmp::Ordering::Less => 1.0,
                    std::cmp::Ordering::Equal => 0.0,
                    std::cmp::Ordering::Greater => 0.5,
                };
            }
            if anchor.is_some() {
                call += 1;
            }
            let before = planned.replace(right);
            let progress = generation.advance(&plan.answer(&choices).map_err(fail)?).map_err(fail)?;
            tokens.extend(progress.tokens);
            if let (Some(right), Some(count)) = (before, generation.counts().per_call.last())
                && plan.kind() == CallKind::Decode
                && count.drafted > 0
            {
                // Where the anchor's own verify row drafts the first token, that one is always right.
                let least = usize::from(
                    plain_two_call && rules.verify == VerifyRows::Mask || plain_two_call && shared_without_next(&rules),
                );
                let expected = right.max(least).min(count.drafted);
                if count.accepted != expected {
                    return Err(format!(
                        "{} of {} drafted tokens were accepted, {expected} are right",
                        count.accepted, count.drafted
                    ));
                }
                let n = clean.first().map_or(0, |(position, _)| *position);
                let shared = usize::from(rules.anchor == Anchor::Shared);
                let anchors = blocks.iter().filter_map(|end| end.checked_sub(n + shared));
                if let Some(anchor) = anchors.filter(|h| *h <= count.accepted).max() {
                    seen.insert((count.drafted, count.accepted, anchor));
                }
            }
            match progress.next {
                Some(next) => plan = next,
                None => break,
            }
        } else {
            let progress = generation.advance(&plan.answer(&choices).map_err(fail)?).map_err(fail)?;
            tokens.extend(progress.tokens);
            match progress.next {
                Some(next) => plan = next,
                None => break,
            }
        }
    }
    Ok(Run { tokens, counts: generation.counts().clone(), seen })
}

/// Whether a block has no row that predicts the position behind its anchor, although verify rows are clean.
fn shared_without_next(rules: &DraftRules) -> bool {
    rules.anchor == Anchor::Shared && rules.logit_shift == 1
}

fn cache(model: &Model) -> Vec<LayerKeyValues> {
    (0..model.layers()).map(|layer| block_on(model.kv_cache(layer)).unwrap()).collect()
}

/// Whether two caches hold the same bits in their first `slots` slots of `all`.
fn same_cache(a: &[LayerKeyValues], b: &[LayerKeyValues], slots: usize, all: usize) -> Result<(), String> {
    if a.len() != b.len() || a.is_empty() {
        return Err(format!("{} layers and {}", a.len(), b.len()));
    }
    for (layer, (a, b)) in a.iter().zip(b).enumerate() {
        for (name, a, b) in [("keys", &a.keys, &b.keys), ("values", &a.values, &b.values)] {
            let width = a.len() / all;
            if width == 0 || a.len() != b.len() {
                return Err(format!("{name} of layer {layer}: {} and {} values", a.len(), b.len()));
            }
            let same = |i: &usize| a[*i].to_bits() == b[*i].to_bits() && a[*i].is_finite();
            if let Some(i) = (0..slots * width).find(|i| !same(i)) {
                return Err(format!("{name} of layer {layer}, slot {}: {} and {}", i / width, a[i], b[i]));
            }
        }
    }
    Ok(())
}

fn all_slots(model: &mut Model) -> usize {
    let Geometry { context, scratch, .. } = model.calls().geometry();
    (context + scratch) as usize
}

/// A schedule test that never accepted a draft shows nothing.
fn accepted_some(counts: &Counts) -> Result<(), String> {
    match counts.accepted() {
        0 => Err(format!("no draft was accepted in {} calls", counts.calls())),
        _ => Ok(()),
    }
}

/// The text without drafts, and the cache it leaves.
struct Truth {
    prompt: Vec<u32>,
    /// The prompt and more than [`TOKENS`] tokens behind it.
    text: Vec<u32>,
    cache: Vec<LayerKeyValues>,
}

impl Truth {
    fn new(model: &mut Model, rules: DraftRules, prompt: &[u32], count: usize) -> Self {
        let done = run(model.calls(), rules, ScheduleKind::Autoregressive, (1, 1), prompt, count + 20, None).unwrap();
        assert_eq!(done.tokens.len(), count + 20);
        Self { prompt: prompt.to_vec(), text: [prompt, &done.tokens].concat(), cache: cache(model) }
    }

    /// Judges a run that emitted `tokens` and left `cache`: the last token is pending, so its slot does not count.
    fn judge(&self, tokens: &[u32], cache: &[LayerKeyValues], all: usize) -> Result<(), String> {
        let end = self.prompt.len() + tokens.len();
        if self.text.get(self.prompt.len()..end) != Some(tokens) {
            return Err(format!("the text differs: {tokens:?}"));
        }
        same_cache(cache, &self.cache, end - 1, all)
    }
}

/// Everything that changes a draft's row plan: both shifts, both anchors, and rows that verify as masks.
fn all_rules() -> Vec<DraftRules> {
    let clean =
        |logit_shift, anchor| DraftRules { logit_shift, anchor, verify: VerifyRows::Clean, bidirectional: true, adapter: true };
    vec![
        clean(1, Anchor::InBlock),
        clean(0, Anchor::InBlock),
        clean(1, Anchor::Shared),
        clean(0, Anchor::Shared),
        DraftRules { verify: VerifyRows::Mask, bidirectional: false, adapter: false, ..clean(0, Anchor::Shared) },
    ]
}

/// Injects drafts into every schedule. `thorough` runs every a with every anchor, otherwise a and the anchor change from
/// call to call.
fn inject(model: &mut Model, rules: DraftRules, prompt: &[u32], thorough: bool) -> Result<usize, String> {
    let all = all_slots(model);
    let truth = Truth::new(model, rules, prompt, TOKENS);
    // Wide enough that a full draft is left after full acceptance.
    let widths = (VERIFY, 2 * VERIFY + 1 - rules.logit_shift);
    let each: Vec<Vec<usize>> = (0..=VERIFY as usize).map(|a| vec![a]).collect();
    let mixed = vec![4usize, 0, 2, 1, 3, 3, 0, 4, 4, 1, 2];
    let patterns: Vec<Vec<usize>> = if thorough { each.into_iter().chain([mixed]).collect() } else { vec![mixed] };
    let anchored = ScheduleKind::Packed { anchors: Anchors::Count(2), shared: false };
    let quadratic = ScheduleKind::Packed { anchors: Anchors::Every, shared: false };
    let kinds = [
        ScheduleKind::TwoCall { seed_row: false },
        ScheduleKind::TwoCall { seed_row: true },
        ScheduleKind::PACKED,
        anchored,
        quadratic,
    ];
    let mut runs = 0;
    for kind in kinds {
        let mut seen = BTreeSet::new();
        let anchors = if kind == anchored { 1..=VERIFY as usize } else { 1..=1 };
        for ends_at in anchors {
            for right in &patterns {
                let injection = Injection { right, ends_at };
                let done = run(model.calls(), rules, kind, widths, prompt, TOKENS, Some((&truth.text, injection)))
                    .map_err(|e| format!("{kind} {injection:?}: {e}"))?;
                truth.judge(&done.tokens, &cache(model), all).map_err(|e| format!("{kind} {injection:?}: {e}"))?;
                if right.iter().any(|&a| a > 0) {
                    accepted_some(&done.counts)?;
                }
                seen.extend(done.seen);
                runs += 1;
            }
        }
        // What the runs were meant to reach: every accepted length, and at every anchor each length it speaks for.
        if let ScheduleKind::Packed { anchors, .. } = kind {
            let (k, full) = (VERIFY as usize, |h, a| seen.contains(&(VERIFY as usize, a, h)));
            let missing: Vec<(usize, usize)> = match anchors {
                Anchors::Count(1) => (0..=k).map(|a| (0, a)).filter(|&(h, a)| !full(h, a)).collect(),
                Anchors::Every => (0..=k).map(|a| (a, a)).filter(|&(h, a)| !full(h, a)).collect(),
                Anchors::Count(_) if thorough => {
                    (1..=k).flat_map(|h| (h..=k).map(move |a| (h, a))).filter(|&(h, a)| !full(h, a)).collect()
                }
                Anchors::Count(_) => Vec::new(),
            };
            if !missing.is_empty() {
                return Err(format!("{kind}: (anchor, accepted) never seen: {missing:?}; seen: {seen:?}"));
            }
        }
    }
    Ok(runs)
}

/// Rows of the call see the first scratch slot, whether or not it is theirs: the fault that bit-equality is there to find.
struct Leaky<'a, C>(&'a mut C);

impl<C: ModelCalls> ModelCalls for Leaky<'_, C> {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn submit(&mut self, plan: &CallPlan) -> forecall::Result<Ticket> {
        let scratch = plan.rows().iter().any(|row| matches!(row.keep, Keep::Scratch(_)));
        let leak = |row: &Row| {
            let mut row = row.clone();
            if scratch && row.sees.scratch.is_empty() {
                row.sees.scratch = 0..1;
            }
            row
        };
        self.0.submit(&CallPlan::new(plan.kind(), plan.rows().iter().map(leak).collect()))
    }

    async fn answer(&mut self, ticket: Ticket) -> forecall::Result<Vec<Choice>> {
        self.0.answer(ticket).await
    }

    async fn logits(&mut self) -> forecall::Result<Vec<Vec<f32>>> {
        self.0.logits().await
    }
}

/// One bit of a row's logits differs in those rows and calls that the function names.
struct Nudge<'a, C>(&'a mut C, fn(&CallPlan, &Row) -> bool, Vec<bool>);

impl<C: ModelCalls> ModelCalls for Nudge<'_, C> {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn submit(&mut self, plan: &CallPlan) -> forecall::Result<Ticket> {
        self.2 = plan.rows()[plan.choose()].iter().map(|row| self.1(plan, row)).collect();
        self.0.submit(plan)
    }

    async fn answer(&mut self, ticket: Ticket) -> forecall::Result<Vec<Choice>> {
        self.0.answer(ticket).await
    }

    async fn logits(&mut self) -> forecall::Result<Vec<Vec<f32>>> {
        let mut logits = self.0.logits().await?;
        for (row, _) in logits.iter_mut().zip(&self.2).filter(|(_, nudged)| **nudged) {
            let value = row.last_mut().unwrap();
            *value = f32::from_bits(value.to_bits() ^ 1);
        }
        Ok(logits)
    }
}

/// A prompt of ids that any vocabulary here has.
fn prompt(length: usize) -> Vec<u32> {
    (0..length as u32).map(|i| 32 + (i * i * 7 + i * 13 + 5) % 90).collect()
}

/// One model at a time on the GPU: all tests of this file share two cores.
static TURN: Mutex<()> = Mutex::new(());

fn injected(backend: usize, checkpoint: &str, thorough: usize) {
    let _turn = (BACKENDS[backend].1 == Backend::Gpu).then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner));
    let mut model = load(&golden_folder(checkpoint), BACKENDS[backend].1, Precision::Auto, Some(CONTEXT));
    for (i, rules) in all_rules().into_iter().enumerate() {
        let runs = inject(&mut model, rules, &prompt(13), i < thorough)
            .unwrap_or_else(|e| panic!("{checkpoint} on {}, {rules:?}: {e}", BACKENDS[backend].0));
        println!("{checkpoint} on {}: {runs} runs with {rules:?}", BACKENDS[backend].0);
    }
    controls(&mut model);
    assert!(block_on(model.row_invariance()).unwrap(), "{checkpoint} on {}", BACKENDS[backend].0);
    let rules = model.draft_rules();
    assert!(!block_on(row_invariance(&mut Leaky(model.calls()), rules)).unwrap(), "control: a leak is noticed");
    let masks = rules.is_some_and(|rules| rules.verify == VerifyRows::Mask);
    type Which = fn(&CallPlan, &Row) -> bool;
    let nudges: [(&str, bool, Which); 3] = [
        ("in calls of several rows", true, |plan, _| plan.rows().len() > 2),
        ("in calls that take a GPU's other kernel", true, |plan, _| plan.rows().len() >= 48),
        ("of mask rows that do not come first", masks, |_, row| {
            row.token == RowToken::Mask && matches!(row.keep, Keep::Scratch(1..))
        }),
    ];
    for (what, there, which) in nudges {
        let same = block_on(row_invariance(&mut Nudge(model.calls(), which, Vec::new()), rules)).unwrap();
        assert!(same != there, "control: a bit {what} is noticed, where there are such");
    }
}

/// The judges fail where they should.
fn controls(model: &mut Model) {
    let (all, rules) = (all_slots(model), all_rules()[0]);
    let truth = Truth::new(model, rules, &prompt(13), TOKENS);
    let injection = Injection { right: &[2], ends_at: 1 };
    let widths = (VERIFY, 8);
    let mut go = |right: &[usize]| {
        let injection = Injection { right, ..injection };
        run(model.calls(), rules, ScheduleKind::PACKED, widths, &truth.prompt, TOKENS, Some((&truth.text, injection))).unwrap()
    };
    // No draft is right: the text is, but nothing was shown.
    assert!(accepted_some(&go(&[0]).counts).is_err());
    let done = go(&[2]);
    accepted_some(&done.counts).unwrap();
    let left = cache(model);
    truth.judge(&done.tokens, &left, all).unwrap();
    let mut tokens = done.tokens.clone();
    tokens[5] ^= 1;
    assert!(truth.judge(&tokens, &left, all).is_err(), "another token");
    let mut bit = left.clone();
    let value = &mut bit[1].values[40];
    *value = f64::from_bits(value.to_bits() ^ 1);
    assert!(truth.judge(&done.tokens, &bit, all).is_err(), "another bit");
    // Verify rows that see a draft row.
    let leaked = run(
        &mut Leaky(model.calls()),
        rules,
        ScheduleKind::PACKED,
        widths,
        &truth.prompt,
        TOKENS,
        Some((&truth.text, injection)),
    );
    let caught = match leaked {
        Err(_) => true,
        Ok(done) => truth.judge(&done.tokens, &cache(model), all).is_err(),
    };
    assert!(caught, "a leak is noticed");
}

#[test]
fn injected_drafts_change_no_bit_on_the_cpu() {
    injected(1, "tiny-llama-tied", 5);
    injected(1, "tiny-llama", 5);
    injected(1, "tiny-llama-q4", 5);
    injected(1, "tiny-llama-q8-bf16", 5);
}

/// Windows, norms of queries and keys, query scaling; masks that are tokens.
#[test]
fn injected_drafts_change_no_bit_in_other_families() {
    for backend in [1, 2] {
        for checkpoint in ["tiny-mistral", "tiny-setdlm", "tiny-nemotron"] {
            injected(backend, checkpoint, 0);
        }
    }
}

#[test]
fn injected_drafts_change_no_bit_on_the_reference() {
    injected(0, "tiny-llama-tied", 1);
    injected(0, "tiny-llama", 0);
    injected(0, "tiny-llama-q4", 0);
}

#[test]
fn injected_drafts_change_no_bit_on_the_gpu_of_a_trained_f32_model() {
    injected(2, "tiny-llama-tied", 2);
}

#[test]
fn injected_drafts_change_no_bit_on_the_gpu_of_random_models() {
    injected(2, "tiny-llama", 0);
    injected(2, "tiny-llama-q4", 0);
    injected(2, "tiny-llama-q8-bf16", 0);
}

/// Prompts around the chunk's edge: the drafts that ride with the last chunk, and all later ones, change nothing.
#[test]
fn prompts_longer_than_a_chunk() {
    for (name, backend) in [BACKENDS[1], BACKENDS[2]] {
        let _turn = (backend == Backend::Gpu).then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner));
        for checkpoint in ["tiny-llama-tied", "tiny-llama-q4"] {
            let mut model = load(&golden_folder(checkpoint), backend, Precision::Auto, Some(PREFILL_CHUNK + 96));
            let (all, rules) = (all_slots(&mut model), all_rules()[0]);
            for length in [PREFILL_CHUNK - 1, PREFILL_CHUNK, PREFILL_CHUNK + 1, PREFILL_CHUNK + 40] {
                let truth = Truth::new(&mut model, rules, &prompt(length), 12);
                for kind in [ScheduleKind::PACKED, ScheduleKind::TwoCall { seed_row: false }] {
                    let injection = Injection { right: &[3, 0, 2, 4], ends_at: 1 };
                    let done =
                        run(model.calls(), rules, kind, (VERIFY, 8), &truth.prompt, 12, Some((&truth.text, injection))).unwrap();
                    truth
                        .judge(&done.tokens, &cache(&model), all)
                        .unwrap_or_else(|e| panic!("{checkpoint} on {name}, {length}, {kind}: {e}"));
                    accepted_some(&done.counts).unwrap();
                    assert_eq!(done.counts.prefill.calls, length.div_ceil(PREFILL_CHUNK));
                }
            }
        }
    }
}

/// The prefill call itself, with a draft block behind the prompt and without.
#[test]
fn draft_rows_never_change_the_prompts_keys_and_values() {
    for (name, backend) in BACKENDS {
        let _turn = (backend == Backend::Gpu).then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner));
        for checkpoint in ["tiny-llama", "tiny-llama-q8-bf16"] {
            let mut model = load(&golden_folder(checkpoint), backend, Precision::Auto, Some(CONTEXT));
            let (all, prompt) = (all_slots(&mut model), prompt(37));
            let first = |model: &mut Model, kind: ScheduleKind, width: u32| {
                let options = ScheduleOptions {
                    kind: Some(kind),
                    verify_width: Some(VERIFY),
                    draft_width: Some(width),
                    ..ScheduleOptions::default()
                };
                let geometry = model.calls().geometry();
                let (_, plan) =
                    Generation::start(&prompt, 0, model.draft_rules(), &options, &geometry, StopRules::default()).unwrap();
                plan
            };
            let go = |model: &mut Model, plan: &CallPlan| {
                block_on(model.run_plan(plan)).unwrap();
                cache(model)
            };
            let plain = first(&mut model, ScheduleKind::Autoregressive, 1);
            assert_eq!(plain.rows().len(), prompt.len());
            let want = go(&mut model, &plain);
            for width in [2, 7, 31] {
                let drafting = first(&mut model, ScheduleKind::PACKED, width);
                assert_eq!(drafting.rows().len(), prompt.len() + 1 + width as usize);
                let got = go(&mut model, &drafting);
                same_cache(&got, &want, prompt.len(), all)
                    .unwrap_or_else(|e| panic!("{checkpoint} on {name}, width {width}: {e}"));
                // Control: prompt rows that see a draft row are told apart.
                let ticket = Leaky(model.calls()).submit(&drafting).unwrap();
                block_on(model.calls().answer(ticket)).unwrap();
                assert!(same_cache(&cache(&model), &want, prompt.len(), all).is_err(), "control");
            }
        }
    }
}

/// Turns of a chat: what the cache holds of the prompt is used again, and changes no bit.
#[test]
fn a_prompt_that_begins_like_the_last_text_is_not_computed_again() {
    for (name, backend) in BACKENDS {
        let _turn = (backend == Backend::Gpu).then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner));
        for checkpoint in ["tiny-llama-tied", "tiny-setdlm-trained"] {
            let open = || load(&golden_folder(checkpoint), backend, Precision::Auto, Some(CONTEXT));
            let generate = |model: &mut Model, prompt: &[u32], reuse_cache: bool| {
                let prompt = Prompt::Tokens(prompt.to_vec());
                let request = Generate {
                    max_tokens: 12,
                    schedule: Some("packed".into()),
                    verify_width: Some(VERIFY as usize),
                    draft_width: Some(6),
                    ignore_eos: true,
                    reuse_cache,
                    ..Generate::new(prompt)
                };
                block_on(model.generate(&request, &mut |_| true)).unwrap()
            };
            let (mut model, mut fresh) = (open(), open());
            let all = all_slots(&mut model);
            let first = prompt(23);
            let answer = generate(&mut model, &first, true);
            assert_eq!(answer.cached_tokens, 0, "{checkpoint} on {name}: nothing was there before");
            let second = [&first[..], &answer.tokens, &prompt(9)].concat();
            let want = generate(&mut fresh, &second, true);
            let got = generate(&mut model, &second, true);
            // All but the answer's last token had rows of their own.
            let least = first.len() + answer.tokens.len() - 1;
            assert!((least..second.len()).contains(&got.cached_tokens), "{checkpoint} on {name}: {}", got.cached_tokens);
            let rows = |done: &Generated| done.counts.prefill.rows;
            assert_eq!(rows(&got), rows(&want) - got.cached_tokens);
            assert_eq!(got.tokens, want.tokens, "{checkpoint} on {name}");
            let slots = second.len() + got.tokens.len() - 1;
            same_cache(&cache(&model), &cache(&fresh), slots, all).unwrap_or_else(|e| panic!("{checkpoint} on {name}: {e}"));

            // Another beginning is used as far as it agrees, and not at all where that is not wanted.
            let mut other = second.clone();
            other[5] = (other[5] + 1) % 64;
            assert_eq!(generate(&mut model, &second, false).cached_tokens, 0);
            let got = generate(&mut model, &other, true);
            assert_eq!(got.cached_tokens, 5, "{checkpoint} on {name}");
            assert_eq!(got.tokens, generate(&mut fresh, &other, false).tokens, "{checkpoint} on {name}");
            // Control: another token in the part that was used again is told apart.
            generate(&mut model, &second, true);
            assert!(same_cache(&cache(&model), &cache(&fresh), slots, all).is_err(), "control");
        }
    }
}
