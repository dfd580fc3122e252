//! What a decoder-only model is, as data. Families differ in values of [`Arch`], never in code of their own.

/// How a model's rotary frequencies are stretched. Field names are those of `rope_parameters` / `rope_scaling`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Plain RoPE.
    Default,
    /// Every frequency divided by `factor`.
    Linear {
        /// Stretch.
        factor: f64,
    },
    /// Llama 3's piecewise stretch by wavelength.
    Llama3 {
        /// Stretch of long wavelengths.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are stretched in full.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are left alone.
        high_freq_factor: f64,
        /// `original_max_position_embeddings`, in positions.
        original: f64,
    },
    /// YaRN as transformers defines it.
    Yarn {
        /// Stretch; below 1 it compresses.
        factor: f64,
        /// `original_max_position_embeddings`, in positions.
        original: f64,
        /// Rotations above which a dimension is left alone.
        beta_fast: f64,
        /// Rotations below which a dimension is stretched in full.
        beta_slow: f64,
        /// Multiplier of cos and sin, computed from `mscale`, `mscale_all_dim` or `attention_factor`.
        attention_factor: f64,
        /// Whether the correction range is rounded to whole dimensions (`truncate`, true unless the file says no).
        truncate: bool,
    },
}

/// Rotary position embedding in half-split order: dimension `i` pairs with `i + head_dim / 2`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Base of the frequencies, `rope_theta`.
    pub theta: f64,
    /// Stretch for long contexts.
    pub scaling: RopeScaling,
}

/// Llama-4 query scaling: q is multiplied by `1 + beta * ln(1 + floor(position / original))` after RoPE.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryScaling {
    /// `llama_4_scaling_beta`.
    pub beta: f64,
    /// `original_max_position_embeddings`, in positions.
    pub original: f64,
}

/// What differs from layer to layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layer {
    /// Whether q and k are rotated (false in SmolLM3's NoPE layers).
    pub rope: bool,
    /// Sliding window: a row at slot `s` sees slots above `s - window` only.
    pub window: Option<u32>,
}

/// Which row of a call is the target's distribution for a position, and how a draft block is anchored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VerifyRows {
    /// The clean token at p-1, causal, predicts p (every autoregressive model).
    Clean,
    /// A mask row at p that sees the clean rows below p and itself predicts p (SetDLM).
    Mask,
}

/// How a draft block begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Anchor {
    /// The block's first row is the anchor token itself.
    InBlock,
    /// The block holds masks only; they see clean rows up to and including the anchor's.
    Shared,
}

/// How a model drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftRules {
    /// 0: a draft row at p predicts p. 1: it predicts p+1.
    pub logit_shift: u32,
    /// First row of a block.
    pub anchor: Anchor,
    /// Rows that verify.
    pub verify: VerifyRows,
    /// Whether draft rows of a block see each other both ways (false: cache, clean rows and themselves only).
    pub bidirectional: bool,
    /// Whether the adapter is on for draft rows.
    pub adapter: bool,
}

/// What a call of block diffusion denoises, and what the rows that it keeps see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiffusionLayout {
    /// Blocks begin right behind the prompt; kept rows are causal, and the last one's choice is the first token of the next
    /// block (Nemotron-Labs-Diffusion).
    Seeded,
    /// Blocks lie at multiples of their length, prompt included; kept rows see their whole block. With a logit shift of 1
    /// the last kept row's choice is the first token of the next block (SDAR, Fast-dLLM v2).
    Aligned,
    /// A window that begins at the first mask and slides; masks see kept rows and themselves, and what was revealed is kept
    /// in the order in which it was (SetDLM).
    Window,
}

/// How a checkpoint decodes by diffusion: several masks of a block a call, the most confident first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DiffusionRules {
    /// What is denoised, and what kept rows see.
    pub layout: DiffusionLayout,
    /// 0: a row at p predicts p. 1: it predicts p+1.
    pub logit_shift: u32,
    /// Tokens of a block (positions of the window) unless asked otherwise, at least 1.
    pub block_length: u32,
    /// Blocks are filled in parts of this many positions, one after the other.
    pub sub_block: Option<u32>,
    /// Masks whose choice is this probable are revealed together, unless asked otherwise.
    pub threshold: f32,
    /// Whether a probability equal to the threshold is not enough.
    pub strict: bool,
    /// Whether the checkpoint was trained for no other schedule.
    pub only: bool,
}

/// What a model can do beside plain next tokens.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ModelRules {
    /// How it drafts; `None` if it cannot.
    pub draft: Option<DraftRules>,
    /// How it decodes by diffusion; `None` if it cannot.
    pub diffusion: Option<DiffusionRules>,
    /// How far ahead of the text it was trained to predict, in positions, where that is known to be short.
    pub horizon: Option<u32>,
}

impl From<Option<DraftRules>> for ModelRules {
    fn from(draft: Option<DraftRules>) -> Self {
        Self { draft, ..Self::default() }
    }
}

/// What stands at a mask row's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    /// An ordinary token id of the embedding table.
    Token(u32),
    /// A learned vector of the draft adapter, `mask_embedding` [D].
    Embedding,
}

/// Sizes and formulas of a model: everything the forward pass needs to know beside the weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Arch {
    /// `model_type` as the checkpoint gives it.
    pub model_type: String,
    /// D.
    pub hidden_size: usize,
    /// F.
    pub intermediate_size: usize,
    /// One entry per layer (L entries).
    pub layers: Vec<Layer>,
    /// Hq.
    pub num_attention_heads: usize,
    /// Hkv; divides Hq.
    pub num_key_value_heads: usize,
    /// Dh; even. Explicit in some checkpoints, else D / Hq.
    pub head_dim: usize,
    /// V.
    pub vocab_size: usize,
    /// Added to the mean square in every RMSNorm.
    pub rms_norm_eps: f64,
    /// Rotary embedding.
    pub rope: Rope,
    /// Longest context the checkpoint was made for, in positions.
    pub max_position_embeddings: usize,
    /// Whether the head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Whether q_proj, k_proj and v_proj add a bias (Qwen2).
    pub attention_bias: bool,
    /// Whether o_proj adds a bias.
    pub output_bias: bool,
    /// Whether gate_proj, up_proj and down_proj add a bias.
    pub mlp_bias: bool,
    /// Whether q and k heads pass an RMSNorm over Dh before RoPE (Qwen3).
    pub qk_norm: bool,
    /// Llama-4 query scaling.
    pub query_scaling: Option<QueryScaling>,
    /// The checkpoint's own mask token, if it names one.
    pub mask_token_id: Option<u32>,
    /// Ids that end a text: the union of config and generation config (the tokenizer's stops join at load).
    pub eos_token_ids: Vec<u32>,
    /// How the checkpoint drafts by itself; `None` for plain autoregressive models without an adapter.
    pub draft: Option<DraftRules>,
    /// How the checkpoint decodes by diffusion; `None` if it was not made for that.
    pub diffusion: Option<DiffusionRules>,
    /// How far ahead of the text the checkpoint was trained to predict, in positions, where that is known to be short.
    pub horizon: Option<u32>,
}

impl Arch {
    /// Output rows of the fused q, k, v projection: (Hq + 2 Hkv) Dh.
    #[must_use]
    pub fn qkv_size(&self) -> usize {
        (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
    }

    /// Hq Dh.
    #[must_use]
    pub fn q_size(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Hkv Dh.
    #[must_use]
    pub fn kv_size(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }
}
