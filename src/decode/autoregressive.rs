//! One token per call: the text every lossless schedule must reproduce.

use super::accept::accept;
use super::plan::{CallKind, CallOutput, CallPlan, RowId};
use super::prefill::Decoder;
use super::schedule::Step;
use super::segments::{Segments, choices};
use crate::error::Result;
use crate::model::arch::VerifyRows;

/// One row a call (two where a mask row verifies).
#[derive(Debug)]
pub(super) struct Autoregressive {
    verify: VerifyRows,
    context: u32,
    /// n of the call on its way.
    n: u32,
    /// Its choosing row.
    rows: Vec<RowId>,
}

impl Autoregressive {
    pub fn new(verify: VerifyRows, context: u32) -> Self {
        Self { verify, context, n: 0, rows: Vec::new() }
    }

    fn call(&mut self, mut segments: Segments, kind: CallKind, n: u32, pending: u32) -> CallPlan {
        self.n = n;
        self.rows = segments.verify(self.verify, n, &[pending]);
        segments.finish(kind)
    }
}

impl Decoder for Autoregressive {
    fn first_call(&mut self, segments: Segments, n: u32, pending: u32) -> CallPlan {
        self.call(segments, CallKind::Prefill, n, pending)
    }

    fn advance(&mut self, last: &CallOutput) -> Result<Step> {
        let accepted = accept(&[], &choices(&self.rows, last)?)?;
        let n = self.n + 1;
        let next = (n < self.context).then(|| self.call(Segments::new(), CallKind::Decode, n, accepted.bonus));
        Ok(Step { committed: accepted.committed(), drafted: 0, accepted: 0, next })
    }
}
