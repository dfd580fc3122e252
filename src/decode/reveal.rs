//! The one place where masks become tokens: which of a block's guesses are taken over.

use super::plan::Choice;

/// When masks are revealed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Reveal {
    /// Guesses this probable are taken over together; `None` for the even schedule of `steps` alone.
    pub threshold: Option<f32>,
    /// Whether a probability equal to the threshold is not enough.
    pub strict: bool,
    /// In how many steps a block is to be filled at most; `None` for at least one mask a step.
    pub steps: Option<u32>,
}

impl Reveal {
    /// How many of a block's `count` tokens step `step` (from 0) reveals at least, never none: equal shares, what does not
    /// divide in the first steps.
    pub fn least(&self, count: u32, step: u32) -> usize {
        let Some(steps) = self.steps.filter(|&steps| steps > 0) else { return 1 };
        let share = count / steps + u32::from(step < count % steps);
        share.max(1) as usize
    }

    /// Which of `guesses`, given by rising position, are taken over, as indices into them, rising: all that are probable
    /// enough if there are `least` of them, else the `least` most probable (the first among equals). None only where there
    /// are no guesses.
    pub fn choose(&self, guesses: &[Choice], least: usize) -> Vec<usize> {
        let enough = |p: f32| self.threshold.is_some_and(|t| if self.strict { p > t } else { p >= t });
        let sure: Vec<usize> = (0..guesses.len()).filter(|&i| guesses.get(i).is_some_and(|g| enough(g.probability))).collect();
        let least = least.clamp(1, guesses.len().max(1));
        if sure.len() >= least {
            return sure;
        }
        // What is not a number is the last resort.
        let worth = |g: &Choice| if g.probability.is_nan() { -1.0 } else { g.probability };
        let mut by_worth: Vec<(usize, f32)> = guesses.iter().map(worth).enumerate().collect();
        by_worth.sort_by(|a, b| b.1.total_cmp(&a.1));
        let mut best: Vec<usize> = by_worth.into_iter().take(least).map(|(i, _)| i).collect();
        best.sort_unstable();
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guesses(p: &[f32]) -> Vec<Choice> {
        p.iter().map(|&probability| Choice { token: 1, probability }).collect()
    }

    #[test]
    fn the_sure_ones_together_else_the_best() {
        let rule = |threshold, strict, steps| Reveal { threshold, strict, steps };
        let all = |rule: Reveal, p: &[f32], least| rule.choose(&guesses(p), least);
        let usual = rule(Some(0.9), false, None);
        assert_eq!(all(usual, &[0.5, 0.9, 0.3, 0.95], 1), [1, 3]);
        assert_eq!(all(rule(Some(0.9), true, None), &[0.5, 0.9, 0.3, 0.95], 1), [3], "equal is not above");
        assert_eq!(all(usual, &[0.5, 0.7, 0.7], 1), [1], "never none; the first among equals");
        assert_eq!(all(rule(Some(1.0), true, None), &[1.0, 1.0], 1), [0]);
        assert_eq!(all(usual, &[0.5, 0.95, 0.6, 0.1], 2), [1, 2], "one is sure, two are due");
        assert_eq!(all(usual, &[0.95, 0.95, 0.95], 2), [0, 1, 2], "two are due, three are sure");
        assert_eq!(all(rule(None, false, Some(2)), &[0.99, 0.98, 0.97], 2), [0, 1]);
        assert_eq!(all(usual, &[0.5, 0.4], 5), [0, 1], "no more than there are");
        assert_eq!(all(usual, &[f32::NAN, 0.1], 1), [1]);
        assert!(all(usual, &[], 1).is_empty());
    }

    #[test]
    fn shares_add_up_and_the_remainder_comes_first() {
        let least = |steps, count| -> Vec<usize> {
            let rule = Reveal { threshold: None, strict: false, steps: Some(steps) };
            (0..steps).map(|step| rule.least(count, step)).collect()
        };
        assert_eq!(least(3, 8), [3, 3, 2]);
        assert_eq!(least(4, 8), [2, 2, 2, 2]);
        assert_eq!(least(8, 7), [1, 1, 1, 1, 1, 1, 1, 1], "never none");
        assert_eq!(Reveal { threshold: None, strict: false, steps: None }.least(8, 0), 1);
    }
}
