"""Families of checkpoints: what differs between them, as data. A new family is an entry of FAMILIES."""

import dataclasses

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class Diffusion:
    """How a family decodes by diffusion (diffusion.py says what the layouts are)."""

    layout: str
    length: int
    threshold: float
    length_field: str | None = None  # the config entry that holds the block length
    sub_block: int | None = None  # blocks are filled in parts of so many positions
    strict: bool = False  # a probability equal to the threshold is not enough


@dataclasses.dataclass(frozen=True)
class Family:
    """Names and row rules of a model family, and the transformers class that judges `forward`."""

    config: dict  # config.json entries that every checkpoint of the family has
    body: str  # what stands before `embed_tokens`, `layers` and `norm`
    head: str
    # transformers' name without ForCausalLM and Config; for families it does not have, the class with the same block.
    reference: str
    logit_shift: int = 1  # 1: a draft row at position p predicts p + 1
    mask_verify: bool = False  # the target's word on p is that of a mask row at p, not of the clean row at p - 1
    in_block: bool = True  # a block begins with its anchor's token; else it sees the anchor's clean row
    bidirectional: bool = True  # rows of a block see each other
    adapter_modules: tuple = LINEARS  # none: the family drafts without an adapter
    adapter_folder: str = "draft_adapter"
    mask_embedding: bool = True  # the adapter has a learned mask; else the mask is `mask_token_id` and is never chosen
    qkv_bias: bool = False
    qk_norm: bool = False
    diffusion: Diffusion | None = None
    drafts: bool = True  # else it fills blocks and does nothing else

    @property
    def first_row(self):
        """The first row of a block: row r stands r behind the anchor."""
        return 2 if self.mask_verify else 0 if self.in_block else 1

    def tensor_name(self, role):
        """The checkpoint's name of a tensor: "norm.weight", (layer, "q_proj.bias"), (layer, "q_proj"), ..."""
        if not isinstance(role, tuple):
            return f"{self.body}{role}".replace(f"{self.body}lm_head", self.head)
        layer, part = role
        place = "self_attn." if part[:2] in ("q_", "k_", "v_", "o_") else "mlp." if part.split(".")[0] in LINEARS else ""
        return f"{self.body}layers.{layer}.{place}{part}"


LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
}
PLAIN = {"body": "model.", "head": "lm_head"}


def config(architecture, model_type, eps=1e-6, **more):
    base = {"architectures": [architecture], "model_type": model_type, "hidden_act": "silu", "rms_norm_eps": eps}
    return base | more


FAMILIES = {
    "llama": Family(LLAMA_CONFIG, reference="Llama", **PLAIN),
    "mistral": Family(config("MistralForCausalLM", "mistral", 1e-5), reference="Mistral", **PLAIN),
    "qwen2": Family(config("Qwen2ForCausalLM", "qwen2"), reference="Qwen2", qkv_bias=True, **PLAIN),
    "qwen3": Family(
        config("Qwen3ForCausalLM", "qwen3", attention_bias=False), reference="Qwen3", qk_norm=True, **PLAIN
    ),
    "smollm3": Family(
        config("SmolLM3ForCausalLM", "smollm3", attention_bias=False, mlp_bias=False), reference="SmolLM3", **PLAIN
    ),
    "ministral3": Family(config("Ministral3ForCausalLM", "ministral3", 1e-5), reference="Ministral3", **PLAIN),
    # Its block is Ministral3's.
    "nemotron_labs_diffusion": Family(
        config(
            "NemotronLabsDiffusionModel",
            "nemotron_labs_diffusion",
            1e-5,
            attention_bias=False,
            mlp_bias=False,
            sliding_window=None,
            dlm_paradigm="bidirectional",
            block_size=8,
            use_cache=False,
        ),
        body="encoder.",
        head="diffusion_head",
        reference="Ministral3",
        logit_shift=0,
        adapter_modules=("o_proj",),
        adapter_folder="linear_spec_lora",
        mask_embedding=False,
        diffusion=Diffusion("seeded", 32, 0.9, "block_size"),
    ),
    # Its block is Qwen3's.
    "setdlm": Family(
        config("SetDLM", "setdlm", attention_bias=False),
        body="backbone.model.model.",
        head="backbone.model.lm_head",
        reference="Qwen3",
        logit_shift=0,
        mask_verify=True,
        in_block=False,
        bidirectional=False,
        adapter_modules=(),
        mask_embedding=False,
        qk_norm=True,
        diffusion=Diffusion("window", 4, 0.9),
    ),
    # Its block is Qwen3's.
    "sdar": Family(
        config("SDARForCausalLM", "sdar", attention_bias=False, block_size=4),
        reference="Qwen3",
        logit_shift=0,
        adapter_modules=(),
        mask_embedding=False,
        qk_norm=True,
        diffusion=Diffusion("aligned", 4, 0.85, "block_size", strict=True),
        drafts=False,
        **PLAIN,
    ),
    # Its block is Qwen2's.
    "fast_dllm": Family(
        config("Fast_dLLM_QwenForCausalLM", "Fast_dLLM_Qwen", bd_size=16),
        reference="Qwen2",
        logit_shift=1,
        adapter_modules=(),
        mask_embedding=False,
        qkv_bias=True,
        diffusion=Diffusion("aligned", 32, 0.9, "bd_size", sub_block=8, strict=True),
        drafts=False,
        **PLAIN,
    ),
}
