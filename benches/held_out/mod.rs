//! The held-out prompts that benches decode, and how they end.

use std::path::Path;

use forecall::{Error, Result};

/// A prompt of `tests/data/heldout_prompts.json`.
#[derive(serde::Deserialize)]
pub struct HeldOut {
    /// Its kind.
    #[allow(dead_code, reason = "not every bench names the kinds")]
    pub category: String,
    /// Its token ids.
    pub prompt_ids: Vec<u32>,
}

/// `count` prompts (one at least, and no more than there are) spread evenly over the list, so that kinds mix.
///
/// # Errors
/// [`Error::Fetch`] if the list cannot be read.
pub fn spread(root: &Path, count: usize) -> Result<Vec<HeldOut>> {
    let bytes = std::fs::read(root.join("tests/data/heldout_prompts.json")).map_err(|e| Error::Fetch(e.to_string()))?;
    let all: Vec<HeldOut> = serde_json::from_slice(&bytes).map_err(|e| Error::Fetch(e.to_string()))?;
    let (count, len) = (count.clamp(1, all.len().max(1)), all.len());
    let chosen: std::collections::BTreeSet<usize> = (0..count).map(|i| i * len / count).collect();
    Ok(all.into_iter().enumerate().filter(|(i, _)| chosen.contains(i)).map(|(_, prompt)| prompt).collect())
}

/// A bench's options, `--name value` each, in order.
///
/// # Errors
/// [`Error::InvalidOption`] for a name without a value, and whatever `take` says of an option.
pub fn options(mut take: impl FnMut(&str, &str) -> Result<()>) -> Result<()> {
    // Cargo itself passes `--bench`.
    let mut words = std::env::args().skip(1).filter(|word| word != "--bench");
    while let Some(name) = words.next() {
        let value = words.next().ok_or_else(|| Error::InvalidOption(format!("{name} needs a value")))?;
        take(&name, &value)?;
    }
    Ok(())
}

/// The number an option was given.
///
/// # Errors
/// [`Error::InvalidOption`] if it is none.
pub fn number(name: &str, value: &str) -> Result<usize> {
    value.parse().map_err(|e| Error::InvalidOption(format!("{name} {value}: {e}")))
}

/// A bench's end: what failed goes to stderr.
pub fn exit(outcome: Result<()>) -> std::process::ExitCode {
    match outcome {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}
