//! Draft, then verify: two calls a round, every draft made from the newest prefix. The baseline of one-call schedules.
//!
//! With the *seed row* the draft call also carries the clean x[n], whose choice is the exact token n+1: it is committed at
//! once, the draft's own word on it is dropped, and the verify call starts one token further. Then a round emits a+2.

use super::accept::accept;
use super::plan::{CallKind, CallOutput, CallPlan, Choice, RowId};
use super::prefill::Decoder;
use super::schedule::Step;
use super::segments::{DraftBlock, Drafter, Segments, choices};
use crate::error::{Error, Result};

/// The call on its way.
#[derive(Debug)]
enum Waiting {
    /// V: x[n], d[1..=m].
    Verify { draft: Vec<Choice>, rows: Vec<RowId> },
    /// D, and the rows whose choices are the target's for position n+1: the seed row, or the anchor's verify row in
    /// families whose blocks do not predict that position.
    Draft { rows: Vec<RowId>, block: DraftBlock },
}

/// Two calls a round.
#[derive(Debug)]
pub(super) struct TwoCall {
    drafter: Drafter,
    seed_row: bool,
    /// K.
    verify_width: u32,
    context: u32,
    /// Position of the pending token.
    n: u32,
    /// x[n].
    pending: u32,
    waiting: Option<Waiting>,
}

impl TwoCall {
    pub fn new(drafter: Drafter, seed_row: bool, verify_width: u32, context: u32) -> Self {
        Self { drafter, seed_row, verify_width, context, n: 0, pending: 0, waiting: None }
    }

    /// The last position a draft may fill when the prefix ends at `n`.
    fn draft_end(&self, n: u32) -> u32 {
        n.saturating_add(self.verify_width).min(self.context.saturating_sub(1))
    }

    fn verify_call(&mut self, mut segments: Segments, kind: CallKind, draft: Vec<Choice>) -> CallPlan {
        let tokens: Vec<u32> = std::iter::once(self.pending).chain(draft.iter().map(|d| d.token)).collect();
        let rows = segments.verify(self.drafter.rules.verify, self.n, &tokens);
        self.waiting = Some(Waiting::Verify { draft, rows });
        segments.finish(kind)
    }

    /// The first call of a round; `None` when the context is full. Where no draft fits any more it verifies nothing, for
    /// one more token.
    fn round(&mut self) -> Option<CallPlan> {
        if self.n >= self.context {
            return None;
        }
        let (n, mut segments) = (self.n, Segments::new());
        let from = n + 1 + u32::from(self.seed_row);
        let to = self.draft_end(from - 1);
        if from > to {
            return Some(self.verify_call(segments, CallKind::Decode, Vec::new()));
        }
        let rows = if self.seed_row || !self.drafter.predicts_next() {
            segments.verify(self.drafter.rules.verify, n, &[self.pending])
        } else {
            if self.drafter.sees_anchor_row() {
                segments.silent(n, &[self.pending]);
            }
            Vec::new()
        };
        let block = segments.draft(self.drafter, n, self.pending, from, to);
        self.waiting = Some(Waiting::Draft { rows, block });
        Some(segments.finish(CallKind::Decode))
    }
}

impl Decoder for TwoCall {
    fn first_call(&mut self, segments: Segments, n: u32, pending: u32) -> CallPlan {
        (self.n, self.pending) = (n, pending);
        self.verify_call(segments, CallKind::Prefill, Vec::new())
    }

    fn advance(&mut self, last: &CallOutput) -> Result<Step> {
        match self.waiting.take() {
            Some(Waiting::Verify { draft, rows }) => {
                let accepted = accept(&draft, &choices(&rows, last)?)?;
                self.n += accepted.count as u32 + 1;
                self.pending = accepted.bonus;
                let next = self.round();
                Ok(Step { committed: accepted.committed(), drafted: draft.len(), accepted: accepted.count, next })
            }
            Some(Waiting::Draft { rows, block }) => {
                let next_token = choices(&rows, last)?;
                let mut draft = Vec::new();
                let mut committed = Vec::new();
                if self.seed_row {
                    let accepted = accept(&[], &next_token)?;
                    self.n += 1;
                    self.pending = accepted.bonus;
                    committed = accepted.committed();
                } else {
                    draft = next_token;
                }
                let from = self.n + 1 + draft.len() as u32;
                draft.extend(block.predictions(from, self.draft_end(self.n), last)?);
                let next = Some(self.verify_call(Segments::new(), CallKind::Decode, draft));
                Ok(Step { committed, drafted: 0, accepted: 0, next })
            }
            None => Err(Error::Internal("the two-call schedule was advanced after it ended".into())),
        }
    }
}
