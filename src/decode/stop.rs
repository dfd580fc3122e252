//! When a text ends: end ids and the budget, once, for all schedules. Stop strings belong to the text room.

use crate::error::{Error, Result};

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// An end id (or, when the caller says so, a stop string).
    Stop,
    /// The budget is spent.
    Length,
    /// The context is full.
    Context,
    /// Whoever asked for the text stopped it.
    Aborted,
}

impl FinishReason {
    /// The name in JSON: `stop`, `length`, `context` or `aborted`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Context => "context",
            Self::Aborted => "aborted",
        }
    }
}

/// When to stop.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StopRules {
    /// Ids that end the text. The one that did is its last token.
    pub end_ids: Vec<u32>,
    /// Whether end ids are ordinary tokens.
    pub ignore_eos: bool,
    /// Exactly how many tokens to emit unless something else ends the text; `None` for as many as the context holds.
    pub max_tokens: Option<usize>,
}

/// [`StopRules`] applied to a text as it is committed.
#[derive(Debug)]
pub(super) struct Stop {
    rules: StopRules,
    emitted: usize,
}

impl Stop {
    /// # Errors
    /// [`Error::InvalidOption`] for a budget of 0.
    pub fn new(rules: StopRules) -> Result<Self> {
        if rules.max_tokens == Some(0) {
            return Err(Error::option("max_tokens", "max tokens is 0; ask for at least 1"));
        }
        Ok(Self { rules, emitted: 0 })
    }

    /// Cuts what a call committed behind the token that ends the text, if one does.
    pub fn cut(&mut self, committed: &mut Vec<u32>) -> Option<FinishReason> {
        for (i, token) in committed.iter().enumerate() {
            self.emitted += 1;
            let ended = !self.rules.ignore_eos && self.rules.end_ids.contains(token);
            let spent = self.rules.max_tokens.is_some_and(|most| self.emitted >= most);
            if ended || spent {
                committed.truncate(i + 1);
                return Some(if ended { FinishReason::Stop } else { FinishReason::Length });
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(rules: &StopRules, steps: &[&[u32]]) -> (Vec<u32>, Option<FinishReason>) {
        let (mut stop, mut text) = (Stop::new(rules.clone()).unwrap(), Vec::new());
        for step in steps {
            let mut committed = step.to_vec();
            let reason = stop.cut(&mut committed);
            text.extend(committed);
            if reason.is_some() {
                return (text, reason);
            }
        }
        (text, None)
    }

    #[test]
    fn cuts_inside_a_run() {
        let rules = |end_ids: &[u32], ignore_eos, max_tokens| StopRules { end_ids: end_ids.to_vec(), ignore_eos, max_tokens };
        let run: &[&[u32]] = &[&[1], &[2, 3, 4], &[5, 6]];
        assert_eq!(cut(&rules(&[], false, Some(3)), run), (vec![1, 2, 3], Some(FinishReason::Length)));
        assert_eq!(cut(&rules(&[3, 9], false, Some(9)), run), (vec![1, 2, 3], Some(FinishReason::Stop)));
        assert_eq!(cut(&rules(&[3], false, Some(3)), run), (vec![1, 2, 3], Some(FinishReason::Stop)), "both: the text is whole");
        assert_eq!(cut(&rules(&[3], true, Some(5)), run), (vec![1, 2, 3, 4, 5], Some(FinishReason::Length)));
        assert_eq!(cut(&rules(&[7], false, None), run), (vec![1, 2, 3, 4, 5, 6], None));
        assert_eq!(Stop::new(rules(&[], false, Some(0))).unwrap_err().code(), "InvalidOption");
    }
}
