//! A sliding window of masks, as SetDLM's own decoder has it: each call keeps what the last one revealed and guesses what is
//! still masked in the window, so the cache grows with every call. Not lossless against the autoregressive text.
//!
//! The window covers so many positions from the first mask on. A mask sees the prompt, everything revealed so far, also
//! behind itself, and itself; never another mask. What a call reveals stands in the cache in the order in which it was
//! revealed (by position within a call), so here, and only here, a token's cache slot is not its position.

use std::collections::BTreeMap;

use super::plan::{CallKind, CallOutput, CallPlan, Choice, RowId};
use super::prefill::Decoder;
use super::reveal::Reveal;
use super::schedule::Step;
use super::segments::Segments;
use crate::error::{Error, Result};

/// The schedule behind the prompt.
#[derive(Debug)]
pub(super) struct WindowDiffusion {
    /// Positions of the window.
    length: u32,
    reveal: Reveal,
    context: u32,
    /// Cache slots in use once the call on its way has run.
    cached: u32,
    /// Position of the first mask: the next token to become text.
    next: u32,
    /// Revealed tokens behind a mask, by position.
    ahead: BTreeMap<u32, u32>,
    /// The masks of the call on its way.
    waiting: Option<Vec<(u32, RowId)>>,
}

impl WindowDiffusion {
    pub fn new(length: u32, reveal: Reveal, context: u32) -> Self {
        Self { length, reveal, context, cached: 0, next: 0, ahead: BTreeMap::new(), waiting: None }
    }

    /// The call that guesses the window's masks behind the clean rows in `segments`.
    fn guess(&mut self, mut segments: Segments, kind: CallKind) -> CallPlan {
        let end = self.next.saturating_add(self.length).min(self.context + 1);
        let open = (self.next..end).filter(|position| !self.ahead.contains_key(position));
        self.waiting = Some(open.map(|position| (position, segments.lone_mask(position, self.cached))).collect());
        segments.finish(kind)
    }
}

impl Decoder for WindowDiffusion {
    fn first_call(&mut self, mut segments: Segments, n: u32, pending: u32) -> CallPlan {
        segments.silent(n, &[pending]);
        (self.cached, self.next) = (n + 1, n + 1);
        self.guess(segments, CallKind::Prefill)
    }

    fn advance(&mut self, last: &CallOutput) -> Result<Step> {
        let Some(rows) = self.waiting.take() else {
            return Err(Error::Internal("the window diffusion schedule was advanced after it ended".into()));
        };
        let guesses = rows.iter().map(|&(_, row)| last.choice(row)).collect::<Result<Vec<Choice>>>()?;
        let mut fresh = Vec::new();
        for i in self.reveal.choose(&guesses, 1) {
            if let (Some(&(position, _)), Some(guess)) = (rows.get(i), guesses.get(i)) {
                fresh.push((position, guess.token));
            }
        }
        self.ahead.extend(fresh.iter().copied());
        let mut committed = Vec::new();
        while let Some(token) = self.ahead.remove(&self.next) {
            committed.push(token);
            self.next += 1;
        }
        let next = (self.next <= self.context).then(|| {
            let mut segments = Segments::new();
            for (position, token) in fresh {
                segments.revealed(self.cached, position, token);
                self.cached += 1;
            }
            self.guess(segments, CallKind::Decode)
        });
        Ok(Step { committed, drafted: 0, accepted: 0, next })
    }
}
