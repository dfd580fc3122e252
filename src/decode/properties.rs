//! What schedules promise, checked against random oracles: the same text always, never more calls than the theory says,
//! exactly the rows of the definition. Every check has a control that shows it can fail.

use super::accept::accept;
use super::fake::{Fake, Oracle, Scripted, Skill, VOCAB, alter, hash, uniform};
use super::generation::{Counts, Generation};
use super::options::{Anchors, ScheduleKind, ScheduleOptions};
use super::plan::{CallKind, CallOutput, CallPlan, Choice, Keep, Row, RowToken, Sees};
use super::schedule::{Geometry, MAX_CHOOSE, MAX_ROWS, ModelCalls, PREFILL_CHUNK, SCRATCH_SLOTS};
use super::stop::{FinishReason, StopRules};
use crate::model::arch::{Anchor, DraftRules, VerifyRows};

const ADAPTER: DraftRules =
    DraftRules { logit_shift: 1, anchor: Anchor::InBlock, verify: VerifyRows::Clean, bidirectional: true, adapter: true };
const NEMOTRON: DraftRules = DraftRules { logit_shift: 0, ..ADAPTER };
const SETDLM: DraftRules =
    DraftRules { logit_shift: 0, anchor: Anchor::Shared, verify: VerifyRows::Mask, bidirectional: false, adapter: false };
const FAMILIES: [DraftRules; 6] = [
    ADAPTER,
    NEMOTRON,
    DraftRules { anchor: Anchor::Shared, ..ADAPTER },
    DraftRules { anchor: Anchor::Shared, ..NEMOTRON },
    DraftRules { anchor: Anchor::Shared, bidirectional: false, adapter: false, ..NEMOTRON },
    SETDLM,
];

const TWO_CALL: ScheduleKind = ScheduleKind::TwoCall { seed_row: false };
const SEED: ScheduleKind = ScheduleKind::TwoCall { seed_row: true };
const QUADRATIC: ScheduleKind = ScheduleKind::Packed { anchors: Anchors::Every, shared: false };
const fn anchored(count: u32) -> ScheduleKind {
    ScheduleKind::Packed { anchors: Anchors::Count(count), shared: false }
}

fn kinds() -> Vec<ScheduleKind> {
    let mut kinds: Vec<ScheduleKind> = ScheduleKind::LOSSLESS.iter().map(|name| name.parse().unwrap()).collect();
    kinds.push(anchored(3));
    kinds.push(ScheduleKind::Packed { anchors: Anchors::Count(2), shared: true });
    kinds
}

fn geometry(context: u32) -> Geometry {
    Geometry { context, scratch: SCRATCH_SLOTS, max_rows: MAX_ROWS, max_choose: MAX_CHOOSE, vocab_size: VOCAB as usize }
}

fn prompt(length: usize) -> Vec<u32> {
    (0..length).map(|i| (hash(5, i as u64) % u64::from(VOCAB)) as u32).collect()
}

/// One generation to run.
#[derive(Debug, Clone)]
struct Case {
    rules: DraftRules,
    kind: ScheduleKind,
    k: u32,
    w: u32,
    prompt: Vec<u32>,
    context: u32,
    stop: StopRules,
}

impl Case {
    fn new(rules: DraftRules, kind: ScheduleKind, k: u32, w: u32) -> Self {
        let stop = StopRules { max_tokens: Some(40), ..StopRules::default() };
        Self { rules, kind, k, w, prompt: prompt(5), context: 1024, stop }
    }

    fn prompt(mut self, length: usize) -> Self {
        self.prompt = prompt(length);
        self
    }

    fn context(mut self, context: u32) -> Self {
        self.context = context;
        self
    }

    fn tokens(mut self, tokens: usize) -> Self {
        self.stop.max_tokens = Some(tokens);
        self
    }

    fn options(&self) -> ScheduleOptions {
        ScheduleOptions {
            kind: Some(self.kind),
            verify_width: Some(self.k),
            draft_width: Some(self.w),
            ..ScheduleOptions::default()
        }
    }

    fn run(&self, oracle: &Scripted) -> Result<Run, String> {
        self.run_tampered(oracle, |_, plan| plan.clone(), |_, _, output| output)
    }

    /// Runs with a saboteur between schedule and model.
    fn run_tampered(
        &self,
        oracle: &Scripted,
        mut plans: impl FnMut(usize, &CallPlan) -> CallPlan,
        mut outputs: impl FnMut(usize, &CallPlan, CallOutput) -> CallOutput,
    ) -> Result<Run, String> {
        let geometry = geometry(self.context);
        let shared = matches!(self.kind, ScheduleKind::Packed { shared: true, .. });
        let rules = DraftRules { anchor: if shared { Anchor::Shared } else { self.rules.anchor }, ..self.rules };
        let mut fake = Fake::new(oracle.clone(), &self.prompt, Some(rules), Some(self.w), geometry);
        let (mut generation, plan) =
            Generation::start(&self.prompt, 0, Some(self.rules), &self.options(), &geometry, self.stop.clone())
                .map_err(|e| e.to_string())?;
        let (mut tokens, mut sent, mut next) = (Vec::new(), Vec::new(), Some(plan));
        while let Some(plan) = next {
            let call = sent.len();
            let output = fake.run(&plans(call, &plan)).map_err(|e| format!("call {call}: {e}"))?;
            let progress = generation.advance(&outputs(call, &plan, output)).map_err(|e| e.to_string())?;
            tokens.extend(progress.tokens);
            sent.push(plan);
            next = progress.next;
        }
        let reason = generation.finish_reason().ok_or("no finish reason")?;
        Ok(Run { tokens, reason, counts: generation.counts().clone(), plans: sent })
    }

    /// Runs and compares the text with the oracle's own.
    fn check(&self, oracle: &Scripted) -> Result<Run, String> {
        let run = self.run(oracle)?;
        self.compare(oracle, &run)?;
        Ok(run)
    }

    fn compare(&self, oracle: &Scripted, run: &Run) -> Result<(), String> {
        let greedy = oracle.text(&self.prompt, run.tokens.len());
        if run.tokens == greedy { Ok(()) } else { Err(format!("text {:?} is not {greedy:?}", run.tokens)) }
    }
}

#[derive(Debug, PartialEq)]
struct Run {
    tokens: Vec<u32>,
    reason: FinishReason,
    counts: Counts,
    plans: Vec<CallPlan>,
}

#[track_caller]
fn ok<T>(case: &Case, oracle: &Scripted, result: Result<T, String>) -> T {
    result.unwrap_or_else(|e| panic!("{case:?} with {:?}, seed {}: {e}", oracle.skill, oracle.seed))
}

#[test]
fn every_lossless_schedule_emits_the_targets_greedy_text() {
    let skills =
        [Skill::Independent(0.0), Skill::Independent(0.7), Skill::Independent(1.0), Skill::Frontier(2.0), Skill::Ripening(4.0)];
    for kind in kinds() {
        for rules in FAMILIES {
            let mut accepted = 0;
            for (i, (k, w)) in [(1, 2), (1, 7), (2, 3), (3, 5), (4, 7), (8, 5), (8, 13)].into_iter().enumerate() {
                for (j, skill) in skills.into_iter().enumerate() {
                    for length in [1, 2, 9] {
                        let oracle = Scripted::new((100 * i + 10 * j + length) as u64, skill);
                        let case = Case::new(rules, kind, k, w).prompt(length);
                        let run = ok(&case, &oracle, case.check(&oracle));
                        assert_eq!((run.tokens.len(), run.reason), (40, FinishReason::Length), "{case:?}");
                        accepted += run.counts.accepted();
                    }
                }
            }
            assert_eq!(accepted > 0, kind != ScheduleKind::Autoregressive, "{kind} with {rules:?} accepted {accepted} drafts");
        }
    }
}

#[test]
fn the_narrowest_draft_works_where_it_can() {
    for (rules, kind) in [(ADAPTER, ScheduleKind::PACKED), (ADAPTER, TWO_CALL), (NEMOTRON, TWO_CALL), (SETDLM, TWO_CALL)] {
        let oracle = Scripted::new(3, Skill::Independent(0.8));
        let case = Case::new(rules, kind, 4, 1);
        let run = ok(&case, &oracle, case.check(&oracle));
        assert!(run.counts.accepted() > 0, "{case:?}");
    }
}

#[test]
fn prompts_are_cut_into_the_same_chunks_by_every_schedule() {
    let silent_rows = |plan: &CallPlan| -> Vec<(Row, bool)> {
        let clean = |row: &&Row| matches!(row.keep, Keep::Cache(_));
        // Whether the last row itself chooses is the family's affair.
        plan.rows().iter().filter(clean).map(|row| (Row { choose: false, ..row.clone() }, row.choose)).collect()
    };
    for length in [1, PREFILL_CHUNK - 1, PREFILL_CHUNK, PREFILL_CHUNK + 1, 2 * PREFILL_CHUNK, 2 * PREFILL_CHUNK + 3] {
        for rules in [ADAPTER, NEMOTRON, SETDLM] {
            let oracle = Scripted::new(length as u64, Skill::Independent(0.8));
            let runs: Vec<Run> = kinds()
                .into_iter()
                .map(|kind| {
                    let case = Case::new(rules, kind, 4, 7).prompt(length).tokens(12);
                    ok(&case, &oracle, case.check(&oracle))
                })
                .collect();
            let chunks = length.div_ceil(PREFILL_CHUNK);
            for (run, kind) in runs.iter().zip(kinds()) {
                assert_eq!(run.counts.prefill.calls, chunks, "{kind}, prompt of {length}");
                for (call, (plan, first)) in run.plans.iter().zip(&runs[0].plans).take(chunks).enumerate() {
                    assert_eq!(plan.kind(), CallKind::Prefill);
                    assert_eq!(silent_rows(plan), silent_rows(first), "{kind}, prompt of {length}");
                    assert!(call + 1 == chunks || plan.choose().is_empty(), "the head runs on the last chunk only");
                }
                let mask = usize::from(rules == SETDLM);
                let beside = match kind {
                    ScheduleKind::Packed { shared, .. } => block_rows(rules, shared, 7) + mask,
                    _ => mask,
                };
                assert_eq!(run.counts.prefill.rows, length + beside, "{kind}, prompt of {length}");
                assert!(run.plans.iter().skip(chunks).all(|plan| plan.kind() == CallKind::Decode));
            }
        }
    }
}

fn block_rows(rules: DraftRules, shared: bool, w: usize) -> usize {
    match (rules.verify, rules.anchor) {
        (VerifyRows::Mask, _) => w - 1,
        (VerifyRows::Clean, Anchor::InBlock) if !shared => 1 + w,
        _ => w,
    }
}

#[test]
fn calls_have_exactly_the_rows_of_the_definition() {
    for rules in FAMILIES {
        for kind in kinds() {
            for (k, w) in [(1, 2), (3, 5), (4, 7), (8, 13)] {
                let oracle = Scripted::new(u64::from(k + w), Skill::Independent(0.75));
                let case = Case::new(rules, kind, k, w);
                let run = ok(&case, &oracle, case.check(&oracle));
                let verify = |m: usize| (1 + m) * if rules.verify == VerifyRows::Mask { 2 } else { 1 };
                let block = |shared| block_rows(rules, shared, w as usize);
                let mut drafts = true;
                for call in &run.counts.per_call {
                    let m = call.drafted;
                    let expected = match kind {
                        ScheduleKind::Autoregressive => verify(0),
                        ScheduleKind::TwoCall { seed_row } => {
                            drafts = !drafts;
                            match drafts {
                                true => verify(m),
                                // x[n] stands beside a block that shares it; with a seed row always.
                                false if seed_row || rules.anchor == Anchor::Shared => {
                                    block(false) + if rules.verify == VerifyRows::Mask { 2 } else { 1 }
                                }
                                false => block(false),
                            }
                        }
                        ScheduleKind::BlockDiffusion => unreachable!("it is not lossless"),
                        ScheduleKind::Packed { anchors: Anchors::Every, shared } => verify(m) + (1 + m) * block(shared),
                        ScheduleKind::Packed { anchors: Anchors::Count(h), shared } => {
                            verify(m) + (1 + m).min(h as usize) * block(shared)
                        }
                    };
                    assert_eq!(call.rows, expected, "{case:?}: {call:?}");
                    assert!(m <= k as usize);
                }
            }
        }
    }
}

#[test]
fn the_table_of_rows_holds_for_clean_families() {
    // Drafter always right, w >= 2K+1-s: every step verifies K.
    let oracle = Scripted::new(1, Skill::Independent(1.0));
    let rows = |rules, kind, k, w| {
        let case = Case::new(rules, kind, k, w);
        let run = ok(&case, &oracle, case.check(&oracle));
        let rows: Vec<usize> = run.counts.per_call.iter().map(|call| call.rows).skip(1).take(2).collect();
        (rows[0], rows[1])
    };
    for (rules, k, w) in [(ADAPTER, 4u32, 8u32), (NEMOTRON, 4, 9)] {
        let (m, w1) = (k as usize, w as usize + 1);
        assert_eq!(rows(rules, ScheduleKind::Autoregressive, k, w), (1, 1));
        assert_eq!(rows(rules, TWO_CALL, k, w), (1 + m, w1));
        assert_eq!(rows(rules, SEED, k, w), (1 + m, 1 + w1));
        assert_eq!(rows(rules, ScheduleKind::PACKED, k, w), ((1 + m) + w1, (1 + m) + w1));
        assert_eq!(rows(rules, anchored(3), k, w), ((1 + m) + 3 * w1, (1 + m) + 3 * w1));
        assert_eq!(rows(rules, QUADRATIC, k, w).0, (1 + m) * (1 + w1));
        assert_eq!(rows(rules, ScheduleKind::Packed { anchors: Anchors::Every, shared: true }, k, w).0, (1 + m) * w1);
    }
    assert_eq!(rows(SETDLM, ScheduleKind::Autoregressive, 4, 9), (2, 2));
    assert_eq!(rows(SETDLM, ScheduleKind::PACKED, 4, 9), (2 * 5 + 8, 2 * 5 + 8));
}

/// Packed-SS in its own words, without plans: (m, a) of every decode call.
fn simulate(
    oracle: &Scripted,
    anchors: impl Fn(usize) -> Vec<usize>,
    s: usize,
    k: usize,
    w: usize,
    prompt: usize,
    tokens: usize,
) -> Vec<(usize, usize)> {
    let (mut n, mut draft): (usize, Vec<bool>) = (prompt - 1, Vec::new());
    let (mut emitted, mut steps) = (0, Vec::new());
    while emitted < tokens {
        let a = draft.iter().take_while(|&&right| right).count();
        let h = anchors(draft.len()).into_iter().filter(|&h| h <= a).max().unwrap();
        let next = n + a + 1;
        steps.push((draft.len(), a));
        // Row r of the block at n+h predicts n+h+r+s.
        draft =
            (0..=w).map(|r| n + h + r + s).filter(|&p| p > next && p <= next + k).map(|p| oracle.right(n + h + 1, p)).collect();
        let m = (w + s) as isize - (a - h) as isize - 1;
        assert_eq!(draft.len() as isize, m.clamp(0, k as isize), "m' = clamp(w+s-(a-h)-1, 0, K)");
        emitted += a + 1;
        n = next;
    }
    steps.remove(0);
    steps
}

#[test]
fn the_unresolved_suffix_is_what_the_definition_says() {
    let steps_of = |run: &Run| -> Vec<(usize, usize)> { run.counts.per_call.iter().map(|c| (c.drafted, c.accepted)).collect() };
    let (mut suffixes, mut differs) = (std::collections::BTreeSet::new(), false);
    for seed in 0..12 {
        for rules in [ADAPTER, NEMOTRON] {
            for (k, w) in [(1u32, 2u32), (2, 7), (4, 3), (4, 7), (7, 15)] {
                let oracle = Scripted::new(seed, Skill::Independent(0.8));
                let s = rules.logit_shift as usize;
                let simulated = |s, every: bool| {
                    let anchors = |m| if every { (0..=m).collect() } else { vec![0] };
                    simulate(&oracle, anchors, s, k as usize, w as usize, 5, 40)
                };
                for (kind, every) in [(ScheduleKind::PACKED, false), (QUADRATIC, true)] {
                    let case = Case::new(rules, kind, k, w);
                    let run = ok(&case, &oracle, case.check(&oracle));
                    let steps = steps_of(&run);
                    assert_eq!(steps, simulated(s, every), "{case:?}");
                    suffixes.extend(steps.iter().map(|&(m, a)| (k, m, a)));
                    differs |= w > 2 && steps != simulated(1 - s, every);
                }
            }
        }
    }
    assert!(suffixes.len() > 20, "only {} kinds of steps were seen", suffixes.len());
    assert!(differs, "control: the other shift's arithmetic must not fit");
}

/// Calls that `kind` needs for 48 tokens, decode only.
fn calls(kind: ScheduleKind, oracle: &Scripted, rules: DraftRules, k: u32, w: u32) -> usize {
    let case = Case::new(rules, kind, k, w).tokens(48);
    ok(&case, oracle, case.check(oracle)).counts.calls()
}

/// Over many oracles: in how many `less` needs more calls than `more`, and in how many fewer.
fn compare_calls(less: ScheduleKind, more: ScheduleKind, skill: impl Fn(f64) -> Skill, count: u64) -> (usize, usize) {
    let (mut worse, mut better) = (0, 0);
    for seed in 0..count {
        let oracle = Scripted::new(seed, skill(uniform(hash(seed, 17))));
        for rules in [ADAPTER, NEMOTRON] {
            let k = 1 + (hash(seed, 19) % 5) as u32;
            let w = 2 * k + 1 - rules.logit_shift;
            let (a, b) = (calls(less, &oracle, rules, k, w), calls(more, &oracle, rules, k, w));
            worse += usize::from(a > b);
            better += usize::from(a < b);
        }
    }
    (worse, better)
}

#[test]
fn packed_never_needs_more_calls_than_two_call_with_a_monotone_drafter() {
    let (worse, better) = compare_calls(ScheduleKind::PACKED, TWO_CALL, |u| Skill::Frontier(6.0 * u), 400);
    assert_eq!(worse, 0);
    assert!(better > 400, "better only {better} times");
    // Control: a drafter that knows everything at just the prefixes where two-call's rounds begin, and nothing elsewhere.
    let fickle = Scripted::new(1, Skill::Periodic(5));
    let [packed, two_call] = [ScheduleKind::PACKED, TWO_CALL].map(|kind| calls(kind, &fickle, ADAPTER, 4, 8));
    assert!(packed > two_call, "control: without the assumption the bound does not hold, but {packed} <= {two_call}");
}

#[test]
fn quadratic_never_needs_more_calls_than_packed_when_right_words_stay_right() {
    let (worse, better) = compare_calls(QUADRATIC, ScheduleKind::PACKED, |u| Skill::Ripening(8.0 * u), 400);
    assert_eq!(worse, 0);
    assert!(better > 100, "better only {better} times");
    let (worse, _) = compare_calls(QUADRATIC, ScheduleKind::PACKED, |u| Skill::Frontier(6.0 * u), 400);
    assert!(worse > 0, "control: a monotone frontier alone is not enough");
}

#[test]
fn anchored_has_packed_and_quadratic_at_its_ends() {
    let mut between = 0;
    for seed in 0..20 {
        for rules in FAMILIES {
            let oracle = Scripted::new(seed, Skill::Ripening(5.0));
            let run = |kind| {
                let case = Case::new(rules, kind, 4, 9);
                ok(&case, &oracle, case.check(&oracle))
            };
            let (packed, quadratic) = (run(ScheduleKind::PACKED), run(QUADRATIC));
            assert_eq!(run(anchored(1)).plans, packed.plans);
            assert_eq!(run(anchored(5)).plans, quadratic.plans);
            let two = run(anchored(2));
            assert_ne!(two.plans, packed.plans, "control");
            assert_ne!(two.plans, quadratic.plans, "control");
            between += usize::from(two.counts.calls() < packed.counts.calls());
        }
    }
    assert!(between > 10, "two anchors saved calls only {between} times");
}

#[test]
fn anchors_stand_where_acceptance_most_probably_ends() {
    let draft = |p: &[f32]| -> Vec<Choice> { p.iter().map(|&probability| Choice { token: 1, probability }).collect() };
    // P(a = 0..=3) = 0.1, 0.45, 0.045, 0.405.
    let sure = draft(&[0.9, 0.5, 0.9]);
    assert_eq!(Anchors::Count(1).place(&sure), [0]);
    assert_eq!(Anchors::Count(2).place(&sure), [0, 1]);
    assert_eq!(Anchors::Count(3).place(&sure), [0, 1, 3]);
    assert_eq!(Anchors::Count(9).place(&sure), [0, 1, 2, 3]);
    assert_eq!(Anchors::Every.place(&sure), [0, 1, 2, 3]);
    assert_eq!(Anchors::Count(2).place(&draft(&[0.9, 0.95, 0.97])), [0, 3]);
    assert_eq!(Anchors::Count(2).place(&draft(&[f32::NAN, 2.0])), [0, 1], "nonsense is no reason to panic");
    assert_eq!(Anchors::Count(4).place(&[]), [0]);
}

#[test]
fn the_context_is_filled_to_its_end_by_every_schedule() {
    for kind in kinds() {
        for rules in FAMILIES {
            for (length, context) in
                [(1, 1), (1, 2), (1, 3), (3, 4), (5, 12), (5, 30), (30, 30), (PREFILL_CHUNK + 1, PREFILL_CHUNK as u32 + 4)]
            {
                for p in [0.0, 0.8, 1.0] {
                    let oracle = Scripted::new(u64::from(context), Skill::Independent(p));
                    let case = Case::new(rules, kind, 4, 7).prompt(length).context(context).tokens(1000);
                    let run = ok(&case, &oracle, case.check(&oracle));
                    assert_eq!(run.reason, FinishReason::Context, "{case:?}");
                    assert_eq!(run.tokens.len(), context as usize - length + 1, "{case:?}");
                }
            }
        }
    }
}

/// The rows of a plan's draft block that is anchored at `position`, in order, without saying which run the head.
fn block_at(plan: &CallPlan, position: u32) -> Vec<Row> {
    let mut rows: Vec<Row> = plan
        .rows()
        .iter()
        .filter(|row| matches!(row.keep, Keep::Scratch(_)) && row.sees.cache.end == position)
        .map(|row| Row { choose: false, ..row.clone() })
        .collect();
    rows.sort_by_key(|row| row.position);
    rows
}

#[test]
fn the_draft_of_a_packed_call_is_the_two_call_drafters_own() {
    let (mut same, mut elsewhere) = (0, 0);
    for rules in [ADAPTER, NEMOTRON] {
        let oracle = Scripted::new(8, Skill::Independent(0.7));
        let run = |kind| {
            let case = Case::new(rules, kind, 4, 9);
            ok(&case, &oracle, case.check(&oracle)).plans
        };
        let (packed, two_call) = (run(ScheduleKind::PACKED), run(TWO_CALL));
        let drafts = |plan: &&CallPlan| plan.kind() == CallKind::Decode && plan.rows().len() == 10;
        for draft in two_call.iter().filter(drafts) {
            let n = draft.rows().iter().map(|row| row.position).min().unwrap();
            for plan in &packed {
                let block = block_at(plan, n);
                same += usize::from(!block.is_empty());
                elsewhere += usize::from(block.is_empty());
                assert!(block.is_empty() || block == block_at(draft, n), "{plan:?} is not {draft:?}");
            }
        }
    }
    assert!(same > 10 && elsewhere > 10, "the two schedules drafted from one prefix only {same} times");
}

#[test]
fn the_head_runs_only_on_rows_that_may_be_read() {
    // m, and how many rows choose.
    let heads = |rules, kind, k, w, p: f64| -> Vec<(usize, usize)> {
        let oracle = Scripted::new(1, Skill::Independent(p));
        let case = Case::new(rules, kind, k, w);
        let run = ok(&case, &oracle, case.check(&oracle));
        let plans = run.plans.iter().skip(run.counts.prefill.calls).map(|plan| plan.choose().len());
        run.counts.per_call.iter().map(|call| call.drafted).zip(plans).skip(2).take(2).collect()
    };
    // Two-call: rows r >= 1-s, K of them at most.
    assert_eq!(heads(ADAPTER, TWO_CALL, 4, 7, 1.0), [(0, 4), (4, 5)]);
    assert_eq!(heads(NEMOTRON, TWO_CALL, 8, 5, 1.0), [(0, 5), (5, 6)]);
    assert_eq!(heads(ADAPTER, SEED, 4, 7, 1.0), [(0, 5), (4, 5)]);
    // Packed: rows r >= 2-s, as far as the largest acceptance leaves them to be verified.
    assert_eq!(heads(ADAPTER, ScheduleKind::PACKED, 4, 9, 1.0), [(4, 5 + 8), (4, 5 + 8)]);
    assert_eq!(heads(ADAPTER, ScheduleKind::PACKED, 4, 7, 0.0), [(4, 5 + 7), (4, 5 + 7)]);
    assert_eq!(heads(NEMOTRON, ScheduleKind::PACKED, 4, 7, 0.0), [(4, 5 + 6), (4, 5 + 6)]);
    // Quadratic: each block speaks for one acceptance.
    assert_eq!(heads(ADAPTER, QUADRATIC, 4, 9, 1.0), [(4, 5 + 5 * 4), (4, 5 + 5 * 4)]);
    assert_eq!(heads(SETDLM, ScheduleKind::PACKED, 4, 9, 1.0), [(4, 5 + 8), (4, 5 + 8)]);
}

#[test]
fn budgets_are_met_exactly_and_end_ids_cut_inside_accepted_runs() {
    let mut inside = 0;
    for kind in kinds() {
        for rules in [ADAPTER, NEMOTRON, SETDLM] {
            let oracle = Scripted::new(21, Skill::Independent(0.9));
            for tokens in 1..=14 {
                let case = Case::new(rules, kind, 4, 9).tokens(tokens);
                let run = ok(&case, &oracle, case.check(&oracle));
                assert_eq!((run.tokens.len(), run.reason, run.counts.tokens), (tokens, FinishReason::Length, tokens));
            }
            let case = Case::new(rules, kind, 4, 9).tokens(30);
            let text = oracle.text(&case.prompt, 30);
            for end in 1..20 {
                let first = text.iter().position(|t| *t == text[end]).unwrap();
                let mut case = case.clone();
                case.stop.end_ids = vec![text[end], VOCAB];
                let run = ok(&case, &oracle, case.check(&oracle));
                assert_eq!((run.tokens.len(), run.reason), (first + 1, FinishReason::Stop), "{case:?}");
                let committed: usize = 1 + run.counts.per_call.iter().map(|c| c.accepted + 1).sum::<usize>();
                inside += usize::from(committed > run.tokens.len() && kind == ScheduleKind::PACKED);
                case.stop.ignore_eos = true;
                let run = ok(&case, &oracle, case.check(&oracle));
                assert_eq!((run.tokens.len(), run.reason), (30, FinishReason::Length));
            }
        }
    }
    assert!(inside > 10, "an end id stood inside an accepted run only {inside} times");
}

#[test]
fn a_generation_that_ended_refuses_to_go_on() {
    let case = Case::new(ADAPTER, ScheduleKind::PACKED, 4, 7).tokens(1);
    let (mut generation, plan) =
        Generation::start(&case.prompt, 0, Some(ADAPTER), &case.options(), &geometry(64), case.stop.clone()).unwrap();
    let mut fake = Fake::new(Scripted::new(1, Skill::Independent(0.5)), &case.prompt, Some(ADAPTER), Some(7), geometry(64));
    let output = fake.run(&plan).unwrap();
    let progress = generation.advance(&output).unwrap();
    assert_eq!((progress.tokens.len(), progress.next), (1, None));
    assert_eq!(generation.advance(&output).unwrap_err().code(), "Internal");

    let (mut generation, _) =
        Generation::start(&case.prompt, 0, Some(ADAPTER), &case.options(), &geometry(64), StopRules::default()).unwrap();
    generation.end(FinishReason::Stop, 0);
    assert_eq!((generation.finish_reason(), generation.counts().tokens), (Some(FinishReason::Stop), 0));
    assert!(generation.advance(&output).is_err());
}

#[test]
fn a_scripted_model_runs_behind_the_trait() {
    let case = Case::new(ADAPTER, ScheduleKind::PACKED, 4, 7);
    let oracle = Scripted::new(2, Skill::Independent(0.8));
    let mut model = Fake::new(oracle.clone(), &case.prompt, Some(ADAPTER), Some(7), geometry(64));
    let size = model.geometry();
    let (mut generation, plan) =
        Generation::start(&case.prompt, 0, Some(ADAPTER), &case.options(), &size, case.stop.clone()).unwrap();
    let (mut text, mut next) = (Vec::new(), Some(plan));
    while let Some(plan) = next {
        let ticket = model.submit(&plan).unwrap();
        let choices = pollster::block_on(model.answer(ticket)).unwrap();
        let progress = generation.advance(&plan.answer(&choices).unwrap()).unwrap();
        text.extend(progress.tokens);
        next = progress.next;
    }
    assert_eq!(text, oracle.text(&case.prompt, 40));
    assert!(generation.counts().accepted() > 0);
}

#[test]
fn the_scripted_model_catches_every_wrong_plan() {
    let clean = |row: &Row| matches!(row.keep, Keep::Cache(_));
    let mask = |row: &Row| row.token == RowToken::Mask;
    let anchor = |row: &Row| matches!(row.keep, Keep::Scratch(_)) && row.token != RowToken::Mask;
    type Which<'a> = &'a dyn Fn(&Row) -> bool;
    let second = |row: &Row| clean(row) && row.position > 8;
    let sabotages: [(&str, Which, fn(&mut Row)); 15] = [
        ("a verify row sees one key too many", &clean, |row| row.sees.cache.end += 1),
        ("a verify row misses itself", &clean, |row| row.sees.cache.end -= 1),
        ("a verify row misses the first key", &clean, |row| row.sees.cache.start += 1),
        ("a verify row sees the draft block", &clean, |row| row.sees.scratch = 0..1),
        ("a verify row's adapter is on", &clean, |row| row.adapter = true),
        ("a verify row stands one further", &clean, |row| row.position += 1),
        ("a verify row's K/V goes one slot further", &second, |row| row.keep = Keep::Cache(row.position + 1)),
        ("a verify row's K/V goes to the scratch area", &second, |row| row.keep = Keep::Scratch(150)),
        ("a block sees its anchor's verify row", &mask, |row| row.sees.cache.end += 1),
        ("a block misses a cached token", &mask, |row| row.sees.cache.end -= 1),
        ("a mask misses the block's last row", &mask, |row| row.sees.scratch.end -= 1),
        ("a mask stands one further", &mask, |row| row.position += 1),
        ("a mask's adapter is off", &mask, |row| row.adapter = false),
        ("the anchor is a mask", &anchor, |row| row.token = RowToken::Mask),
        ("the anchor is another token", &anchor, |row| row.token = RowToken::Id(VOCAB - 1)),
    ];
    for rules in [ADAPTER, NEMOTRON] {
        for kind in [TWO_CALL, SEED, ScheduleKind::PACKED, anchored(2), QUADRATIC] {
            let oracle = Scripted::new(4, Skill::Independent(0.9));
            let case = Case::new(rules, kind, 4, 7).prompt(6);
            ok(&case, &oracle, case.check(&oracle));
            for (name, which, change) in &sabotages {
                let mut changed = false;
                let caught = case.run_tampered(
                    &oracle,
                    |_, plan| {
                        let wrong = if plan.kind() == CallKind::Decode { alter(plan, which, change) } else { plan.clone() };
                        changed |= wrong != *plan;
                        wrong
                    },
                    |_, _, output| output,
                );
                assert!(changed, "{name}: nothing was changed in {kind}");
                assert!(caught.is_err(), "{name}: not caught in {kind}");
            }
        }
    }
    // Mask-verify families.
    let oracle = Scripted::new(4, Skill::Independent(0.9));
    let case = Case::new(SETDLM, ScheduleKind::PACKED, 4, 7).prompt(6);
    ok(&case, &oracle, case.check(&oracle));
    let sabotages: [(&str, Which, fn(&mut Row)); 4] = [
        ("a mask sees another mask", &mask, |row| row.sees.scratch.end += 1),
        ("a clean row is asked", &clean, |row| row.choose = true),
        ("a mask's adapter is on", &mask, |row| row.adapter = true),
        ("a mask sees beyond its place", &mask, |row| row.sees.cache.end += 1),
    ];
    for (name, which, change) in &sabotages {
        let wrong = |plan: &CallPlan| if plan.kind() == CallKind::Decode { alter(plan, which, change) } else { plan.clone() };
        let caught = case.run_tampered(&oracle, |_, plan| wrong(plan), |_, _, output| output);
        assert!(caught.is_err(), "{name}: not caught");
    }
}

#[test]
fn the_scripted_model_catches_stale_keys() {
    let clean = |position: u32, token: u32, choose| Row {
        token: RowToken::Id(token),
        position,
        adapter: false,
        keep: Keep::Cache(position),
        sees: Sees { cache: 0..position + 1, scratch: 0..0 },
        choose,
    };
    let block = |end: u32, token: u32| {
        let row = |slot: u32, token| Row {
            token,
            position: end + slot,
            adapter: true,
            keep: Keep::Scratch(slot),
            sees: Sees { cache: 0..end, scratch: 0..2 },
            choose: slot == 1,
        };
        [row(0, RowToken::Id(token)), row(1, RowToken::Mask)]
    };
    let oracle = Scripted::new(9, Skill::Independent(0.6));
    let text = [prompt(5), oracle.text(&prompt(5), 5)].concat();
    let wrong = (text[6] + 1) % VOCAB;
    let run = |last: Vec<Row>| {
        let mut fake = Fake::new(oracle.clone(), &text[..5], Some(ADAPTER), Some(1), geometry(64));
        let before = text[..5].iter().zip(0..).map(|(&token, position)| clean(position, token, position == 4)).collect();
        fake.run(&CallPlan::new(CallKind::Prefill, before)).unwrap();
        // The draft at 6 is wrong; slots 6 and 7 now hold what will not be text.
        let draft = vec![clean(5, text[5], true), clean(6, wrong, true), clean(7, text[7], true)];
        fake.run(&CallPlan::new(CallKind::Decode, draft)).unwrap();
        fake.run(&CallPlan::new(CallKind::Decode, last))
    };
    // The pending token overwrites slot 6, but slot 7 was computed on the wrong token.
    let stale = run([vec![clean(6, text[6], true)], block(8, text[8]).to_vec()].concat()).unwrap_err();
    assert!(stale.contains("stale read: slot 7"), "{stale}");
    let rejected = run(vec![clean(7, text[7], true)]).unwrap_err();
    assert!(rejected.contains("slot 6 holds"), "{rejected}");
    let rejected = run(block(7, text[7]).to_vec()).unwrap_err();
    assert!(rejected.contains("is not the text"), "{rejected}");
    run([vec![clean(6, text[6], true)], block(6, text[6]).to_vec()].concat()).expect("control: the right call is taken");
}

#[test]
fn accepting_what_the_target_did_not_choose_is_caught() {
    // The saboteur makes the target seem to agree with a wrong draft: what an acceptance off by one would do.
    let oracle = Scripted::new(13, Skill::Independent(0.6));
    let case = Case::new(ADAPTER, ScheduleKind::PACKED, 4, 9);
    ok(&case, &oracle, case.check(&oracle));
    let result = case.run_tampered(
        &oracle,
        |_, plan| plan.clone(),
        |_, plan, output| {
            let verify: Vec<usize> = (0..plan.rows().len())
                .filter(|&i| plan.rows().get(i).is_some_and(|r| matches!(r.keep, Keep::Cache(_)) && r.choose))
                .collect();
            let choices: Vec<Choice> = plan
                .choose()
                .filter_map(|i| {
                    let chosen = plan.row_id(i).and_then(|id| output.choice(id).ok())?;
                    let drafted = verify.iter().position(|&v| v == i).and_then(|at| verify.get(at + 1));
                    let token = match drafted.and_then(|&v| plan.rows().get(v)).map(|row| row.token) {
                        Some(RowToken::Id(token)) => token,
                        _ => chosen.token,
                    };
                    Some(Choice { token, ..chosen })
                })
                .collect();
            plan.answer(&choices).unwrap()
        },
    );
    let caught = result.and_then(|run| case.compare(&oracle, &run));
    assert!(caught.is_err(), "a wrong draft became text unnoticed");
    let choice = |token| Choice { token, probability: 1.0 };
    assert_eq!(accept(&[choice(1), choice(2)], &[choice(1), choice(3), choice(4)]).unwrap().committed(), [1, 3]);
}

#[test]
fn options_that_do_not_fit_are_refused_by_name() {
    let start = |rules: Option<DraftRules>, options: ScheduleOptions, geometry: &Geometry, prompt: &[u32]| match super::start(
        prompt, 0, rules, &options, geometry,
    ) {
        Ok(_) => panic!("{options:?} was taken"),
        Err(e) => (e.code(), e.to_string()),
    };
    let wide = geometry(64);
    let with = |kind: &str, verify_width, draft_width| ScheduleOptions {
        kind: Some(kind.parse().unwrap()),
        verify_width,
        draft_width,
        ..ScheduleOptions::default()
    };
    let auto = ScheduleOptions::default();
    for (got, code, part) in [
        (start(None, with("packed", None, None), &wide, &[1]), "InvalidOption", "packed needs a drafter"),
        (start(None, with("two-call", None, None), &wide, &[1]), "InvalidOption", "draft adapter"),
        (start(None, auto, &wide, &[]), "InvalidOption", "no tokens"),
        (start(None, auto, &wide, &[1; 65]), "InvalidOption", "65 tokens, but the context has 64"),
        (start(None, auto, &wide, &[1, 50]), "InvalidOption", "token 1 of the prompt is id 50"),
        (start(Some(ADAPTER), with("packed", Some(0), None), &wide, &[1]), "InvalidOption", "verify width is 0"),
        (start(Some(ADAPTER), with("packed", None, Some(0)), &wide, &[1]), "InvalidOption", "draft width is 0"),
        (start(Some(NEMOTRON), with("packed", None, Some(1)), &wide, &[1]), "InvalidOption", "at least 2"),
        (start(Some(ADAPTER), with("packed", None, Some(160)), &wide, &[1]), "InvalidOption", "161 scratch slots"),
        (start(Some(ADAPTER), with("quadratic", Some(12), Some(15)), &wide, &[1]), "InvalidOption", "208 scratch slots"),
        (start(Some(ADAPTER), with("two-call", Some(192), None), &wide, &[1]), "InvalidOption", "193 rows that choose"),
        (start(Some(ADAPTER), with("two-call", Some(u32::MAX), Some(u32::MAX)), &wide, &[1]), "InvalidOption", "rows"),
        (
            start(Some(ADAPTER), with("quadratic", Some(u32::MAX), Some(u32::MAX)), &wide, &[1]),
            "InvalidOption",
            "needs 18446744073709551615 rows,",
        ),
        (start(Some(ADAPTER), auto, &Geometry { max_rows: 12, ..wide }, &[1]), "InvalidOption", "set up for 12"),
        (start(Some(DraftRules { logit_shift: 2, ..ADAPTER }), auto, &wide, &[1]), "BadConfig", "logit_shift"),
        (start(Some(DraftRules { bidirectional: false, ..ADAPTER }), auto, &wide, &[1]), "BadConfig", "bidirectional"),
        (start(Some(DraftRules { anchor: Anchor::InBlock, ..SETDLM }), auto, &wide, &[1]), "BadConfig", "anchor"),
    ] {
        assert_eq!(got.0, code, "{got:?}");
        assert!(got.1.contains(part), "{got:?} does not say {part:?}");
    }
    assert!("pakced".parse::<ScheduleKind>().unwrap_err().to_string().contains("two-call-seed"));
    for name in ScheduleKind::NAMES {
        assert_eq!(name.parse::<ScheduleKind>().unwrap().to_string(), name);
    }
    let zero = ScheduleOptions { kind: Some(anchored(0)), ..auto };
    assert_eq!(start(Some(ADAPTER), zero, &wide, &[1]).0, "InvalidOption");
}

#[test]
fn defaults_follow_the_model() {
    use super::options::Resolved;
    let resolve = |rules| ScheduleOptions::default().resolve(rules, &geometry(64)).unwrap();
    let widths = |rules| match resolve(Some(rules)) {
        Resolved::Drafting { kind, verify_width, draft_width, .. } => (kind, verify_width, draft_width),
        other => panic!("{other:?}"),
    };
    assert_eq!(widths(ADAPTER), (ScheduleKind::PACKED, 4, 7));
    assert_eq!(widths(NEMOTRON), (ScheduleKind::PACKED, 8, 15));
    assert_eq!(resolve(None).kind(), ScheduleKind::Autoregressive);
    // The widest defaults fit what models are set up for.
    for name in ScheduleKind::LOSSLESS {
        for rules in FAMILIES {
            let options = ScheduleOptions { kind: Some(name.parse().unwrap()), ..ScheduleOptions::default() };
            options.resolve(Some(rules), &geometry(4096)).unwrap();
        }
    }
}

#[test]
fn no_call_exceeds_what_was_checked_beforehand() {
    // Geometries that fit by one: the widest call must stay inside, and one less must be refused.
    for rules in FAMILIES {
        for kind in kinds() {
            let oracle = Scripted::new(6, Skill::Independent(0.95));
            let case = Case::new(rules, kind, 3, 8);
            let run = ok(&case, &oracle, case.check(&oracle));
            let rows = run.plans.iter().filter(|plan| plan.kind() == CallKind::Decode).map(|plan| plan.rows().len()).max();
            let resolved = case.options().resolve(Some(rules), &geometry(1024)).unwrap();
            // A two-call draft without the seed row has one less.
            let spare = usize::from(kind == TWO_CALL);
            let rows = rows.unwrap();
            assert!((rows..=rows + spare).contains(&resolved.decode_rows()), "{case:?}: {rows} rows, {resolved:?}");
            let scratch = |plan: &CallPlan| plan.rows().iter().filter(|r| matches!(r.keep, Keep::Scratch(_))).count();
            let widest = run.plans.iter().map(scratch).max().unwrap() as u32;
            let heads = run.plans.iter().map(|plan| plan.choose().len()).max().unwrap();
            let fits = |scratch: u32, max_choose: usize| {
                let geometry = Geometry { scratch, max_choose, ..geometry(1024) };
                case.options().resolve(Some(rules), &geometry).is_ok()
            };
            assert!(fits(widest, MAX_CHOOSE), "{case:?}: {widest} scratch slots");
            assert!(widest == 0 || !fits(widest - 1, MAX_CHOOSE), "{case:?}: {widest} scratch slots");
            assert!(!fits(SCRATCH_SLOTS, heads - 1), "{case:?}: {heads} heads");
        }
    }
}
