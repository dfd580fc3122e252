//! Rotary frequencies, in f64; every backend's tables come from them.
//!
//! Half-split order: dimension `i` of a head pairs with `i + Dh / 2`, `i` in `0..Dh/2`, and both turn by `position * inv_freq[i]`.

use std::f64::consts::PI;

use super::arch::{Rope, RopeScaling};

/// Angle per position of each pair `[Dh / 2]`, in radians.
///
/// Formulas as transformers defines them (`modeling_rope_utils`).
#[must_use]
pub fn inv_freq(rope: &Rope, head_dim: usize) -> Vec<f64> {
    let dim = head_dim as f64;
    let plain = |i: usize| rope.theta.powf(-2.0 * i as f64 / dim);
    let scaled = |i: usize| -> f64 {
        let f = plain(i);
        match rope.scaling {
            RopeScaling::Default => f,
            RopeScaling::Linear { factor } => f / factor,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => {
                let wavelength = 2.0 * PI / f;
                if wavelength < original / high_freq_factor {
                    f
                } else if wavelength > original / low_freq_factor {
                    f / factor
                } else {
                    let smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * f / factor + smooth * f
                }
            }
            RopeScaling::Yarn { factor, original, beta_fast, beta_slow, truncate, .. } => {
                // The dimension whose pair turns `r` times within the original context.
                let turns = |r: f64| dim * (original / (r * 2.0 * PI)).ln() / (2.0 * rope.theta.ln());
                let (mut low, mut high) = (turns(beta_fast), turns(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(dim - 1.0));
                if low == high {
                    high += 0.001;
                }
                let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                f / factor * ramp + f * (1.0 - ramp)
            }
        }
    };
    (0..head_dim / 2).map(scaled).collect()
}

/// What cos and sin are multiplied by: YaRN's attention factor, 1 elsewhere.
#[must_use]
pub fn attention_factor(scaling: &RopeScaling) -> f64 {
    match scaling {
        RopeScaling::Yarn { attention_factor, .. } => *attention_factor,
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yarn(theta: f64, factor: f64) -> Vec<f64> {
        let scaling = RopeScaling::Yarn {
            factor,
            original: 16384.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 1.0,
            truncate: true,
        };
        inv_freq(&Rope { theta, scaling }, 128)
    }

    const AT: [usize; 9] = [0, 1, 10, 20, 25, 30, 37, 50, 63];

    /// Largest relative error against seven-digit check values.
    fn error(got: &[f64], want: &[f64; 9]) -> f64 {
        AT.iter().zip(want).map(|(&i, w)| (got[i] / w - 1.0).abs()).fold(0.0, f64::max)
    }

    const LONG: [f64; 9] =
        [1.0, 0.8058422, 0.1154782, 0.01333521, 3.282066e-3, 6.907023e-4, 2.12388e-5, 1.283453e-6, 7.755861e-8];
    const LARGE_BASE: [f64; 9] =
        [1.0, 0.7233942, 0.0392419, 6.977792e-4, 1.90658e-5, 3.776852e-6, 3.91521e-7, 5.816075e-9, 8.639826e-11];
    const SHORT: [f64; 9] = [1.0, 0.8058422, 0.1154782, 0.01333521, 8.53004e-3, 4.257444e-3, 1.359283e-3, 8.2141e-5, 4.963751e-6];

    #[test]
    fn yarn_matches_the_check_values_of_three_checkpoints() {
        assert!(error(&yarn(1e6, 16.0), &LONG) < 1e-6);
        assert!(error(&yarn(1e9, 16.0), &LARGE_BASE) < 1e-6);
        assert!(error(&yarn(1e6, 0.25), &SHORT) < 1e-6);
        assert!(error(&yarn(1e6, 15.9), &LONG) > 1e-3, "the check must see a wrong factor");
    }

    #[test]
    fn llama3_leaves_short_waves_and_stretches_long_ones() {
        let scaling = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original: 8192.0 };
        let (plain, got) =
            (inv_freq(&Rope { theta: 5e5, scaling: RopeScaling::Default }, 128), inv_freq(&Rope { theta: 5e5, scaling }, 128));
        let ratio: Vec<f64> = plain.iter().zip(&got).map(|(p, g)| p / g).collect();
        assert!(ratio[..20].iter().all(|r| *r == 1.0) && ratio[40..].iter().all(|r| (*r - 8.0).abs() < 1e-12));
        assert!(ratio.windows(2).all(|w| w[0] <= w[1] + 1e-12), "the stretch grows with the wavelength");
        // Between the bounds: wavelength 2 pi / f, smooth = (8192 / wavelength - 1) / 3.
        let i = (0..64).find(|&i| ratio[i] > 1.0).unwrap_or(0);
        let smooth = (8192.0 * plain[i] / (2.0 * PI) - 1.0) / 3.0;
        assert!((got[i] - plain[i] * (smooth + (1.0 - smooth) / 8.0)).abs() < 1e-15);
    }

    #[test]
    fn linear_divides() {
        let rope = |scaling| inv_freq(&Rope { theta: 1e4, scaling }, 8);
        let (plain, stretched) = (rope(RopeScaling::Default), rope(RopeScaling::Linear { factor: 4.0 }));
        assert!(plain.iter().zip(&stretched).all(|(p, s)| *p == s * 4.0));
        assert_eq!(plain.len(), 4);
        assert!((plain[1] - 0.1).abs() < 1e-15);
    }
}
