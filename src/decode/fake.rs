//! A scripted model for tests: it answers calls from an [`Oracle`] and judges every plan by its own idea of who may see
//! whom, written from the definition of the schedules and not from the code that writes plans.
//!
//! It keeps what a KV cache keeps: for every slot the token, its position and (as a chained hash) the tokens that were
//! below it when its K/V was computed. A row that reads a slot whose K/V belongs to another text is an error, and so is
//! every visibility that [`Fake::run`] lists.

use std::future::{Future, ready};
use std::ops::Range;

use super::plan::{CallKind, CallOutput, CallPlan, Choice, Keep, Row, RowToken};
use super::schedule::{Geometry, ModelCalls, PREFILL_CHUNK, Ticket};
use crate::error::{Error, Result};
use crate::model::arch::{Anchor, DraftRules, VerifyRows};

/// What a target and its drafter say.
pub(crate) trait Oracle {
    /// The target's greedy token behind `prefix`.
    fn target(&self, prefix: &[u32]) -> u32;

    /// The drafter's word on `position`, having seen `prefix` (`position >= prefix.len()`).
    fn draft(&self, prefix: &[u32], position: usize) -> Choice;

    /// The greedy text: `count` tokens behind `prompt`.
    fn text(&self, prompt: &[u32], count: usize) -> Vec<u32> {
        let mut text = prompt.to_vec();
        for _ in 0..count {
            text.push(self.target(&text));
        }
        text.split_off(prompt.len())
    }
}

/// SplitMix64's finaliser over a running state: the tests' only source of chance.
pub(crate) fn hash(state: u64, word: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_add(word.wrapping_mul(0xd129_0d3f_9fb1_6d4b));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A uniform number in [0, 1) from a hash.
pub(crate) fn uniform(hash: u64) -> f64 {
    (hash >> 11) as f64 / (1u64 << 53) as f64
}

/// The vocabulary of [`Scripted`].
pub(crate) const VOCAB: u32 = 50;

/// Which of a [`Scripted`] drafter's predictions are right.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Skill {
    /// Each with this probability, whatever the prefix: a longer prefix may turn a right word wrong.
    Independent(f64),
    /// All of a prefix of `1 + i * period` tokens, none of the others: a longer prefix may lose everything.
    Periodic(usize),
    /// All up to a frontier that never moves back as the prefix grows; behind it by chance (0.3), the position after the
    /// frontier never. The frontier reaches so many tokens on average.
    Frontier(f64),
    /// Each position from a prefix length of its own on: a longer prefix never turns a right word wrong.
    Ripening(f64),
}

/// A target that hashes the whole prefix, so that any foreign token below changes everything after; and a drafter of known
/// skill.
#[derive(Debug, Clone)]
pub(crate) struct Scripted {
    pub seed: u64,
    pub skill: Skill,
    /// F by prefix length, for [`Skill::Frontier`].
    frontier: Vec<usize>,
}

impl Scripted {
    pub fn new(seed: u64, skill: Skill) -> Self {
        let mut frontier = Vec::new();
        if let Skill::Frontier(mean) = skill {
            let mut last = 0;
            for length in 0..2048usize {
                let u = uniform(hash(hash(seed, 7), length as u64));
                let reach = (-(1.0 - u).ln() * mean) as usize;
                last = last.max(length.saturating_sub(1) + reach);
                frontier.push(last);
            }
        }
        Self { seed, skill, frontier }
    }

    fn choose(state: u64) -> u32 {
        (hash(state, 13) % u64::from(VOCAB)) as u32
    }

    /// Whether the draft for `position` from the first `length` tokens of the text is right.
    pub fn right(&self, length: usize, position: usize) -> bool {
        let chance = |salt: u64, a: usize, b: usize| uniform(hash(hash(hash(self.seed, salt), a as u64), b as u64));
        match self.skill {
            Skill::Independent(p) => chance(1, length, position) < p,
            Skill::Periodic(period) => length % period == 1,
            Skill::Frontier(_) => {
                let frontier = self.frontier.get(length).copied().unwrap_or(0);
                position <= frontier || (position > frontier + 1 && chance(2, length, position) < 0.3)
            }
            Skill::Ripening(mean) => {
                let lead = (-(1.0 - chance(3, position, 0)).ln() * mean) as usize;
                length + lead > position
            }
        }
    }
}

impl Oracle for Scripted {
    fn target(&self, prefix: &[u32]) -> u32 {
        Self::choose(prefix.iter().fold(hash(self.seed, 11), |state, &token| hash(state, u64::from(token))))
    }

    fn draft(&self, prefix: &[u32], position: usize) -> Choice {
        let mut state = prefix.iter().fold(hash(self.seed, 11), |state, &token| hash(state, u64::from(token)));
        for _ in prefix.len()..position {
            state = hash(state, u64::from(Self::choose(state)));
        }
        let (right, token) = (self.right(prefix.len(), position), Self::choose(state));
        let doubt = uniform(hash(hash(self.seed, prefix.len() as u64), position as u64)) as f32;
        let probability = if right { 1.0 - 0.5 * doubt } else { 0.7 * doubt };
        Choice { token: if right { token } else { (token + 1) % VOCAB }, probability }
    }
}

/// What a cache slot holds.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Entry {
    token: u32,
    position: u32,
    /// Hash of this token and all below it when this was computed.
    chain: u64,
}

/// The scripted model.
pub(crate) struct Fake<O> {
    oracle: O,
    rules: Option<DraftRules>,
    geometry: Geometry,
    /// The prompt and its greedy continuation, as far as it was asked for.
    text: Vec<u32>,
    prompt: usize,
    cache: Vec<Option<Entry>>,
    /// Slots written by clean rows of the call that runs.
    written: Range<u32>,
    /// Masks of a draft block, w; checked in every call that drafts.
    width: Option<u32>,
    waiting: Option<(Ticket, Vec<Choice>)>,
    tickets: u64,
}

impl<O: Oracle> Fake<O> {
    pub fn new(oracle: O, prompt: &[u32], rules: Option<DraftRules>, width: Option<u32>, geometry: Geometry) -> Self {
        let cache = vec![None; geometry.context as usize];
        let text = prompt.to_vec();
        Self { oracle, rules, geometry, text, prompt: prompt.len(), cache, written: 0..0, width, waiting: None, tickets: 0 }
    }

    /// Runs a call.
    ///
    /// # Errors
    /// A sentence for the first of these that does not hold:
    /// - sizes stay within the geometry; every slot is written at most once in a call;
    /// - prefill calls carry prompt rows, [`PREFILL_CHUNK`] unless they are the last;
    /// - clean rows: an id, slot = position, adapter off, they see the cache up to and including themselves;
    /// - everything below the lowest clean row, and that row, is the true text;
    /// - every cache slot that is read holds K/V computed on the tokens that stand below it now;
    /// - mask rows that verify see all below them, and themselves;
    /// - a block's rows see the cache below its anchor (with it, where shared), the whole block (or themselves), and no
    ///   scratch of others; its positions follow each other, its first row is its anchor's token, the rest are masks;
    /// - rows that choose have something to say.
    pub fn run(&mut self, plan: &CallPlan) -> Result<CallOutput, String> {
        let rows = plan.rows();
        let geometry = self.geometry;
        check(!rows.is_empty() && rows.len() <= geometry.max_rows, || format!("{} rows", rows.len()))?;
        check(plan.choose().len() <= geometry.max_choose, || format!("{} rows choose", plan.choose().len()))?;
        for (i, row) in rows.iter().enumerate() {
            check(plan.choose().contains(&i) == row.choose, || format!("{row:?} is outside the choosing range"))?;
            check(plan.adapter().contains(&i) == row.adapter, || format!("{row:?} is outside the adapter range"))?;
            check(row.position < geometry.context + geometry.scratch, || format!("{row:?} is beyond the rotary table"))?;
        }
        self.write_clean(rows)?;
        self.check_prefill(plan)?;
        let scratch = self.scratch_owners(rows)?;
        let mut choices = Vec::new();
        for row in rows {
            let answer = match row.keep {
                Keep::Cache(slot) => self.clean_row(row, slot)?,
                Keep::Scratch(slot) => self.scratch_row(row, slot, &scratch)?,
            };
            if row.choose {
                choices.push(answer.ok_or_else(|| format!("{row:?} chooses but has nothing to say"))?);
            }
        }
        plan.answer(&choices).map_err(|e| e.to_string())
    }

    fn truth(&mut self, position: usize) -> u32 {
        while self.text.len() <= position {
            self.text.push(self.oracle.target(&self.text));
        }
        self.text[position]
    }

    /// Writes the K/V of clean rows, lowest first.
    fn write_clean(&mut self, rows: &[Row]) -> Result<(), String> {
        let mut clean: Vec<(u32, &Row)> =
            rows.iter().filter_map(|row| if let Keep::Cache(slot) = row.keep { Some((slot, row)) } else { None }).collect();
        clean.sort_by_key(|(slot, _)| *slot);
        for pair in clean.windows(2) {
            check(pair[0].0 + 1 == pair[1].0, || format!("clean rows at slots {} and {}", pair[0].0, pair[1].0))?;
        }
        if let Some(&(lowest, _)) = clean.first() {
            for position in 0..lowest as usize {
                let truth = self.truth(position);
                let held = self.cache.get(position).copied().flatten();
                check(held.is_some_and(|e| e.token == truth), || {
                    format!("slot {position} holds {held:?} under a call at {lowest}; the text has {truth} there")
                })?;
            }
        }
        self.written = clean.first().map_or(0, |c| c.0)..clean.last().map_or(0, |c| c.0 + 1);
        for (i, (slot, row)) in clean.into_iter().enumerate() {
            let RowToken::Id(token) = row.token else { return Err(format!("a mask in the cache: {row:?}")) };
            if i == 0 {
                let truth = self.truth(slot as usize);
                check(token == truth, || format!("the pending token is {truth}: {row:?}"))?;
            }
            let chain = hash(self.chain(slot)?, u64::from(token));
            let entry = Entry { token, position: row.position, chain };
            *self.cache.get_mut(slot as usize).ok_or_else(|| format!("no such slot: {row:?}"))? = Some(entry);
        }
        Ok(())
    }

    /// Hash of all tokens below `slot`.
    fn chain(&self, slot: u32) -> Result<u64, String> {
        match slot.checked_sub(1) {
            None => Ok(0),
            Some(below) => {
                let entry = self.cache.get(below as usize).copied().flatten();
                Ok(entry.ok_or_else(|| format!("slot {below} is read but was never written"))?.chain)
            }
        }
    }

    /// The tokens in slots `0..end`, provided each belongs to this very text.
    fn read(&self, cache: &Range<u32>) -> Result<Vec<u32>, String> {
        check(cache.start == 0, || format!("a row sees the cache from {} on", cache.start))?;
        let mut chain = 0;
        let mut tokens = Vec::with_capacity(cache.end as usize);
        for slot in 0..cache.end {
            let entry =
                self.cache.get(slot as usize).copied().flatten().ok_or_else(|| format!("slot {slot} is read but empty"))?;
            chain = hash(chain, u64::from(entry.token));
            check(entry.position == slot, || format!("slot {slot} holds position {}", entry.position))?;
            check(entry.chain == chain, || format!("stale read: slot {slot} was computed on another text"))?;
            tokens.push(entry.token);
        }
        Ok(tokens)
    }

    fn check_prefill(&self, plan: &CallPlan) -> Result<(), String> {
        let prompt_rows: Vec<u32> = plan
            .rows()
            .iter()
            .filter(|row| matches!(row.keep, Keep::Cache(slot) if (slot as usize) < self.prompt))
            .map(|row| row.position)
            .collect();
        match plan.kind() {
            CallKind::Decode => check(prompt_rows.is_empty(), || format!("prompt rows {prompt_rows:?} in a decode call")),
            CallKind::Prefill => {
                let (first, last) = (prompt_rows.first().copied().unwrap_or(0), prompt_rows.last().copied().unwrap_or(0));
                check(first as usize % PREFILL_CHUNK == 0, || format!("a prompt chunk begins at {first}"))?;
                let whole = prompt_rows.len() == PREFILL_CHUNK || last as usize + 1 == self.prompt;
                check(!prompt_rows.is_empty() && prompt_rows.len() <= PREFILL_CHUNK && whole, || {
                    format!("a prompt chunk of {} rows from {first}", prompt_rows.len())
                })?;
                let heads = plan.rows().iter().filter(|r| matches!(r.keep, Keep::Cache(_)) && r.choose).count();
                check(heads <= 1, || format!("{heads} prompt rows run the head"))
            }
        }
    }

    /// The row that writes each scratch slot.
    fn scratch_owners<'a>(&self, rows: &'a [Row]) -> Result<Vec<Option<&'a Row>>, String> {
        let mut owners = vec![None; self.geometry.scratch as usize];
        for row in rows {
            if let Keep::Scratch(slot) = row.keep {
                let owner = owners.get_mut(slot as usize).ok_or_else(|| format!("no such scratch slot: {row:?}"))?;
                check(owner.is_none(), || format!("scratch slot {slot} is written twice"))?;
                *owner = Some(row);
            }
        }
        Ok(owners)
    }

    fn clean_row(&mut self, row: &Row, slot: u32) -> Result<Option<Choice>, String> {
        check(row.position == slot && !row.adapter, || format!("slot, position or adapter of a clean row: {row:?}"))?;
        check(row.sees.cache == (0..slot + 1) && row.sees.scratch.is_empty(), || format!("a clean row sees wrongly: {row:?}"))?;
        if !row.choose {
            return Ok(None);
        }
        let tokens = self.read(&row.sees.cache)?;
        let says = self.rules.is_none_or(|rules| rules.verify == VerifyRows::Clean);
        Ok(says.then(|| Choice { token: self.oracle.target(&tokens), probability: 0.9 }))
    }

    fn scratch_row(&mut self, row: &Row, slot: u32, owners: &[Option<&Row>]) -> Result<Option<Choice>, String> {
        let rules = self.rules.ok_or_else(|| format!("no drafter, yet {row:?}"))?;
        let mut seen = self.read(&row.sees.cache)?;
        let (end, position) = (row.sees.cache.end, row.position);
        for (i, &token) in seen.iter().enumerate() {
            let known = self.written.contains(&(i as u32)) || token == self.truth(i);
            check(known, || format!("a draft row reads token {token} at {i}, which is not the text"))?;
        }
        let scratch = &row.sees.scratch;
        check(scratch.contains(&slot), || format!("a scratch row does not see itself: {row:?}"))?;
        if rules.verify == VerifyRows::Mask {
            check(scratch.len() == 1 && row.token == RowToken::Mask && !row.adapter, || {
                format!("a mask row sees others: {row:?}")
            })?;
            if position == end {
                return Ok(Some(Choice { token: self.oracle.target(&seen), probability: 0.9 }));
            }
            let ahead = self.width.is_none_or(|w| position < end + w);
            check(position > end && ahead, || format!("a mask row out of its block: {row:?}"))?;
            return Ok(Some(self.oracle.draft(&seen, position as usize)));
        }
        check(row.adapter == rules.adapter, || format!("the adapter of a draft row: {row:?}"))?;
        let in_block = rules.anchor == Anchor::InBlock;
        // A block is told by the cache its rows see; its rows follow each other from there.
        let block: Vec<(usize, &Row)> =
            owners.iter().enumerate().filter_map(|(i, o)| o.filter(|o| o.sees.cache.end == end).map(|o| (i, o))).collect();
        let (first, last) = (block.first().map_or(0, |b| b.0), block.last().map_or(0, |b| b.0));
        check(last - first + 1 == block.len(), || format!("two blocks share the anchor of {row:?}"))?;
        if let Some(w) = self.width {
            check(block.len() == (w + u32::from(in_block)) as usize, || format!("a block of {} rows", block.len()))?;
        }
        let all = first as u32..last as u32 + 1;
        let expected = if rules.bidirectional { all } else { slot..slot + 1 };
        check(*scratch == expected, || format!("a draft row sees the scratch of others, or not its block: {row:?}"))?;
        for (i, (_, member)) in block.iter().enumerate() {
            check(member.position == end + i as u32, || format!("a block's positions do not follow each other: {member:?}"))?;
            let anchor = in_block && i == 0;
            check(anchor == (member.token != RowToken::Mask), || format!("mask or token: {member:?}"))?;
        }
        if let (true, Some(&(_, Row { token: RowToken::Id(token), .. }))) = (in_block, block.first()) {
            // In a call that only drafts, the pending token is not in the cache yet.
            let expected = match self.cache.get(end as usize) {
                Some(Some(entry)) if self.written.contains(&end) => entry.token,
                _ if self.written.is_empty() => self.truth(end as usize),
                _ => return Err(format!("a block at {end} beside verify rows at {:?}", self.written)),
            };
            check(*token == expected, || format!("a block at {end} is anchored at token {token}, not {expected}"))?;
            seen.push(*token);
        }
        let predicted = (position + rules.logit_shift) as usize;
        Ok((predicted >= seen.len()).then(|| self.oracle.draft(&seen, predicted)))
    }
}

impl<O: Oracle> ModelCalls for Fake<O> {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&mut self, plan: &CallPlan) -> Result<Ticket> {
        let output = self.run(plan).map_err(Error::Internal)?;
        let choices = plan.choose().filter_map(|i| plan.row_id(i)).map(|id| output.choice(id)).collect::<Result<_>>()?;
        self.tickets += 1;
        self.waiting = Some((Ticket(self.tickets), choices));
        Ok(Ticket(self.tickets))
    }

    fn answer(&mut self, ticket: Ticket) -> impl Future<Output = Result<Vec<Choice>>> {
        ready(match self.waiting.take() {
            Some((waiting, choices)) if waiting == ticket => Ok(choices),
            _ => Err(Error::Internal(format!("{ticket:?} is not waiting"))),
        })
    }

    fn logits(&mut self) -> impl Future<Output = Result<Vec<Vec<f32>>>> {
        ready(Err(Error::InvalidOption("a scripted model has no logits".into())))
    }
}

fn check(holds: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what()) }
}

/// Rebuilds a plan with one row changed. `which` picks the row; nothing changes where there is none.
pub fn alter(plan: &CallPlan, which: impl Fn(&Row) -> bool, change: impl Fn(&mut Row)) -> CallPlan {
    let mut rows: Vec<(usize, Row)> =
        plan.rows().iter().enumerate().filter_map(|(i, row)| plan.row_id(i).map(|id| (id, row.clone()))).collect();
    rows.sort_by_key(|(id, _)| *id);
    let mut rows: Vec<Row> = rows.into_iter().map(|(_, row)| row).collect();
    if let Some(row) = rows.iter_mut().find(|row| which(row)) {
        change(row);
    }
    CallPlan::new(plan.kind(), rows)
}
