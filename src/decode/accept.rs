//! The one place where drafts are accepted.

use super::plan::Choice;
use crate::error::{Error, Result};

/// What verifying a draft brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Accepted {
    /// a: how many tokens of the draft became text.
    pub count: usize,
    /// d[1..=a].
    pub draft: Vec<u32>,
    /// y[a]: the target's own choice behind them, always text.
    pub bonus: u32,
}

impl Accepted {
    /// Everything that became text: d[1..=a], y[a].
    pub fn committed(&self) -> Vec<u32> {
        let mut tokens = self.draft.clone();
        tokens.push(self.bonus);
        tokens
    }
}

/// Accepts the longest `a` with `d[i] == y[i-1]` for `i = 1..=a`. `draft` is d[1..=m]; `target` is y[0..=m], where y[i]
/// is the target's choice after d[1..=i].
///
/// # Errors
/// [`Error::Internal`] unless there is one choice more than drafted tokens.
pub(super) fn accept(draft: &[Choice], target: &[Choice]) -> Result<Accepted> {
    let count = draft.iter().zip(target).take_while(|(d, y)| d.token == y.token).count();
    match target.get(count) {
        Some(bonus) if target.len() == draft.len() + 1 => {
            Ok(Accepted { count, draft: draft.iter().take(count).map(|d| d.token).collect(), bonus: bonus.token })
        }
        _ => Err(Error::Internal(format!("{} verify rows for {} drafted tokens", target.len(), draft.len()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices(tokens: &[u32]) -> Vec<Choice> {
        tokens.iter().map(|&token| Choice { token, probability: 0.5 }).collect()
    }

    #[test]
    fn accepts_up_to_the_first_difference_and_adds_the_targets_token() {
        let target = choices(&[5, 6, 7, 8]);
        for (draft, count, committed) in
            [(&[5, 6, 7][..], 3, &[5, 6, 7, 8][..]), (&[5, 6, 9], 2, &[5, 6, 7]), (&[9, 6, 7], 0, &[5]), (&[5, 9, 7], 1, &[5, 6])]
        {
            let accepted = accept(&choices(draft), &target).unwrap();
            assert_eq!((accepted.count, accepted.committed()), (count, committed.to_vec()));
        }
        assert_eq!(accept(&[], &choices(&[3])).unwrap().committed(), [3]);
        assert!(accept(&choices(&[5]), &choices(&[5])).is_err(), "the bonus row is missing");
        assert!(accept(&choices(&[5]), &choices(&[5, 6, 7])).is_err(), "a row too many");
    }
}
