//! The words that schedules and models share: what one call (one forward pass) computes and what it answers.
//!
//! A *row* is one token of a call's input. Rows differ in three things only: what they are (token or mask, adapter on or
//! off), where their K/V goes ([`Keep`]) and what they see ([`Sees`]). Every schedule and every family of checkpoints is
//! described by these, so kernels know nothing of schedules. Source: the packed call of Packed-SS.

use std::ops::Range;

use crate::error::{Error, Result};

/// What stands at a row's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowToken {
    /// A token of the vocabulary.
    Id(u32),
    /// The mask: the adapter's learned embedding where there is one, else the checkpoint's mask token.
    Mask,
}

/// Where a row's K/V is written, before any row of the call attends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Keep {
    /// Slot of the cache, counted from 0. Slots behind the schedule's cache length are overwritten later.
    Cache(u32),
    /// Slot of the scratch area behind the cache, counted from 0; lives for this call only.
    Scratch(u32),
}

/// The keys a row sees: a range of cache slots and then a range of scratch slots, both half open, reduced over in this
/// order. Sliding windows are a property of layers and cut `cache` further.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Sees {
    /// Cache slots, those written by this call's own rows included.
    pub cache: Range<u32>,
    /// Scratch slots: the row's own draft block (empty for causal rows).
    pub scratch: Range<u32>,
}

/// One token of a call's input.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Row {
    /// What stands at the input.
    pub token: RowToken,
    /// Absolute position, 0-based: decides rotary angles and query scaling.
    pub position: u32,
    /// Whether the draft adapter is on.
    pub adapter: bool,
    /// Where the K/V goes.
    pub keep: Keep,
    /// What the row attends to.
    pub sees: Sees,
    /// Whether the output head runs on this row and its choice is read back.
    pub choose: bool,
}

/// What a call is counted and timed as. Backends do not look at it: a row's numbers are the same in either kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CallKind {
    /// The call carries prompt rows.
    Prefill,
    /// Everything after the prompt.
    Decode,
}

/// Index of a row in the order in which it was pushed to the [`CallPlan`].
pub type RowId = usize;

/// One forward pass, ready to run.
///
/// Rows are stored in *device order*: rows with the adapter are contiguous, and so are rows that choose. The order is
/// (plain silent, adapter silent, adapter choosing, plain choosing), stable within each class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallPlan {
    kind: CallKind,
    rows: Vec<Row>,
    pushed: Vec<RowId>,
    adapter: Range<usize>,
    choose: Range<usize>,
}

impl CallPlan {
    /// Sorts `rows`, given in the schedule's own order, into device order. [`RowId`]s refer to the order given.
    #[must_use]
    pub fn new(kind: CallKind, rows: Vec<Row>) -> Self {
        let class = |row: &Row| match (row.adapter, row.choose) {
            (false, false) => 0usize,
            (true, false) => 1,
            (true, true) => 2,
            (false, true) => 3,
        };
        let mut counts = [0usize; 4];
        for row in &rows {
            counts[class(row)] += 1;
        }
        let mut order: Vec<(RowId, Row)> = rows.into_iter().enumerate().collect();
        order.sort_by_key(|(_, row)| class(row));
        let (pushed, rows): (Vec<_>, Vec<_>) = order.into_iter().unzip();
        let adapter = counts[0]..counts[0] + counts[1] + counts[2];
        let choose = counts[0] + counts[1]..rows.len();
        Self { kind, rows, pushed, adapter, choose }
    }

    /// What the call is counted as.
    #[must_use]
    pub fn kind(&self) -> CallKind {
        self.kind
    }

    /// The rows in device order.
    #[must_use]
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Device-order range of the rows whose adapter is on.
    #[must_use]
    pub fn adapter(&self) -> Range<usize> {
        self.adapter.clone()
    }

    /// Device-order range of the rows that choose a token.
    #[must_use]
    pub fn choose(&self) -> Range<usize> {
        self.choose.clone()
    }

    /// The pushed index of the row at device index `device`, if there is one.
    #[must_use]
    pub fn row_id(&self, device: usize) -> Option<RowId> {
        self.pushed.get(device).copied()
    }

    /// Turns the choices of the rows `choose()`, in device order, into a [`CallOutput`].
    ///
    /// # Errors
    /// [`Error::Internal`] if the count is not that of `choose()`.
    pub fn answer(&self, choices: &[Choice]) -> Result<CallOutput> {
        if choices.len() != self.choose.len() {
            return Err(Error::Internal(format!(
                "a call answered {} choices where {} rows choose",
                choices.len(),
                self.choose.len()
            )));
        }
        let mut by_row = vec![None; self.rows.len()];
        for (device, choice) in self.choose.clone().zip(choices) {
            if let Some(slot) = self.pushed.get(device).and_then(|&id| by_row.get_mut(id)) {
                *slot = Some(*choice);
            }
        }
        Ok(CallOutput { by_row })
    }
}

/// A row's choice: the target's or the drafter's pick for the position the row predicts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// The chosen token; the smallest id among equals.
    pub token: u32,
    /// Its softmax probability over the whole vocabulary (banned ids excluded).
    pub probability: f32,
}

/// What a call answers: at most one [`Choice`] per row.
#[derive(Debug, Clone, PartialEq)]
pub struct CallOutput {
    by_row: Vec<Option<Choice>>,
}

impl CallOutput {
    /// The choice of the row pushed as `id`.
    ///
    /// # Errors
    /// [`Error::Internal`] if that row does not exist or did not choose.
    pub fn choice(&self, id: RowId) -> Result<Choice> {
        self.by_row.get(id).copied().flatten().ok_or_else(|| Error::Internal(format!("row {id} of the call chose no token")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(position: u32, adapter: bool, choose: bool) -> Row {
        Row {
            token: RowToken::Id(position),
            position,
            adapter,
            keep: Keep::Cache(position),
            sees: Sees { cache: 0..position + 1, scratch: 0..0 },
            choose,
        }
    }

    #[test]
    fn device_order_keeps_adapter_and_choosing_rows_contiguous() {
        let plan = CallPlan::new(
            CallKind::Decode,
            vec![row(0, false, true), row(1, true, false), row(2, true, true), row(3, false, false), row(4, true, true)],
        );
        let positions: Vec<_> = plan.rows().iter().map(|r| r.position).collect();
        assert_eq!(positions, [3, 1, 2, 4, 0]);
        assert_eq!((plan.adapter(), plan.choose()), (1..4, 2..5));
        let pick = |token| Choice { token, probability: 1.0 };
        let output = plan.answer(&[pick(20), pick(40), pick(0)]).unwrap();
        assert_eq!(output.choice(2).unwrap().token, 20);
        assert_eq!(output.choice(0).unwrap().token, 0);
        assert!(output.choice(3).is_err(), "a silent row has no choice");
        assert!(plan.answer(&[pick(1)]).is_err());
    }
}
