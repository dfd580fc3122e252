"""Calls: which rows there are, what each sees, and the logits that come out."""

import dataclasses
import math

import torch
from model import MASK, forward


@dataclasses.dataclass
class Call:
    """The rows of a call: the cached prefix and the draft's clean rows, mask rows that verify, draft blocks by anchor."""

    tokens: torch.Tensor
    positions: torch.Tensor
    sees: torch.Tensor
    adapted: torch.Tensor
    scratch: torch.Tensor  # rows that live for the call only
    clean: int  # how many rows are clean
    verify: slice  # rows that say what follows x[n], d[1], ..., d[m]
    blocks: dict


def rows_of(family, prefix, draft, anchors, width, adapter_on=True, at=None):
    """The packed call at prefix x[0..=n] with draft d[1..=m] and a block of `width` masks for each anchor.

    `at` are the positions of the clean rows, 0, 1, ... by default.
    """
    n, m = len(prefix) - 1, len(draft)
    clean = n + 1 + m
    masks = m + 1 if family.mask_verify else 0
    count = clean + masks + len(anchors) * (1 + width - family.first_row)
    tokens, positions = list(prefix) + list(draft), list(range(clean) if at is None else at)
    assert len(positions) == clean
    sees = torch.zeros(count, count, dtype=torch.bool)
    sees[:clean, :clean] = torch.ones(clean, clean, dtype=torch.bool).tril()
    verify = slice(n, clean)
    if family.mask_verify:
        # M_i at n+1+i sees the clean rows up to that of n+i, and itself.
        verify = slice(clean, clean + masks)
        for i in range(masks):
            sees[clean + i, : n + 1 + i] = True
            sees[clean + i, clean + i] = True
            tokens.append(MASK)
            positions.append(positions[n + i] + 1)
    blocks = {}
    for h in anchors:
        first = len(tokens)
        rows = range(family.first_row, width + 1)
        blocks[h] = slice(first, first + len(rows))
        tokens += [tokens[n + h] if r == 0 else MASK for r in rows]
        positions += [positions[n + h] + r for r in rows]
        # The cache and the clean rows below the anchor's, or up to it where the block has no row of its own for it.
        sees[blocks[h], : n + h + (0 if family.in_block else 1)] = True
        if family.bidirectional:
            sees[blocks[h], blocks[h]] = True
        else:
            sees[range(first, len(tokens)), range(first, len(tokens))] = True
    assert len(tokens) == count
    scratch = torch.arange(count) >= clean
    adapted = (torch.arange(count) >= clean + masks) & (adapter_on and bool(family.adapter_modules))
    return Call(torch.tensor(tokens), torch.tensor(positions), sees, adapted, scratch, clean, verify, blocks)


def run(model, call, trace=None):
    with torch.no_grad():
        return forward(model, call.tokens, call.positions, call.sees, call.adapted, trace, call.scratch)


def target_call(family, tokens, last_only=False):
    """The call whose verify rows say what follows every token, or only what follows the last one."""
    split = len(tokens) if last_only else 1
    return rows_of(family, tokens[:split], tokens[split:], [], 0)


def target(model, tokens, trace=None):
    """The target's logits for what follows every token."""
    call = target_call(model.family, tokens)
    logits = run(model, call, trace)
    if trace is not None:
        for name in ("hidden", "keys", "values"):
            trace[name] = trace[name][:, : call.clean]
    return logits[call.verify]


def target_after(model, tokens):
    """The target's logits for what follows the last token [1, V]."""
    call = target_call(model.family, tokens, last_only=True)
    return run(model, call)[call.verify]


def drafted(model, tokens, width, adapter_on=True):
    call = rows_of(model.family, tokens, [], [0], width, adapter_on)
    return run(model, call)[call.blocks[0]]


# ---- text: greedy, and what each schedule makes of it ---------------------------------------------------------


def choose(model, logits):
    """Argmax of each row (smallest id among equals, never the mask token) and the smallest distance of first and second."""
    if not len(logits):
        return [], math.inf
    if model.mask is not None:
        logits = logits.clone()
        logits[..., model.mask] = -math.inf
    top = logits.topk(2, -1).values
    return logits.argmax(-1).tolist(), (top[..., 0] - top[..., 1]).min().item()


def greedy(model, prompt, count):
    tokens, gap = list(prompt), math.inf
    for _ in range(count):
        chosen, near = choose(model, target_after(model, tokens))
        tokens, gap = tokens + chosen, min(gap, near)
    return tokens[len(prompt) :], gap


def accept(draft, choices):
    a = 0
    while a < len(draft) and draft[a] == choices[a]:
        a += 1
    return a


def packed(model, prompt, count, k, w):
    """Packed-SS: the first call is the prefill, every later one verifies and drafts."""
    # Row r of a block at n predicts n + r + shift; after a accepted tokens the draft begins at n + a + 2.
    behind = model.family.logit_shift + model.family.first_row
    tokens, draft, accepted, gap = list(prompt), [], [], math.inf
    while len(tokens) - len(prompt) < count:
        call = rows_of(model.family, tokens, draft, [0], w)
        logits = run(model, call)
        choices, _ = choose(model, logits[call.verify])
        a = accept(draft, choices)
        suffix, near = choose(model, logits[call.blocks[0]][a + 2 - behind :])
        accepted.append([len(draft), a])
        tokens, draft, gap = tokens + draft[:a] + [choices[a]], suffix[:k], min(gap, near)
    return {"calls": len(accepted) - 1, "per_call": accepted[1:], "smallest_draft_gap": gap}, tokens


def two_call(model, prompt, count, k, w):
    """Draft, then verify. The prefill emits one token and drafts nothing."""
    family = model.family
    tokens, rounds, gap = list(prompt), [], math.inf
    tokens += choose(model, target_after(model, tokens))[0]
    while len(tokens) - len(prompt) < count:
        call = rows_of(family, tokens, [], [0], w)
        logits = run(model, call)
        behind = family.logit_shift + family.first_row
        draft, near = choose(model, logits[call.blocks[0]][max(1 - behind, 0) :])
        if behind > 1:  # the block says nothing of the next position; the target's own row does
            draft = choose(model, logits[call.verify])[0] + draft
        draft = draft[:k]
        verify = rows_of(family, tokens, draft, [], 0)
        choices, _ = choose(model, run(model, verify)[verify.verify])
        a = accept(draft, choices)
        rounds.append([len(draft), a])
        tokens, gap = tokens + draft[:a] + [choices[a]], min(gap, near)
    return {"calls": 2 * len(rounds), "per_round": rounds, "smallest_draft_gap": gap}, tokens
