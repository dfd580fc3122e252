//! The backends behind one type, which also knows what the cache holds.

use crate::cpu::CpuModel;
#[cfg(not(target_arch = "wasm32"))]
use crate::cpu::reference::Reference;
use crate::decode::CachedPrefix;
use crate::decode::plan::{CallPlan, Choice};
use crate::decode::schedule::{Geometry, ModelCalls, Ticket};
use crate::error::{Error, Result};
use crate::gpu::GpuModel;
use crate::model::program::{MatrixId, VectorId};
use crate::weights::WeightSink;
use crate::weights::packed::PackedRows;

/// A model on one of the backends.
pub(super) struct Calls {
    /// What runs it.
    pub(super) on: Runs,
    /// What its cache holds, by the calls that went through here.
    cached: CachedPrefix,
}

/// The backends.
pub(super) enum Runs {
    /// WebGPU.
    Gpu(Box<GpuModel>),
    /// The fast CPU path.
    Cpu(Box<CpuModel>),
    /// The f64 twins; in a page they would only be weight.
    #[cfg(not(target_arch = "wasm32"))]
    Reference(Box<Reference>),
}

/// Runs `$body` with `$calls` bound to whichever backend there is.
macro_rules! each {
    ($self:expr, $calls:ident => $body:expr) => {
        match $self {
            Runs::Gpu($calls) => $body,
            Runs::Cpu($calls) => $body,
            #[cfg(not(target_arch = "wasm32"))]
            Runs::Reference($calls) => $body,
        }
    };
}

impl From<Runs> for Calls {
    fn from(on: Runs) -> Self {
        Self { on, cached: CachedPrefix::default() }
    }
}

impl Calls {
    /// How many of the prompt's first tokens the cache holds already.
    pub(super) fn cached(&self, prompt: &[u32]) -> usize {
        self.cached.common(prompt)
    }
}

impl ModelCalls for Calls {
    fn geometry(&self) -> Geometry {
        each!(&self.on, calls => calls.geometry())
    }

    fn submit(&mut self, plan: &CallPlan) -> Result<Ticket> {
        let sent = each!(&mut self.on, calls => calls.submit(plan));
        match sent {
            Ok(_) => self.cached.note(plan),
            Err(_) => self.cached.forget(),
        }
        sent
    }

    async fn answer(&mut self, ticket: Ticket) -> Result<Vec<Choice>> {
        let answer = each!(&mut self.on, calls => calls.answer(ticket).await);
        // The GPU's answers come as events; what the CPU computed is there at once, and nothing else would get its turn.
        #[cfg(target_arch = "wasm32")]
        if !matches!(self.on, Runs::Gpu(_)) {
            super::page_turn::let_events_in().await;
        }
        let answer = answer.and_then(finite);
        if answer.is_err() {
            self.cached.forget();
        }
        answer
    }

    async fn logits(&mut self) -> Result<Vec<Vec<f32>>> {
        each!(&mut self.on, calls => calls.logits().await)
    }
}

/// A probability is a number only where all logits of its row are; without that a choice means nothing.
fn finite(choices: Vec<Choice>) -> Result<Vec<Choice>> {
    match choices.iter().position(|choice| !choice.probability.is_finite()) {
        None => Ok(choices),
        Some(row) => Err(Error::BadWeights(format!(
            "the model's logits are not finite (those of row {} of the {} that a call chose from): its weights, or those of \
             its draft adapter, are damaged, or they overflow. Without the adapter (`adapter: none`) the former alone count",
            row + 1,
            choices.len()
        ))),
    }
}

impl WeightSink for Calls {
    fn matrix(&mut self, id: MatrixId, rows: PackedRows) -> Result<()> {
        each!(&mut self.on, calls => calls.matrix(id, rows))
    }

    fn vector(&mut self, id: VectorId, values: Vec<f32>) -> Result<()> {
        each!(&mut self.on, calls => calls.vector(id, values))
    }
}
