"""Training: a minute on a toy text, so that greedy text is text and drafts are accepted."""

import dataclasses

import torch
from calls import MASK
from checkpoints import END
from model import forward

LENGTH, BATCH = 96, 24
entropy = torch.nn.functional.cross_entropy


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
    for parameter in parameters:
        parameter.requires_grad_(False)


@dataclasses.dataclass
class Text:
    ids: torch.Tensor
    generator: torch.Generator

    def windows(self, count, span):
        starts = torch.randint(len(self.ids) - span, (count,), generator=self.generator)
        return torch.stack([self.ids[s : s + span] for s in starts.tolist()])


NO_ADAPTER = torch.zeros(LENGTH, dtype=torch.bool)
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
POSITIONS = torch.arange(LENGTH)


def language_loss(model, ids):
    """Next tokens of ids [B, LENGTH + 1]."""
    logits = forward(model, ids[:, :-1], POSITIONS, CAUSAL, NO_ADAPTER)
    return entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def blocks_loss(model, ids, width, generator, adapter_on, joint):
    """Draft blocks at random anchors over the clean tokens; `joint` adds the clean rows' next-token loss."""
    shift, blocks, rows = model.family.logit_shift, 6, 1 + width
    adapted = torch.cat([NO_ADAPTER, torch.full((blocks * rows,), adapter_on)])
    anchors = torch.randint(4, LENGTH - rows, (len(ids), blocks), generator=generator)
    at = anchors[:, :, None] + torch.arange(rows)
    tokens = torch.full((len(ids), blocks, rows), MASK)
    tokens[:, :, 0] = ids.gather(1, anchors)
    sees = torch.zeros(len(ids), LENGTH + blocks * rows, LENGTH + blocks * rows, dtype=torch.bool)
    sees[:, :LENGTH, :LENGTH] = CAUSAL
    below = torch.arange(LENGTH) < anchors[:, :, None]
    sees[:, LENGTH:, :LENGTH] = below.repeat_interleave(rows, 1)
    own_block = torch.arange(blocks * rows) // rows
    sees[:, LENGTH:, LENGTH:] = own_block[:, None] == own_block[None]
    logits = forward(
        model,
        torch.cat([ids[:, :-1], tokens.flatten(1)], 1),
        torch.cat([POSITIONS.expand(len(ids), -1), at.flatten(1)], 1),
        sees,
        adapted,
    )
    targets = ids.gather(1, (at + shift).flatten(1))
    weight = 0.85 ** torch.arange(rows)
    weight[: 1 - shift] = 0  # without a shift the anchor's own row predicts nothing
    weight = weight.repeat(len(ids) * blocks)
    losses = entropy(logits[:, LENGTH:].flatten(0, 1), targets.flatten(), reduction="none")
    loss = (losses * weight).sum() / weight.sum()
    if joint:
        loss = loss + entropy(logits[:, :LENGTH].flatten(0, 1), ids[:, 1:].flatten())
    return loss


def set_loss(model, ids, reach, generator):
    """Clean rows and mask rows in a shuffled order: mask row i sees the clean rows before it in that order, and itself, and
    predicts its own position. Every other text is in plain order, which makes the model autoregressive too."""
    ids = ids[:, :LENGTH]
    late = torch.rand(ids.shape, generator=generator) * reach
    late[::2] = 0
    order = (POSITIONS + late).argsort(-1)
    rank = order.argsort(-1)  # when a position's turn comes
    before = rank[:, :, None] > rank[:, None, :]
    own = torch.eye(LENGTH, dtype=torch.bool)
    sees = torch.zeros(len(ids), 2 * LENGTH, 2 * LENGTH, dtype=torch.bool)
    sees[:, :LENGTH, :LENGTH] = before | own
    sees[:, LENGTH:, :LENGTH] = before
    sees[:, LENGTH:, LENGTH:] = own
    tokens = torch.cat([ids, torch.full_like(ids, MASK)], 1)
    logits = forward(model, tokens, POSITIONS.repeat(2).expand(len(ids), -1), sees, NO_ADAPTER.repeat(2))[:, LENGTH:]
    logits[..., model.mask] = -1e12
    return entropy(logits.flatten(0, 1), ids.flatten())


def aligned_loss(model, ids, length, generator):
    """Aligned blocks with some tokens masked, behind the clean tokens of the blocks before; a clean block's rows see their
    block. Without a shift every masked position has its own row's word; with a shift the row before it has, and the first of
    a block that of the clean row before."""
    ids, shift = ids[:, :LENGTH], model.family.logit_shift
    block = POSITIONS // length
    rate = torch.rand(len(ids), LENGTH // length, generator=generator).repeat_interleave(length, 1)
    masked = torch.rand(ids.shape, generator=generator) < rate
    sees = torch.zeros(2 * LENGTH, 2 * LENGTH, dtype=torch.bool)
    sees[:LENGTH, :LENGTH] = block[:, None] >= block[None]
    sees[LENGTH:, :LENGTH] = block[:, None] > block[None]
    sees[LENGTH:, LENGTH:] = block[:, None] == block[None]
    tokens = torch.cat([ids, torch.where(masked, MASK, ids)], 1)
    logits = forward(model, tokens, POSITIONS.repeat(2), sees, NO_ADAPTER.repeat(2))
    clean, noisy = logits[:, :LENGTH], logits[:, LENGTH:]
    says = noisy
    if shift:
        before = torch.where((POSITIONS % length == 0)[:, None], clean.roll(1, 1), noisy.roll(1, 1))
        says = before[:, 1:]
        masked, ids = (masked | (POSITIONS % length == 0))[:, 1:], ids[:, 1:]
    return entropy(says[masked], ids[masked])


def own_text(model, text):
    """The model's own continuations, half of them greedy, half sampled."""
    with torch.no_grad():
        own = text.windows(192, 12)
        while own.shape[1] < LENGTH + 1:
            t = own.shape[1]
            logits = forward(model, own, POSITIONS[:t], CAUSAL[:t, :t], NO_ADAPTER[:t])[:, -1]
            sampled = torch.multinomial((logits / 0.8).softmax(-1), 1, generator=text.generator)
            best = logits.argmax(-1, keepdim=True)
            odd = (torch.arange(len(own)) % 2 == 1)[:, None]
            own = torch.cat([own, torch.where(odd, sampled, best)], 1)
    return own


def train(model, width, generator):
    """Trains the weights on the toy text as the family is trained, then the adapter on the model's own text."""
    model = model.to(torch.float32)
    for value in model.weights.values():
        if value.dim() == 2:
            value.mul_(0.4)
        else:
            value.fill_(1.0)
        value.requires_grad_(True)
    text = Text(toy_text(generator, 120_000), generator)
    weights, family = list(model.weights.values()), model.family
    if not family.drafts:
        length = model.config[family.diffusion.length_field]
        loss = lambda _: aligned_loss(model, text.windows(16, LENGTH), length, generator)
        # Long blocks whose rows speak of the next position are sure of themselves early.
        learn(weights, 350 if model.family.logit_shift else 900, 6e-3, loss, "model, aligned blocks")
    elif family.mask_verify:
        loss = lambda _: set_loss(model, text.windows(16, LENGTH), width, generator)
        learn(weights, 900, 6e-3, loss, "model, in shuffled orders")
    elif family.mask_embedding:
        learn(weights, 600, 6e-3, lambda _: language_loss(model, text.windows(BATCH, LENGTH + 1)), "model")
    else:
        loss = lambda _: blocks_loss(model, text.windows(16, LENGTH + 1), width, generator, False, joint=True)
        learn(weights, 700, 6e-3, loss, "model, next tokens and blocks")
    if not family.adapter_modules:
        return model

    # Few steps on purpose: a drafter that is always right, or never, would leave most of the schedules' paths untried.
    own, adapter = own_text(model, text), model.adapter
    parameters = [t for pair in adapter.pairs.values() for t in pair]
    for _, b in adapter.pairs.values():
        b.zero_()
    if adapter.mask_embedding is not None:
        adapter.mask_embedding.copy_(model.weights["embed_tokens.weight"].mean(0))
        parameters.append(adapter.mask_embedding)
    for parameter in parameters:
        parameter.requires_grad_(True)

    def draft_loss(_):
        ids = own[torch.randint(len(own), (16,), generator=generator)]
        return blocks_loss(model, ids, width, generator, True, joint=False)

    learn(parameters, 160, 4e-3, draft_loss, "adapter")
    return model
