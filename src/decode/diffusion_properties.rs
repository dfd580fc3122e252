//! What decoding by diffusion promises, checked against a scripted model that judges every plan by its own idea of who may
//! see whom, and against the rule written down once more without plans. Every check has a control that shows it can fail.

use super::fake::{VOCAB, alter, hash, uniform};
use super::generation::{Counts, Generation};
use super::options::{BlockOptions, Resolved, ScheduleKind, ScheduleOptions};
use super::plan::{CallKind, CallPlan, Choice, Keep, Row, RowToken, Sees};
use super::schedule::{Geometry, MAX_CHOOSE, MAX_ROWS, PREFILL_CHUNK, SCRATCH_SLOTS};
use super::stop::{FinishReason, StopRules};
use crate::model::arch::{Anchor, DiffusionLayout, DiffusionRules, DraftRules, ModelRules, VerifyRows};

const SEEDED: DiffusionRules = DiffusionRules {
    layout: DiffusionLayout::Seeded,
    logit_shift: 0,
    block_length: 8,
    sub_block: None,
    threshold: 0.8,
    strict: false,
    only: false,
};
const DREAM: DiffusionRules = DiffusionRules { logit_shift: 1, ..SEEDED };
const ALIGNED: DiffusionRules = DiffusionRules { layout: DiffusionLayout::Aligned, strict: true, only: true, ..SEEDED };
const SHIFTED: DiffusionRules = DiffusionRules { logit_shift: 1, sub_block: Some(4), ..ALIGNED };
const WINDOW: DiffusionRules = DiffusionRules { layout: DiffusionLayout::Window, block_length: 5, ..SEEDED };
const FAMILIES: [DiffusionRules; 5] = [SEEDED, DREAM, ALIGNED, SHIFTED, WINDOW];

/// What the model's mask token is: no guess ever, since models ban it.
const MASK: u32 = VOCAB;

fn geometry(context: u32) -> Geometry {
    Geometry { context, scratch: SCRATCH_SLOTS, max_rows: MAX_ROWS, max_choose: MAX_CHOOSE, vocab_size: VOCAB as usize + 1 }
}

fn prompt(length: usize) -> Vec<u32> {
    (0..length).map(|i| (hash(5, i as u64) % u64::from(VOCAB)) as u32).collect()
}

fn rules(diffusion: DiffusionRules) -> ModelRules {
    ModelRules { diffusion: Some(diffusion), ..ModelRules::default() }
}

/// A model's word on a position from everything that its row sees: kept tokens with their positions in cache order, and the
/// block's.
fn guess(seed: u64, kept: &[(u32, u32)], block: &[(u32, Option<u32>)], position: u32) -> Choice {
    let mut state = hash(seed, 3);
    for &(position, token) in kept {
        state = hash(hash(state, u64::from(position)), u64::from(token));
    }
    for &(position, token) in block {
        state = hash(hash(state, 1000 + u64::from(position)), token.map_or(77, u64::from));
    }
    state = hash(state, u64::from(position));
    let token = (hash(state, 1) % u64::from(VOCAB)) as u32;
    // Now and then exactly the threshold, and equals.
    let p = (uniform(hash(state, 2)) * 20.0).floor() / 20.0;
    Choice { token, probability: p as f32 }
}

/// The rule once more: (text, guessing steps of each block or, for windows, of the whole text).
fn in_other_words(case: &Case) -> (Vec<u32>, Vec<u32>) {
    let DiffusionRules { layout, logit_shift, sub_block, strict, .. } = case.rules;
    let (length, seed) = (case.length(), case.seed);
    let threshold = match (case.block.threshold, case.block.steps) {
        (None, None) => case.rules.threshold,
        (None, Some(_)) => 9.0,
        (Some(t), _) => t,
    };
    let over = |p: f32| if strict { p > threshold } else { p >= threshold };
    let limit = (case.context + 1) as usize;
    let mut text: Vec<Option<u32>> = case.prompt.iter().copied().map(Some).collect();
    let mut steps = Vec::new();
    if layout == DiffusionLayout::Window {
        text.resize(limit, None);
        let mut order: Vec<u32> = (0..case.prompt.len() as u32).collect();
        let mut count = 0;
        while let Some(first) = text.iter().position(Option::is_none) {
            count += 1;
            let kept: Vec<(u32, u32)> = order.iter().map(|&p| (p, text[p as usize].unwrap())).collect();
            let open: Vec<usize> = (first..(first + length).min(limit)).filter(|&p| text[p].is_none()).collect();
            let found: Vec<Choice> = open.iter().map(|&p| guess(seed, &kept, &[(p as u32, None)], p as u32)).collect();
            let best = found.iter().map(|c| c.probability).fold(-1.0, f32::max);
            let mut chosen: Vec<usize> = (0..open.len()).filter(|&i| over(found[i].probability)).collect();
            if chosen.is_empty() {
                chosen.push(found.iter().position(|c| c.probability == best).unwrap());
            }
            for i in chosen {
                text[open[i]] = Some(found[i].token);
                order.push(open[i] as u32);
            }
        }
        let text = text.into_iter().skip(case.prompt.len()).map(Option::unwrap).collect();
        return (text, vec![count]);
    }
    let aligned = layout == DiffusionLayout::Aligned;
    while text.len() < limit {
        let start = if aligned { text.len() - text.len() % length } else { text.len() };
        let kept: Vec<(u32, u32)> = (0..start as u32).map(|p| (p, text[p as usize].unwrap())).collect();
        let mut block: Vec<Option<u32>> = text.split_off(start);
        let known = block.len();
        if block.is_empty() && (layout == DiffusionLayout::Seeded || logit_shift == 1) {
            // The last kept row of an aligned block sees that block; what it says depends on all that is kept.
            block.push(Some(guess(seed, &kept, &[], start as u32).token));
        }
        block.resize(length, None);
        let masks = length - known.max(block.iter().flatten().count());
        let (mut count, all) = (0, if aligned { length } else { masks });
        while block.iter().any(Option::is_none) {
            let part = sub_block.map_or(length, |part| part as usize);
            let first = block.iter().position(Option::is_none).unwrap() / part * part;
            let open: Vec<usize> = (first..(first + part).min(length)).filter(|&i| block[i].is_none()).collect();
            let rows: Vec<(u32, Option<u32>)> = block.iter().enumerate().map(|(i, &t)| ((start + i) as u32, t)).collect();
            let mut found: Vec<(usize, Choice)> =
                open.iter().map(|&i| (i, guess(seed, &kept, &rows, (start + i) as u32 - logit_shift))).collect();
            let due = match case.block.steps {
                None => 1,
                Some(n) => (all / n as usize + usize::from(count < all % n as usize)).max(1),
            };
            let sure = found.iter().filter(|(_, c)| over(c.probability)).count();
            if sure >= due {
                found.retain(|(_, c)| over(c.probability));
            } else {
                found.sort_by(|a, b| b.1.probability.total_cmp(&a.1.probability));
                found.truncate(due);
            }
            for (i, choice) in found {
                block[i] = Some(choice.token);
            }
            count += 1;
        }
        steps.push(count as u32);
        text.extend(block);
    }
    let text = text.into_iter().take(limit).skip(case.prompt.len()).map(Option::unwrap).collect();
    (text, steps)
}

#[derive(Debug, Clone)]
struct Case {
    rules: DiffusionRules,
    block: BlockOptions,
    prompt: Vec<u32>,
    context: u32,
    seed: u64,
    stop: StopRules,
}

#[derive(Debug)]
struct Run {
    tokens: Vec<u32>,
    reason: FinishReason,
    counts: Counts,
    plans: Vec<CallPlan>,
}

impl Case {
    fn new(rules: DiffusionRules, prompt_length: usize, seed: u64) -> Self {
        let block = BlockOptions::default();
        Self { rules, block, prompt: prompt(prompt_length), context: 60, seed, stop: StopRules::default() }
    }

    fn with(self, length: Option<u32>, threshold: Option<f32>, steps: Option<u32>) -> Self {
        Self { block: BlockOptions { length, threshold, steps }, ..self }
    }

    fn length(&self) -> usize {
        self.block.length.unwrap_or(self.rules.block_length) as usize
    }

    fn options(&self) -> ScheduleOptions {
        ScheduleOptions { kind: Some(ScheduleKind::BlockDiffusion), block: self.block, ..ScheduleOptions::default() }
    }

    fn run(&self) -> Result<Run, String> {
        self.run_tampered(|plan| plan.clone())
    }

    fn run_tampered(&self, mut tamper: impl FnMut(&CallPlan) -> CallPlan) -> Result<Run, String> {
        let geometry = geometry(self.context);
        let mut model = Scripted { case: self, cache: Vec::new(), open: None, done: false };
        let started = Generation::start(&self.prompt, 0, rules(self.rules), &self.options(), &geometry, self.stop.clone());
        let (mut generation, plan) = started.map_err(|e| e.to_string())?;
        let (mut tokens, mut plans, mut next) = (Vec::new(), Vec::new(), Some(plan));
        while let Some(plan) = next {
            let choices = model.run(&tamper(&plan)).map_err(|e| format!("call {}: {e}", plans.len()))?;
            let output = plan.answer(&choices).map_err(|e| e.to_string())?;
            let progress = generation.advance(&output).map_err(|e| e.to_string())?;
            tokens.extend(progress.tokens);
            plans.push(plan);
            next = progress.next;
        }
        let reason = generation.finish_reason().ok_or("no finish reason")?;
        Ok(Run { tokens, reason, counts: generation.counts().clone(), plans })
    }

    fn ok(&self) -> Run {
        self.run().unwrap_or_else(|e| panic!("{self:?}: {e}"))
    }
}

/// Keeps what a K/V cache keeps, and what was last said of the open masks.
struct Scripted<'a> {
    case: &'a Case,
    /// By slot: position and token.
    cache: Vec<(u32, u32)>,
    /// The last guesses by position, before which they were masks.
    open: Option<Vec<(u32, Choice)>>,
    done: bool,
}

fn check(holds: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what()) }
}

impl Scripted<'_> {
    /// # Errors
    /// A sentence for the first thing that is not as the definition has it.
    fn run(&mut self, plan: &CallPlan) -> Result<Vec<Choice>, String> {
        let case = self.case;
        let layout = case.rules.layout;
        check(!self.done, || "a call after the end".into())?;
        let prompt = case.prompt.len();
        let mut kept: Vec<&Row> = plan.rows().iter().filter(|row| matches!(row.keep, Keep::Cache(_))).collect();
        kept.sort_by_key(|row| if let Keep::Cache(slot) = row.keep { slot } else { 0 });
        let first = self.cache.len();
        let end = first + kept.len();
        for (row, slot) in kept.iter().zip(first as u32..) {
            let RowToken::Id(token) = row.token else { return Err(format!("a mask is kept: {row:?}")) };
            check(row.keep == Keep::Cache(slot), || format!("slot {slot} is next: {row:?}"))?;
            check(layout == DiffusionLayout::Window || row.position == slot, || format!("not where it stands: {row:?}"))?;
            let sees = match layout {
                DiffusionLayout::Aligned => (slot - slot % case.length() as u32 + case.length() as u32).min(end as u32),
                _ => slot + 1,
            };
            check(row.sees == Sees { cache: 0..sees, scratch: 0..0 }, || format!("a kept row sees wrongly: {row:?}"))?;
            check(!row.adapter, || format!("the adapter is on: {row:?}"))?;
            if let Some(&truth) = case.prompt.get(row.position as usize) {
                check(token == truth, || format!("not the prompt's token: {row:?}"))?;
            }
            self.cache.push((row.position, token));
        }
        if layout == DiffusionLayout::Aligned {
            let whole = end.is_multiple_of(case.length());
            check(whole, || format!("{end} kept tokens are no whole blocks"))?;
        }
        // What does not fill a block is kept with the first block of the answer.
        let whole = if layout == DiffusionLayout::Aligned { prompt - prompt % case.length() } else { prompt };
        let in_prompt = kept.iter().any(|row| (row.position as usize) < whole);
        check(!in_prompt || plan.kind() == CallKind::Prefill, || "prompt rows in a decode call".into())?;
        check(kept.len() <= PREFILL_CHUNK, || format!("{} kept rows", kept.len()))?;

        let mut block: Vec<&Row> = plan.rows().iter().filter(|row| matches!(row.keep, Keep::Scratch(_))).collect();
        block.sort_by_key(|row| row.position);
        let inside: Vec<(u32, Option<u32>)> = block
            .iter()
            .map(|row| (row.position, if let RowToken::Id(token) = row.token { Some(token) } else { None }))
            .collect();
        self.check_revealed(&inside, first)?;
        let slots: Vec<u32> = block.iter().map(|row| if let Keep::Scratch(slot) = row.keep { slot } else { 0 }).collect();
        for (row, &slot) in block.iter().zip(&slots) {
            let scratch = match layout {
                DiffusionLayout::Window => slot..slot + 1,
                _ => slots.iter().min().copied().unwrap_or(0)..slots.iter().max().map_or(0, |slot| slot + 1),
            };
            let sees = Sees { cache: 0..end as u32, scratch };
            check(row.sees == sees && !row.adapter, || format!("a row of the block sees wrongly: {row:?}, not {sees:?}"))?;
        }
        if layout != DiffusionLayout::Window && !block.is_empty() {
            let start = end as u32;
            check(inside.iter().map(|b| b.0).eq(start..start + case.length() as u32), || format!("not a block: {inside:?}"))?;
        }
        // What the rows say, in device order.
        let mut open = Vec::new();
        let mut choices = Vec::new();
        for row in plan.rows().iter().filter(|row| row.choose) {
            let (target, choice) = match row.keep {
                Keep::Cache(slot) => {
                    check(slot as usize + 1 == end && block.is_empty(), || format!("nobody asks this row: {row:?}"))?;
                    (end as u32, guess(case.seed, &self.cache, &[], end as u32))
                }
                Keep::Scratch(_) => {
                    let own = [(row.position, None)];
                    let seen: &[_] = if layout == DiffusionLayout::Window { &own } else { &inside };
                    (row.position + case.rules.logit_shift, guess(case.seed, &self.cache, seen, row.position))
                }
            };
            let masked = block.is_empty() || inside.contains(&(target, None));
            check(masked, || format!("{row:?} speaks of {target}, which is known"))?;
            open.push((target, choice));
            choices.push(choice);
        }
        open.sort_by_key(|o| o.0);
        self.open = Some(open);
        Ok(choices)
    }

    /// At least one of the last guesses became a token, none became another.
    fn check_revealed(&self, block: &[(u32, Option<u32>)], first: usize) -> Result<(), String> {
        let Some(last) = self.open.as_ref().filter(|last| !last.is_empty()) else { return Ok(()) };
        let now = |position: u32| {
            let inside = block.iter().find(|b| b.0 == position).map(|b| b.1);
            let fresh = self.cache.iter().skip(first).find(|kept| kept.0 == position).map(|kept| Some(kept.1));
            fresh.or(inside)
        };
        let mut revealed = 0;
        for &(position, choice) in last {
            match now(position) {
                Some(Some(token)) => {
                    check(token == choice.token, || format!("{position} became {token}, {} was guessed", choice.token))?;
                    revealed += 1;
                }
                Some(None) => {}
                None => return Err(format!("position {position} was guessed and is gone")),
            }
        }
        check(revealed > 0, || "a step revealed nothing".into())
    }
}

#[test]
fn every_layout_says_what_the_rule_in_other_words_says() {
    let mut several = 0;
    for rules in FAMILIES {
        for seed in 0..8 {
            for length in [1, 2, 7, 8, 9, 16, 23] {
                for (block, threshold, steps) in [
                    (None, None, None),
                    (Some(3), Some(0.5), None),
                    (Some(6), Some(2.0), None),
                    (Some(4), Some(0.0), None),
                    (Some(1), None, None),
                    (Some(8), None, Some(3)),
                    (Some(6), Some(0.7), Some(2)),
                ] {
                    if rules.layout == DiffusionLayout::Window && steps.is_some() {
                        continue;
                    }
                    let case = Case::new(rules, length, seed).with(block, threshold, steps);
                    let run = case.ok();
                    let (text, steps) = in_other_words(&case);
                    assert_eq!(run.tokens, text, "{case:?}");
                    assert_eq!(run.reason, FinishReason::Context);
                    assert_eq!(run.tokens.len(), 61 - length, "the context is filled: {case:?}");
                    assert!(!run.tokens.contains(&MASK));
                    // Controls: another threshold or shift is another text.
                    let other = Case { seed: seed + 100, ..case.clone() };
                    assert_ne!(in_other_words(&other).0, text);
                    several += usize::from(steps.iter().any(|&s| s > 1 && (s as usize) < case.length()));
                }
            }
        }
    }
    assert!(several > 50, "only {several} texts had steps that revealed several masks");
    let case = Case::new(SEEDED, 5, 1);
    let strict = Case { rules: DiffusionRules { strict: true, ..SEEDED }, ..case.clone() };
    assert!(
        (0..20).any(|seed| {
            let of = |case: &Case| in_other_words(&Case { seed, ..case.clone() }).0;
            of(&case) != of(&strict)
        }),
        "control: equal to the threshold happens"
    );
}

#[test]
fn long_prompts_are_cut_between_blocks() {
    for rules in FAMILIES {
        for length in [PREFILL_CHUNK - 1, PREFILL_CHUNK, PREFILL_CHUNK + 1, 2 * PREFILL_CHUNK + 5] {
            for block in [Some(3), Some(8), Some(48)] {
                let case = Case { context: 700, ..Case::new(rules, length, 3) }.with(block, None, None);
                let case = Case { stop: StopRules { max_tokens: Some(20), ..StopRules::default() }, ..case };
                let run = case.ok();
                assert_eq!(run.tokens, in_other_words(&case).0[..20], "{case:?}");
                let prompt_rows = |plan: &&CallPlan| plan.kind() == CallKind::Prefill;
                assert_eq!(run.plans.iter().filter(prompt_rows).count(), run.counts.prefill.calls);
            }
        }
    }
}

#[test]
fn steps_reveal_as_many_as_were_asked_for() {
    for rules in FAMILIES {
        let calls = |threshold, steps| {
            let case = Case { context: 63, ..Case::new(rules, 8, 4) }.with(None, threshold, steps);
            case.ok().plans.iter().filter(|plan| plan.rows().iter().any(|row| row.token == RowToken::Mask)).count()
        };
        // Whole blocks, so that the context's end cuts none.
        let masks = 64 - 8;
        let window = rules.layout == DiffusionLayout::Window;
        // Seeds are no guesses: the first token of each block.
        let blocks = masks / 8;
        let seeds = if window || rules == ALIGNED { 0 } else { blocks };
        let guesses = if window { masks } else { blocks * 8 - seeds };
        assert_eq!(calls(Some(2.0), None), guesses, "one a step: {rules:?}");
        let at_once = calls(Some(0.0), None);
        assert!(at_once <= guesses / 2, "all at once: {at_once} of {guesses}, {rules:?}");
        if !window && rules.sub_block.is_none() {
            assert_eq!(calls(None, Some(2)), 2 * blocks, "{rules:?}");
            assert!(calls(Some(0.5), Some(2)) <= 2 * blocks);
        }
    }
}

#[test]
fn budgets_are_met_exactly_and_end_ids_cut() {
    for rules in FAMILIES {
        let whole = Case::new(rules, 5, 9).ok().tokens;
        for count in 1..20 {
            let mut case = Case::new(rules, 5, 9);
            case.stop.max_tokens = Some(count);
            let run = case.ok();
            assert_eq!((run.tokens.as_slice(), run.reason), (&whole[..count], FinishReason::Length), "{rules:?}");
            let mut case = Case::new(rules, 5, 9);
            case.stop.end_ids = vec![whole[count]];
            let first = whole.iter().position(|t| *t == whole[count]).unwrap();
            let run = case.ok();
            assert_eq!((run.tokens.as_slice(), run.reason), (&whole[..=first], FinishReason::Stop), "{rules:?}");
            case.stop.ignore_eos = true;
            assert_eq!(case.ok().tokens, whole);
        }
    }
}

#[test]
fn the_scripted_model_catches_every_wrong_plan() {
    let kept = |row: &Row| matches!(row.keep, Keep::Cache(_));
    let mask = |row: &Row| row.token == RowToken::Mask;
    type Which<'a> = &'a dyn Fn(&Row) -> bool;
    let sabotages: [(&str, Which, fn(&mut Row)); 9] = [
        ("a kept row sees one key too many", &kept, |row| row.sees.cache.end += 1),
        ("a kept row misses the first key", &kept, |row| row.sees.cache.start += 1),
        ("a kept row goes one slot further", &kept, |row| row.keep = Keep::Cache(row.position + 9)),
        ("a kept row sees the block", &kept, |row| row.sees.scratch = 0..1),
        ("a kept row is a mask", &kept, |row| row.token = RowToken::Mask),
        ("a mask misses a kept key", &mask, |row| row.sees.cache.end -= 1),
        ("a mask does not see its place", &mask, |row| row.sees.scratch.end -= 1),
        ("a mask's adapter is on", &mask, |row| row.adapter = true),
        ("a mask became what nobody guessed", &mask, |row| row.token = RowToken::Id(MASK)),
    ];
    for rules in FAMILIES {
        let case = Case::new(rules, 9, 2);
        case.ok();
        for (name, which, change) in &sabotages {
            let mut changed = false;
            let caught = case.run_tampered(|plan| {
                let wrong = if plan.kind() == CallKind::Decode { alter(plan, which, change) } else { plan.clone() };
                changed |= wrong != *plan;
                wrong
            });
            assert!(changed, "{name}: nothing was changed with {rules:?}");
            assert!(caught.is_err(), "{name}: not caught with {rules:?}");
        }
    }
    // A schedule that reveals nothing is caught too: the same call twice.
    let case = Case::new(SEEDED, 9, 2);
    let mut first = None;
    let caught = case.run_tampered(|plan| {
        let guesses = plan.rows().iter().any(mask);
        if guesses && first.is_none() {
            first = Some(plan.clone());
        }
        if guesses { first.clone().unwrap() } else { plan.clone() }
    });
    assert!(caught.unwrap_err().contains("revealed nothing"));
}

#[test]
fn no_call_exceeds_what_was_checked_beforehand() {
    for rules in FAMILIES {
        let case = Case::new(rules, 9, 6);
        let run = case.ok();
        let scratch = |plan: &CallPlan| plan.rows().iter().filter(|r| matches!(r.keep, Keep::Scratch(_))).count();
        let widest = run.plans.iter().map(scratch).max().unwrap() as u32;
        let heads = run.plans.iter().map(|plan| plan.choose().len()).max().unwrap();
        let rows = run.plans.iter().map(|plan| plan.rows().len()).max().unwrap();
        let fits = |geometry| case.options().resolve(self::rules(rules), &geometry).is_ok();
        let wide = geometry(60);
        assert!(fits(Geometry { scratch: widest, ..wide }) && !fits(Geometry { scratch: widest - 1, ..wide }), "{rules:?}");
        assert!(!fits(Geometry { max_choose: heads - 1, ..wide }) && !fits(Geometry { max_rows: rows - 1, ..wide }), "{rules:?}");
    }
}

#[test]
fn options_that_do_not_fit_are_refused_by_name() {
    let refused = |rules: ModelRules, options: ScheduleOptions| match options.resolve(rules, &geometry(64)) {
        Ok(taken) => panic!("{options:?} was taken: {taken:?}"),
        Err(e) => (e.code(), e.to_string()),
    };
    let draft =
        DraftRules { logit_shift: 1, anchor: Anchor::InBlock, verify: VerifyRows::Clean, bidirectional: true, adapter: true };
    let kind = |name: &str| ScheduleOptions { kind: Some(name.parse().unwrap()), ..ScheduleOptions::default() };
    let block = |length, threshold, steps| ScheduleOptions {
        block: BlockOptions { length, threshold, steps },
        ..kind("block-diffusion")
    };
    for (got, part) in [
        (refused(ModelRules::default(), kind("block-diffusion")), "made for it"),
        (refused(Some(draft).into(), kind("block-diffusion")), "made for it"),
        (refused(rules(ALIGNED), kind("autoregressive")), "block-diffusion"),
        (refused(ModelRules { draft: Some(draft), ..rules(ALIGNED) }, kind("packed")), "fill blocks only"),
        (refused(rules(SEEDED), block(Some(0), None, None)), "block length is 0"),
        (refused(rules(SEEDED), block(None, Some(-0.5), None)), "threshold is -0.5"),
        (refused(rules(SEEDED), block(None, Some(f32::NAN), None)), "threshold is NaN"),
        (refused(rules(SEEDED), block(None, None, Some(0))), "0 steps"),
        (refused(rules(SEEDED), block(None, None, Some(9))), "use 1 to 8"),
        (refused(rules(WINDOW), block(None, None, Some(2))), "window slides"),
        (refused(rules(SEEDED), block(Some(161), None, None)), "161 scratch slots"),
        (refused(rules(SEEDED), block(Some(u32::MAX), None, None)), "rows"),
        (
            refused(rules(SEEDED), ScheduleOptions { kind: None, ..block(None, Some(0.5), None) }),
            "only the schedule block-diffusion",
        ),
    ] {
        assert_eq!(got.0, "InvalidOption", "{got:?}");
        assert!(got.1.contains(part), "{got:?} does not say {part:?}");
    }
    let default = |rules| ScheduleOptions::default().resolve(rules, &geometry(64)).unwrap();
    assert_eq!(default(rules(ALIGNED)).kind(), ScheduleKind::BlockDiffusion);
    assert_eq!(default(ModelRules { draft: Some(draft), ..rules(SEEDED) }).kind(), ScheduleKind::PACKED);
    // Drafts stay below the reach.
    let setdlm =
        DraftRules { logit_shift: 0, anchor: Anchor::Shared, verify: VerifyRows::Mask, bidirectional: false, adapter: false };
    for (horizon, widths) in [(Some(8), (3, 7)), (Some(16), (8, 15)), (Some(32), (8, 15)), (None, (8, 15))] {
        match default(ModelRules { draft: Some(setdlm), diffusion: Some(WINDOW), horizon }) {
            Resolved::Drafting { verify_width, draft_width, .. } => assert_eq!((verify_width, draft_width), widths),
            other => panic!("{other:?}"),
        }
    }
}
