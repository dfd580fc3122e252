//! Per row of `Logits`: the largest entry (smallest id among equals) and its softmax probability.

use crate::decode::plan::Choice;

/// Twin for one row `[V]`. `banned` is never chosen and does not count in the softmax. Entries that are not a number are
/// never chosen either; they make the probability NaN.
#[must_use]
pub fn argmax<T: Copy + Into<f64>>(logits: &[T], banned: Option<u32>) -> Choice {
    let allowed = || logits.iter().enumerate().filter(|(id, _)| Some(*id as u32) != banned);
    let (mut token, mut largest) = (None, f64::NEG_INFINITY);
    for (id, &value) in allowed() {
        let value: f64 = value.into();
        if value > largest || token.is_none() && !value.is_nan() {
            (token, largest) = (Some(id), value);
        }
    }
    let mut total = 0.0;
    for (_, &value) in allowed() {
        total += (value.into() - largest).exp();
    }
    Choice { token: token.unwrap_or(0) as u32, probability: (1.0 / total) as f32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn largest_smallest_id_and_probability_by_hand() {
        let ln = f32::ln;
        let logits = [ln(1.0), ln(3.0), ln(6.0), ln(6.0)];
        let choice = argmax(&logits, None);
        assert_eq!(choice.token, 2, "the smallest id among equals");
        assert!((choice.probability - 6.0 / 16.0).abs() < 1e-6);
        let choice = argmax(&logits, Some(2));
        assert_eq!(choice.token, 3);
        assert!((choice.probability - 0.6).abs() < 1e-6, "a banned id does not count");
        // Control: a larger last entry wins.
        assert_eq!(argmax(&[0f32, 1.0, 1.5], None).token, 2);
    }

    #[test]
    fn a_nan_is_not_chosen() {
        let choice = argmax(&[f32::NAN, 1.0, 2.0], None);
        assert_eq!(choice.token, 2);
        assert!(choice.probability.is_nan());
    }
}
