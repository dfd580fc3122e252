"""transformers' own model class in float64, held against `model.forward`."""

import dataclasses
import math

import torch
import transformers
from calls import drafted, rows_of, run, target
from model import MASK, Model, frequencies, layer_kinds, windowed

# transformers keeps norms, rotary angles, query factors and softmax in float32 whatever the model's type.
BOUND = 2e-5


def reference(model, merged):
    """transformers' model with these weights in float64; `merged` adds the adapter to the linears."""
    family = model.family
    ours = ("architectures", "model_type", "mask_token_id", "dlm_paradigm", "block_size", "bd_size", "use_cache")
    config = getattr(transformers, f"{family.reference}Config")(
        **{k: v for k, v in model.config.items() if k not in ours}, pad_token_id=None, attn_implementation="eager"
    )
    state = {}
    for role, value in model.weights.items():
        if merged and isinstance(role, tuple):
            pair = model.adapter.pairs.get((role[0], role[1].removesuffix(".weight")))
            value = value if pair is None else value + model.adapter.scale * (pair[1] @ pair[0])
        name = family.tensor_name(role)
        state["lm_head.weight" if role == "lm_head.weight" else name.replace(family.body, "model.", 1)] = value
    if model.config["tie_word_embeddings"]:
        state["lm_head.weight"] = model.weights["embed_tokens.weight"]
    judge = getattr(transformers, f"{family.reference}ForCausalLM")(config).double().eval()
    judge.load_state_dict(state, strict=True)
    return judge


def exact_angles(judge, model):
    """Rotary angles in float64, of frequencies that are transformers' own but for float32's rounding."""
    rotary = judge.model.rotary_emb
    per_position, ratio = frequencies(model.config)
    torch.testing.assert_close(rotary.inv_freq.double(), per_position, rtol=1e-6, atol=0)
    assert abs(rotary.attention_scaling - ratio) < 1e-12

    def forward(x, position_ids):
        angles = torch.cat([position_ids[..., None].double() * per_position] * 2, -1)
        return (angles.cos() * ratio).to(x.dtype), (angles.sin() * ratio).to(x.dtype)

    rotary.forward = forward
    return judge


def inputs(model, tokens):
    table = model.weights["embed_tokens.weight"]
    if model.mask is not None:
        return table[torch.where(tokens == MASK, model.mask, tokens)][None]
    rows = table[tokens.clamp(min=0)]
    return torch.where((tokens == MASK)[:, None], model.adapter.mask_embedding, rows)[None]


def masks(model, call, rows, keys):
    """What transformers takes for the visibility of `rows` among `keys`: one for each kind of layer."""

    def additive(window):
        sees = windowed(call.sees, call.positions, call.scratch, window)[rows, keys]
        return torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, -math.inf)[None, None]

    kinds = {window for _, window in layer_kinds(model.config)}
    if len(kinds) == 1:
        return additive(kinds.pop())
    full, slides = additive(None), additive(max(k for k in kinds if k is not None))
    return {"full_attention": full, "sliding_attention": slides}


def judged(model, call, exact=False):
    """The call's logits as transformers computes them: adapted rows by a model with the adapter merged in, behind a cache
    that the plain model filled."""

    def prepare(merged):
        judge = reference(model, merged)
        return exact_angles(judge, model) if exact else judge

    embedded, cache, count = inputs(model, call.tokens), transformers.DynamicCache(), len(call.tokens)
    plain = int((~call.adapted).sum())
    assert not call.adapted[:plain].any()

    def rows(judge, which, keys):
        return judge(
            inputs_embeds=embedded[:, which],
            position_ids=call.positions[which][None],
            attention_mask=masks(model, call, which, keys),
            past_key_values=cache,
            use_cache=True,
        ).logits[0]

    with torch.no_grad():
        logits = rows(prepare(False), slice(0, plain), slice(0, plain))
        if plain < count:
            logits = torch.cat([logits, rows(prepare(True), slice(plain, count), slice(0, count))])
    return logits


def distance(ours, theirs):
    return ((ours - theirs).abs().max() / (theirs.max() - theirs.min())).item()


def hold_blocks_against_transformers(model, calls):
    """The same for the calls of a family that does nothing but fill blocks: name -> call."""
    found = []
    for what, call in calls.items():
        theirs = judged(model, call)
        found.append(distance(run(model, call), theirs))
        assert found[-1] < BOUND, f"{what} differ from transformers by {found[-1]}"
        causal = dataclasses.replace(call, sees=torch.ones_like(call.sees).tril())
        assert distance(run(model, causal), theirs) > 100 * BOUND, "control: what rows see of their block matters"
    return max(found)


def hold_against_transformers(model, tokens, draft, width, far):
    """Asserts that `forward` computes what transformers computes; returns the largest relative difference."""
    family, found = model.family, []

    def compare(what, call, exact=False):
        theirs = judged(model, call, exact)
        found.append(distance(run(model, call), theirs))
        assert found[-1] < BOUND, f"{what} differ from transformers by {found[-1]}"
        return theirs

    causal = compare("the target's rows", rows_of(family, tokens[:1], tokens[1:], [], 0))
    call = rows_of(family, tokens, draft, [0, 2], width)
    block = compare("the rows of a packed call", call)[call.blocks[0]]
    if family.adapter_modules:
        compare("draft rows without the adapter", rows_of(family, tokens, [], [0], width, adapter_on=False))
    with torch.no_grad():
        # transformers' own masks and positions, not those we hand it.
        own = reference(model, merged=False)(torch.tensor([tokens])).logits[0]
    clean = run(model, rows_of(family, tokens[:1], tokens[1:], [], 0))[: len(tokens)]
    found.append(distance(clean, own))
    assert found[-1] < BOUND, f"clean rows differ from transformers by {found[-1]}"
    if far:
        there = rows_of(family, tokens, [], [0], width, at=far)
        theirs = compare("rows far away", there, exact=True)
        near = run(model, rows_of(family, tokens, [], [0], width))
        assert distance(near, theirs) > 100 * BOUND, "control: positions matter"
        for scaling in ({"llama_4_scaling_beta": 0.05}, {"factor": 2.0}):
            rope = model.config.get("rope_parameters") or model.config["rope_scaling"]
            seen = any(name in rope for name in scaling)
            if seen and not ("llama_4_scaling_beta" in scaling and max(far) < rope["original_max_position_embeddings"]):
                config = model.config | {"rope_parameters": {"rope_theta": model.config.get("rope_theta")} | rope | scaling}
                other = run(Model(family, config, model.weights, model.adapter, model.mask), there)
                assert distance(other, theirs) > 10 * BOUND, f"control: {scaling} is noticed"

    # Controls: the comparison must see a slightly wrong frequency, and a draft without the adapter.
    skewed = dict(model.config)
    for holder in ("rope_parameters", "rope_scaling"):
        if holder in skewed and "rope_theta" in skewed[holder]:
            skewed[holder] = skewed[holder] | {"rope_theta": skewed[holder]["rope_theta"] * 1.05}
    if "rope_theta" in skewed:
        skewed["rope_theta"] *= 1.05
    skewed = Model(family, skewed, model.weights, model.adapter, model.mask)
    truth = causal[rows_of(family, tokens[:1], tokens[1:], [], 0).verify]
    assert distance(target(skewed, tokens), truth) > 5 * BOUND
    if family.adapter_modules:
        assert distance(drafted(model, tokens, width, adapter_on=False), block) > 100 * BOUND
    return max(found)
