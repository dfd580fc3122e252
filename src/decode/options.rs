//! Which schedule, how wide, and whether that fits the model: the one place where a schedule is made.

use std::fmt;
use std::str::FromStr;

use super::autoregressive::Autoregressive;
use super::block_diffusion::BlockDiffusion;
pub use super::packed::Anchors;
use super::packed::Packed;
use super::plan::CallPlan;
use super::prefill::Prefill;
use super::reveal::Reveal;
use super::schedule::{Geometry, PREFILL_CHUNK, Schedule};
use super::segments::Drafter;
use super::two_call::TwoCall;
use super::window_diffusion::WindowDiffusion;
use crate::error::{Error, Result};
use crate::model::arch::{Anchor, DiffusionLayout, DiffusionRules, DraftRules, ModelRules, VerifyRows};

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
    /// Blocks, or a window, filled mask by mask as the checkpoint's own diffusion decoder does. Not lossless.
    BlockDiffusion,
}

impl ScheduleKind {
    /// Packed-SS.
    pub const PACKED: Self = Self::Packed { anchors: Anchors::Count(1), shared: false };

    /// The names that [`ScheduleKind::from_str`] understands.
    pub const NAMES: [&'static str; 8] =
        ["autoregressive", "two-call", "two-call-seed", "packed", "anchored", "quadratic", "quadratic-shared", "block-diffusion"];

    /// Those whose text is the target's own.
    pub const LOSSLESS: [&'static str; 7] =
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
            "block-diffusion" => Self::BlockDiffusion,
            _ => {
                return invalid("schedule", format!("unknown schedule \"{name}\"; the schedules are {}", Self::NAMES.join(", ")));
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
            Self::BlockDiffusion => "block-diffusion",
        })
    }
}

/// What a caller may choose about block diffusion, and about nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct BlockOptions {
    /// L, tokens of a block or positions of the window, at least 1. Default: the checkpoint's own.
    pub length: Option<u32>,
    /// Guesses this probable are taken over together, from 0; above 1 none is. Default: the checkpoint's own, or none where
    /// only `steps` is given.
    pub threshold: Option<f32>,
    /// Steps that fill a block at most, 1 to L: each takes over at least an equal share. Default: at least one token a step.
    pub steps: Option<u32>,
}

/// What a caller may choose about decoding. Everything left out has a default that depends on the model.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ScheduleOptions {
    /// Default: block diffusion for checkpoints that were trained for nothing else, packed where the model can draft, else
    /// autoregressive.
    pub kind: Option<ScheduleKind>,
    /// K, most draft tokens verified in one call, at least 1. Default: 4 with logit shift 1, 8 with shift 0, 3 where w is 7
    /// or less for want of reach. Says nothing to schedules that do not draft.
    pub verify_width: Option<u32>,
    /// w, masks of a draft block, at least 1 (2 for one-call schedules and the seed row with logit shift 0). Default: 7
    /// with logit shift 1, 15 with shift 0, below the checkpoint's reach ([`ModelRules::horizon`]) in any case. Says nothing
    /// to schedules that do not draft.
    pub draft_width: Option<u32>,
    /// Of block diffusion.
    pub block: BlockOptions,
}

/// [`ScheduleOptions`] with every default filled in and checked against the model.
#[derive(Debug, Clone, Copy, PartialEq)]
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
    /// Block diffusion.
    Diffusion {
        /// How the model does it.
        rules: DiffusionRules,
        /// L.
        block_length: u32,
        /// The threshold, if there is one.
        threshold: Option<f32>,
        /// Most steps a block, if that was asked for.
        steps: Option<u32>,
    },
}

impl Resolved {
    /// The schedule's kind.
    #[must_use]
    pub fn kind(&self) -> ScheduleKind {
        match self {
            Self::Autoregressive { .. } => ScheduleKind::Autoregressive,
            Self::Drafting { kind, .. } => *kind,
            Self::Diffusion { .. } => ScheduleKind::BlockDiffusion,
        }
    }

    /// Rows of the widest call after the prompt; saturates.
    #[must_use]
    pub fn decode_rows(&self) -> usize {
        usize::try_from(Need::of(self).decode_rows).unwrap_or(usize::MAX)
    }
}

impl ScheduleOptions {
    /// Fills in the defaults and checks that the schedule's widest calls fit the model.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for a drafting schedule without drafter, for widths of 0 or too small to be of use, and for
    /// calls wider than `geometry`, for block diffusion with a model that was not made for it, other schedules with one that
    /// was made for nothing else, and options of block diffusion beside another schedule; [`Error::BadConfig`] for draft rules
    /// that contradict themselves.
    pub fn resolve(&self, rules: impl Into<ModelRules>, geometry: &Geometry) -> Result<Resolved> {
        let ModelRules { draft: rules, diffusion, horizon } = rules.into();
        let only = diffusion.is_some_and(|diffusion| diffusion.only);
        let kind = self.kind.unwrap_or(match rules {
            _ if only => ScheduleKind::BlockDiffusion,
            Some(_) => ScheduleKind::PACKED,
            None => ScheduleKind::Autoregressive,
        });
        for (option, name, width) in [("verify_width", "verify", self.verify_width), ("draft_width", "draft", self.draft_width)] {
            if width == Some(0) {
                return invalid(option, format!("the {name} width is 0; it must be at least 1"));
            }
        }
        if let Some(rules) = &rules {
            check_rules(rules)?;
        }
        if kind == ScheduleKind::BlockDiffusion {
            return self.block.resolve(diffusion, geometry);
        }
        if only {
            return invalid(
                "schedule",
                format!(
                    "the schedule {kind} needs a model that predicts the next token from causal rows, and this one was trained to fill \
                 blocks only; choose the schedule block-diffusion, its default"
                ),
            );
        }
        if let Some(option) = self.block.given() {
            return invalid(
                option,
                format!(
                    "a block length, a threshold or steps were given, which only the schedule block-diffusion takes; the schedule is {kind}"
                ),
            );
        }
        let rules = match (kind, rules) {
            (ScheduleKind::Autoregressive, rules) => {
                let resolved = Resolved::Autoregressive { verify: rules.map_or(VerifyRows::Clean, |rules| rules.verify) };
                Need::of(&resolved).check(geometry, "schedule")?;
                return Ok(resolved);
            }
            (_, None) => {
                return invalid(
                    "schedule",
                    format!(
                        "the schedule {kind} needs a drafter and this model has none: load a draft adapter with it, or choose the \
                     schedule autoregressive"
                    ),
                );
            }
            (ScheduleKind::Packed { shared: true, .. }, Some(rules)) => DraftRules { anchor: Anchor::Shared, ..rules },
            (_, Some(rules)) => rules,
        };
        if let ScheduleKind::Packed { anchors: Anchors::Count(0), .. } = kind {
            return invalid("anchors", "the schedule has 0 anchors; it needs at least 1");
        }
        let (verify_width, draft_width) = match (rules.logit_shift, horizon) {
            (1, _) => (4, 7),
            // w below the reach, and K as far as full drafts go with it.
            (_, Some(reach)) if reach <= 15 => ((reach / 2).saturating_sub(1).max(1), reach.saturating_sub(1).max(2)),
            _ => (8, 15),
        };
        let verify_width = self.verify_width.unwrap_or(verify_width);
        let draft_width = self.draft_width.unwrap_or(draft_width);
        let next_token_known = !matches!(kind, ScheduleKind::TwoCall { seed_row: false });
        if next_token_known && draft_width.saturating_add(rules.logit_shift) < 2 {
            return invalid(
                "draft_width",
                format!(
                    "the draft width is {draft_width}, but with this model the schedule {kind} would never have a draft to verify; use at \
                 least 2"
                ),
            );
        }
        let resolved = Resolved::Drafting { kind, rules, verify_width, draft_width };
        let option = match (self.draft_width, self.verify_width) {
            (Some(_), _) => "draft_width",
            (None, Some(_)) => "verify_width",
            (None, None) => "schedule",
        };
        Need::of(&resolved).check(geometry, option)?;
        Ok(resolved)
    }
}

impl BlockOptions {
    /// The name of one that was given, if any was.
    fn given(&self) -> Option<&'static str> {
        let given = [self.length.map(|_| "block_length"), self.threshold.map(|_| "threshold"), self.steps.map(|_| "steps")];
        given.into_iter().flatten().next()
    }

    fn resolve(&self, rules: Option<DiffusionRules>, geometry: &Geometry) -> Result<Resolved> {
        let Some(rules) = rules else {
            return invalid(
                "schedule",
                "the schedule block-diffusion needs a checkpoint that was made for it, such as Nemotron-Labs-Diffusion, SetDLM, SDAR \
                 or Fast-dLLM v2; choose the schedule autoregressive",
            );
        };
        let block_length = self.length.unwrap_or(rules.block_length);
        if block_length == 0 {
            return invalid("block_length", "the block length is 0; it must be at least 1");
        }
        if let Some(threshold) = self.threshold
            && (threshold.is_nan() || threshold < 0.0)
        {
            return invalid(
                "threshold",
                format!("the threshold is {threshold}; it must be a probability from 0 on (above 1 none is enough)"),
            );
        }
        if let Some(steps) = self.steps {
            if rules.layout == DiffusionLayout::Window {
                return invalid(
                    "steps",
                    format!("{steps} steps were given, but with this model a window slides and no block is filled in steps"),
                );
            }
            if steps == 0 || steps > block_length {
                return invalid(
                    "steps",
                    format!("{steps} steps were given for a block of {block_length}; use 1 to {block_length}"),
                );
            }
        }
        let threshold = match (self.threshold, self.steps) {
            (None, None) => Some(rules.threshold),
            (threshold, _) => threshold,
        };
        let resolved = Resolved::Diffusion { rules, block_length, threshold, steps: self.steps };
        Need::of(&resolved).check(geometry, "block_length")?;
        Ok(resolved)
    }
}

/// Makes the schedule for one prompt: hands back the state machine and its first call.
///
/// The prompt's first `cached` tokens are in the cache already ([`super::CachedPrefix::common`]); the last one never counts, and block
/// diffusion takes no notice of them.
/// `rules` is what the model can do ([`crate::model::program::Program::rules`]), or how it drafts, `None` if it cannot.
///
/// # Errors
/// [`Error::InvalidOption`] for an empty prompt, one longer than the context or with an id outside the vocabulary; those
/// of [`ScheduleOptions::resolve`].
pub fn start(
    prompt: &[u32],
    cached: usize,
    rules: impl Into<ModelRules>,
    options: &ScheduleOptions,
    geometry: &Geometry,
) -> Result<(Box<dyn Schedule>, CallPlan)> {
    if prompt.is_empty() {
        return invalid("prompt", "the prompt has no tokens; give at least one");
    }
    if prompt.len() > geometry.context as usize {
        return invalid(
            "prompt",
            format!(
                "the prompt has {} tokens, but the context has {} positions; shorten the prompt or load the model with a longer context",
                prompt.len(),
                geometry.context
            ),
        );
    }
    if let Some((i, id)) = prompt.iter().enumerate().find(|&(_, &id)| id as usize >= geometry.vocab_size) {
        return invalid(
            "prompt",
            format!("token {i} of the prompt is id {id}, but the vocabulary has {} entries", geometry.vocab_size),
        );
    }
    Ok(match options.resolve(rules, geometry)? {
        Resolved::Autoregressive { verify } => {
            boxed(Prefill::start(prompt, cached, Autoregressive::new(verify, geometry.context)))
        }
        Resolved::Drafting { kind, rules, verify_width, draft_width } => {
            let drafter = Drafter { rules, width: draft_width };
            match kind {
                ScheduleKind::Packed { anchors, .. } => {
                    boxed(Prefill::start(prompt, cached, Packed::new(drafter, anchors, verify_width, geometry.context)))
                }
                ScheduleKind::TwoCall { seed_row } => {
                    boxed(Prefill::start(prompt, cached, TwoCall::new(drafter, seed_row, verify_width, geometry.context)))
                }
                ScheduleKind::Autoregressive | ScheduleKind::BlockDiffusion => {
                    boxed(Prefill::start(prompt, cached, Autoregressive::new(rules.verify, geometry.context)))
                }
            }
        }
        Resolved::Diffusion { rules, block_length, threshold, steps } => {
            let reveal = Reveal { threshold, strict: rules.strict, steps };
            match rules.layout {
                DiffusionLayout::Window => {
                    boxed(Prefill::start(prompt, 0, WindowDiffusion::new(block_length, reveal, geometry.context)))
                }
                _ => boxed(BlockDiffusion::start(prompt, rules, block_length, reveal, geometry.context)?),
            }
        }
    })
}

fn boxed(started: (impl Schedule + 'static, CallPlan)) -> (Box<dyn Schedule>, CallPlan) {
    (Box::new(started.0), started.1)
}

fn invalid<T>(option: &'static str, what: impl Into<String>) -> Result<T> {
    Err(Error::option(option, what))
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
            Resolved::Diffusion { rules, block_length, .. } => {
                let block = u64::from(block_length);
                // A block's rows beside the kept rows of the one before; a window's masks beside what the last call revealed.
                return Self {
                    decode_rows: 2 * block,
                    beside_prompt: block,
                    choose: block.saturating_sub(u64::from(rules.layout == DiffusionLayout::Seeded)).max(1),
                    scratch: block,
                };
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
                let drafts = blocks.saturating_mul(block);
                let heads = drafts.min(blocks.saturating_mul(u64::from(k)).saturating_add(between));
                Self {
                    decode_rows: (verify * (1 + mask)).saturating_add(drafts),
                    beside_prompt: mask + block,
                    choose: verify.saturating_add(heads),
                    scratch: (mask * verify).saturating_add(drafts),
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

    /// `option` is blamed.
    fn check(&self, geometry: &Geometry, option: &'static str) -> Result<()> {
        let chunk = u64::from(geometry.context).min(PREFILL_CHUNK as u64);
        let advice = "use a smaller verify width, draft width or block length, or fewer anchors";
        let bounds = [
            ("rows", self.decode_rows, geometry.max_rows as u64),
            ("rows, a prompt chunk among them,", chunk + self.beside_prompt, geometry.max_rows as u64),
            ("rows that choose a token", self.choose, geometry.max_choose as u64),
            ("scratch slots", self.scratch, u64::from(geometry.scratch)),
        ];
        for (what, need, have) in bounds {
            if need > have {
                return invalid(
                    option,
                    format!("the schedule's widest call needs {need} {what}, but this model was set up for {have}; {advice}"),
                );
            }
        }
        Ok(())
    }
}
