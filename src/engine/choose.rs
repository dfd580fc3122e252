//! Which schedule is fastest here: tokens per call, as far as known, against the time of a call, measured.

use web_time::Instant;

use super::probe::causal_rows;
use super::{Calls, Model};
use crate::decode::plan::{CallKind, CallPlan};
use crate::decode::schedule::ModelCalls;
use crate::decode::{ScheduleKind, ScheduleOptions};
use crate::decode::{packed_rows, target_rows};
use crate::error::Result;

/// What is taken when a request names neither schedule nor widths.
#[derive(Debug, Clone)]
pub(super) struct Default {
    pub options: ScheduleOptions,
    pub reason: String,
}

/// Widths worth trying and the tokens per packed call to expect of them, narrow first.
struct Candidate {
    verify_width: u32,
    draft_width: u32,
    tokens_per_call: f64,
}

/// With logit shift 1: the demo model's adapter on held-out prompts (`cargo bench --bench schedules`).
const SHIFT_1: &[Candidate] = &[
    Candidate { verify_width: 2, draft_width: 3, tokens_per_call: 1.55 },
    Candidate { verify_width: 3, draft_width: 4, tokens_per_call: 1.58 },
    Candidate { verify_width: 4, draft_width: 7, tokens_per_call: 1.60 },
];
/// With logit shift 0: models trained to draft. NVIDIA publishes 5.99 tokens per two-call forward pass at a draft width of 31
/// for its 8B model; this is a cautious share of it.
const SHIFT_0: &[Candidate] = &[
    Candidate { verify_width: 4, draft_width: 8, tokens_per_call: 2.5 },
    Candidate { verify_width: 8, draft_width: 15, tokens_per_call: 3.5 },
];

/// Milliseconds of trying widths after which no further one is tried.
const BUDGET_MS: f64 = 500.0;
/// Positions in the cache while calls are timed.
const PREFIX: u32 = 16;

impl Default {
    /// What needs no measuring: packed where the model can draft.
    pub fn unmeasured(model_drafts: bool) -> Self {
        let reason = if model_drafts { "the model can draft" } else { "the model has no drafter" };
        Self { options: ScheduleOptions::default(), reason: reason.into() }
    }
}

impl Model {
    /// Chooses the default schedule. On the GPU a call's cost is nearly flat in its rows, so packed is taken without
    /// measuring; on the CPU it is not, so calls are timed, half a second at most.
    ///
    /// # Errors
    /// Failures of the device.
    pub(super) async fn choose_default(&mut self) -> Result<Default> {
        let unmeasured = Default::unmeasured(self.program.draft.is_some());
        let (Some(rules), Calls::Cpu(_)) = (self.program.draft, &self.calls) else {
            return Ok(unmeasured);
        };
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
        for candidate in candidates {
            let (k, w) = (candidate.verify_width, candidate.draft_width);
            if ms(begun) > BUDGET_MS {
                break;
            }
            let rows = packed_rows(rules, PREFIX, tail.get(..k as usize + 1).unwrap_or(tail), &[0], w);
            let count = rows.len();
            let took = time(self, &CallPlan::new(CallKind::Decode, rows)).await?;
            tried.push(format!("{count} rows cost {:.1} times one", took / alone));
            let rate = candidate.tokens_per_call / took;
            if rate > best.0 {
                let options = ScheduleOptions { kind: Some(ScheduleKind::PACKED), verify_width: Some(k), draft_width: Some(w) };
                best = (rate, options);
            }
        }
        Ok(Default { options: best.1, reason: format!("measured on this machine: {}", tried.join(", ")) })
    }
}
