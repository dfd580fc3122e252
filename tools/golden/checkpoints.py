"""The checkpoints that are written. A new one is an entry of CHECKPOINTS."""

import dataclasses

from diffusion import Settings

END, FIM_MIDDLE = 256, 257  # special tokens of the byte tokenizer


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    name: str
    family: str
    seed: int
    config: dict
    dtype: str = "f32"  # of norms, plain weights, and of scales and biases when quantised
    quantization: dict | None = None  # {"group_size", "bits", tensor name: {"group_size", "bits"}}
    adapter_rank: int = 4
    adapter_alpha: int = 8
    trained: bool = False
    far: tuple = ()  # positions of the rows of `far.logits`, rising
    mask: int | None = None  # the mask token; where config.json does not name it, the tokenizer does
    records: tuple = ()  # texts decoded by diffusion: (settings, tokens of the prompt)


def sizes(vocab, hidden, layers, heads, kv_heads, head_dim, ffn, tied, **more):
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | more


def small(tied, **more):
    """heads * head_dim is not hidden, three query heads per K/V head, no size a multiple of 64."""
    return sizes(211, 48, 3, 6, 2, 16, 72, tied, **more)


def without(entries, *names):
    return {name: value for name, value in entries.items() if name not in names}


def yarn(theta, factor, **more):
    """Rotary parameters of the Ministral3 block; the query scaling steps at positions 16384, 32768, ..."""
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    } | more


def modern(tied, rope, length, **more):
    """`small` with its rotary parameters in an object of their own."""
    return without(small(tied, max_position_embeddings=length, rope_parameters=rope, **more), "rope_theta")


LONG = (0, 1, 2, 3, 100, 5000, 16383, 16384, 16385, 20000, 20001, 32767, 32768)

CHECKPOINTS = [
    Checkpoint("tiny-llama", "llama", 20, small(tied=False)),
    # Trained, so that greedy text is text and drafts are accepted. Ids 0..255 are bytes, 256 ends a text.
    Checkpoint(
        "tiny-llama-tied",
        "llama",
        21,
        sizes(257, 64, 3, 4, 2, 16, 96, tied=True, bos_token_id=END, eos_token_id=END),
        adapter_rank=8,
        adapter_alpha=16,
        trained=True,
    ),
    # MLX-affine: 4-bit linears, 8-bit embedding that is also the head.
    Checkpoint(
        "tiny-llama-q4",
        "llama",
        22,
        sizes(211, 64, 3, 8, 2, 16, 96, tied=True),
        dtype="f16",
        quantization={"group_size": 32, "bits": 4, "model.embed_tokens": {"group_size": 32, "bits": 8}},
    ),
    # 8 bits, groups of 64, bf16 scales, a quantised head of its own.
    Checkpoint(
        "tiny-llama-q8-bf16",
        "llama",
        23,
        sizes(211, 64, 3, 4, 1, 32, 128, tied=False),
        dtype="bf16",
        quantization={"group_size": 64, "bits": 8},
    ),
    # Llama 3.1's piecewise stretch; the original context is short, so that all three pieces matter early.
    Checkpoint(
        "tiny-llama3",
        "llama",
        24,
        small(
            tied=True,
            rope_theta=500000.0,
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        far=(0, 1, 2, 3, 50, 63, 64, 65, 200, 201, 400, 480, 490),
    ),
    # A window shorter than the prompt.
    Checkpoint("tiny-mistral", "mistral", 25, small(tied=False, sliding_window=5)),
    # A window in the config that is switched off, as in the published ones.
    Checkpoint(
        "tiny-qwen2",
        "qwen2",
        26,
        small(tied=True, rope_theta=1000000.0, use_sliding_window=False, sliding_window=6, max_window_layers=1),
    ),
    # A window in the upper layers.
    Checkpoint(
        "tiny-qwen3",
        "qwen3",
        27,
        small(tied=True, rope_theta=1000000.0, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    ),
    Checkpoint("tiny-smollm3", "smollm3", 28, small(tied=True, rope_theta=2000000.0, no_rope_layers=[1, 0, 1])),
    Checkpoint(
        "tiny-ministral3",
        "ministral3",
        29,
        modern(False, yarn(1e6, 16.0), 262144, sliding_window=None),
        far=LONG,
    ),
    Checkpoint(
        "tiny-nemotron",
        "nemotron_labs_diffusion",
        30,
        modern(False, yarn(1e9, 16.0), 262144, mask_token_id=100, eos_token_id=11),
        adapter_alpha=16,
        far=LONG,
        mask=100,
        records=((Settings(), 13), (Settings(threshold=0.3), 8), (Settings(length=5, steps=2), 11)),
    ),
    # The published 3B base differs from its instruct model: a short context, and a factor that compresses.
    Checkpoint(
        "tiny-nemotron-base",
        "nemotron_labs_diffusion",
        31,
        modern(False, yarn(1e6, 0.25), 4096, mask_token_id=100),
        adapter_alpha=16,
        far=(0, 1, 2, 3, 50, 51, 300, 1000, 1001, 2000, 3000, 4000, 4001),
        mask=100,
    ),
    # Trained on next tokens and masked blocks together.
    Checkpoint(
        "tiny-nemotron-trained",
        "nemotron_labs_diffusion",
        32,
        without(
            sizes(
                263,
                48,
                3,
                6,
                2,
                16,
                96,
                tied=False,
                max_position_embeddings=262144,
                rope_parameters=yarn(1e6, 16.0),
                mask_token_id=FIM_MIDDLE,
                bos_token_id=END,
                eos_token_id=END,
            ),
            "rope_theta",
        ),
        adapter_rank=8,
        adapter_alpha=32,
        trained=True,
        mask=FIM_MIDDLE,
        records=(
            (Settings(), 40),
            (Settings(length=12, threshold=0.6), 33),
            (Settings(length=6, steps=3), 24),
            (Settings(threshold=0.8, steps=2), 41),
        ),
    ),
    Checkpoint(
        "tiny-setdlm",
        "setdlm",
        33,
        small(tied=True, rope_theta=1000000.0, mask_token_id=100),
        mask=100,
        records=((Settings(), 13), (Settings(length=6, threshold=0.3), 9)),
    ),
    # Trained in shuffled orders; says of itself only that it is Qwen3, and leaves its mask to the tokenizer.
    Checkpoint(
        "tiny-setdlm-trained",
        "setdlm",
        34,
        sizes(263, 48, 3, 6, 2, 16, 96, tied=True, bos_token_id=END, eos_token_id=END)
        | {"rope_theta": 1000000.0, "architectures": ["CustomQwen3ForCausalLM"], "model_type": "qwen3"},
        trained=True,
        mask=FIM_MIDDLE,
        records=((Settings(), 40), (Settings(length=8, threshold=0.7), 33), (Settings(length=5, threshold=1.5), 24)),
    ),
    # Half precision and groups of two families with a mask token: an output head of its own, and a tied one.
    Checkpoint(
        "tiny-nemotron-q4",
        "nemotron_labs_diffusion",
        35,
        without(
            sizes(
                211,
                64,
                2,
                6,
                2,
                16,
                96,
                tied=False,
                max_position_embeddings=262144,
                rope_parameters=yarn(1e6, 16.0),
                mask_token_id=100,
            ),
            "rope_theta",
        ),
        dtype="bf16",
        quantization={"group_size": 32, "bits": 4, "encoder.embed_tokens": {"group_size": 32, "bits": 8}},
        adapter_alpha=16,
        mask=100,
        records=((Settings(threshold=0.3), 13),),
    ),
    Checkpoint(
        "tiny-setdlm-f16",
        "setdlm",
        36,
        sizes(211, 48, 2, 6, 2, 16, 72, tied=True, rope_theta=1000000.0, mask_token_id=100),
        dtype="f16",
        mask=100,
        records=((Settings(length=6, threshold=0.3), 13),),
    ),
    # Families that fill blocks and do nothing else: trained, and in groups or halves.
    Checkpoint(
        "tiny-sdar-trained",
        "sdar",
        37,
        sizes(263, 48, 3, 6, 2, 16, 96, tied=False, bos_token_id=END, eos_token_id=END)
        | {"rope_theta": 1000000.0, "mask_token_id": FIM_MIDDLE},
        trained=True,
        mask=FIM_MIDDLE,
        records=(
            (Settings(), 41),
            (Settings(threshold=0.5), 32),
            (Settings(threshold=0.95, steps=2), 23),
            (Settings(steps=3), 3),
        ),
    ),
    Checkpoint(
        "tiny-sdar-q8",
        "sdar",
        38,
        sizes(211, 64, 2, 8, 2, 16, 128, tied=True, rope_theta=1000000.0, mask_token_id=100),
        dtype="f16",
        quantization={"group_size": 64, "bits": 8, "model.embed_tokens": {"group_size": 32, "bits": 8}}
        | {f"model.layers.{i}.mlp.down_proj": {"group_size": 32, "bits": 4} for i in range(2)},
        mask=100,
        records=((Settings(length=8, threshold=0.3), 13),),
    ),
    Checkpoint(
        "tiny-fast-dllm-trained",
        "fast_dllm",
        39,
        sizes(263, 48, 3, 6, 2, 16, 96, tied=True, bos_token_id=END, eos_token_id=END)
        | {"rope_theta": 1000000.0, "mask_token_id": FIM_MIDDLE},
        trained=True,
        mask=FIM_MIDDLE,
        records=(
            (Settings(), 41),
            (Settings(threshold=0.5), 32),
            (Settings(length=8, threshold=0.7), 24),
            (Settings(threshold=1.0), 9),
        ),
    ),
    Checkpoint(
        "tiny-fast-dllm-f16",
        "fast_dllm",
        40,
        sizes(211, 48, 2, 6, 2, 16, 72, tied=False, rope_theta=1000000.0, mask_token_id=100),
        dtype="f16",
        mask=100,
        records=((Settings(threshold=0.3), 13),),
    ),
    # bf16, as most checkpoints are published; the truth has the weights quantised while loading too.
    Checkpoint(
        "tiny-nemotron-bf16",
        "nemotron_labs_diffusion",
        41,
        without(
            sizes(211, 48, 2, 6, 2, 16, 72, tied=False, max_position_embeddings=262144, mask_token_id=100)
            | {"rope_parameters": yarn(1e6, 16.0)},
            "rope_theta",
        ),
        dtype="bf16",
        adapter_alpha=16,
        mask=100,
        records=((Settings(threshold=0.3), 13),),
    ),
    Checkpoint(
        "tiny-setdlm-bf16",
        "setdlm",
        42,
        sizes(211, 48, 2, 6, 2, 16, 72, tied=True, rope_theta=1000000.0, mask_token_id=100),
        dtype="bf16",
        mask=100,
        records=((Settings(length=6, threshold=0.3), 13),),
    ),
    Checkpoint(
        "tiny-sdar-bf16",
        "sdar",
        43,
        sizes(211, 48, 2, 6, 2, 16, 72, tied=False, rope_theta=1000000.0, mask_token_id=100),
        dtype="bf16",
        mask=100,
        records=((Settings(length=8, threshold=0.3), 13),),
    ),
    Checkpoint(
        "tiny-fast-dllm-bf16",
        "fast_dllm",
        44,
        sizes(211, 48, 2, 6, 2, 16, 72, tied=True, rope_theta=1000000.0, mask_token_id=100),
        dtype="bf16",
        mask=100,
        records=((Settings(threshold=0.3), 13),),
    ),
]
