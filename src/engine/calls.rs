//! The backends behind one type.

use crate::cpu::CpuModel;
#[cfg(not(target_arch = "wasm32"))]
use crate::cpu::reference::Reference;
use crate::decode::plan::{CallPlan, Choice};
use crate::decode::schedule::{Geometry, ModelCalls, Ticket};
use crate::error::Result;
use crate::gpu::GpuModel;
use crate::model::program::{MatrixId, VectorId};
use crate::weights::WeightSink;
use crate::weights::packed::PackedRows;

/// A model on one of the backends.
pub(super) enum Calls {
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
            Calls::Gpu($calls) => $body,
            Calls::Cpu($calls) => $body,
            #[cfg(not(target_arch = "wasm32"))]
            Calls::Reference($calls) => $body,
        }
    };
}

impl ModelCalls for Calls {
    fn geometry(&self) -> Geometry {
        each!(self, calls => calls.geometry())
    }

    fn submit(&mut self, plan: &CallPlan) -> Result<Ticket> {
        each!(self, calls => calls.submit(plan))
    }

    async fn answer(&mut self, ticket: Ticket) -> Result<Vec<Choice>> {
        let answer = each!(self, calls => calls.answer(ticket).await);
        // The GPU's answers come as events; what the CPU computed is there at once, and nothing else would get its turn.
        #[cfg(target_arch = "wasm32")]
        if !matches!(self, Calls::Gpu(_)) {
            super::page_turn::let_events_in().await;
        }
        answer
    }

    async fn logits(&mut self) -> Result<Vec<Vec<f32>>> {
        each!(self, calls => calls.logits().await)
    }
}

impl WeightSink for Calls {
    fn matrix(&mut self, id: MatrixId, rows: PackedRows) -> Result<()> {
        each!(self, calls => calls.matrix(id, rows))
    }

    fn vector(&mut self, id: VectorId, values: Vec<f32>) -> Result<()> {
        each!(self, calls => calls.vector(id, values))
    }
}
