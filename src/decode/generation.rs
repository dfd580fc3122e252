//! One generation: a schedule, its stop rules and its counts. Whoever drives it only carries plans to a model and answers
//! back.

use super::options::{self, ScheduleOptions};
use super::plan::{CallKind, CallOutput, CallPlan};
use super::schedule::{Geometry, Schedule};
use super::stop::{FinishReason, Stop, StopRules};
use crate::error::{Error, Result};
use crate::model::arch::ModelRules;

/// Calls and rows that carried the prompt (and the draft behind its last chunk).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefillCount {
    /// Forward passes.
    pub calls: usize,
    /// Rows, unpadded.
    pub rows: usize,
}

/// One decode call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallCount {
    /// Rows, unpadded.
    pub rows: usize,
    /// Draft tokens it verified.
    pub drafted: usize,
    /// How many of them the target agreed with, whether or not the text was cut before them.
    pub accepted: usize,
}

/// What a generation has cost so far.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Counts {
    /// The prompt.
    pub prefill: PrefillCount,
    /// Every decode call answered, in order.
    pub per_call: Vec<CallCount>,
    /// Tokens emitted, after cutting.
    pub tokens: usize,
}

impl Counts {
    /// Decode calls.
    #[must_use]
    pub fn calls(&self) -> usize {
        self.per_call.len()
    }

    /// Rows of the decode calls, unpadded.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.per_call.iter().map(|call| call.rows).sum()
    }

    /// Draft tokens verified.
    #[must_use]
    pub fn drafted(&self) -> usize {
        self.per_call.iter().map(|call| call.drafted).sum()
    }

    /// Draft tokens accepted.
    #[must_use]
    pub fn accepted(&self) -> usize {
        self.per_call.iter().map(|call| call.accepted).sum()
    }
}

/// What one call brought.
#[derive(Debug, Clone, PartialEq)]
pub struct Progress {
    /// New tokens of the text, in order, already cut; often none (a prompt chunk, a two-call draft).
    pub tokens: Vec<u32>,
    /// The next call; `None` once [`Generation::finish_reason`] is set.
    pub next: Option<CallPlan>,
}

/// Drives one [`Schedule`] until its text ends.
pub struct Generation {
    schedule: Box<dyn Schedule>,
    stop: Stop,
    counts: Counts,
    finish: Option<FinishReason>,
    /// Kind and rows of the call on its way.
    sent: Option<(CallKind, usize)>,
}

impl Generation {
    /// The generation and its first call. The prompt's first `cached` tokens are in the cache already
    /// ([`super::CachedPrefix::common`]); 0 for a cache that holds nothing of it.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for a budget of 0, and everything [`options::start`] refuses.
    pub fn start(
        prompt: &[u32],
        cached: usize,
        rules: impl Into<ModelRules>,
        options: &ScheduleOptions,
        geometry: &Geometry,
        stop: StopRules,
    ) -> Result<(Self, CallPlan)> {
        let stop = Stop::new(stop)?;
        let (schedule, plan) = options::start(prompt, cached, rules, options, geometry)?;
        let sent = Some((plan.kind(), plan.rows().len()));
        Ok((Self { schedule, stop, counts: Counts::default(), finish: None, sent }, plan))
    }

    /// Takes the answer of the call handed out last.
    ///
    /// # Errors
    /// [`Error::Internal`] if the text has ended or the answer is not that call's.
    pub fn advance(&mut self, output: &CallOutput) -> Result<Progress> {
        let Some((kind, rows)) = self.sent.take() else {
            return Err(Error::Internal("a generation was advanced after its text had ended".into()));
        };
        let step = self.schedule.advance(output)?;
        match kind {
            CallKind::Prefill => {
                self.counts.prefill.calls += 1;
                self.counts.prefill.rows += rows;
            }
            CallKind::Decode => {
                self.counts.per_call.push(CallCount { rows, drafted: step.drafted, accepted: step.accepted });
            }
        }
        let mut tokens = step.committed;
        self.finish = self.stop.cut(&mut tokens);
        self.counts.tokens += tokens.len();
        let next = if self.finish.is_some() { None } else { step.next };
        if next.is_none() && self.finish.is_none() {
            self.finish = Some(FinishReason::Context);
        }
        self.sent = next.as_ref().map(|plan| (plan.kind(), plan.rows().len()));
        Ok(Progress { tokens, next })
    }

    /// Ends the text from outside, because a stop string was found or the caller wants no more: no call follows. `tokens` is
    /// how many of those emitted are the text's.
    pub fn end(&mut self, reason: FinishReason, tokens: usize) {
        self.sent = None;
        self.finish = Some(reason);
        self.counts.tokens = self.counts.tokens.min(tokens);
    }

    /// Why the text ended; `None` while it goes on.
    #[must_use]
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finish
    }

    /// What it has cost so far.
    #[must_use]
    pub fn counts(&self) -> &Counts {
        &self.counts
    }
}

impl std::fmt::Debug for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generation").field("counts", &self.counts).field("finish", &self.finish).finish_non_exhaustive()
    }
}
