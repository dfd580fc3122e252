//! The shell: loads a model, drives one schedule against it, turns ids into text. The only room that awaits.
//!
//! Everything a caller of the crate needs is here: [`Model::load`], [`Model::generate`], [`Model::logits`], [`Model::info`].

mod calls;
mod choose;
mod generate;
mod info;
mod load;
mod logits;
mod measure;
#[cfg(target_arch = "wasm32")]
mod page_turn;
mod preflight;
mod probe;

pub use generate::{Generate, Generated, Part, Piece, Prompt, Timings};
pub use load::{Backend, LoadEvent, LoadOptions, Offer, Phase, Precision, Progress, Quantize};
pub use logits::Logits;
pub use measure::{RowTiming, row_invariance};
pub use preflight::Offered;
pub use probe::{LayerKeyValues, causal_rows, run_plan};

pub use crate::model::load::{AdapterFrom, Sources};

use std::sync::Arc;

use calls::Calls;

use crate::model::program::Program;
use crate::text::Tokenizer;
use crate::text::chat_template::ChatTemplate;

/// A loaded model. One generation at a time: every method that runs it takes `&mut self`.
pub struct Model {
    calls: Calls,
    program: Program,
    tokenizer: Option<Arc<Tokenizer>>,
    template: Option<ChatTemplate>,
    /// Ids that end a text: of the config, the generation config and the tokenizer.
    end_ids: Vec<u32>,
    facts: info::Facts,
    default: choose::Chosen,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model").field("model_type", &self.program.arch.model_type).finish_non_exhaustive()
    }
}
