//! Raw head outputs for given tokens: what golden vectors are compared with.

use super::Model;
use crate::decode::plan::{CallKind, CallPlan};
use crate::decode::schedule::ModelCalls;
use crate::decode::{draft_rows, target_rows};
use crate::error::{Error, Result};
use crate::model::arch::VerifyRows;

/// Raw logits, one vector [V] per row.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    /// The target's for the position behind every token: of the token's own causal row, or, in families whose mask rows
    /// verify, of the mask row behind it.
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
        let verify = self.program.draft.map_or(VerifyRows::Clean, |rules| rules.verify);
        let mut causal = Vec::with_capacity(tokens.len());
        for (chunk, ids) in tokens.chunks(rows).enumerate() {
            let plan = CallPlan::new(CallKind::Prefill, target_rows(verify, (chunk * rows) as u32, ids));
            causal.extend(self.run_plan(&plan).await?);
        }
        let draft = match draft_width {
            None => None,
            Some(width) => {
                let rules = self.program.draft.ok_or_else(|| {
                    Error::InvalidOption(
                        "a draft was asked for, but the model has no drafter: load a draft adapter with it".into(),
                    )
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
                Some(self.run_plan(&plan).await?)
            }
        };
        Ok(Logits { causal, draft })
    }
}
