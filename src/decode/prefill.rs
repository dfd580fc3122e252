//! The prompt: cut into the same chunks in every schedule, so that its K/V is the same in all of them.
//!
//! The last chunk ends with the prompt's last token, which is the first *pending* token: the schedule itself writes that
//! row (and, if it drafts in the same call, its draft block) as it writes every later call, with nothing drafted yet.

use super::plan::{CallKind, CallOutput, CallPlan};
use super::schedule::{PREFILL_CHUNK, Schedule, Step};
use super::segments::Segments;
use crate::error::Result;

/// What a schedule does once the prompt is in: a [`Schedule`] that begins at a prefix instead of a prompt.
pub(super) trait Decoder {
    /// Writes the call at prefix n behind the prompt rows in `segments`; `pending` is x[n], the prompt's last token.
    fn first_call(&mut self, segments: Segments, n: u32, pending: u32) -> CallPlan;

    /// As [`Schedule::advance`].
    fn advance(&mut self, last: &CallOutput) -> Result<Step>;
}

/// A schedule: the prompt's chunks, then a [`Decoder`].
#[derive(Debug)]
pub(super) struct Prefill<D> {
    prompt: Vec<u32>,
    /// Prompt tokens in the cache or in the calls handed out so far.
    sent: usize,
    decoder: D,
}

impl<D: Decoder> Prefill<D> {
    /// The schedule and its first plan. `prompt` is not empty; its first `cached` tokens, not its last, are in the cache.
    pub fn start(prompt: &[u32], cached: usize, decoder: D) -> (Self, CallPlan) {
        let sent = cached.min(prompt.len().saturating_sub(1));
        let mut prefill = Self { prompt: prompt.to_vec(), sent, decoder };
        let plan = prefill.chunk();
        (prefill, plan)
    }

    fn chunk(&mut self) -> CallPlan {
        let position = self.sent as u32;
        let rest = self.prompt.get(self.sent..).unwrap_or_default();
        let mut segments = Segments::new();
        match rest.split_last() {
            Some((&pending, before)) if rest.len() <= PREFILL_CHUNK => {
                segments.silent(position, before);
                self.sent = self.prompt.len();
                self.decoder.first_call(segments, position + before.len() as u32, pending)
            }
            _ => {
                let chunk = rest.get(..PREFILL_CHUNK).unwrap_or(rest);
                segments.silent(position, chunk);
                self.sent += chunk.len();
                segments.finish(CallKind::Prefill)
            }
        }
    }
}

impl<D: Decoder> Schedule for Prefill<D> {
    fn advance(&mut self, last: &CallOutput) -> Result<Step> {
        if self.sent < self.prompt.len() {
            let next = Some(self.chunk());
            return Ok(Step { committed: Vec::new(), drafted: 0, accepted: 0, next });
        }
        self.decoder.advance(last)
    }
}
