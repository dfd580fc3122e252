//! The segments a call is made of, written as rows: prompt rows, verify rows, draft blocks. Here, and only here, families
//! of checkpoints differ.

use super::plan::{CallKind, CallOutput, CallPlan, Choice, Keep, Row, RowId, RowToken, Sees};
use crate::error::{Error, Result};
use crate::model::arch::{Anchor, DraftRules, VerifyRows};

/// How a model drafts, and how wide.
///
/// Row `r` of a block anchored at position `q` stands at `q + r` and predicts position `q + r + s` (s the logit shift).
/// Not every family has every row: see [`Drafter::first_row`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Drafter {
    pub rules: DraftRules,
    /// w: masks of a block, at `q+1 ..= q+w`.
    pub width: u32,
}

impl Drafter {
    /// The first `r` that is a row of the block itself: the anchor where it stands in the block, else the first mask. With
    /// mask-verify rows the mask at `q + 1` is the anchor's verify row, so the block begins behind it.
    pub fn first_row(&self) -> u32 {
        match (self.rules.verify, self.rules.anchor) {
            (VerifyRows::Mask, _) => 2,
            (VerifyRows::Clean, Anchor::Shared) => 1,
            (VerifyRows::Clean, Anchor::InBlock) => 0,
        }
    }

    /// Rows of a block.
    pub fn rows(&self) -> u32 {
        self.width.saturating_add(1).saturating_sub(self.first_row())
    }

    /// The last position a block anchored at `q` predicts.
    pub fn reach(&self, q: u32) -> u32 {
        q + self.width + self.rules.logit_shift
    }

    /// Whether the block itself predicts the position behind its anchor. Where it does not, the anchor's verify row does.
    pub fn predicts_next(&self) -> bool {
        self.first_row() + self.rules.logit_shift <= 1
    }

    /// Whether a block sees the clean row of its own anchor, which must then be in the cache or in the call.
    pub fn sees_anchor_row(&self) -> bool {
        self.rules.anchor == Anchor::Shared
    }
}

/// A draft block of a call on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DraftBlock {
    drafter: Drafter,
    /// q: the anchor's position.
    position: u32,
    /// Row id of the block's first row.
    base: RowId,
}

impl DraftBlock {
    /// The anchor's position.
    pub fn position(&self) -> u32 {
        self.position
    }

    /// What the block predicts for the positions `from ..= to`, as far as it reaches.
    ///
    /// # Errors
    /// [`Error::Internal`] if a row among them did not choose.
    pub fn predictions(&self, from: u32, to: u32, output: &CallOutput) -> Result<Vec<Choice>> {
        (from..=to.min(self.drafter.reach(self.position)))
            .map(|position| {
                let r = position.checked_sub(self.position + self.drafter.rules.logit_shift);
                match r.and_then(|r| r.checked_sub(self.drafter.first_row())) {
                    Some(i) => output.choice(self.base + i as usize),
                    None => Err(Error::Internal(format!(
                        "the draft block at position {} has no row that predicts position {position}",
                        self.position
                    ))),
                }
            })
            .collect()
    }
}

/// The rows of a call as they are written. [`RowId`]s are handed out in this order.
#[derive(Debug, Default)]
pub(super) struct Segments {
    rows: Vec<Row>,
    scratch: u32,
}

impl Segments {
    pub fn new() -> Self {
        Self::default()
    }

    /// Clean, causal rows without choices, `tokens[0]` at `position`.
    pub fn silent(&mut self, position: u32, tokens: &[u32]) {
        for (position, &token) in (position..).zip(tokens) {
            self.clean(position, token, false);
        }
    }

    /// The verify segment: `tokens` = x[n], d[1..=m] at `n ..= n+m`. Returns the rows that choose y[0..=m].
    pub fn verify(&mut self, rows: VerifyRows, n: u32, tokens: &[u32]) -> Vec<RowId> {
        match rows {
            VerifyRows::Clean => (n..).zip(tokens).map(|(position, &token)| self.clean(position, token, true)).collect(),
            VerifyRows::Mask => {
                self.silent(n, tokens);
                (n + 1..).zip(tokens).map(|(position, _)| self.lone_mask(position, position)).collect()
            }
        }
    }

    /// A draft block anchored at `token`, which stands at `position`. The head runs on the rows that predict the positions
    /// `read_from ..= read_to`.
    pub fn draft(&mut self, drafter: Drafter, position: u32, token: u32, read_from: u32, read_to: u32) -> DraftBlock {
        let (base, start) = (self.rows.len(), self.scratch);
        self.scratch += drafter.rows();
        let cache = 0..position + u32::from(drafter.sees_anchor_row());
        for (slot, r) in (start..).zip(drafter.first_row()..=drafter.width) {
            let input = if r == 0 { RowToken::Id(token) } else { RowToken::Mask };
            let scratch = if drafter.rules.bidirectional { start..self.scratch } else { slot..slot + 1 };
            let predicted = position + r + drafter.rules.logit_shift;
            let choose = predicted > position && (read_from..=read_to).contains(&predicted);
            let sees = Sees { cache: cache.clone(), scratch };
            self.push(input, position + r, drafter.rules.adapter, Keep::Scratch(slot), sees, choose);
        }
        DraftBlock { drafter, position, base }
    }

    /// Rows whose K/V is kept, `tokens[0]` at `position`: each sees everything up to the end of its block of `length`
    /// positions (counted from `position`), as far as there are tokens; with a length of 1 they are causal. With `choose` the
    /// last one chooses. Returns the last one.
    pub fn keep_blocks(&mut self, position: u32, tokens: &[u32], length: u32, choose: bool) -> Option<RowId> {
        let (length, end) = (length.max(1), position + tokens.len() as u32);
        let mut last = None;
        for (at, &token) in (position..).zip(tokens) {
            let block_end = (at - (at - position) % length + length).min(end);
            let sees = Sees { cache: 0..block_end, scratch: 0..0 };
            last = Some(self.push(RowToken::Id(token), at, false, Keep::Cache(at), sees, choose && at + 1 == end));
        }
        last
    }

    /// A block whose rows see the cache below it and one another, none of them kept: `tokens[i]` at `start + i`, masks where
    /// there is none. The rows for which `choose` says so choose. Returns the first.
    pub fn joined(&mut self, start: u32, tokens: &[Option<u32>], choose: impl Fn(usize) -> bool) -> RowId {
        let (first, scratch) = (self.rows.len(), self.scratch);
        self.scratch += tokens.len() as u32;
        for (i, token) in tokens.iter().enumerate() {
            let (at, token) = (i as u32, token.map_or(RowToken::Mask, RowToken::Id));
            let sees = Sees { cache: 0..start, scratch: scratch..self.scratch };
            self.push(token, start + at, false, Keep::Scratch(scratch + at), sees, choose(i));
        }
        first
    }

    /// A mask that sees the cache below `end` and itself, and chooses.
    pub fn lone_mask(&mut self, position: u32, end: u32) -> RowId {
        let slot = self.scratch;
        self.scratch += 1;
        let sees = Sees { cache: 0..end, scratch: slot..slot + 1 };
        self.push(RowToken::Mask, position, false, Keep::Scratch(slot), sees, true)
    }

    /// A silent row in cache slot `slot`, whatever its position; sees all slots up to its own.
    pub fn revealed(&mut self, slot: u32, position: u32, token: u32) {
        let sees = Sees { cache: 0..slot + 1, scratch: 0..0 };
        self.push(RowToken::Id(token), position, false, Keep::Cache(slot), sees, false);
    }

    /// A draft block all of whose rows choose.
    fn probe(&mut self, drafter: Drafter, position: u32, token: u32) {
        let first = self.rows.len();
        self.draft(drafter, position, token, 0, 0);
        for row in self.rows.iter_mut().skip(first) {
            row.choose = true;
        }
    }

    /// The finished call.
    pub fn finish(self, kind: CallKind) -> CallPlan {
        CallPlan::new(kind, self.rows)
    }

    fn clean(&mut self, position: u32, token: u32, choose: bool) -> RowId {
        let sees = Sees { cache: 0..position + 1, scratch: 0..0 };
        self.push(RowToken::Id(token), position, false, Keep::Cache(position), sees, choose)
    }

    fn push(&mut self, token: RowToken, position: u32, adapter: bool, keep: Keep, sees: Sees, choose: bool) -> RowId {
        self.rows.push(Row { token, position, adapter, keep, sees, choose });
        self.rows.len() - 1
    }
}

/// The choices of `rows`, in order.
///
/// # Errors
/// [`Error::Internal`] if one of them did not choose.
pub(super) fn choices(rows: &[RowId], output: &CallOutput) -> Result<Vec<Choice>> {
    rows.iter().map(|&row| output.choice(row)).collect()
}

/// The rows of a draft block of `width` masks anchored at `token`, which stands at `position`, all of them choosing: for
/// probing a model outside any schedule.
#[must_use]
pub fn draft_rows(rules: DraftRules, position: u32, token: u32, width: u32) -> Vec<Row> {
    let mut segments = Segments::new();
    segments.probe(Drafter { rules, width }, position, token);
    segments.rows
}

/// The rows whose choices are the target's for the positions behind each of `tokens`, which stand at `n` and behind it, and
/// the clean rows they need: for probing a model outside any schedule.
#[must_use]
pub fn target_rows(verify: VerifyRows, n: u32, tokens: &[u32]) -> Vec<Row> {
    let mut segments = Segments::new();
    segments.verify(verify, n, tokens);
    segments.rows
}

/// The rows of `tokens`, which stand at `position` and behind it, in blocks of `length` positions whose rows see one another,
/// all of them choosing: for probing a model outside any schedule.
#[must_use]
pub fn block_rows(position: u32, tokens: &[u32], length: u32) -> Vec<Row> {
    let mut segments = Segments::new();
    segments.keep_blocks(position, tokens, length, false);
    for row in &mut segments.rows {
        row.choose = true;
    }
    segments.rows
}

/// The rows of a packed call: [`target_rows`] of `tokens` (x[n], d[1..=m]), then for each anchor in `0..=m` a block of `width`
/// masks, all of whose rows choose: for probing a model outside any schedule. Anchors beyond m have no block.
#[must_use]
pub fn packed_rows(rules: DraftRules, n: u32, tokens: &[u32], anchors: &[u32], width: u32) -> Vec<Row> {
    let mut segments = Segments::new();
    segments.verify(rules.verify, n, tokens);
    for &anchor in anchors {
        if let Some(&token) = tokens.get(anchor as usize) {
            segments.probe(Drafter { rules, width }, n + anchor, token);
        }
    }
    segments.rows
}
