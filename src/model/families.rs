//! What a `model_type` implies that its config need not say: one table entry per family.

use super::arch::{Anchor, DiffusionLayout, DiffusionRules, DraftRules, VerifyRows};
use super::names::{self, NameTable};

/// Where a projection's bias comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bias {
    /// The family has none, whatever the config says.
    Never,
    /// The family always has one.
    Always,
    /// A boolean field of the config, false if absent.
    Config,
}

/// How a family's layers get their sliding windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Windows {
    /// None.
    Never,
    /// `sliding_window` in every layer (Mistral); the value where the field is absent (null means none).
    Every(Option<usize>),
    /// `layer_types`, else layers from `max_window_layers` on; only with `use_sliding_window` (Qwen).
    Upper,
    /// `layer_types`, else layers without RoPE; only with `use_sliding_window` (SmolLM3).
    WithoutRope,
}

/// Defaults and rules of a family. Sizes are those a config leaves out because they are its class's defaults.
#[derive(Debug, PartialEq)]
pub struct Family {
    /// `model_type`.
    pub model_type: &'static str,
    /// q_proj, k_proj, v_proj.
    pub qkv_bias: Bias,
    /// o_proj.
    pub output_bias: Bias,
    /// gate_proj, up_proj, down_proj.
    pub mlp_bias: Bias,
    /// RMSNorm over each head of q and k.
    pub qk_norm: bool,
    /// Sliding windows.
    pub windows: Windows,
    /// Whether `no_rope_layers` applies.
    pub no_rope_layers: bool,
    /// `tie_word_embeddings` where absent.
    pub tied: bool,
    /// `num_key_value_heads` where absent; `None` is one per attention head.
    pub key_value_heads: Option<usize>,
    /// `head_dim` where absent; `None` is D / Hq.
    pub head_dim: Option<usize>,
    /// `rope_theta` where absent.
    pub rope_theta: u32,
    /// How its checkpoints draft by themselves.
    pub draft: Option<DraftRules>,
    /// How its checkpoints decode by diffusion.
    pub diffusion: Option<DiffusionRules>,
    /// The field that holds a checkpoint's block length.
    pub block_field: Option<&'static str>,
    /// The special token that stands at mask rows where the config names none.
    pub mask_token: Option<&'static str>,
    /// The id that stands at mask rows where the config names none, if the vocabulary has it.
    pub mask_id: Option<u32>,
    /// Ids that end a text whatever the config says, those of them that the vocabulary has.
    pub end_ids: &'static [u32],
    /// Whether a head in the file is used although the config ties it to the embedding.
    pub head_if_present: bool,
    /// Spellings of its tensors.
    pub names: &'static NameTable,
}

const LLAMA: Family = Family {
    model_type: "llama",
    qkv_bias: Bias::Config,
    output_bias: Bias::Config,
    mlp_bias: Bias::Config,
    qk_norm: false,
    windows: Windows::Never,
    no_rope_layers: false,
    tied: false,
    key_value_heads: None,
    head_dim: None,
    rope_theta: 10_000,
    draft: None,
    diffusion: None,
    block_field: None,
    mask_token: None,
    mask_id: None,
    end_ids: &[],
    head_if_present: false,
    names: &names::LLAMA,
};

const MISTRAL: Family = Family {
    model_type: "mistral",
    qkv_bias: Bias::Never,
    output_bias: Bias::Never,
    mlp_bias: Bias::Never,
    windows: Windows::Every(Some(4096)),
    key_value_heads: Some(8),
    ..LLAMA
};

const QWEN3: Family =
    Family { model_type: "qwen3", mlp_bias: Bias::Never, qk_norm: true, windows: Windows::Upper, head_dim: Some(128), ..LLAMA };

const QWEN2: Family = Family {
    model_type: "qwen2",
    qkv_bias: Bias::Always,
    output_bias: Bias::Never,
    mlp_bias: Bias::Never,
    windows: Windows::Upper,
    ..LLAMA
};

/// Every family, by `model_type`.
pub const FAMILIES: [Family; 10] = [
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    Family {
        model_type: "smollm3",
        windows: Windows::WithoutRope,
        no_rope_layers: true,
        tied: true,
        key_value_heads: Some(4),
        rope_theta: 2_000_000,
        ..LLAMA
    },
    Family { model_type: "ministral3", windows: Windows::Every(None), head_dim: Some(128), ..MISTRAL },
    Family {
        model_type: "nemotron_labs_diffusion",
        windows: Windows::Every(None),
        key_value_heads: Some(8),
        head_dim: Some(128),
        draft: Some(DraftRules {
            logit_shift: 0,
            anchor: Anchor::InBlock,
            verify: VerifyRows::Clean,
            bidirectional: true,
            adapter: true,
        }),
        diffusion: Some(DiffusionRules {
            layout: DiffusionLayout::Seeded,
            logit_shift: 0,
            block_length: 32,
            sub_block: None,
            threshold: 0.9,
            strict: false,
            only: false,
        }),
        block_field: Some("block_size"),
        names: &names::NEMOTRON,
        ..LLAMA
    },
    Family {
        model_type: "setdlm",
        tied: true,
        draft: Some(DraftRules {
            logit_shift: 0,
            anchor: Anchor::Shared,
            verify: VerifyRows::Mask,
            bidirectional: false,
            adapter: false,
        }),
        // The window of the smallest published reach (`Arch::horizon`); a config that tells its own overrules it.
        diffusion: Some(DiffusionRules {
            layout: DiffusionLayout::Window,
            logit_shift: 0,
            block_length: 4,
            sub_block: None,
            threshold: 0.9,
            strict: false,
            only: false,
        }),
        mask_token: Some("<|fim_middle|>"),
        names: &names::SETDLM,
        rope_theta: 1_000_000,
        ..QWEN3
    },
    Family {
        model_type: "sdar",
        diffusion: Some(DiffusionRules {
            layout: DiffusionLayout::Aligned,
            logit_shift: 0,
            block_length: 4,
            sub_block: None,
            threshold: 0.85,
            strict: true,
            only: true,
        }),
        block_field: Some("block_size"),
        mask_id: Some(151_669),
        end_ids: &[151_643, 151_645],
        head_if_present: true,
        rope_theta: 1_000_000,
        ..QWEN3
    },
    Family {
        model_type: "Fast_dLLM_Qwen",
        tied: true,
        diffusion: Some(DiffusionRules {
            layout: DiffusionLayout::Aligned,
            logit_shift: 1,
            block_length: 32,
            sub_block: Some(8),
            threshold: 0.9,
            strict: true,
            only: true,
        }),
        block_field: Some("bd_size"),
        mask_id: Some(151_665),
        end_ids: &[151_645],
        head_if_present: true,
        rope_theta: 1_000_000,
        ..QWEN2
    },
];

/// The family of a `model_type`.
#[must_use]
pub fn family(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|f| f.model_type == model_type)
}

/// The family of a checkpoint whose tensors give it away, whatever its config says.
#[must_use]
pub fn family_of_tensors<'a>(mut names: impl Iterator<Item = &'a str>) -> Option<&'static Family> {
    names.any(|name| name.starts_with("backbone.model.")).then(|| family("setdlm")).flatten()
}
