//! Which tokens the K/V cache holds, told from the calls that were made: a later prompt that begins alike need not compute
//! them again.
//!
//! A clean causal row's K/V depends on the tokens up to it and on nothing else (rows are invariant), so a slot that such a
//! row wrote holds what a prompt row would write there, whether it was a prompt row, a verified draft token or one whose
//! draft was refused. Rows that saw anything else (masks, later positions, part of the cache) end what can be used again.

use super::plan::{CallPlan, Keep, Row, RowToken};

/// The tokens at slots `0..`, as far as they can be used again.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CachedPrefix {
    tokens: Vec<u32>,
}

impl CachedPrefix {
    /// Takes note of a call that was submitted after those noted before.
    pub fn note(&mut self, plan: &CallPlan) {
        let slot = |row: &Row| match row.keep {
            Keep::Cache(slot) => Some(slot),
            Keep::Scratch(_) => None,
        };
        let mut written: Vec<(u32, &Row)> = plan.rows().iter().filter_map(|row| Some((slot(row)?, row))).collect();
        written.sort_by_key(|(slot, _)| *slot);
        for (slot, row) in written {
            // What lies behind a slot was computed from what stood in it before.
            self.tokens.truncate(slot as usize);
            let causal = !row.adapter
                && row.position == slot
                && row.sees.cache.start == 0
                && row.sees.cache.end == slot + 1
                && row.sees.scratch.is_empty();
            match row.token {
                RowToken::Id(token) if causal && self.tokens.len() == slot as usize => self.tokens.push(token),
                _ => {}
            }
        }
    }

    /// How many of the prompt's first tokens are in the cache. At most all but the last, whose row the schedule writes.
    #[must_use]
    pub fn common(&self, prompt: &[u32]) -> usize {
        let alike = self.tokens.iter().zip(prompt).take_while(|(have, want)| have == want).count();
        alike.min(prompt.len().saturating_sub(1))
    }

    /// Forgets everything: a call may have failed half way.
    pub fn forget(&mut self) {
        self.tokens.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::{CallKind, Sees};
    use super::*;

    fn clean(slot: u32, token: u32) -> Row {
        Row {
            token: RowToken::Id(token),
            position: slot,
            adapter: false,
            keep: Keep::Cache(slot),
            sees: Sees { cache: 0..slot + 1, scratch: 0..0 },
            choose: slot % 2 == 0,
        }
    }

    fn noted(calls: &[Vec<Row>]) -> CachedPrefix {
        let mut cached = CachedPrefix::default();
        for rows in calls {
            cached.note(&CallPlan::new(CallKind::Decode, rows.clone()));
        }
        cached
    }

    #[test]
    fn prompts_and_verified_tokens_are_remembered_up_to_the_last_token_of_the_next_prompt() {
        let cached = noted(&[vec![clean(0, 7), clean(1, 8), clean(2, 9)], vec![clean(3, 10), clean(4, 11)]]);
        assert_eq!(cached.common(&[7, 8, 9, 10, 11, 12]), 5);
        assert_eq!(cached.common(&[7, 8, 9, 10, 11]), 4, "the last token's row is written anew");
        assert_eq!(cached.common(&[7, 8, 1, 10]), 2);
        assert_eq!(cached.common(&[1]), 0);
        assert_eq!(cached.common(&[]), 0);
    }

    #[test]
    fn a_slot_written_again_ends_what_was_behind_it() {
        // Drafts 20 and 21 are refused; 30 takes the place of 20, and 21's slot still holds what followed 20.
        let cached = noted(&[vec![clean(0, 7)], vec![clean(1, 8), clean(2, 20), clean(3, 21)], vec![clean(2, 30)]]);
        assert_eq!(cached.common(&[7, 8, 20, 21, 22]), 2);
        assert_eq!(cached.common(&[7, 8, 30, 21, 22]), 3);
    }

    #[test]
    fn rows_that_are_not_causal_tokens_do_not_count() {
        let spoil: [fn(&mut Row); 6] = [
            |row| row.token = RowToken::Mask,
            |row| row.adapter = true,
            |row| row.position += 1,
            |row| row.sees.cache.start = 1,
            |row| row.sees.cache.end += 1,
            |row| row.sees.scratch = 0..1,
        ];
        for spoil in spoil {
            let mut row = clean(1, 8);
            spoil(&mut row);
            let cached = noted(&[vec![clean(0, 7), row, clean(2, 9)]]);
            assert_eq!(cached.common(&[7, 8, 9, 10]), 1);
        }
        let mut scratch = clean(1, 5);
        scratch.keep = Keep::Scratch(0);
        assert_eq!(noted(&[vec![clean(0, 7), clean(1, 8)], vec![scratch]]).common(&[7, 8, 9]), 2, "scratch is no slot");
        assert_eq!(noted(&[vec![clean(0, 7), clean(2, 9)]]).common(&[7, 8, 9, 9]), 1, "nothing behind a gap");
    }
}
