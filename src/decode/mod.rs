//! Decoding schedules as pure state machines: no device, clock or I/O.
//!
//! A schedule writes a [`plan::CallPlan`], is told what the call chose, commits text and writes the next plan. All
//! lossless schedules share the words of Packed-SS: the *prefix* `x[0..=n]`, whose last token is *pending* (text
//! already, but without K/V in the cache), a *draft* `d[1..=m]` of what follows it, and the target's choices `y[0..=m]`
//! that decide how much of the draft becomes text.
//!
//! | file | what it owns |
//! | --- | --- |
//! | [`plan`], [`schedule`] | the words shared with models |
//! | [`options`] | which schedule, how wide, and whether that fits the model; the one constructor |
//! | [`generation`] | one schedule with its stop rules and its counts: what an engine drives |
//! | [`stop`] | end ids and the budget |
//! | `prefill` | the prompt's chunks, the same in every schedule |
//! | `segments` | how verify rows and draft blocks are written as rows, for every family |
//! | `accept` | which drafts become text |
//! | `autoregressive`, `two_call`, `packed` | the lossless schedules |
//! | `reveal` | which guesses of a diffusion call become tokens |
//! | `block_diffusion`, `window_diffusion` | decoding as diffusion models do by themselves; not lossless |
//!
//! In all but the last a token's cache slot is its position.

mod accept;
mod autoregressive;
mod block_diffusion;
mod cached_prefix;
pub mod generation;
pub mod options;
mod packed;
pub mod plan;
mod prefill;
mod reveal;
pub mod schedule;
mod segments;
pub mod stop;
mod two_call;
mod window_diffusion;

#[cfg(test)]
mod diffusion_properties;
#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
mod properties;

pub use cached_prefix::CachedPrefix;
pub use generation::{CallCount, Counts, Generation, PrefillCount, Progress};
pub use options::{BlockOptions, ScheduleKind, ScheduleOptions, start};
pub use segments::{block_rows, draft_rows, packed_rows, target_rows};
pub use stop::{FinishReason, StopRules};
