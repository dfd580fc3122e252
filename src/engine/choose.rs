//! Which schedule is fastest here: tokens per call, as far as known, against the time of a call, measured.

use web_time::Instant;

use super::Model;
use super::calls::Runs;
use crate::decode::plan::{CallKind, CallPlan, RowToken};
use crate::decode::schedule::ModelCalls;
use crate::decode::{ScheduleKind, ScheduleOptions};
use crate::decode::{packed_rows, target_rows};
use crate::error::Result;
use crate::model::arch::{DiffusionRules, ModelRules};

/// What is taken when a request names neither schedule nor widths.
#[derive(Debug, Clone)]
pub(super) struct Chosen {
    pub options: ScheduleOptions,
    pub reason: String,
}

/// Widths worth trying, and what to expect of a packed call with them.
struct Candidate {
    verify_width: u32,
    draft_width: u32,
    tokens_per_call: f64,
    /// Rows of an average call; drafts are not always as long as they may be.
    rows_per_call: f64,
}

const fn candidate(verify_width: u32, draft_width: u32, tokens_per_call: f64, rows_per_call: f64) -> Candidate {
    Candidate { verify_width, draft_width, tokens_per_call, rows_per_call }
}

/// With logit shift 1, narrow first: the demo model's adapter on held-out prompts (`cargo bench --bench packed`).
const SHIFT_1: &[Candidate] = &[
    candidate(1, 1, 1.31, 3.7),
    candidate(1, 2, 1.41, 5.0),
    candidate(2, 2, 1.48, 5.5),
    candidate(2, 3, 1.51, 6.9),
    candidate(3, 4, 1.55, 8.8),
    candidate(4, 7, 1.57, 13.0),
];
/// With logit shift 0: models trained to draft. NVIDIA publishes 5.99 tokens per two-call forward pass at a draft width of 31
/// for its 8B model; this is a cautious share of it.
const SHIFT_0: &[Candidate] = &[
    // For checkpoints of short reach.
    candidate(3, 7, 2.2, 12.0),
    candidate(4, 8, 2.5, 14.0),
    candidate(8, 15, 3.5, 25.0),
];

/// Milliseconds that trying widths takes at most. One-row calls are timed whatever they take.
const BUDGET_MS: f64 = 500.0;

impl Chosen {
    /// What needs no measuring: the only schedule of models that have but one, packed where the model can draft.
    pub fn unmeasured(rules: &ModelRules) -> Self {
        let reason = match rules {
            ModelRules { diffusion: Some(DiffusionRules { only: true, .. }), .. } => "the model was trained to fill blocks",
            ModelRules { draft: Some(_), .. } => "the model can draft",
            _ => "the model has no drafter",
        };
        Self { options: ScheduleOptions::default(), reason: reason.into() }
    }
}

impl Model {
    /// Chooses the default schedule. On the GPU a call's cost is nearly flat in its rows, so packed is taken without
    /// measuring; on the CPU it is not, so calls are timed, half a second at most.
    ///
    /// # Errors
    /// Failures of the device.
    pub(super) async fn choose_default(&mut self) -> Result<Chosen> {
        let rules = self.program.rules();
        if !matches!(self.calls.on, Runs::Cpu(_)) {
            return Ok(Chosen::unmeasured(&rules));
        }
        let begun = Instant::now();
        measured(&mut self.calls, &rules, &|| begun.elapsed().as_secs_f64() * 1000.0).await
    }
}

/// Times calls by `now`, in milliseconds from 0 on, and takes what promises most tokens for their time. What the calls leave
/// in the cache is what any prompt overwrites.
///
/// # Errors
/// Failures of the device.
async fn measured(calls: &mut impl ModelCalls, all: &ModelRules, now: &dyn Fn() -> f64) -> Result<Chosen> {
    let geometry = calls.geometry();
    let unmeasured = Chosen::unmeasured(all);
    let Some(rules) = all.draft.filter(|_| !all.diffusion.is_some_and(|diffusion| diffusion.only)) else {
        return Ok(unmeasured);
    };
    let candidates = if rules.logit_shift == 1 { SHIFT_1 } else { SHIFT_0 };
    let ids: Vec<u32> = (0..16).map(|i: u32| (i * 7919 + 13) % (geometry.vocab_size as u32).max(1)).collect();
    if (geometry.context as usize) < 2 * ids.len() {
        return Ok(unmeasured);
    }
    let mut time = async |plan: &CallPlan| -> Result<f64> {
        let sent = now();
        let ticket = calls.submit(plan)?;
        calls.answer(ticket).await?;
        Ok(now() - sent)
    };
    let one = CallPlan::new(CallKind::Decode, target_rows(rules.verify, 0, ids.get(..1).unwrap_or(&ids)));
    // The first call pays for memory that is touched for the first time; where that alone takes long, it has to do.
    let mut alone = time(&one).await?;
    if now() + 2.0 * alone < BUDGET_MS {
        alone = time(&one).await?.min(time(&one).await?);
    }
    let mut best = (1.0 / alone, ScheduleOptions { kind: Some(ScheduleKind::Autoregressive), ..ScheduleOptions::default() });
    let mut tried = Vec::new();
    let within_reach = |candidate: &&Candidate| all.horizon.is_none_or(|reach| candidate.draft_width < reach);
    for candidate in candidates.iter().filter(within_reach) {
        let (k, w) = (candidate.verify_width, candidate.draft_width);
        let mut rows = packed_rows(rules, 0, ids.get(..k as usize + 1).unwrap_or(&ids), &[0], w);
        if rules.logit_shift == 1 {
            // What a block's first row says is known from the verify row beside it.
            rows.iter_mut().filter(|row| row.adapter && row.token != RowToken::Mask).for_each(|row| row.choose = false);
        }
        let count = rows.len();
        // Twice, if every row cost as much as one alone.
        if now() + 2.0 * alone * count as f64 > BUDGET_MS {
            break;
        }
        let plan = CallPlan::new(CallKind::Decode, rows);
        let took = time(&plan).await?.min(time(&plan).await?);
        tried.push(format!("{count} rows cost {:.1} times one", took / alone));
        // Calls cost by the row, beside what every call costs.
        let share = (candidate.rows_per_call - 1.0) / (count as f64 - 1.0).max(1.0);
        let rate = candidate.tokens_per_call / (alone + (took - alone) * share.min(1.0));
        if rate > best.0 {
            let kind = Some(ScheduleKind::PACKED);
            let (verify_width, draft_width) = (Some(k), Some(w));
            let options = ScheduleOptions { kind, verify_width, draft_width, ..ScheduleOptions::default() };
            best = (rate, options);
        }
    }
    let reason = match tried.as_slice() {
        [] => format!("a call of one row takes {alone:.0} ms here, so wider ones were not tried"),
        tried => format!("measured on this machine: {}", tried.join(", ")),
    };
    Ok(Chosen { options: best.1, reason })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::decode::plan::Choice;
    use crate::decode::schedule::{Geometry, MAX_CHOOSE, MAX_ROWS, SCRATCH_SLOTS, Ticket};
    use crate::model::arch::{Anchor, DraftRules, VerifyRows};

    /// A model whose calls take `call` milliseconds and `row` more for every row.
    struct Timed<'a> {
        clock: &'a Cell<f64>,
        call: f64,
        row: f64,
        calls: usize,
        choices: usize,
    }

    impl ModelCalls for Timed<'_> {
        fn geometry(&self) -> Geometry {
            Geometry { context: 64, scratch: SCRATCH_SLOTS, max_rows: MAX_ROWS, max_choose: MAX_CHOOSE, vocab_size: 100 }
        }

        fn submit(&mut self, plan: &CallPlan) -> Result<Ticket> {
            self.clock.set(self.clock.get() + self.call + self.row * plan.rows().len() as f64);
            self.calls += 1;
            self.choices = plan.choose().len();
            Ok(Ticket(0))
        }

        async fn answer(&mut self, _: Ticket) -> Result<Vec<Choice>> {
            Ok(vec![Choice { token: 0, probability: 1.0 }; self.choices])
        }

        async fn logits(&mut self) -> Result<Vec<Vec<f32>>> {
            Ok(Vec::new())
        }
    }

    #[test]
    fn measuring_keeps_to_its_budget_and_finds_what_is_fastest() {
        let adapter =
            DraftRules { logit_shift: 1, anchor: Anchor::InBlock, verify: VerifyRows::Clean, bidirectional: true, adapter: true };
        let native = DraftRules { logit_shift: 0, ..adapter };
        let masks =
            DraftRules { anchor: Anchor::Shared, verify: VerifyRows::Mask, bidirectional: false, adapter: false, ..native };
        for (name, rules) in [("adapter", adapter), ("native", native), ("masks", masks)] {
            let choose = |call: f64, row: f64| {
                let clock = Cell::new(0.0);
                let mut model = Timed { clock: &clock, call, row, calls: 0, choices: 0 };
                let all = ModelRules { draft: Some(rules), ..ModelRules::default() };
                let chosen = pollster::block_on(measured(&mut model, &all, &|| clock.get())).unwrap();
                (chosen.options, chosen.reason, clock.get(), model.calls)
            };
            for one in [0.01, 1.0, 10.0, 30.0, 100.0, 150.0, 400.0, 3000.0] {
                for share in [0.0, 0.5, 1.0] {
                    let (_, reason, took, calls) = choose(one * (1.0 - share), one * share);
                    let first = if rules.verify == VerifyRows::Mask { one * (1.0 + share) } else { one };
                    assert!(took <= BUDGET_MS.max(first + 1e-9), "{name}, {one} ms, {share}: {took} ms, {calls} calls");
                    assert!(!reason.is_empty());
                }
            }
            let kind = |call, row| choose(call, row).0.kind;
            assert_eq!(kind(1.0, 0.001), Some(ScheduleKind::PACKED), "{name}: rows that cost nothing");
            assert_eq!(kind(0.001, 1.0), Some(ScheduleKind::Autoregressive), "{name}: rows that cost a call");
            let (slow, reason, _, calls) = choose(0.0, 600.0);
            assert_eq!((slow.kind, calls), (Some(ScheduleKind::Autoregressive), 1), "{name}: {reason}");
            assert!(reason.contains("not tried"), "{reason}");
        }
    }
}
