#!/usr/bin/env python3
"""Writes tests/golden/: tiny checkpoints and the truth about them, in float64, from PyTorch.

Every checkpoint is a folder in the hub's layout (config.json, model.safetensors, draft_adapter/) with
golden.json (what was asked) and golden.safetensors (what must come out) beside it. tests/golden/README.md
says what each tensor is. The Rust tests read these files; they need no Python.

The truth is computed by `forward` below in float64, row by row with an explicit visibility matrix. Before
anything is written it is held against transformers' own model class: the causal rows, and the draft rows with
the adapter merged into the weights and the cache filled by the plain model. Each comparison has a control that
must fail.

    tools/golden.py              write all checkpoints (about two minutes on two cores)
    tools/golden.py NAME ...     write only these
    tools/golden.py --check      recompute the truth of the checkpoints on disk and compare it with theirs

A new family is an entry of FAMILIES; a new checkpoint is an entry of CHECKPOINTS.
"""

import dataclasses
import json
import math
import pathlib
import re
import shutil
import sys

try:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
except ImportError as missing:
    sys.exit(f"{missing}. Install what this script needs: pip install torch 'transformers>=5,<5.40' safetensors")

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden"
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MASK = -1  # stands for the mask embedding in a list of tokens
VERIFY_WIDTH, DRAFT_WIDTH = 4, 7  # K and w of the packed call and of the schedules
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
HUB_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


# ---- families: what differs between them, as data ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Family:
    """Names and row rules of a model family, and the transformers class that judges `forward`."""

    config: dict  # config.json entries that every checkpoint of the family has
    globals: dict  # role -> tensor name
    layer: dict  # role -> tensor name inside a layer
    layer_prefix: str
    adapter_prefix: str  # what PEFT puts in front of a tensor's name
    logit_shift: int  # 1: a draft row at position p predicts p + 1
    reference: str  # transformers class names: config, model
    reference_config: str


FAMILIES = {
    "llama": Family(
        config={
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": 1e-5,
        },
        globals={"embed_tokens": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"},
        layer={
            "input_layernorm": "input_layernorm",
            "q_proj": "self_attn.q_proj",
            "k_proj": "self_attn.k_proj",
            "v_proj": "self_attn.v_proj",
            "o_proj": "self_attn.o_proj",
            "post_attention_layernorm": "post_attention_layernorm",
            "gate_proj": "mlp.gate_proj",
            "up_proj": "mlp.up_proj",
            "down_proj": "mlp.down_proj",
        },
        layer_prefix="model.layers.{}.",
        adapter_prefix="base_model.model.",
        logit_shift=1,
        reference="LlamaForCausalLM",
        reference_config="LlamaConfig",
    ),
}


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


CHECKPOINTS = [
    # heads * head_dim is not hidden, three query heads per K/V head, no size a multiple of 64.
    Checkpoint("tiny-llama", "llama", 20, sizes(211, 48, 3, 6, 2, 16, 72, tied=False)),
    # Trained, so that greedy text is text and drafts are accepted. Ids 0..255 are bytes, 256 ends a text.
    Checkpoint(
        "tiny-llama-tied",
        "llama",
        21,
        sizes(257, 64, 3, 4, 2, 16, 96, tied=True, bos_token_id=256, eos_token_id=256),
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
]


# ---- a model in memory ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Adapter:
    """LoRA pairs by (layer, role), the factor alpha / rank, and the mask embedding [D]."""

    pairs: dict
    scale: float
    mask_embedding: torch.Tensor

    def to(self, dtype):
        pairs = {k: (a.to(dtype), b.to(dtype)) for k, (a, b) in self.pairs.items()}
        return Adapter(pairs, self.scale, self.mask_embedding.to(dtype))


@dataclasses.dataclass
class Model:
    """A config and its weights by role (`(layer, role)` inside a layer); all dequantised."""

    family: Family
    config: dict
    weights: dict
    adapter: Adapter | None

    def to(self, dtype):
        weights = {k: v.to(dtype) for k, v in self.weights.items()}
        return Model(self.family, self.config, weights, self.adapter and self.adapter.to(dtype))


def shapes(config):
    """Role -> shape [out, in] of every tensor of a dense llama-like model."""
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer = {
        "input_layernorm": (hidden,),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "down_proj": (hidden, ffn),
    }
    result = {"embed_tokens": (config["vocab_size"], hidden), "norm": (hidden,)}
    if not config["tie_word_embeddings"]:
        result["lm_head"] = (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        result |= {(i, role): shape for role, shape in layer.items()}
    return result


def tensor_name(family, role):
    if isinstance(role, tuple):
        return family.layer_prefix.format(role[0]) + family.layer[role[1]]
    return family.globals[role]


def random_model(checkpoint, generator):
    def normal(shape, deviation):
        return torch.randn(shape, generator=generator, dtype=torch.float64) * deviation

    weights = {}
    for role, shape in shapes(checkpoint.config).items():
        short = role[1] if isinstance(role, tuple) else role
        if len(shape) == 1:
            weights[role] = 1 + normal(shape, 0.2)
        elif short == "embed_tokens":
            # A tied embedding is the head too, so it is scaled as a head: logits of a few units.
            weights[role] = normal(shape, 2.5 / math.sqrt(shape[1]))
        else:
            # Queries and keys large enough for attention to choose rather than to average.
            gain = {"q_proj": 1.6, "k_proj": 1.6, "lm_head": 2.5}.get(short, 1.0)
            weights[role] = normal(shape, gain / math.sqrt(shape[1]))
    pairs = {}
    for role, shape in shapes(checkpoint.config).items():
        if isinstance(role, tuple) and role[1] in LINEARS:
            rank = checkpoint.adapter_rank
            pairs[role] = (normal((rank, shape[1]), 1 / math.sqrt(shape[1])), normal((shape[0], rank), 0.2))
    adapter = Adapter(
        pairs,
        checkpoint.adapter_alpha / checkpoint.adapter_rank,
        normal((checkpoint.config["hidden_size"],), 2.5 / math.sqrt(checkpoint.config["hidden_size"])),
    )
    family = FAMILIES[checkpoint.family]
    return Model(family, family.config | checkpoint.config, weights, adapter)


# ---- the forward pass -------------------------------------------------------------------------------------


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope(x, positions, theta):
    """Half-split rotary embedding: dimension i turns with i + Dh/2. x: [..., H, T, Dh]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = positions[..., None, :, None].to(x.dtype) * frequencies
    cos, sin = angles.cos(), angles.sin()
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def forward(model, tokens, positions, sees, adapted, trace=None):
    """Logits [..., T, V] of one call without a cache: what would be cached is rows of the call.

    tokens [..., T] with MASK for the mask embedding; positions [..., T]; sees [..., T, T], true where the row of
    the first index sees the row of the second; adapted [T], true where the adapter is on. `trace`, a dict,
    receives the residual stream and the keys and values.
    """
    config, w, adapter = model.config, model.weights, model.adapter
    heads, kv_heads, head_dim = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )

    def linear(x, layer, role):
        y = x @ w[layer, role].T
        if adapter is not None and (layer, role) in adapter.pairs and bool(adapted.any()):
            a, b = adapter.pairs[layer, role]
            y = torch.where(adapted[:, None], y + adapter.scale * ((x @ a.T) @ b.T), y)
        return y

    def split(x, count):
        return x.unflatten(-1, (count, head_dim)).transpose(-2, -3)

    table = w["embed_tokens"]
    h = table[tokens.clamp(min=0)]
    if adapter is not None:
        h = torch.where((tokens == MASK)[..., None], adapter.mask_embedding, h)
    hidden, keys, values = [h], [], []
    for layer in range(config["num_hidden_layers"]):
        x = rms_norm(h, w[layer, "input_layernorm"], config["rms_norm_eps"])
        q = rope(split(linear(x, layer, "q_proj"), heads), positions, config["rope_theta"])
        k = rope(split(linear(x, layer, "k_proj"), kv_heads), positions, config["rope_theta"])
        v = split(linear(x, layer, "v_proj"), kv_heads)
        keys.append(k.transpose(-2, -3))
        values.append(v.transpose(-2, -3))
        k, v = (t.repeat_interleave(heads // kv_heads, -3) for t in (k, v))
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(head_dim)
        scores = scores.masked_fill(~sees[..., None, :, :], -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(-2, -3).flatten(-2)
        h = h + linear(mixed, layer, "o_proj")
        x = rms_norm(h, w[layer, "post_attention_layernorm"], config["rms_norm_eps"])
        gate = torch.nn.functional.silu(linear(x, layer, "gate_proj"))
        h = h + linear(gate * linear(x, layer, "up_proj"), layer, "down_proj")
        hidden.append(h)
    if trace is not None:
        trace |= {"hidden": torch.stack(hidden), "keys": torch.stack(keys), "values": torch.stack(values)}
    return rms_norm(h, w["norm"], config["rms_norm_eps"]) @ w.get("lm_head", table).T


@dataclasses.dataclass
class Call:
    """The rows of a call: the cached prefix, the verify segment, draft blocks by anchor."""

    tokens: torch.Tensor
    positions: torch.Tensor
    sees: torch.Tensor
    adapted: torch.Tensor
    verify: slice
    blocks: dict


def rows_of(prefix, draft, anchors, width, adapter_on=True):
    """The packed call at prefix x[0..=n] with draft d[1..=m] and a block of `width` masks for each anchor."""
    n, m = len(prefix) - 1, len(draft)
    tokens, positions = list(prefix) + list(draft), list(range(n + 1 + m))
    count = n + 1 + m + len(anchors) * (1 + width)
    sees = torch.zeros(count, count, dtype=torch.bool)
    sees[: n + 1 + m, : n + 1 + m] = torch.ones(n + 1 + m, n + 1 + m, dtype=torch.bool).tril()
    blocks = {}
    for h in anchors:
        first = len(tokens)
        blocks[h] = slice(first, first + 1 + width)
        tokens += [tokens[n + h]] + [MASK] * width
        positions += range(n + h, n + h + width + 1)
        sees[blocks[h], : n + h] = True  # the cache and the verify rows below the anchor's
        sees[blocks[h], blocks[h]] = True
    adapted = torch.zeros(count, dtype=torch.bool)
    adapted[n + 1 + m :] = adapter_on
    return Call(
        torch.tensor(tokens), torch.tensor(positions), sees, adapted, slice(n, n + 1 + m), blocks
    )


def run(model, call, trace=None):
    with torch.no_grad():
        return forward(model, call.tokens, call.positions, call.sees, call.adapted, trace)


def causal(model, tokens, trace=None):
    return run(model, rows_of(tokens, [], [], 0), trace)


def drafted(model, tokens, width, adapter_on=True):
    call = rows_of(tokens, [], [0], width, adapter_on)
    return run(model, call)[call.blocks[0]]


# ---- text: greedy, and what each schedule makes of it ------------------------------------------------------


def choose(logits):
    """Argmax of each row (smallest id among equals) and the smallest distance between first and second."""
    top = logits.topk(2, -1).values
    return logits.argmax(-1).tolist(), (top[..., 0] - top[..., 1]).min().item()


def greedy(model, prompt, count):
    tokens, gap = list(prompt), math.inf
    for _ in range(count):
        chosen, near = choose(causal(model, tokens)[-1:])
        tokens, gap = tokens + chosen, min(gap, near)
    return tokens[len(prompt) :], gap


def accept(draft, choices):
    a = 0
    while a < len(draft) and draft[a] == choices[a]:
        a += 1
    return a


def packed(model, prompt, count, k, w):
    """Packed-SS: the first call is the prefill, every later one verifies and drafts."""
    shift = model.family.logit_shift
    tokens, draft, accepted, gap = list(prompt), [], [], math.inf
    while len(tokens) - len(prompt) < count:
        call = rows_of(tokens, draft, [0], w)
        logits = run(model, call)
        choices, _ = choose(logits[call.verify])
        a = accept(draft, choices)
        suffix, near = choose(logits[call.blocks[0]][a + 2 - shift :]) if a + 2 - shift <= w else ([], gap)
        accepted.append([len(draft), a])
        tokens, draft, gap = tokens + draft[:a] + [choices[a]], suffix[:k], min(gap, near)
    return {"calls": len(accepted) - 1, "per_call": accepted[1:], "smallest_draft_gap": gap}, tokens


def two_call(model, prompt, count, k, w):
    """Draft, then verify. The prefill emits one token and drafts nothing."""
    shift = model.family.logit_shift
    tokens, rounds, gap = list(prompt), [], math.inf
    tokens += choose(causal(model, tokens)[-1:])[0]
    while len(tokens) - len(prompt) < count:
        draft, near = choose(drafted(model, tokens, w)[1 - shift :])
        draft = draft[:k]
        choices, _ = choose(causal(model, tokens + draft)[len(tokens) - 1 :])
        a = accept(draft, choices)
        rounds.append([len(draft), a])
        tokens, gap = tokens + draft[:a] + [choices[a]], min(gap, near)
    return {"calls": 2 * len(rounds), "per_round": rounds, "smallest_draft_gap": gap}, tokens


# ---- held against transformers -----------------------------------------------------------------------------


def reference(model, merged):
    """transformers' model with these weights in float64; `merged` adds the adapter to the linears."""
    family = model.family
    config = getattr(transformers, family.reference_config)(
        **{k: v for k, v in model.config.items() if k not in ("architectures", "model_type")},
        attn_implementation="eager",
    )
    state = {}
    for role, value in model.weights.items():
        if merged and role in model.adapter.pairs:
            a, b = model.adapter.pairs[role]
            value = value + model.adapter.scale * (b @ a)
        state[tensor_name(family, role) + ".weight"] = value
    if model.config["tie_word_embeddings"]:
        state[family.globals["lm_head"] + ".weight"] = model.weights["embed_tokens"]
    judge = getattr(transformers, family.reference)(config).double().eval()
    judge.load_state_dict(state, strict=True)
    return judge


def anchor_to_transformers(model, tokens):
    """Asserts that `forward` computes what transformers computes; returns the largest relative difference.

    transformers keeps norms, rotary angles and softmax in float32 whatever the model's type, hence the bound.
    """
    bound = 2e-5
    config = model.config

    def distance(ours, theirs):
        return ((ours - theirs).abs().max() / (theirs.max() - theirs.min())).item()

    with torch.no_grad():
        plain = reference(model, merged=False)
        ids = torch.tensor([tokens])
        causal_truth = plain(ids).logits[0]
        found = distance(causal(model, tokens), causal_truth)
        assert found < bound, f"causal rows differ from transformers by {found}"

        cache = plain(ids[:, :-1], use_cache=True).past_key_values
        table = model.weights["embed_tokens"]
        masks = model.adapter.mask_embedding.expand(DRAFT_WIDTH, -1)
        block = torch.cat([table[ids[0, -1:]], masks])[None]
        n = len(tokens) - 1
        open_mask = torch.zeros(1, 1, 1 + DRAFT_WIDTH, n + 1 + DRAFT_WIDTH, dtype=torch.float64)
        draft_truth = reference(model, merged=True)(
            inputs_embeds=block,
            position_ids=torch.arange(n, n + 1 + DRAFT_WIDTH)[None],
            attention_mask=open_mask,
            past_key_values=cache,
        ).logits[0]
        found_draft = distance(drafted(model, tokens, DRAFT_WIDTH), draft_truth)
        assert found_draft < bound, f"draft rows differ from transformers by {found_draft}"

    # Controls: the comparison must see a slightly wrong frequency, and a draft without the adapter.
    skewed = Model(model.family, config | {"rope_theta": config["rope_theta"] * 1.01}, model.weights, model.adapter)
    assert distance(causal(skewed, tokens), causal_truth) > 5 * bound
    assert distance(drafted(model, tokens, DRAFT_WIDTH, adapter_on=False), draft_truth) > 100 * bound
    return max(found, found_draft)


# ---- training ----------------------------------------------------------------------------------------------

END = 256


def toy_text(generator, length):
    """Ids of endless small texts: the facts are fixed, their order and some words are not."""

    def pick(options):
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    who = [
        ("the cat", "a warm place", "sleeps", "🐱"),
        ("the old sailor", "the open sea", "sings", "⛵"),
        ("the gardener", "rain in spring", "waters the roses", "🌹"),
        ("the baker", "fresh bread", "gets up before the sun", "🍞"),
    ]
    ids = []
    while len(ids) < length:
        name, likes, does, sign = pick(who)
        sentences = [f"{name} likes {likes}. ", f"every morning {name} {does}. "]
        if pick([True, False]):
            sentences.reverse()
        closing = pick(["so it goes on", "and nobody minds"])
        text = "".join(sentences) + f"{closing}, déjà vu {sign}\n"
        ids += list(text.encode()) + [END]
    return torch.tensor(ids[:length])


def learn(parameters, steps, rate, loss_at, what):
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_at(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0 or step == steps - 1:
            print(f"  {what} step {step}: loss {loss.item():.3f}", flush=True)


def train(model, generator):
    """Trains the weights on the toy text, then the adapter and the mask embedding on the model's own text."""
    model = model.to(torch.float32)
    for role, value in model.weights.items():
        if value.dim() == 2:
            value.mul_(0.4)
        else:
            value.fill_(1.0)
        value.requires_grad_(True)
    length, batch = 96, 24
    text = toy_text(generator, 120_000)
    no_adapter = torch.zeros(length, dtype=torch.bool)
    sees = torch.ones(length, length, dtype=torch.bool).tril()
    positions = torch.arange(length)
    entropy = torch.nn.functional.cross_entropy

    def windows(count, span):
        starts = torch.randint(len(text) - span, (count,), generator=generator)
        return torch.stack([text[s : s + span] for s in starts.tolist()])

    def language_loss(_):
        ids = windows(batch, length + 1)
        logits = forward(model, ids[:, :-1], positions, sees, no_adapter)
        return entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    learn(list(model.weights.values()), 600, 6e-3, language_loss, "model")
    for value in model.weights.values():
        value.requires_grad_(False)

    # Few steps on purpose: a drafter that is always right, or never, would leave most of the schedules' paths untried.
    # The model's own continuations, half of them greedy, half sampled.
    with torch.no_grad():
        own = windows(192, 12)
        while own.shape[1] < length + 1:
            t = own.shape[1]
            logits = forward(model, own, positions[:t], sees[:t, :t], no_adapter[:t])[:, -1]
            sampled = torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator)
            best = logits.argmax(-1, keepdim=True)
            odd = (torch.arange(len(own)) % 2 == 1)[:, None]
            own = torch.cat([own, torch.where(odd, sampled, best)], 1)

    adapter = model.adapter
    for a, b in adapter.pairs.values():
        b.zero_()
        a.requires_grad_(True)
        b.requires_grad_(True)
    adapter.mask_embedding.copy_(model.weights["embed_tokens"].mean(0)).requires_grad_(True)
    blocks, rows = 6, 1 + DRAFT_WIDTH
    adapted = torch.cat([no_adapter, torch.ones(blocks * rows, dtype=torch.bool)])

    def draft_loss(_):
        ids = own[torch.randint(len(own), (16,), generator=generator)]
        anchors = torch.randint(4, length - rows, (len(ids), blocks), generator=generator)
        at = anchors[:, :, None] + torch.arange(rows)
        tokens = torch.full((len(ids), blocks, rows), MASK)
        tokens[:, :, 0] = ids.gather(1, anchors)
        all_sees = torch.zeros(len(ids), length + blocks * rows, length + blocks * rows, dtype=torch.bool)
        all_sees[:, :length, :length] = sees
        below = torch.arange(length) < anchors[:, :, None]
        all_sees[:, length:, :length] = below.repeat_interleave(rows, 1)
        own_block = torch.arange(blocks * rows) // rows
        all_sees[:, length:, length:] = own_block[:, None] == own_block[None]
        logits = forward(
            model,
            torch.cat([ids[:, :-1], tokens.flatten(1)], 1),
            torch.cat([positions.expand(len(ids), -1), at.flatten(1)], 1),
            all_sees,
            adapted,
        )[:, length:]
        targets = ids.gather(1, (at + 1).flatten(1))
        weight = (0.85 ** torch.arange(rows)).repeat(len(ids) * blocks)
        losses = entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return (losses * weight).sum() / weight.sum()

    parameters = [t for pair in adapter.pairs.values() for t in pair] + [adapter.mask_embedding]
    learn(parameters, 160, 4e-3, draft_loss, "adapter")
    for parameter in parameters:
        parameter.requires_grad_(False)
    return model


# ---- files -------------------------------------------------------------------------------------------------


def quantize(weight, group, bits, dtype):
    """MLX affine groups along the inputs: (packed u32, scales, biases), w = scale * q + bias."""
    levels = 2**bits - 1
    groups = weight.double().unflatten(-1, (-1, group))
    low, high = groups.amin(-1), groups.amax(-1)
    scales, biases = ((high - low) / levels).to(dtype), low.to(dtype)
    q = ((groups - biases.double()[..., None]) / scales.double()[..., None]).round().clamp(0, levels)
    per_word = 32 // bits
    words = q.flatten(-2).to(torch.int64).unflatten(-1, (-1, per_word))
    packed_words = (words << (torch.arange(per_word) * bits)).sum(-1)
    return packed_words.to(torch.uint32), scales, biases


def dequantize(words, scales, biases, bits):
    per_word = 32 // bits
    q = (words.to(torch.int64)[..., None] >> (torch.arange(per_word) * bits)) & (2**bits - 1)
    q = q.flatten(-2).double().unflatten(-1, (scales.shape[-1], -1))
    return (q * scales.double()[..., None] + biases.double()[..., None]).flatten(-2)


def byte_tokenizer():
    """tokenizer.json whose id is the byte, without merges, with one special token that ends a text."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in plain}
    letters |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in letters)}
    end = {"id": END, "content": "<|end|>", "special": True}
    end |= {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letters[b]: b for b in range(256)} | {"<|end|>": END},
            "merges": [],
        },
    }


def write_json(path, value):
    text = json.dumps(value, indent=1, ensure_ascii=False)
    flat = re.compile(r"\[[-\d.,\s]*\]")  # a list of numbers stays on one line
    path.write_text(flat.sub(lambda m: " ".join(m[0].split()).replace("[ ", "[").replace(" ]", "]"), text) + "\n")


def write_checkpoint(folder, checkpoint, model):
    family, dtype = model.family, DTYPES[checkpoint.dtype]
    config = family.config | checkpoint.config | {"torch_dtype": HUB_DTYPES[checkpoint.dtype]}
    quantization = checkpoint.quantization
    if quantization:
        config["quantization"] = quantization
    write_json(folder / "config.json", config)
    tensors = {}
    for role, value in model.weights.items():
        name = tensor_name(family, role)
        if quantization and value.dim() == 2:
            own = quantization.get(name, quantization)
            words, scales, biases = quantize(value, own["group_size"], own["bits"], dtype)
            tensors |= {f"{name}.weight": words, f"{name}.scales": scales, f"{name}.biases": biases}
        else:
            tensors[f"{name}.weight"] = value.to(dtype)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")

    adapter_folder = folder / "draft_adapter"
    adapter_folder.mkdir()
    write_json(
        adapter_folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": checkpoint.adapter_rank,
            "lora_alpha": checkpoint.adapter_alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(LINEARS),
            "draft": {
                "mask_embedding": "mask_embedding",
                "logit_shift": family.logit_shift,
                "anchor": "in-block",
                "adapter_rows": "draft",
            },
        },
    )
    tensors = {"mask_embedding": model.adapter.mask_embedding}
    for role, (a, b) in model.adapter.pairs.items():
        name = family.adapter_prefix + tensor_name(family, role)
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    tensors = {k: v.to(dtype).contiguous() for k, v in tensors.items()}
    save_file(tensors, adapter_folder / "adapter_model.safetensors")
    if checkpoint.trained:
        write_json(folder / "tokenizer.json", byte_tokenizer())
        write_json(folder / "tokenizer_config.json", {"eos_token": "<|end|>", "add_bos_token": False})


def read_checkpoint(folder, checkpoint):
    """What was written, read back: the truth belongs to the bytes on disk, not to what they were made from."""
    family = FAMILIES[checkpoint.family]
    stored = load_file(folder / "model.safetensors")
    weights = {}
    for role in shapes(checkpoint.config):
        name = tensor_name(family, role)
        value = stored.pop(f"{name}.weight")
        if value.dtype == torch.uint32:
            own = checkpoint.quantization.get(name, checkpoint.quantization)
            value = dequantize(value, stored.pop(f"{name}.scales"), stored.pop(f"{name}.biases"), own["bits"])
        weights[role] = value.double()
    assert not stored, f"tensors nobody reads: {list(stored)}"
    stored = load_file(folder / "draft_adapter" / "adapter_model.safetensors")
    pairs = {}
    for role in weights:
        if isinstance(role, tuple) and role[1] in LINEARS:
            name = family.adapter_prefix + tensor_name(family, role)
            pairs[role] = tuple(stored.pop(f"{name}.lora_{x}.weight").double() for x in "AB")
    adapter = Adapter(
        pairs, checkpoint.adapter_alpha / checkpoint.adapter_rank, stored.pop("mask_embedding").double()
    )
    assert not stored, f"adapter tensors nobody reads: {list(stored)}"
    return Model(family, family.config | checkpoint.config, weights, adapter)


def questions(checkpoint, model, generator):
    """(prompt of 13 tokens, draft of K tokens, prompts of the greedy texts)."""
    if checkpoint.trained:
        texts = ["every morning", "the baker lik", "so it goes on, déjà", "the old sailor likes the open sea. e"]
        prompts = [list(t.encode()) for t in texts]
        draft, _ = greedy(model, prompts[0], VERIFY_WIDTH)
        draft[2] = (draft[2] + 1) % 256  # right, right, wrong, and whatever follows a wrong one
        return prompts[0], draft, prompts
    ids = torch.randint(3, checkpoint.config["vocab_size"], (4, 13), generator=generator).tolist()
    draft = torch.randint(3, checkpoint.config["vocab_size"], (VERIFY_WIDTH,), generator=generator).tolist()
    return ids[0], draft, ids[:2]


def truth_of(checkpoint, model):
    generator = torch.Generator().manual_seed(checkpoint.seed + 1000)
    prompt, draft, prompts = questions(checkpoint, model, generator)
    assert len(prompt) == 13 and len(draft) == VERIFY_WIDTH
    difference = anchor_to_transformers(model, prompt)

    trace = {}
    tensors = {"causal.logits": causal(model, prompt, trace)}
    tensors |= {f"causal.{name}": value for name, value in trace.items()}
    for width in (DRAFT_WIDTH, 3):
        tensors[f"draft.w{width}.logits"] = drafted(model, prompt, width)
    tensors["draft_without_adapter.w7.logits"] = drafted(model, prompt, DRAFT_WIDTH, adapter_on=False)
    call = rows_of(prompt, draft, [0], DRAFT_WIDTH)
    logits = run(model, call)
    tensors["packed.logits"] = logits[call.verify.start :]
    wide = rows_of(prompt, draft, [0, 2], DRAFT_WIDTH)
    tensors["anchored.logits"] = run(model, wide)[wide.verify.start :]

    # What the packed call promises: its verify rows are causal rows, its draft is two-call's draft.
    same = dict(atol=1e-9, rtol=0)
    torch.testing.assert_close(logits[call.verify], causal(model, prompt + draft)[12:], **same)
    torch.testing.assert_close(logits[call.blocks[0]], tensors["draft.w7.logits"], **same)

    texts = []
    for p in prompts:
        tokens, gap = greedy(model, p, 48)
        entry = {"prompt": p, "tokens": tokens, "smallest_top2_gap": gap}
        ends = checkpoint.config["eos_token_id"]
        entry["first_end"] = tokens.index(ends) if ends in tokens else None
        for name, schedule in (("packed", packed), ("two_call", two_call)):
            entry[name], text = schedule(model, p, 48, VERIFY_WIDTH, DRAFT_WIDTH)
            assert text[len(p) :][:48] == tokens, f"{name} is not lossless"
        texts.append(entry)
    manifest = {
        "checkpoint": checkpoint.name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "difference_from_transformers": difference,
        "prompt": prompt,
        "draft": draft,
        "verify_width": VERIFY_WIDTH,
        "draft_width": DRAFT_WIDTH,
        "anchors": [0, 2],
        "logit_range": (tensors["causal.logits"].max() - tensors["causal.logits"].min()).item(),
        "greedy": texts,
    }
    return manifest, {k: v.to(torch.float32).contiguous() for k, v in tensors.items()}


def build(checkpoint):
    print(checkpoint.name, flush=True)
    torch.manual_seed(checkpoint.seed)
    generator = torch.Generator().manual_seed(checkpoint.seed)
    model = random_model(checkpoint, generator)
    if checkpoint.trained:
        model = train(model, generator)
    folder = OUT / checkpoint.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_checkpoint(folder, checkpoint, model)
    manifest, tensors = truth_of(checkpoint, read_checkpoint(folder, checkpoint))
    write_json(folder / "golden.json", manifest)
    save_file(tensors, folder / "golden.safetensors")
    for text in manifest["greedy"]:
        calls = f"packed {text['packed']['calls']} calls, two-call {text['two_call']['calls']}"
        shown = repr(bytes(t for t in text["tokens"] if t < 256).decode(errors="replace")) if checkpoint.trained else ""
        print(f"  48 tokens: {calls}, closest choice {text['smallest_top2_gap']:.4f} {shown}", flush=True)
        print(f"  {text['packed']['per_call']}", flush=True)


def check(checkpoint):
    folder = OUT / checkpoint.name
    manifest, tensors = truth_of(checkpoint, read_checkpoint(folder, checkpoint))
    for name, value in load_file(folder / "golden.safetensors").items():
        torch.testing.assert_close(tensors[name], value, atol=1e-6, rtol=0, msg=f"{checkpoint.name}: {name}")
    stored = json.loads((folder / "golden.json").read_text())
    for key in ("prompt", "draft"):
        assert manifest[key] == stored[key], f"{checkpoint.name}: {key}"
    assert [t["tokens"] for t in manifest["greedy"]] == [t["tokens"] for t in stored["greedy"]]
    print(f"{checkpoint.name}: as stored")


def main():
    torch.set_num_threads(2)
    arguments = [a for a in sys.argv[1:] if a != "--check"]
    known = {c.name: c for c in CHECKPOINTS}
    unknown = [a for a in arguments if a not in known]
    if unknown:
        sys.exit(f"no checkpoint named {', '.join(unknown)}; there are {', '.join(known)}")
    for name in arguments or known:
        (check if "--check" in sys.argv else build)(known[name])


if __name__ == "__main__":
    main()
