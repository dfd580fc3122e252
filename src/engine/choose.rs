//! Which schedule is fastest here: tokens per call, as far as known, against the time of a call, measured.

use web_time::Instant;

use super::Model;
use super::calls::Runs;
use super::probe::causal_rows;
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

/// Milliseconds of trying widths after which no further one is tried.
const BUDGET_MS: f64 = 500.0;
/// Positions in the cache while calls are timed.
const PREFIX: u32 = 16;

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
        let all = self.program.rules();
        let unmeasured = Chosen::unmeasured(&all);
        let (Some(rules), Runs::Cpu(_)) = (all.draft, &self.calls.on) else {
            return Ok(unmeasured);
        };
        if all.diffusion.is_some_and(|diffusion| diffusion.only) {
            return Ok(unmeasured);
        }
        let geometry = self.calls.geometry();
        let candidates = if rules.logit_shift == 1 { SHIFT_1 } else { SHIFT_0 };
        if geometry.context < PREFIX + 16 {
            return Ok(unmeasured);
        }
        let token = |position: u32| (position.wrapping_mul(7919) + 13) % (geometry.vocab_size as u32).max(1);
        let ids: Vec<u32> = (0..PREFIX + 16).map(token).collect();
        let (head, tail) = ids.split_at(PREFIX as usize);
        let ms = |since: Instant| since.elapsed().as_secs_f64() * 1000.0;
        let time = async |model: &mut Self, plan: &CallPlan| -> Result<f64> {
            let sent = Instant::now();
            let ticket = model.calls.submit(plan)?;
            model.calls.answer(ticket).await?;
            Ok(ms(sent))
        };
        time(self, &CallPlan::new(CallKind::Prefill, causal_rows(0, head))).await?;
        let one = CallPlan::new(CallKind::Decode, target_rows(rules.verify, PREFIX, tail.get(..1).unwrap_or(tail)));
        time(self, &one).await?;
        let alone = time(self, &one).await?.min(time(self, &one).await?);

        let begun = Instant::now();
        let mut best = (1.0 / alone, ScheduleOptions { kind: Some(ScheduleKind::Autoregressive), ..ScheduleOptions::default() });
        let mut tried = Vec::new();
        let within_reach = |candidate: &&Candidate| all.horizon.is_none_or(|reach| candidate.draft_width < reach);
        for candidate in candidates.iter().filter(within_reach) {
            let (k, w) = (candidate.verify_width, candidate.draft_width);
            if ms(begun) > BUDGET_MS {
                break;
            }
            let mut rows = packed_rows(rules, PREFIX, tail.get(..k as usize + 1).unwrap_or(tail), &[0], w);
            if rules.logit_shift == 1 {
                // What a block's first row says is known from the verify row beside it.
                rows.iter_mut().filter(|row| row.adapter && row.token != RowToken::Mask).for_each(|row| row.choose = false);
            }
            let count = rows.len();
            let plan = CallPlan::new(CallKind::Decode, rows);
            let took = time(self, &plan).await?.min(time(self, &plan).await?);
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
        Ok(Chosen { options: best.1, reason: format!("measured on this machine: {}", tried.join(", ")) })
    }
}
