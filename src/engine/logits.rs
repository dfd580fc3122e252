//! Raw head outputs for given tokens: what golden vectors are compared with.

use super::Model;
use crate::decode::plan::{CallKind, CallPlan, Keep, Row, RowToken, Sees};
use crate::decode::schedule::ModelCalls;
use crate::decode::draft_rows;
use crate::error::{Error, Result};

/// Raw logits, one vector [V] per row.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    /// Of every token's causal row.
    pub causal: Vec<Vec<f32>>,
    /// Of every row of a draft block made after the tokens, in order; the anchor's row first where the family has one.
    pub draft: Option<Vec<Vec<f32>>>,
}

/// Rows per call: all of them choose, and logits are wide.
const ROWS: usize = 32;

impl Model {
    /// Runs `tokens` causally from an empty cache, then, with `draft_width`, a draft block of that many masks behind the
    /// last token.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for no tokens, tokens out of range, more tokens than the context holds, or a draft from a
    /// model that cannot draft.
    pub async fn logits(&mut self, tokens: &[u32], draft_width: Option<usize>) -> Result<Logits> {
        let geometry = self.calls.geometry();
        if tokens.is_empty() || tokens.len() > geometry.context as usize {
            return Err(Error::InvalidOption(format!(
                "{} tokens were given; 1 to {} fit the context",
                tokens.len(),
                geometry.context
            )));
        }
        let rows = ROWS.min(geometry.max_choose);
        let mut causal = Vec::with_capacity(tokens.len());
        for (chunk, ids) in tokens.chunks(rows).enumerate() {
            let plan = causal_rows(CallKind::Prefill, (chunk * rows) as u32, ids);
            causal.extend(self.raw(&plan).await?);
        }
        let draft = match draft_width {
            None => None,
            Some(width) => {
                let rules = self.program.draft.ok_or_else(|| {
                    Error::InvalidOption("a draft was asked for, but the model has no drafter: load a draft adapter with it".into())
                })?;
                let fits = width >= 1 && width < geometry.scratch as usize && width < geometry.max_choose;
                let (Some(&anchor), true) = (tokens.last(), fits) else {
                    return Err(Error::InvalidOption(format!(
                        "the draft width is {width}; 1 to {} fit",
                        (geometry.scratch as usize).min(geometry.max_choose) - 1
                    )));
                };
                let rows = draft_rows(rules, (tokens.len() - 1) as u32, anchor, width as u32);
                let plan = CallPlan::new(CallKind::Decode, rows);
                Some(self.raw(&plan).await?)
            }
        };
        Ok(Logits { causal, draft })
    }

    /// Runs a plan and reads back its choosing rows' logits in the order the rows were pushed.
    pub(super) async fn raw(&mut self, plan: &CallPlan) -> Result<Vec<Vec<f32>>> {
        let ticket = self.calls.submit(plan)?;
        self.calls.answer(ticket).await?;
        let mut rows: Vec<_> = plan.choose().filter_map(|device| plan.row_id(device)).zip(self.calls.logits().await?).collect();
        rows.sort_by_key(|(id, _)| *id);
        Ok(rows.into_iter().map(|(_, logits)| logits).collect())
    }
}

/// Causal rows that all choose, `ids[0]` at `position`.
pub(super) fn causal_list(position: u32, ids: &[u32]) -> Vec<Row> {
    let row = |(position, &id): (u32, &u32)| Row {
        token: RowToken::Id(id),
        position,
        adapter: false,
        keep: Keep::Cache(position),
        sees: Sees { cache: 0..position + 1, scratch: 0..0 },
        choose: true,
    };
    (position..).zip(ids).map(row).collect()
}

/// A call of [`causal_list`].
pub(super) fn causal_rows(kind: CallKind, position: u32, ids: &[u32]) -> CallPlan {
    CallPlan::new(kind, causal_list(position, ids))
}
