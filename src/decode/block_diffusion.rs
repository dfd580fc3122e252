//! Blocks filled by diffusion, as the checkpoints' own code does it: a call guesses a block's masks, the most probable
//! guesses are taken over, until no mask is left; then the block's K/V is kept and the next begins. Not lossless against the
//! autoregressive text.
//!
//! Rows of the block see the cache and one another, and their K/V lives for the call. What is kept is computed anew from the
//! finished block: causally, or block by block ([`DiffusionLayout`]). Where the next block needs nothing of that call but its
//! K/V, its first guesses are made in the same call, which sees the same and saves a pass over the weights.
//!
//! A block is always decoded whole, so a longer text begins with the shorter one; only the context's end cuts it. Tokens
//! become text from the front, as soon as no mask is before them.

use super::plan::{CallKind, CallOutput, CallPlan, Choice, RowId};
use super::reveal::Reveal;
use super::schedule::{PREFILL_CHUNK, Schedule, Step};
use super::segments::Segments;
use crate::error::{Error, Result};
use crate::model::arch::{DiffusionLayout, DiffusionRules};

/// A block as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Block {
    /// Position of its first token.
    start: u32,
    /// Its tokens; `None` for masks.
    tokens: Vec<Option<u32>>,
    /// Calls that guessed so far.
    step: u32,
    /// How many masks it began with.
    masks: u32,
}

impl Block {
    fn new(start: u32, length: u32, known: &[u32]) -> Self {
        let mut tokens: Vec<Option<u32>> = known.iter().copied().map(Some).collect();
        tokens.resize((length as usize).max(known.len()), None);
        let masks = (tokens.len() - known.len()) as u32;
        Self { start, tokens, step: 0, masks }
    }

    fn token(&self, position: u32) -> Option<u32> {
        self.tokens.get(position.checked_sub(self.start)? as usize).copied().flatten()
    }

    /// All tokens, if none is a mask.
    fn complete(&self) -> Option<Vec<u32>> {
        self.tokens.iter().copied().collect()
    }

    /// Places of the masks that the next call guesses: those of the first part that has any.
    fn open(&self, part: usize) -> Vec<usize> {
        let masks = |i: &usize| self.tokens.get(*i).is_some_and(Option::is_none);
        let first = (0..self.tokens.len()).find(masks).unwrap_or(0);
        let start = first - first % part.max(1);
        (start..(start + part).min(self.tokens.len())).filter(masks).collect()
    }
}

/// The call on its way.
#[derive(Debug)]
enum Waiting {
    /// A prompt chunk that chooses nothing.
    Chunk,
    /// The row that chooses the block's first token.
    Seed(RowId),
    /// The rows that guess these places of the block.
    Guesses(Vec<(usize, RowId)>),
}

/// The schedule.
#[derive(Debug)]
pub(super) struct BlockDiffusion {
    rules: DiffusionRules,
    /// L.
    length: u32,
    reveal: Reveal,
    context: u32,
    prompt: Vec<u32>,
    /// Prompt tokens in the calls handed out so far.
    sent: usize,
    block: Block,
    /// Position of the next token to become text.
    next: u32,
    waiting: Option<Waiting>,
}

impl BlockDiffusion {
    /// The schedule and its first plan. `prompt` is not empty, `length` not 0.
    ///
    /// # Errors
    /// [`Error::Internal`] as [`Schedule::advance`].
    pub fn start(prompt: &[u32], rules: DiffusionRules, length: u32, reveal: Reveal, context: u32) -> Result<(Self, CallPlan)> {
        let all = prompt.len() as u32;
        let kept = match rules.layout {
            DiffusionLayout::Aligned => all - all % length.max(1),
            _ => all,
        };
        let known = prompt.get(kept as usize..).unwrap_or_default();
        let block = Block::new(kept, length, known);
        let prompt = prompt.get(..kept as usize).unwrap_or_default().to_vec();
        let mut new = Self { rules, length, reveal, context, prompt, sent: 0, block, next: all, waiting: None };
        let plan = new.prefill()?;
        Ok((new, plan))
    }

    /// Whether the last kept row chooses the block's first token.
    fn seeds(&self) -> bool {
        self.rules.layout == DiffusionLayout::Seeded || self.rules.logit_shift == 1
    }

    /// The prompt's next chunk, with what follows the prompt in the last one.
    fn prefill(&mut self) -> Result<CallPlan> {
        let whole = match self.rules.layout {
            // A block's rows see one another, so they share a call.
            DiffusionLayout::Aligned => PREFILL_CHUNK - PREFILL_CHUNK % (self.length as usize).clamp(1, PREFILL_CHUNK),
            _ => PREFILL_CHUNK,
        };
        let rest = self.prompt.get(self.sent..).unwrap_or_default().to_vec();
        let (position, chunk) = (self.sent as u32, rest.get(..whole).unwrap_or(&rest));
        self.sent += chunk.len();
        if chunk.len() < rest.len() {
            let mut segments = Segments::new();
            self.keep(&mut segments, position, chunk, false);
            self.waiting = Some(Waiting::Chunk);
            return Ok(segments.finish(CallKind::Prefill));
        }
        self.follow(position, chunk, CallKind::Prefill)
    }

    /// Writes rows whose K/V is kept; with `choose` the last of them chooses.
    fn keep(&self, segments: &mut Segments, position: u32, tokens: &[u32], choose: bool) -> Option<RowId> {
        let see = match self.rules.layout {
            DiffusionLayout::Aligned => self.length,
            _ => 1,
        };
        segments.keep_blocks(position, tokens, see, choose)
    }

    /// The call that keeps `tokens`, which end where the block begins, and opens the block: with its first token, or, where
    /// that is known or a guess like the others, with its guesses.
    fn follow(&mut self, position: u32, tokens: &[u32], kind: CallKind) -> Result<CallPlan> {
        let mut segments = Segments::new();
        let seed = self.seeds() && self.block.tokens.first().is_some_and(Option::is_none);
        let last = self.keep(&mut segments, position, tokens, seed);
        match (seed, last) {
            (false, _) => self.guess(segments, kind),
            (true, Some(row)) => {
                self.waiting = Some(Waiting::Seed(row));
                Ok(segments.finish(kind))
            }
            (true, None) => Err(Error::Internal("a block of diffusion has no row before it to choose its first token".into())),
        }
    }

    /// The call that guesses the block's open masks.
    fn guess(&mut self, mut segments: Segments, kind: CallKind) -> Result<CallPlan> {
        let part = self.rules.sub_block.map_or(self.block.tokens.len(), |part| part as usize);
        let (open, shift) = (self.block.open(part), self.rules.logit_shift as usize);
        let says = |row: usize| open.contains(&(row + shift));
        let first = segments.joined(self.block.start, &self.block.tokens, says);
        let rows = open.iter().map(|&place| Some((place, first + place.checked_sub(shift)?))).collect::<Option<Vec<_>>>();
        let rows = rows.ok_or_else(|| Error::Internal("no row of a block predicts its first token".into()))?;
        self.waiting = Some(Waiting::Guesses(rows));
        Ok(segments.finish(kind))
    }

    /// What comes next; `None` when the context is full.
    fn next_call(&mut self) -> Result<Option<CallPlan>> {
        if self.next > self.context {
            return Ok(None);
        }
        let Some(tokens) = self.block.complete() else { return self.guess(Segments::new(), CallKind::Decode).map(Some) };
        let start = self.block.start;
        self.block = Block::new(start + self.length, self.length, &[]);
        self.follow(start, &tokens, CallKind::Decode).map(Some)
    }

    /// What became text: from the front, as far as there is no mask and the context goes.
    fn text(&mut self) -> Vec<u32> {
        let mut text = Vec::new();
        while self.next <= self.context
            && let Some(token) = self.block.token(self.next)
        {
            text.push(token);
            self.next += 1;
        }
        text
    }
}

impl Schedule for BlockDiffusion {
    fn advance(&mut self, last: &CallOutput) -> Result<Step> {
        match self.waiting.take() {
            Some(Waiting::Chunk) => {
                let next = Some(self.prefill()?);
                return Ok(Step { committed: Vec::new(), drafted: 0, accepted: 0, next });
            }
            Some(Waiting::Seed(row)) => {
                if let Some(first) = self.block.tokens.first_mut() {
                    *first = Some(last.choice(row)?.token);
                }
                self.block.masks = self.block.masks.saturating_sub(1);
            }
            Some(Waiting::Guesses(rows)) => {
                let guesses = rows.iter().map(|&(_, row)| last.choice(row)).collect::<Result<Vec<Choice>>>()?;
                let count = match self.rules.layout {
                    DiffusionLayout::Aligned => self.length,
                    _ => self.block.masks,
                };
                let least = self.reveal.least(count, self.block.step);
                for i in self.reveal.choose(&guesses, least) {
                    let place = rows.get(i).and_then(|&(place, _)| self.block.tokens.get_mut(place));
                    if let (Some(place), Some(guess)) = (place, guesses.get(i)) {
                        *place = Some(guess.token);
                    }
                }
                self.block.step += 1;
            }
            None => return Err(Error::Internal("the block diffusion schedule was advanced after it ended".into())),
        }
        let committed = self.text();
        let next = self.next_call()?;
        Ok(Step { committed, drafted: 0, accepted: 0, next })
    }
}
