//! The two traits that meet in the engine: a schedule says what to compute, a model computes it.

use std::future::Future;

use super::plan::{CallOutput, CallPlan, Choice};
use crate::error::Result;

/// A decoding schedule for one generation, as a pure state machine. Its constructor hands back the first plan; after that
/// [`Schedule::advance`] is the only method, so a wrong order cannot be written.
pub trait Schedule {
    /// Takes what the last plan answered; says what became text and what to do next.
    ///
    /// # Errors
    /// [`crate::Error::Internal`] if `last` lacks a choice the plan asked for.
    fn advance(&mut self, last: &CallOutput) -> Result<Step>;
}

/// What one call brought.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// Tokens that are now text, in order. They are the target's own greedy choices in every lossless schedule.
    pub committed: Vec<u32>,
    /// Draft tokens the call verified.
    pub drafted: usize,
    /// How many of them were accepted.
    pub accepted: usize,
    /// The next call; `None` when the context is full.
    pub next: Option<CallPlan>,
}

/// Names a submitted call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket(pub u64);

/// A loaded model that runs calls: on the GPU, on the CPU, in f64, or scripted in tests.
#[allow(async_fn_in_trait, reason = "futures need not be Send: the engine is single-threaded by design")]
pub trait ModelCalls {
    /// Sizes that plans must stay within.
    fn geometry(&self) -> Geometry;

    /// Starts a call; never waits for it. Calls run in the order submitted.
    ///
    /// # Errors
    /// [`crate::Error::InvalidOption`] if the plan does not fit the model or the geometry; the state is then unchanged.
    fn submit(&mut self, plan: &CallPlan) -> Result<Ticket>;

    /// Waits for a call and returns the choices of its choosing rows, in device order. Each ticket is asked for once.
    ///
    /// # Errors
    /// [`crate::Error::DeviceLost`] and other failures of the device.
    fn answer(&mut self, ticket: Ticket) -> impl Future<Output = Result<Vec<Choice>>>;

    /// The raw head output `[choosing rows][V]` of the last submitted call (mask id not banned). For tests and
    /// `forecall logits`; reads back the whole vocabulary.
    ///
    /// # Errors
    /// Failures of the device; [`crate::Error::InvalidOption`] if no call was submitted yet.
    fn logits(&mut self) -> impl Future<Output = Result<Vec<Vec<f32>>>>;
}

/// Sizes a loaded model was set up with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Cache slots, `contextLength`.
    pub context: u32,
    /// Scratch slots behind the cache.
    pub scratch: u32,
    /// Most rows in one call.
    pub max_rows: usize,
    /// Most choosing rows in one call.
    pub max_choose: usize,
    /// V.
    pub vocab_size: usize,
}

/// Most prompt rows in one prefill call; the same in every schedule and backend.
pub const PREFILL_CHUNK: usize = 256;
/// Scratch slots behind the cache, and so the most draft rows in one call.
pub const SCRATCH_SLOTS: u32 = 160;
/// Most rows in one call: a prompt chunk and the widest draft.
pub const MAX_ROWS: usize = PREFILL_CHUNK + SCRATCH_SLOTS as usize;
/// Most choosing rows in one call.
pub const MAX_CHOOSE: usize = 192;
