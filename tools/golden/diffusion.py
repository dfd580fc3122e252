"""Decoding by diffusion: what each call guesses and what it reveals, with every row computed anew in every step.

Three layouts. `seeded` (Nemotron-Labs-Diffusion): a block begins behind the text with the target's own next token, its rows
see the causal text and one another. `aligned` (SDAR, Fast-dLLM v2): blocks lie at multiples of their length, the prompt's
included, and the rows of a finished block see that block and all before it; with a shift of 1 a row speaks of the next
position, so a new block's first token comes from the last row before it. `window` (SetDLM): the masks among the next so many
positions each see all tokens known before the call, in the order in which they became known, and themselves.
"""

import dataclasses
import math

import torch
from calls import Call, run


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a caller may choose. None: the family's own."""

    length: int | None = None
    threshold: float | None = None
    steps: int | None = None


def call_of(tokens, positions, sees, clean):
    count = len(tokens)
    nobody = torch.zeros(count, dtype=torch.bool)
    scratch = torch.arange(count) >= clean
    return Call(torch.tensor(tokens), torch.tensor(positions), sees, nobody, scratch, clean, slice(0, 0), {})


def text_sees(count, length):
    """What `count` kept rows see of one another: everything up to the end of their block of `length`."""
    at = torch.arange(count)
    return at[None] < ((at // length + 1) * length)[:, None]


def kept_call(text, length):
    return call_of(text, list(range(len(text))), text_sees(len(text), length), len(text))


def block_call(text, block, length, mask):
    """Kept rows of `text` and a block behind them (None for masks) whose rows see one another."""
    n, count = len(text), len(text) + len(block)
    sees = torch.zeros(count, count, dtype=torch.bool)
    sees[:n, :n] = text_sees(n, length)
    sees[n:] = True
    tokens = list(text) + [mask if token is None else token for token in block]
    return call_of(tokens, list(range(count)), sees, n)


def window_call(kept, masked, mask):
    """Kept (position, token) in their order, each seeing those before it, and masks that see all of them and themselves."""
    n, count = len(kept), len(kept) + len(masked)
    sees = torch.eye(count, dtype=torch.bool)
    sees[:, :n] |= torch.ones(count, n, dtype=torch.bool).tril()
    return call_of([t for _, t in kept] + [mask] * len(masked), [p for p, _ in kept] + list(masked), sees, n)


class Record:
    """What the calls of one text said, and how close its decisions were."""

    def __init__(self, model):
        self.model, self.calls = model, []
        self.logit_gap, self.probability_gap = math.inf, math.inf

    def guesses(self, logits, positions):
        """[position, token, probability] of each row: the likeliest token that is not the mask, the mask not counted."""
        logits = logits.clone()
        logits[:, self.model.mask] = -math.inf
        top = logits.topk(2, -1).values
        self.logit_gap = min(self.logit_gap, (top[:, 0] - top[:, 1]).min().item())
        p = logits.softmax(-1).max(-1).values
        return list(zip(positions, logits.argmax(-1).tolist(), p.tolist()))

    def add(self, kept, block, guesses, revealed, fresh=()):
        self.calls.append(
            {
                "kept": kept,
                "block": [-1 if token is None else token for token in block],
                "fresh": [list(entry) for entry in fresh],
                "guesses": [[position, token, p] for position, token, p in guesses],
                "revealed": sorted(position for position, _, _ in revealed),
            }
        )

    def reveal(self, guesses, threshold, strict, least):
        """All guesses above the threshold if they are at least `least`, else the `least` likeliest."""
        sure = [g for g in guesses if threshold is not None and (g[2] > threshold if strict else g[2] >= threshold)]
        if threshold is not None:
            self.probability_gap = min([self.probability_gap] + [abs(p - threshold) for _, _, p in guesses])
        least = min(least, len(guesses))
        if len(sure) >= least:
            return sure
        ranked = sorted(guesses, key=lambda g: (-g[2], g[0]))
        if least < len(ranked):
            self.probability_gap = min(self.probability_gap, ranked[least - 1][2] - ranked[least][2])
        return ranked[:least]


def defaults(model, settings):
    """(length, threshold) of these settings."""
    rule = model.family.diffusion
    length = settings.length or (model.config[rule.length_field] if rule.length_field else rule.length)
    threshold = settings.threshold
    if threshold is None and settings.steps is None:
        threshold = rule.threshold
    return length, threshold


def blocks(model, prompt, count, settings):
    """`seeded` and `aligned`: the record and the first `count` tokens behind the prompt."""
    rule, record = model.family.diffusion, Record(model)
    length, threshold = defaults(model, settings)
    aligned, shift, mask = rule.layout == "aligned", model.family.logit_shift, model.mask
    sight = length if aligned else 1  # what kept rows see of their block
    text = list(prompt)
    while len(text) - len(prompt) < count:
        n = len(text) - len(text) % length if aligned else len(text)
        text, known = text[:n], text[n:]
        if not known and (rule.layout == "seeded" or shift == 1):
            logits = run(model, kept_call(text, sight))[-1:]
            guesses = record.guesses(logits, [n])
            record.add(n, [], guesses, guesses)
            known = [guesses[0][1]]
        block = known + [None] * (length - len(known))
        total, step = (length if aligned else block.count(None)), 0
        while None in block and (block.index(None) < count + len(prompt) - n):
            part = rule.sub_block or length
            first = block.index(None) // part * part
            open_places = [i for i in range(first, min(first + part, length)) if block[i] is None]
            logits = run(model, block_call(text, block, sight, mask))[n:]
            guesses = record.guesses(logits[[i - shift for i in open_places]], [n + i for i in open_places])
            least = 1
            if settings.steps is not None:
                least = max(1, total // settings.steps + (step < total % settings.steps))
            revealed = record.reveal(guesses, threshold, rule.strict, least)
            record.add(n, block, guesses, revealed)
            for position, token, _ in revealed:
                block[position - n] = token
            step += 1
        text += block[: block.index(None)] if None in block else block
    return record, text[len(prompt) :][:count]


def window(model, prompt, count, settings):
    """`window`: the same."""
    rule, record = model.family.diffusion, Record(model)
    length, threshold = defaults(model, settings)
    kept, text, fresh = list(enumerate(prompt)), dict(enumerate(prompt)), []
    while True:
        first = next(p for p in range(len(text) + 1) if p not in text)
        if first - len(prompt) >= count:
            return record, [text[p] for p in range(len(prompt), len(prompt) + count)]
        masked = [p for p in range(first, first + length) if p not in text]
        logits = run(model, window_call(kept, masked, model.mask))[len(kept) :]
        guesses = record.guesses(logits, masked)
        revealed = record.reveal(guesses, threshold, rule.strict, 1)
        record.add(len(kept), [], guesses, revealed, fresh)
        fresh = sorted((position, token) for position, token, _ in revealed)
        kept += fresh
        text |= dict(fresh)


def record_of(model, prompt, count, settings):
    decode = window if model.family.diffusion.layout == "window" else blocks
    record, tokens = decode(model, prompt, count, settings)
    assert len(tokens) == count and model.mask not in tokens
    return {
        "prompt": list(prompt),
        "tokens": tokens,
        "block_length": settings.length,
        "threshold": settings.threshold,
        "steps": settings.steps,
        "smallest_logit_gap": record.logit_gap,
        "smallest_probability_gap": record.probability_gap,
        "calls": record.calls,
    }


def most_a_call(record):
    """The most tokens that a call revealed."""
    return max(len(call["revealed"]) for call in record["calls"])
