//! Tiny random models and calls for tests.

use std::collections::BTreeSet;

use crate::decode::plan::{CallKind, CallPlan, Keep, Row, RowToken, Sees};
use crate::kernels::testing::{Random, random};
use crate::model::arch::{Anchor, Arch, DraftRules, Layer, Rope, RopeScaling, VerifyRows};
use crate::model::forward;
use crate::model::program::{AdapterSpec, MatrixId, Program, Role, VectorId};
use crate::weights::WeightSink;
use crate::weights::packed::Format;

/// Sizes and formats of a test model.
#[derive(Clone)]
pub struct Tiny {
    pub hidden: usize,
    pub intermediate: usize,
    pub heads: (usize, usize, usize),
    pub vocab: usize,
    pub format: Format,
    pub tied: bool,
    pub bias: bool,
    pub qk_norm: bool,
    pub adapter_rank: usize,
    pub window: Option<u32>,
}

impl Tiny {
    pub fn new(format: Format) -> Self {
        Self {
            hidden: 64,
            intermediate: 96,
            heads: (4, 2, 16),
            vocab: 50,
            format,
            tied: true,
            bias: false,
            qk_norm: false,
            adapter_rank: 4,
            window: None,
        }
    }

    pub fn program(&self) -> Program {
        let (num_attention_heads, num_key_value_heads, head_dim) = self.heads;
        let arch = Arch {
            model_type: "llama".into(),
            hidden_size: self.hidden,
            intermediate_size: self.intermediate,
            layers: vec![Layer { rope: true, window: None }, Layer { rope: !self.qk_norm, window: self.window }],
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            vocab_size: self.vocab,
            rms_norm_eps: 1e-5,
            rope: Rope { theta: 10_000.0, scaling: RopeScaling::Default },
            max_position_embeddings: 512,
            tie_word_embeddings: self.tied,
            attention_bias: self.bias,
            output_bias: self.bias,
            mlp_bias: self.bias,
            qk_norm: self.qk_norm,
            query_scaling: None,
            mask_token_id: None,
            eos_token_ids: vec![],
            draft: None,
            diffusion: None,
            horizon: None,
        };
        let modules = |l: usize| ["q_proj", "v_proj", "o_proj"].map(|m| format!("model.layers.{l}.self_attn.{m}"));
        let mlp = |l: usize| ["gate_proj", "up_proj", "down_proj"].map(|m| format!("model.layers.{l}.mlp.{m}"));
        let adapter = AdapterSpec {
            rank: self.adapter_rank,
            scale: 2.0,
            modules: (0..2).flat_map(|l| modules(l).into_iter().chain(mlp(l))).collect::<BTreeSet<_>>(),
            mask_embedding: true,
            rules: DraftRules {
                logit_shift: 1,
                anchor: Anchor::InBlock,
                verify: VerifyRows::Clean,
                bidirectional: true,
                adapter: true,
            },
        };
        forward::build(arch, (self.adapter_rank > 0).then_some(&adapter))
    }

    /// Fills a model with weights that depend only on `seed` and the program.
    pub fn fill(&self, program: &Program, seed: u64, sink: &mut impl WeightSink) {
        for (i, spec) in program.matrices.iter().enumerate() {
            let format = if spec.role == Role::Lora { Format::F16 } else { self.format };
            let mut m = random(format, spec.n, spec.k, seed * 1000 + i as u64);
            // In two chunks, as a loader would feed it.
            let cut = (spec.n / 2).next_multiple_of(8).min(spec.n);
            let mut rest = m.clone();
            let (tiles, blocks, groups) = (cut / 8, m.blocks(), m.groups());
            if cut < spec.n && cut > 0 {
                rest.data.drain(..tiles * blocks * 32);
                rest.scales.drain(..tiles * groups * 8);
                (rest.first_row, rest.n) = (cut, spec.n - cut);
                m.data.truncate(tiles * blocks * 32);
                m.scales.truncate(tiles * groups * 8);
                m.n = cut;
                sink.matrix(MatrixId(i), m).unwrap();
                sink.matrix(MatrixId(i), rest).unwrap();
            } else {
                sink.matrix(MatrixId(i), m).unwrap();
            }
        }
        for (i, spec) in program.vectors.iter().enumerate() {
            let mut r = Random(seed * 77 + i as u64 + 1);
            let bias = spec.label.ends_with("bias");
            let values = (0..spec.n).map(|_| if bias { 0.1 * r.value() } else { 1.0 + 0.2 * r.value() });
            sink.vector(VectorId(i), values.collect()).unwrap();
        }
    }
}

/// A causal row for `token` at `position`.
pub fn clean(token: u32, position: u32) -> Row {
    Row {
        token: RowToken::Id(token),
        position,
        adapter: false,
        keep: Keep::Cache(position),
        sees: Sees { cache: 0..position + 1, scratch: 0..0 },
        choose: true,
    }
}

/// A draft block of `width` masks behind `anchor` at `position`, seeing the cache below it, kept in `scratch ..`.
pub fn block(anchor: u32, position: u32, width: u32, scratch: u32) -> Vec<Row> {
    (0..=width)
        .map(|i| Row {
            token: if i == 0 { RowToken::Id(anchor) } else { RowToken::Mask },
            position: position + i,
            adapter: true,
            keep: Keep::Scratch(scratch + i),
            sees: Sees { cache: 0..position, scratch: scratch..scratch + width + 1 },
            choose: i > 0,
        })
        .collect()
}

pub fn plan(rows: Vec<Row>) -> CallPlan {
    CallPlan::new(CallKind::Decode, rows)
}
