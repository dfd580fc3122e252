//! Which schedule, how wide, and whether that fits the model: the one place where a schedule is made.

use std::fmt;
use std::str::FromStr;

use super::autoregressive::Autoregressive;
pub use super::packed::Anchors;
use super::packed::Packed;
use super::plan::CallPlan;
use super::prefill::Prefill;
use super::schedule::{Geometry, PREFILL_CHUNK, Schedule};
use super::segments::Drafter;
use super::two_call::TwoCall;
use crate::error::{Error, Result};
use crate::model::arch::{Anchor, DraftRules, VerifyRows};

/// A schedule without its widths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScheduleKind {
    /// One token per call; needs no drafter.
    Autoregressive,
    /// A draft call, then a verify call.
    TwoCall {
        /// Whether the draft call also carries the clean pending token, for one exact token more per round.
        seed_row: bool,
    },
    /// Every call verifies the last draft and makes the next.
    Packed {
        /// Where blocks are anchored: one is Packed-SS, every one is quadratic.
        anchors: Anchors,
        /// Whether blocks leave out their anchor's own row and see its verify row instead, whatever the checkpoint's rules
        /// say.
        shared: bool,
    },
}

impl ScheduleKind {
    /// Packed-SS.
    pub const PACKED: Self = Self::Packed { anchors: Anchors::Count(1), shared: false };

    /// The names that [`ScheduleKind::from_str`] understands.
    pub const NAMES: [&'static str; 7] =
        ["autoregressive", "two-call", "two-call-seed", "packed", "anchored", "quadratic", "quadratic-shared"];
}

impl FromStr for ScheduleKind {
    type Err = Error;

    /// Parses one of [`ScheduleKind::NAMES`]; `anchored` has two anchors.
    fn from_str(name: &str) -> Result<Self> {
        Ok(match name {
            "autoregressive" => Self::Autoregressive,
            "two-call" => Self::TwoCall { seed_row: false },
            "two-call-seed" => Self::TwoCall { seed_row: true },
            "packed" => Self::PACKED,
            "anchored" => Self::Packed { anchors: Anchors::Count(2), shared: false },
            "quadratic" => Self::Packed { anchors: Anchors::Every, shared: false },
            "quadratic-shared" => Self::Packed { anchors: Anchors::Every, shared: true },
            _ => {
                return Err(Error::InvalidOption(format!(
                    "unknown schedule \"{name}\"; the schedules are {}",
                    Self::NAMES.join(", ")
                )));
            }
        })
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Autoregressive => "autoregressive",
            Self::TwoCall { seed_row: false } => "two-call",
            Self::TwoCall { seed_row: true } => "two-call-seed",
            Self::Packed { anchors: Anchors::Count(0 | 1), .. } => "packed",
            Self::Packed { anchors: Anchors::Count(_), .. } => "anchored",
            Self::Packed { anchors: Anchors::Every, shared: false } => "quadratic",
            Self::Packed { anchors: Anchors::Every, shared: true } => "quadratic-shared",
        })
    }
}

/// What a caller may choose about decoding. Everything left out has a default that depends on the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ScheduleOptions {
    /// Default: packed where the model can draft, else autoregressive.
    pub kind: Option<ScheduleKind>,
    /// K, most draft tokens verified in one call, at least 1. Default: 4 with logit shift 1, 8 with shift 0. Says nothing
    /// to the autoregressive schedule.
    pub verify_width: Option<u32>,
    /// w, masks of a draft block, at least 1 (2 for one-call schedules and the seed row with logit shift 0). Default: 7
    /// with logit shift 1, 15 with shift 0. Says nothing to the autoregressive schedule.
    pub draft_width: Option<u32>,
}

/// [`ScheduleOptions`] with every default filled in and checked against the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resolved {
    /// The autoregressive schedule.
    Autoregressive {
        /// Which row is the target's.
        verify: VerifyRows,
    },
    /// A drafting schedule.
    Drafting {
        /// Two-call or packed.
        kind: ScheduleKind,
        /// How the model drafts, the schedule's own wishes applied.
        rules: DraftRules,
        /// K.
        verify_width: u32,
        /// w.
        draft_width: u32,
    },
}

impl Resolved {
    /// The schedule's kind.
    #[must_use]
    pub fn kind(&self) -> ScheduleKind {
        match self {
            Self::Autoregressive { .. } => ScheduleKind::Autoregressive,
            Self::Drafting { kind, .. } => *kind,
        }
    }
}

impl ScheduleOptions {
    /// Fills in the defaults and checks that the schedule's widest calls fit the model.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for a drafting schedule without drafter, for widths of 0 or too small to be of use, and for
    /// calls wider than `geometry`; [`Error::BadConfig`] for draft rules that contradict themselves.
    pub fn resolve(&self, rules: Option<DraftRules>, geometry: &Geometry) -> Result<Resolved> {
        let kind = self.kind.unwrap_or(if rules.is_some() { ScheduleKind::PACKED } else { ScheduleKind::Autoregressive });
        for (name, width) in [("verify", self.verify_width), ("draft", self.draft_width)] {
            if width == Some(0) {
                return invalid(format!("the {name} width is 0; it must be at least 1"));
            }
        }
        if let Some(rules) = &rules {
            check_rules(rules)?;
        }
        let rules = match (kind, rules) {
            (ScheduleKind::Autoregressive, rules) => {
                let resolved = Resolved::Autoregressive { verify: rules.map_or(VerifyRows::Clean, |rules| rules.verify) };
                Need::of(&resolved).check(geometry)?;
                return Ok(resolved);
            }
            (_, None) => {
                return invalid(format!(
                    "the schedule {kind} needs a drafter and this model has none: load a draft adapter with it, or choose the \
                     schedule autoregressive"
                ));
            }
            (ScheduleKind::Packed { shared: true, .. }, Some(rules)) => DraftRules { anchor: Anchor::Shared, ..rules },
            (_, Some(rules)) => rules,
        };
        if let ScheduleKind::Packed { anchors: Anchors::Count(0), .. } = kind {
            return invalid("the schedule has 0 anchors; it needs at least 1".into());
        }
        let (verify_width, draft_width) = if rules.logit_shift == 1 { (4, 7) } else { (8, 15) };
        let verify_width = self.verify_width.unwrap_or(verify_width);
        let draft_width = self.draft_width.unwrap_or(draft_width);
        let next_token_known = !matches!(kind, ScheduleKind::TwoCall { seed_row: false });
        if next_token_known && draft_width.saturating_add(rules.logit_shift) < 2 {
            return invalid(format!(
                "the draft width is {draft_width}, but with this model the schedule {kind} would never have a draft to verify; use at \
                 least 2"
            ));
        }
        let resolved = Resolved::Drafting { kind, rules, verify_width, draft_width };
        Need::of(&resolved).check(geometry)?;
        Ok(resolved)
    }
}

/// Makes the schedule for one prompt: hands back the state machine and its first call.
///
/// `rules` is how the model drafts ([`crate::model::program::Program::draft`]), `None` if it cannot.
///
/// # Errors
/// [`Error::InvalidOption`] for an empty prompt, one longer than the context or with an id outside the vocabulary; those
/// of [`ScheduleOptions::resolve`].
pub fn start(
    prompt: &[u32],
    rules: Option<DraftRules>,
    options: &ScheduleOptions,
    geometry: &Geometry,
) -> Result<(Box<dyn Schedule>, CallPlan)> {
    if prompt.is_empty() {
        return invalid("the prompt has no tokens; give at least one".into());
    }
    if prompt.len() > geometry.context as usize {
        return invalid(format!(
            "the prompt has {} tokens, but the context has {} positions; shorten the prompt or load the model with a longer context",
            prompt.len(),
            geometry.context
        ));
    }
    if let Some((i, id)) = prompt.iter().enumerate().find(|&(_, &id)| id as usize >= geometry.vocab_size) {
        return invalid(format!("token {i} of the prompt is id {id}, but the vocabulary has {} entries", geometry.vocab_size));
    }
    Ok(match options.resolve(rules, geometry)? {
        Resolved::Autoregressive { verify } => boxed(Prefill::start(prompt, Autoregressive::new(verify, geometry.context))),
        Resolved::Drafting { kind, rules, verify_width, draft_width } => {
            let drafter = Drafter { rules, width: draft_width };
            match kind {
                ScheduleKind::Packed { anchors, .. } => {
                    boxed(Prefill::start(prompt, Packed::new(drafter, anchors, verify_width, geometry.context)))
                }
                ScheduleKind::TwoCall { seed_row } => {
                    boxed(Prefill::start(prompt, TwoCall::new(drafter, seed_row, verify_width, geometry.context)))
                }
                ScheduleKind::Autoregressive => {
                    boxed(Prefill::start(prompt, Autoregressive::new(rules.verify, geometry.context)))
                }
            }
        }
    })
}

fn boxed(started: (impl Schedule + 'static, CallPlan)) -> (Box<dyn Schedule>, CallPlan) {
    (Box::new(started.0), started.1)
}

fn invalid<T>(what: String) -> Result<T> {
    Err(Error::InvalidOption(what))
}

/// Refuses draft rules that no plan can express.
fn check_rules(rules: &DraftRules) -> Result<()> {
    let refuse = |what: &str| Err(Error::BadConfig(format!("draft rules: {what}")));
    match rules {
        DraftRules { logit_shift: 2.., .. } => refuse("logit_shift must be 0 or 1"),
        DraftRules { verify: VerifyRows::Mask, logit_shift: 1, .. } => {
            refuse("mask rows that verify predict their own position, so logit_shift must be 0")
        }
        DraftRules { verify: VerifyRows::Mask, anchor: Anchor::InBlock, .. } => {
            refuse("with mask rows that verify, the anchor's clean row is shared; it cannot stand in the block")
        }
        DraftRules { verify: VerifyRows::Mask, bidirectional: true, .. } => {
            refuse("with mask rows that verify, masks do not see each other; bidirectional must be false")
        }
        DraftRules { anchor: Anchor::InBlock, bidirectional: false, .. } => {
            refuse("an anchor inside the block is seen only if the block is bidirectional")
        }
        _ => Ok(()),
    }
}

/// The widest calls of a schedule. Saturates instead of overflowing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Need {
    /// Rows of a call after the prompt.
    decode_rows: u64,
    /// Rows that a prefill call has beside prompt rows.
    beside_prompt: u64,
    /// Rows that choose.
    choose: u64,
    /// Scratch slots.
    scratch: u64,
}

impl Need {
    fn of(resolved: &Resolved) -> Self {
        let (kind, rules, k, w) = match *resolved {
            Resolved::Autoregressive { verify } => {
                let mask = u64::from(verify == VerifyRows::Mask);
                return Self { decode_rows: 1 + mask, beside_prompt: mask, choose: 1, scratch: mask };
            }
            Resolved::Drafting { kind, rules, verify_width, draft_width } => (kind, rules, verify_width, draft_width),
        };
        let block = u64::from(Drafter { rules, width: w }.rows());
        let mask = u64::from(rules.verify == VerifyRows::Mask);
        let verify = 1 + u64::from(k);
        let read = u64::from(k).min(u64::from(w) + u64::from(rules.logit_shift));
        match kind {
            ScheduleKind::Packed { anchors, .. } => {
                let blocks = match anchors {
                    Anchors::Count(count) => u64::from(count).min(verify),
                    Anchors::Every => verify,
                };
                // A block's head rows: K, and one more for every acceptance between its anchor and the next.
                let between = verify - blocks;
                let heads = blocks.saturating_mul(block).min(blocks.saturating_mul(u64::from(k)).saturating_add(between));
                Self {
                    decode_rows: verify * (1 + mask) + blocks.saturating_mul(block),
                    beside_prompt: mask + block,
                    choose: verify + heads,
                    scratch: mask * verify + blocks.saturating_mul(block),
                }
            }
            _ => Self {
                decode_rows: (verify * (1 + mask)).max(1 + mask + block),
                beside_prompt: mask,
                choose: verify.max(1 + read),
                scratch: (mask * verify).max(mask + block),
            },
        }
    }

    fn check(&self, geometry: &Geometry) -> Result<()> {
        let chunk = u64::from(geometry.context).min(PREFILL_CHUNK as u64);
        let advice = "use a smaller verify width or draft width, or fewer anchors";
        let bounds = [
            ("rows", self.decode_rows, geometry.max_rows as u64),
            ("rows, a prompt chunk among them,", chunk + self.beside_prompt, geometry.max_rows as u64),
            ("rows that choose a token", self.choose, geometry.max_choose as u64),
            ("scratch slots", self.scratch, u64::from(geometry.scratch)),
        ];
        for (what, need, have) in bounds {
            if need > have {
                return invalid(format!(
                    "the schedule's widest call needs {need} {what}, but this model was set up for {have}; {advice}"
                ));
            }
        }
        Ok(())
    }
}
