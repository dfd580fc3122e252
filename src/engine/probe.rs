//! A loaded model without prompt, schedule or text: what tests and tools drive.

use super::Model;
use super::calls::Runs;
use crate::decode::plan::{CallKind, CallPlan, Keep, Row, RowToken, Sees};
use crate::decode::schedule::ModelCalls;
use crate::error::{Error, Result};
use crate::model::arch::{DraftRules, ModelRules};

/// One layer's K/V as `[slots, Hkv Dh]` each, scratch slots last. Whatever a backend stores, f64 holds exactly.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerKeyValues {
    /// Keys after RoPE.
    pub keys: Vec<f64>,
    /// Values.
    pub values: Vec<f64>,
}

impl Model {
    /// The model as schedules see it.
    pub fn calls(&mut self) -> &mut impl ModelCalls {
        &mut self.calls
    }

    /// How the model drafts; `None` if it cannot.
    #[must_use]
    pub fn draft_rules(&self) -> Option<DraftRules> {
        self.program.draft
    }

    /// What the model can do beside plain next tokens.
    #[must_use]
    pub fn rules(&self) -> ModelRules {
        self.program.rules()
    }

    /// Layers of the model (L).
    #[must_use]
    pub fn layers(&self) -> usize {
        self.program.arch.layers.len()
    }

    /// [`run_plan`] on this model.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for a plan that does not fit the model, failures of the device.
    pub async fn run_plan(&mut self, plan: &CallPlan) -> Result<Vec<Vec<f32>>> {
        run_plan(&mut self.calls, plan).await
    }

    /// What the cache holds of a layer.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] if there is no such layer, failures of the device.
    pub async fn kv_cache(&self, layer: usize) -> Result<LayerKeyValues> {
        if layer >= self.layers() {
            return Err(Error::InvalidOption(format!("there is no layer {layer}; the model has {}", self.layers())));
        }
        let wide = |values: Vec<f32>| values.into_iter().map(f64::from).collect();
        Ok(match &self.calls.on {
            Runs::Gpu(gpu) => {
                let (keys, values) = gpu.cache(layer).await?;
                LayerKeyValues { keys: wide(keys), values: wide(values) }
            }
            Runs::Cpu(cpu) => {
                let (keys, values) = cpu.cache(layer);
                LayerKeyValues { keys: wide(keys), values: wide(values) }
            }
            #[cfg(not(target_arch = "wasm32"))]
            Runs::Reference(reference) => {
                let cache = reference.cache(layer);
                LayerKeyValues { keys: cache.keys.to_vec(), values: cache.values.to_vec() }
            }
        })
    }
}

/// Runs a plan and reads back its choosing rows' raw head outputs [V] in the order in which the rows were pushed.
///
/// # Errors
/// [`Error::InvalidOption`] for a plan that does not fit the model, failures of the device.
pub async fn run_plan(calls: &mut impl ModelCalls, plan: &CallPlan) -> Result<Vec<Vec<f32>>> {
    let ticket = calls.submit(plan)?;
    calls.answer(ticket).await?;
    let mut rows: Vec<_> = plan.choose().filter_map(|device| plan.row_id(device)).zip(calls.logits().await?).collect();
    rows.sort_by_key(|(id, _)| *id);
    Ok(rows.into_iter().map(|(_, logits)| logits).collect())
}

/// Causal rows that all choose, `ids[0]` at `position`, as a schedule writes the tokens of a text.
#[must_use]
pub fn causal_rows(position: u32, ids: &[u32]) -> Vec<Row> {
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

/// A call of [`causal_rows`].
pub(super) fn causal_call(kind: CallKind, position: u32, ids: &[u32]) -> CallPlan {
    CallPlan::new(kind, causal_rows(position, ids))
}
