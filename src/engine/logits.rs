//! Raw head outputs for given tokens: what golden vectors are compared with.

use super::Model;
use crate::decode::plan::{CallKind, CallPlan};
use crate::decode::schedule::ModelCalls;
use crate::decode::{block_rows, draft_rows, target_rows};
use crate::error::{Error, Result};
use crate::model::arch::{DiffusionLayout, DiffusionRules, VerifyRows};

/// Raw logits, one vector [V] per row.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    /// The target's for the position behind every token: of the token's own causal row, or, in families whose mask rows
    /// verify, of the mask row behind it. In families that fill aligned blocks: the token's own row, which sees its block.
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
    /// model that cannot draft; [`Error::BadWeights`] for logits that are not finite.
    pub async fn logits(&mut self, tokens: &[u32], draft_width: Option<usize>) -> Result<Logits> {
        let geometry = self.calls.geometry();
        if tokens.is_empty() || tokens.len() > geometry.context as usize {
            return Err(Error::InvalidOption(format!(
                "{} tokens were given; 1 to {} fit the context",
                tokens.len(),
                geometry.context
            )));
        }
        let block = match self.program.rules().diffusion {
            Some(DiffusionRules { layout: DiffusionLayout::Aligned, block_length, .. }) => Some(block_length),
            _ => None,
        };
        let step = block.map_or(1, |length| length as usize);
        // A block's rows share a call.
        let rows = ROWS.min(geometry.max_choose).next_multiple_of(step);
        let verify = self.program.draft.map_or(VerifyRows::Clean, |rules| rules.verify);
        let mut causal = Vec::with_capacity(tokens.len());
        for (chunk, ids) in tokens.chunks(rows).enumerate() {
            let at = (chunk * rows) as u32;
            let target = block.map_or_else(|| target_rows(verify, at, ids), |length| block_rows(at, ids, length));
            let plan = CallPlan::new(CallKind::Prefill, target);
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
        for (of, rows) in [("token", &causal), ("draft row", draft.as_ref().unwrap_or(&Vec::new()))] {
            // The mask's logit too, which nothing is chosen by.
            for (i, row) in rows.iter().enumerate() {
                if let Some((id, logit)) = row.iter().enumerate().find(|(_, logit)| !logit.is_finite()) {
                    return Err(Error::BadWeights(format!(
                        "the model's logits are not finite: behind {of} {i}, id {id} has {logit}; its weights are damaged, or they \
                         overflow"
                    )));
                }
            }
        }
        Ok(Logits { causal, draft })
    }
}
