"""A model in memory and its forward pass: plain PyTorch, row by row, with an explicit visibility matrix."""

import dataclasses
import math

import torch
from families import FAMILIES, LINEARS, Family

MASK = -1  # stands for the mask in a list of tokens: the adapter's mask embedding, or the mask token's own


@dataclasses.dataclass
class Adapter:
    """LoRA pairs by (layer, role), the factor alpha / rank, and the mask embedding [D] if it has one."""

    pairs: dict
    scale: float
    mask_embedding: torch.Tensor | None

    def to(self, dtype):
        pairs = {k: (a.to(dtype), b.to(dtype)) for k, (a, b) in self.pairs.items()}
        return Adapter(pairs, self.scale, None if self.mask_embedding is None else self.mask_embedding.to(dtype))


@dataclasses.dataclass
class Model:
    """A config and its weights by role (`(layer, role)` inside a layer); all dequantised."""

    family: Family
    config: dict
    weights: dict
    adapter: Adapter | None
    mask: int | None = None  # the mask token, where the mask is one

    def to(self, dtype):
        weights = {k: v.to(dtype) for k, v in self.weights.items()}
        return dataclasses.replace(self, weights=weights, adapter=self.adapter and self.adapter.to(dtype))


def shapes(config, family):
    """Role -> shape of every tensor of a dense llama-like model, [out, in] for matrices."""
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer = {
        "input_layernorm.weight": (hidden,),
        "q_proj.weight": (queries, hidden),
        "k_proj.weight": (keys, hidden),
        "v_proj.weight": (keys, hidden),
        "o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "gate_proj.weight": (ffn, hidden),
        "up_proj.weight": (ffn, hidden),
        "down_proj.weight": (hidden, ffn),
    }
    if family.qkv_bias:
        layer |= {"q_proj.bias": (queries,), "k_proj.bias": (keys,), "v_proj.bias": (keys,)}
    if family.qk_norm:
        layer |= {"q_norm.weight": (head_dim,), "k_norm.weight": (head_dim,)}
    result = {"embed_tokens.weight": (config["vocab_size"], hidden), "norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        result["lm_head.weight"] = (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        result |= {(i, role): shape for role, shape in layer.items()}
    return result


def adapted_roles(config, family):
    """(layer, projection) -> shape of the projections that the family's adapter changes."""
    wanted = {f"{name}.weight": name for name in LINEARS if name in family.adapter_modules}
    found = shapes(config, family)
    return {(r[0], wanted[r[1]]): s for r, s in found.items() if isinstance(r, tuple) and r[1] in wanted}


def random_model(checkpoint, generator):
    def normal(shape, deviation):
        return torch.randn(shape, generator=generator, dtype=torch.float64) * deviation

    family = FAMILIES[checkpoint.family]
    weights = {}
    for role, shape in shapes(checkpoint.config, family).items():
        short = role[1] if isinstance(role, tuple) else role
        if short.endswith(".bias"):
            weights[role] = normal(shape, 0.3)
        elif len(shape) == 1:
            weights[role] = 1 + normal(shape, 0.2)
        elif short == "embed_tokens.weight":
            # A tied embedding is the head too, so it is scaled as a head: logits of a few units.
            weights[role] = normal(shape, 2.5 / math.sqrt(shape[1]))
        else:
            # Queries and keys large enough for attention to choose rather than to average.
            gain = {"q_proj.weight": 1.6, "k_proj.weight": 1.6, "lm_head.weight": 2.5}.get(short, 1.0)
            weights[role] = normal(shape, gain / math.sqrt(shape[1]))
    if checkpoint.mask is not None and not checkpoint.trained:
        # Often the largest logit, so that a text shows whether the mask is banned.
        weights.get("lm_head.weight", weights["embed_tokens.weight"])[checkpoint.mask] *= 2.5
    adapter, rank = None, checkpoint.adapter_rank
    if family.adapter_modules:
        pairs = {}
        for role, shape in adapted_roles(checkpoint.config, family).items():
            pairs[role] = (normal((rank, shape[1]), 1 / math.sqrt(shape[1])), normal((shape[0], rank), 0.2))
        hidden = checkpoint.config["hidden_size"]
        embedding = normal((hidden,), 2.5 / math.sqrt(hidden)) if family.mask_embedding else None
        adapter = Adapter(pairs, checkpoint.adapter_alpha / rank, embedding)
    return Model(family, family.config | checkpoint.config, weights, adapter, checkpoint.mask)


# ---- rotary embedding ----------------------------------------------------------------------------------------


def rope_parameters(config):
    """The rotary parameters, wherever the config has them."""
    inner = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta"), "rope_type": "default"} | inner


def frequencies(config):
    """Radians per position [Dh / 2], in float64, and the factor of cosine and sine."""
    p, dim = rope_parameters(config), config["head_dim"]
    i = torch.arange(dim // 2, dtype=torch.float64)
    plain = p["rope_theta"] ** (-2 * i / dim)
    if p["rope_type"] == "default":
        return plain, 1.0
    factor, original = p["factor"], p["original_max_position_embeddings"]
    if p["rope_type"] == "llama3":
        low, high = p["low_freq_factor"], p["high_freq_factor"]
        turns = original * plain / (2 * math.pi)  # how often a pair turns within the original context
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return plain * (keep + (1 - keep) / factor), 1.0
    assert p["rope_type"] == "yarn"

    def pair(turns):  # the pair, as a real number, that turns so often within the original context
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(p["rope_theta"]))

    first = max(math.floor(pair(p["beta_fast"])), 0)
    last = min(math.ceil(pair(p["beta_slow"])), dim - 1)
    stretched = ((i - first) / (last - first)).clamp(0, 1)

    def magnitude(k):
        return 1.0 if factor <= 1 else 0.1 * k * math.log(factor) + 1

    ratio = magnitude(p["mscale"]) / magnitude(p["mscale_all_dim"])
    return plain / factor * stretched + plain * (1 - stretched), ratio


def query_factors(config, positions):
    """Llama 4's factor of the query at each position."""
    p = rope_parameters(config)
    beta = p.get("llama_4_scaling_beta")
    if beta is None:
        return torch.ones(positions.shape, dtype=torch.float64)
    return 1 + beta * torch.log1p(torch.floor(positions.double() / p["original_max_position_embeddings"]))


def rotate(x, positions, per_position, ratio):
    """Half-split rotary embedding: dimension i turns with i + Dh/2. x: [..., H, T, Dh]."""
    half = x.shape[-1] // 2
    angles = positions[..., None, :, None].double() * per_position
    cos, sin = (angles.cos() * ratio).to(x.dtype), (angles.sin() * ratio).to(x.dtype)
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def layer_kinds(config):
    """Per layer: (whether queries and keys are rotated, its window or None)."""
    count, window = config["num_hidden_layers"], config.get("sliding_window")
    ropes = [bool(r) for r in config.get("no_rope_layers", [1] * count)]
    if "use_sliding_window" in config:
        slides = [config["use_sliding_window"] and i >= config["max_window_layers"] for i in range(count)]
    else:
        slides = [True] * count
    return [(rope, window if slide else None) for rope, slide in zip(ropes, slides)]


# ---- the forward pass ----------------------------------------------------------------------------------------


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def windowed(sees, positions, scratch, window):
    """`sees` without the keys that have left the window; keys of a call's own blocks never do."""
    if window is None:
        return sees
    near = positions[..., None, :] > positions[..., :, None] - window
    return sees & (near | scratch)


def forward(model, tokens, positions, sees, adapted, trace=None, scratch=None):
    """Logits [..., T, V] of one call without a cache: what would be cached is rows of the call.

    tokens [..., T] with MASK for the mask; positions [..., T]; sees [..., T, T], true where the row of the first index
    sees the row of the second; adapted [T], true where the adapter is on; scratch [T], true for rows that live for the
    call only, which windows do not cut. `trace`, a dict, receives the residual stream and the keys and values.
    """
    config, w, adapter = model.config, model.weights, model.adapter
    heads, kv_heads, head_dim = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )
    eps = config["rms_norm_eps"]
    per_position, ratio = frequencies(config)
    scratch = torch.zeros(tokens.shape[-1], dtype=torch.bool) if scratch is None else scratch

    def linear(x, layer, role):
        y = x @ w[layer, f"{role}.weight"].T
        if (layer, f"{role}.bias") in w:
            y = y + w[layer, f"{role}.bias"]
        if adapter is not None and (layer, role) in adapter.pairs and bool(adapted.any()):
            a, b = adapter.pairs[layer, role]
            y = torch.where(adapted[:, None], y + adapter.scale * ((x @ a.T) @ b.T), y)
        return y

    def split(x, count):
        return x.unflatten(-1, (count, head_dim)).transpose(-2, -3)

    def normed(x, layer, role):
        return rms_norm(x, w[layer, role], eps) if (layer, role) in w else x

    table = w["embed_tokens.weight"]
    if model.mask is not None:
        h = table[torch.where(tokens == MASK, model.mask, tokens)]
    else:
        h = table[tokens.clamp(min=0)]
        if adapter is not None:
            h = torch.where((tokens == MASK)[..., None], adapter.mask_embedding, h)
    hidden, keys, values = [h], [], []
    queries_times = query_factors(config, positions).to(h.dtype)[..., None, :, None]
    for layer, (rope, window) in enumerate(layer_kinds(config)):
        x = rms_norm(h, w[layer, "input_layernorm.weight"], eps)
        q = normed(split(linear(x, layer, "q_proj"), heads), layer, "q_norm.weight")
        k = normed(split(linear(x, layer, "k_proj"), kv_heads), layer, "k_norm.weight")
        v = split(linear(x, layer, "v_proj"), kv_heads)
        if rope:
            q, k = rotate(q, positions, per_position, ratio), rotate(k, positions, per_position, ratio)
        q = q * queries_times
        keys.append(k.transpose(-2, -3))
        values.append(v.transpose(-2, -3))
        k, v = (t.repeat_interleave(heads // kv_heads, -3) for t in (k, v))
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(head_dim)
        visible = windowed(sees, positions, scratch, window)
        scores = scores.masked_fill(~visible[..., None, :, :], -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(-2, -3).flatten(-2)
        h = h + linear(mixed, layer, "o_proj")
        x = rms_norm(h, w[layer, "post_attention_layernorm.weight"], eps)
        gate = torch.nn.functional.silu(linear(x, layer, "gate_proj"))
        h = h + linear(gate * linear(x, layer, "up_proj"), layer, "down_proj")
        hidden.append(h)
    if trace is not None:
        trace |= {"hidden": torch.stack(hidden), "keys": torch.stack(keys), "values": torch.stack(values)}
    return rms_norm(h, w["norm.weight"], eps) @ w.get("lm_head.weight", table).T
