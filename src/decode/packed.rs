//! One call a step: every call verifies the last draft and makes the next (Packed-SS). Source: "One Call Ahead: Packed
//! Self-Speculative Decoding with Diffusion Drafting".
//!
//! The next draft is made before it is known how much of the last one holds, so it assumes d[1..=h] accepted: its *anchor*
//! h. Packed-SS has the one anchor 0, quadratic decoding has all of them, the anchored schedule has a few where acceptance
//! most probably ends. After a tokens were accepted the block with the largest anchor h <= a speaks; what it says of
//! positions up to the new prefix is resolved, the rest is the next draft, cut to K.

use super::accept::accept;
use super::plan::{CallKind, CallOutput, CallPlan, Choice, RowId};
use super::prefill::Decoder;
use super::schedule::Step;
use super::segments::{DraftBlock, Drafter, Segments, choices};
use crate::error::{Error, Result};

/// Where draft blocks are anchored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Anchors {
    /// At most this many, anchor 0 always among them; the others where acceptance most probably ends.
    Count(u32),
    /// At every acceptance point: quadratic decoding.
    Every,
}

impl Anchors {
    /// The anchors for a draft of m tokens with these confidences, rising: a subset of `0..=m` with 0 in it.
    ///
    /// With c the confidences, P(a = h) = c[1]...c[h] (1 - c[h+1]) and P(a = m) = c[1]...c[m].
    pub(super) fn place(self, draft: &[Choice]) -> Vec<usize> {
        let Self::Count(count) = self else {
            return (0..=draft.len()).collect();
        };
        let confidence = |i: usize| draft.get(i).map_or(0.0, |d| if d.probability >= 0.0 { d.probability.min(1.0) } else { 0.0 });
        let mut reached = 1.0;
        let mut ends: Vec<(usize, f32)> = Vec::with_capacity(draft.len());
        for h in 1..=draft.len() {
            reached *= confidence(h - 1);
            ends.push((h, reached * (1.0 - confidence(h))));
        }
        // Stable: the smaller anchor first among equals.
        ends.sort_by(|a, b| b.1.total_cmp(&a.1));
        let others = ends.into_iter().map(|(h, _)| h).take((count as usize).saturating_sub(1));
        let mut anchors: Vec<usize> = std::iter::once(0).chain(others).collect();
        anchors.sort_unstable();
        anchors
    }
}

/// The call on its way.
#[derive(Debug)]
struct Waiting {
    /// Rows that choose y[0..=m].
    rows: Vec<RowId>,
    /// Rising by anchor.
    blocks: Vec<DraftBlock>,
}

/// One call a step.
#[derive(Debug)]
pub(super) struct Packed {
    drafter: Drafter,
    anchors: Anchors,
    /// K.
    verify_width: u32,
    context: u32,
    /// Position of the pending token.
    n: u32,
    /// x[n].
    pending: u32,
    /// d[1..=m].
    draft: Vec<Choice>,
    waiting: Option<Waiting>,
}

impl Packed {
    pub fn new(drafter: Drafter, anchors: Anchors, verify_width: u32, context: u32) -> Self {
        Self { drafter, anchors, verify_width, context, n: 0, pending: 0, draft: Vec::new(), waiting: None }
    }

    /// The last position a draft may fill when the prefix ends at `n`.
    fn draft_end(&self, n: u32) -> u32 {
        n.saturating_add(self.verify_width).min(self.context.saturating_sub(1))
    }

    fn call(&mut self, mut segments: Segments, kind: CallKind) -> CallPlan {
        let tokens: Vec<u32> = std::iter::once(self.pending).chain(self.draft.iter().map(|d| d.token)).collect();
        let rows = segments.verify(self.drafter.rules.verify, self.n, &tokens);
        let anchors = self.anchors.place(&self.draft);
        // The block at an anchor speaks for every acceptance up to the next anchor, excluded.
        let ends = anchors.iter().skip(1).copied().chain([tokens.len()]);
        let mut blocks = Vec::with_capacity(anchors.len());
        for ((&anchor, end), &token) in anchors.iter().zip(ends).zip(anchors.iter().filter_map(|&h| tokens.get(h))) {
            let position = self.n + anchor as u32;
            // The target's own choice fills the position behind an accepted run, so drafts are read from the one after.
            let (from, to) = (position + 2, self.draft_end(self.n + end as u32));
            if from <= to {
                blocks.push(segments.draft(self.drafter, position, token, from, to));
            }
        }
        self.waiting = Some(Waiting { rows, blocks });
        segments.finish(kind)
    }
}

impl Decoder for Packed {
    fn first_call(&mut self, segments: Segments, n: u32, pending: u32) -> CallPlan {
        (self.n, self.pending) = (n, pending);
        self.call(segments, CallKind::Prefill)
    }

    fn advance(&mut self, last: &CallOutput) -> Result<Step> {
        let Some(Waiting { rows, blocks }) = self.waiting.take() else {
            return Err(Error::Internal("the packed schedule was advanced after it ended".into()));
        };
        let drafted = self.draft.len();
        let accepted = accept(&self.draft, &choices(&rows, last)?)?;
        let end = self.n + accepted.count as u32;
        let block = blocks.iter().rev().find(|block| block.position() <= end);
        self.n = end + 1;
        self.pending = accepted.bonus;
        // The unresolved suffix.
        self.draft = match block {
            Some(block) => block.predictions(self.n + 1, self.draft_end(self.n), last)?,
            None => Vec::new(),
        };
        let next = (self.n < self.context).then(|| self.call(Segments::new(), CallKind::Decode));
        Ok(Step { committed: accepted.committed(), drafted, accepted: accepted.count, next })
    }
}
