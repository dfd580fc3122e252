//! A model's forward pass written down as a list of operations over named weights: what every backend (GPU, CPU, the f64
//! reference) runs. Built once per loaded model by [`super::forward::build`]; independent of a call's rows.

use super::arch::{Arch, DraftRules, Mask, ModelRules};

/// Index into [`Program::matrices`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MatrixId(pub usize);

/// Index into [`Program::vectors`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VectorId(pub usize);

/// Which file of a checkpoint a tensor is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The model's own weights.
    Base,
    /// The draft adapter's.
    Adapter,
}

/// Where rows of a matrix, or entries of a vector, come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A tensor by its canonical name without `.weight` / `.bias` suffix rules applied: the full name, for the base
    /// in the spelling of Hugging Face's Llama (`model.layers.0.self_attn.q_proj.weight`), for the adapter without
    /// `base_model.model.` and with its suffix (`model.layers.0.self_attn.q_proj.lora_A.weight`, `mask_embedding`).
    /// [`super::names`] maps these to what a family's checkpoint calls them.
    Tensor {
        /// Which file.
        origin: Origin,
        /// Canonical name.
        name: String,
        /// Output rows (entries, for a vector) it must have.
        rows: usize,
        /// Inputs it must have; the tensor may have fewer (a LoRA of smaller rank), the rest is zero.
        k: usize,
    },
    /// Rows of zeros (a projection that the adapter leaves alone).
    Zeros {
        /// How many.
        rows: usize,
    },
}

impl Source {
    /// Output rows it contributes.
    #[must_use]
    pub fn rows(&self) -> usize {
        match self {
            Self::Tensor { rows, .. } | Self::Zeros { rows } => *rows,
        }
    }
}

/// How the sources of a matrix lie in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arrangement {
    /// One after the other.
    Stacked,
    /// Two sources of equal size, row by row: row `2j` is row `j` of the first (gate_proj), `2j+1` of the second (up_proj).
    Interleaved,
}

/// What a matrix is used for; decides its format when a plain checkpoint is quantised on load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// The embedding table `[V, D]`; also the head where the two are tied.
    Embedding,
    /// The output head `[V, D]`.
    Head,
    /// A projection of a layer.
    Linear,
    /// LoRA's A or B: never quantised.
    Lora,
}

/// A matrix `[n, k]` the forward pass reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MatrixSpec {
    /// For messages.
    pub label: String,
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// Use.
    pub role: Role,
    /// Sources, whose rows add up to `n`.
    pub sources: Vec<Source>,
    /// How they lie.
    pub arrangement: Arrangement,
}

/// A vector `[n]` of f32 the forward pass reads (RMSNorm gains, biases, the mask embedding).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VectorSpec {
    /// For messages.
    pub label: String,
    /// Entries.
    pub n: usize,
    /// Sources, whose rows add up to `n`.
    pub sources: Vec<Source>,
    /// How they lie.
    pub arrangement: Arrangement,
}

/// A call's activations, each `[rows, width]` f32. The row stride is the width rounded up to 32; the padding is zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Act {
    /// The residual stream `[T, D]`.
    H,
    /// The residual stream times the next RMSNorm's gain `[T, D]`. Its consumer multiplies by `1 / rms(H row)`.
    X,
    /// q, k, v of a layer `[T, (Hq + 2 Hkv) Dh]`; q is rotated in place.
    Qkv,
    /// Attention's output `[T, Hq Dh]`.
    Attn,
    /// `silu(gate) * up` `[T, F]`.
    Ff,
    /// LoRA's inner activations `[T, segments * rank]`; rows outside the call's adapter range are stale.
    Lora,
    /// The head's output `[choosing rows, V]`.
    Logits,
}

/// Which rows of a call an operation covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowSet {
    /// All.
    All,
    /// Those with the adapter on; the operation is left out of calls that have none.
    Adapter,
    /// Those that choose; output rows are counted from the first of them.
    Choose,
}

/// The low-rank part added to a matmul's output on adapter rows: `y[o] += scale * sum_j B[o, j] * lora[segment(o) * rank + j]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoraB {
    /// B `[n, rank]`.
    pub b: MatrixId,
    /// Rank (of the widest segment).
    pub rank: usize,
    /// `lora_alpha / r`.
    pub scale: f32,
    /// First output of the second and third segment of a stacked matrix (`n` where there is none). For an interleaved
    /// matrix the segment of output `o` is `o % 2` and these are not used.
    pub segment_starts: [usize; 2],
    /// How the segments lie; the same as the matrix's.
    pub arrangement: Arrangement,
}

/// What a matmul does with `y`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// `act[r, o] = y`.
    Store(Act),
    /// `H[r, o] += y`, then `X[r, o] = H[r, o] * gain[o]`.
    Residual {
        /// Gain of the RMSNorm that comes next.
        gain: VectorId,
    },
    /// For an interleaved matrix: `act[r, j] = silu(y[2j]) * y[2j+1]`.
    SwiGlu(Act),
}

/// `y[r, o] = norm(r) * sum_k W[o, k] * input[r, k] (+ bias[o]) (+ LoRA)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Matmul {
    /// W `[n, k]`.
    pub weight: MatrixId,
    /// Input activations.
    pub input: Act,
    /// Whether `norm(r)` is `1 / sqrt(mean(H[r]^2) + eps)` (RMSNorm, its gain being in `X` already) or 1.
    pub norm: bool,
    /// Rows covered.
    pub rows: RowSet,
    /// Added to every row.
    pub bias: Option<VectorId>,
    /// Added to adapter rows.
    pub lora: Option<LoraB>,
    /// Where `y` goes.
    pub output: Output,
}

/// One operation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Op {
    /// `H[r] = embedding of row r` (the mask vector for mask rows where there is one), `X[r] = H[r] * gain`.
    Embed {
        /// Table `[V, D]`.
        table: MatrixId,
        /// Mask embedding `[D]`.
        mask: Option<VectorId>,
        /// Gain of the first RMSNorm.
        gain: VectorId,
    },
    /// A matrix product.
    Matmul(Matmul),
    /// Per row and head: RMSNorm over Dh where there is one, RoPE, query scaling; q stays in `Qkv`, k and v go to the
    /// row's slot of the layer's cache.
    RopeKv {
        /// Layer.
        layer: usize,
        /// Gain `[Dh]` of q's norm.
        q_norm: Option<VectorId>,
        /// Gain `[Dh]` of k's norm.
        k_norm: Option<VectorId>,
        /// Whether to rotate.
        rope: bool,
    },
    /// Per row and head: softmax over the keys the row sees, times their values, into `Attn`.
    Attention {
        /// Layer.
        layer: usize,
        /// Sliding window.
        window: Option<u32>,
    },
    /// Per row of `Logits`: the largest entry (smallest id among equals) and its softmax probability.
    ArgMax {
        /// An id that is never chosen and does not count in the softmax.
        banned: Option<u32>,
    },
}

/// A draft adapter as its config describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterSpec {
    /// Rank; the largest where modules differ.
    pub rank: usize,
    /// `lora_alpha / r` (`/ sqrt(r)` with rslora).
    pub scale: f32,
    /// Canonical module names that have A and B, such as `model.layers.0.self_attn.q_proj`.
    pub modules: std::collections::BTreeSet<String>,
    /// Whether the file has a `mask_embedding` [D].
    pub mask_embedding: bool,
    /// How to draft with it.
    pub rules: DraftRules,
}

/// The forward pass of one model, with or without its draft adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    /// Sizes.
    pub arch: Arch,
    /// How the model drafts; `None` if it cannot.
    pub draft: Option<DraftRules>,
    /// What stands at mask rows; `None` if the model has no use for them.
    pub mask: Option<Mask>,
    /// Matrices, by [`MatrixId`].
    pub matrices: Vec<MatrixSpec>,
    /// Vectors, by [`VectorId`].
    pub vectors: Vec<VectorSpec>,
    /// Operations, in order.
    pub ops: Vec<Op>,
    /// Width of [`Act::Lora`] (0 without an adapter).
    pub lora_width: usize,
}

impl Program {
    /// What the model can do beside plain next tokens. Diffusion needs a mask that is a token of the vocabulary: the
    /// checkpoint's own.
    #[must_use]
    pub fn rules(&self) -> ModelRules {
        let own_mask = matches!(self.mask, Some(Mask::Token(_)));
        ModelRules { draft: self.draft, diffusion: self.arch.diffusion.filter(|_| own_mask), horizon: self.arch.horizon }
    }

    /// Values per row of `act`.
    #[must_use]
    pub fn width(&self, act: Act) -> usize {
        match act {
            Act::H | Act::X => self.arch.hidden_size,
            Act::Qkv => self.arch.qkv_size(),
            Act::Attn => self.arch.q_size(),
            Act::Ff => self.arch.intermediate_size,
            Act::Lora => self.lora_width,
            Act::Logits => self.arch.vocab_size,
        }
    }

    /// Row stride of `act` in values: the width rounded up to 32, so that every weight format's blocks stay inside a row.
    #[must_use]
    pub fn stride(&self, act: Act) -> usize {
        self.width(act).next_multiple_of(32)
    }
}
