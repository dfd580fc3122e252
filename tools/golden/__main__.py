#!/usr/bin/env python3
"""Writes tests/golden/: tiny checkpoints and the truth about them, in float64, from PyTorch.

Every checkpoint is a folder in the hub's layout (config.json, model.safetensors, its adapter's folder) with
golden.json (what was asked) and golden.safetensors (what must come out) beside it. tests/golden/README.md
says what each tensor is. The Rust tests read these files; they need no Python.

The truth is computed by `model.forward` in float64, row by row with an explicit visibility matrix. Before
anything is written it is held against transformers' own model class (judge.py), every comparison with a control
that must fail.

    python tools/golden              write all checkpoints (about ten minutes on two cores)
    python tools/golden NAME ...     write only these
    python tools/golden --check      recompute the truth of the checkpoints on disk and compare it with theirs
    python tools/golden --records    write the diffusion records of the checkpoints on disk, and nothing else

A new family is an entry of FAMILIES in families.py; a new checkpoint is an entry of CHECKPOINTS in checkpoints.py.
"""

import json
import pathlib
import shutil
import sys

try:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
except ImportError as missing:
    sys.exit(f"{missing}. Install what this script needs: pip install torch 'transformers>=5,<5.40' safetensors")

from calls import drafted, greedy, packed, rows_of, run, target, two_call
from checkpoints import CHECKPOINTS
from diffusion import block_call, kept_call, most_a_call, record_of
from files import quantized_while_loading, read_checkpoint, write_checkpoint, write_json
from judge import hold_against_transformers, hold_blocks_against_transformers
from model import random_model
from training import train

OUT = pathlib.Path(__file__).resolve().parent.parent.parent / "tests" / "golden"
VERIFY_WIDTH, DRAFT_WIDTH = 4, 7  # K and w of the packed call and of the schedules
RECORDED = 24  # tokens of a text decoded by diffusion


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


def record_prompts(checkpoint):
    """Endless text for the prompts of the records: the toy text of trained checkpoints, else random ids."""
    generator = torch.Generator().manual_seed(checkpoint.seed + 2000)
    if checkpoint.trained:
        text = "the gardener likes rain in spring. every morning the old sailor sings. so it goes on, d"
        return [list(text.encode()), list(text[25:].encode()), list("every morning the baker ".encode())]
    return torch.randint(3, checkpoint.config["vocab_size"], (3, 80), generator=generator).tolist()


def records_of(checkpoint, model):
    """diffusion.json: what decoding by diffusion does, call by call."""
    texts = record_prompts(checkpoint)
    records = []
    for i, (settings, length) in enumerate(checkpoint.records):
        records.append(record_of(model, texts[i % len(texts)][:length], RECORDED, settings))
        last = records[-1]
        most, calls = most_a_call(last), len(last["calls"])
        gaps = f"{last['smallest_logit_gap']:.4f} {last['smallest_probability_gap']:.4f}"
        shown = repr(bytes(t for t in last["tokens"] if t < 256).decode(errors="replace")) if checkpoint.trained else ""
        print(f"  {settings}: {calls} calls, at most {most} a call, gaps {gaps} {shown}", flush=True)
    return records


def write_records(folder, checkpoint, model):
    if checkpoint.records:
        write_json(folder / "diffusion.json", {"mask_token": checkpoint.mask, "texts": records_of(checkpoint, model)})


def truth_of_blocks(checkpoint, model):
    """The truth of a family that does nothing but fill blocks."""
    generator = torch.Generator().manual_seed(checkpoint.seed + 1000)
    rule = model.family.diffusion
    length = model.config[rule.length_field]
    prompt, _, _ = questions(checkpoint, model, generator)
    start = len(prompt) - len(prompt) % length
    block = prompt[start:] + [None] * (length - len(prompt) % length)
    calls = {"kept rows": kept_call(prompt, length), "a block": block_call(prompt[:start], block, length, model.mask)}
    difference = hold_blocks_against_transformers(model, calls)
    trace = {}
    tensors = {"causal.logits": run(model, calls["kept rows"], trace)}
    tensors |= {f"causal.{name}": value for name, value in trace.items()}
    tensors["block.logits"] = run(model, calls["a block"])[start:]
    manifest = origin(checkpoint, difference) | {
        "prompt": prompt,
        "block_length": length,
        "mask_token": checkpoint.mask,
        "logit_range": (tensors["causal.logits"].max() - tensors["causal.logits"].min()).item(),
    }
    return manifest, {k: v.to(torch.float32).contiguous() for k, v in tensors.items()}


def truth_of_quantized(checkpoint, model):
    """The logits that tests ask of a bf16 checkpoint, of its weights as they are after quantising while loading."""
    generator = torch.Generator().manual_seed(checkpoint.seed + 1000)
    prompt, _, _ = questions(checkpoint, model, generator)
    tensors = {}
    for bits in (4, 8):
        quantized = quantized_while_loading(model, bits)
        if model.family.drafts:
            logits = {"causal": target(quantized, prompt), "draft.w7": drafted(quantized, prompt, DRAFT_WIDTH)}
        else:
            length = model.config[model.family.diffusion.length_field]
            logits = {"causal": run(quantized, kept_call(prompt, length))}
        tensors |= {f"q{bits}.{name}.logits": value.float().contiguous() for name, value in logits.items()}
    return tensors


def origin(checkpoint, difference):
    """How a manifest begins: what was measured, with what, and how far transformers is from it."""
    return {
        "checkpoint": checkpoint.name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "difference_from_transformers": difference,
    }


def said(logits, call):
    """What a call's choosing rows say: the target's rows, then each block's."""
    return torch.cat([logits[call.verify], *(logits[block] for block in call.blocks.values())])


def truth_of(checkpoint, model):
    generator = torch.Generator().manual_seed(checkpoint.seed + 1000)
    family = model.family
    prompt, draft, prompts = questions(checkpoint, model, generator)
    assert len(prompt) == 13 and len(draft) == VERIFY_WIDTH
    difference = hold_against_transformers(model, prompt, draft, DRAFT_WIDTH, checkpoint.far)

    trace = {}
    tensors = {"causal.logits": target(model, prompt, trace)}
    tensors |= {f"causal.{name}": value for name, value in trace.items()}
    for width in (DRAFT_WIDTH, 3):
        tensors[f"draft.w{width}.logits"] = drafted(model, prompt, width)
    if family.adapter_modules:
        tensors["draft_without_adapter.w7.logits"] = drafted(model, prompt, DRAFT_WIDTH, adapter_on=False)
    call = rows_of(family, prompt, draft, [0], DRAFT_WIDTH)
    logits = run(model, call)
    tensors["packed.logits"] = said(logits, call)
    wide = rows_of(family, prompt, draft, [0, 2], DRAFT_WIDTH)
    tensors["anchored.logits"] = said(run(model, wide), wide)
    if checkpoint.far:
        there = rows_of(family, prompt, [], [0], DRAFT_WIDTH, at=checkpoint.far)
        tensors["far.logits"] = run(model, there)

    # What the packed call promises: its verify rows are the target's, its draft is two-call's draft.
    same = dict(atol=1e-9, rtol=0)
    torch.testing.assert_close(logits[call.verify], target(model, prompt + draft)[12:], **same)
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
    manifest = origin(checkpoint, difference) | {
        "prompt": prompt,
        "draft": draft,
        "verify_width": VERIFY_WIDTH,
        "draft_width": DRAFT_WIDTH,
        "anchors": [0, 2],
        "far": list(checkpoint.far),
        "mask_token": checkpoint.mask,
        "logit_range": (tensors["causal.logits"].max() - tensors["causal.logits"].min()).item(),
        "greedy": texts,
    }
    return manifest, {k: v.to(torch.float32).contiguous() for k, v in tensors.items()}


def quantizes(checkpoint):
    """Whether quantising while loading is part of a checkpoint's truth: for the plain bf16 ones."""
    return checkpoint.dtype == "bf16" and not checkpoint.quantization


def build(checkpoint):
    print(checkpoint.name, flush=True)
    torch.manual_seed(checkpoint.seed)
    generator = torch.Generator().manual_seed(checkpoint.seed)
    model = random_model(checkpoint, generator)
    if checkpoint.trained:
        model = train(model, DRAFT_WIDTH, generator)
    folder = OUT / checkpoint.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_checkpoint(folder, checkpoint, model)
    stored = read_checkpoint(folder, checkpoint)
    truth = truth_of if model.family.drafts else truth_of_blocks
    manifest, tensors = truth(checkpoint, stored)
    write_json(folder / "golden.json", manifest)
    save_file(tensors, folder / "golden.safetensors")
    if quantizes(checkpoint):
        save_file(truth_of_quantized(checkpoint, stored), folder / "quantized.safetensors")
    print(f"  from transformers {manifest['difference_from_transformers']:.1e}")
    write_records(folder, checkpoint, stored)
    for text in manifest.get("greedy", []):
        calls = f"packed {text['packed']['calls']} calls, two-call {text['two_call']['calls']}"
        shown = repr(bytes(t for t in text["tokens"] if t < 256).decode(errors="replace")) if checkpoint.trained else ""
        print(f"  48 tokens: {calls}, closest choice {text['smallest_top2_gap']:.4f} {shown}", flush=True)
        if checkpoint.trained:
            print(f"  {text['packed']['per_call']}", flush=True)


def records(checkpoint):
    print(checkpoint.name, flush=True)
    folder = OUT / checkpoint.name
    write_records(folder, checkpoint, read_checkpoint(folder, checkpoint))


def check(checkpoint):
    folder = OUT / checkpoint.name
    model = read_checkpoint(folder, checkpoint)
    truth = truth_of if model.family.drafts else truth_of_blocks
    manifest, tensors = truth(checkpoint, model)
    stored = load_file(folder / "golden.safetensors")
    if quantizes(checkpoint):
        tensors |= truth_of_quantized(checkpoint, model)
        stored |= load_file(folder / "quantized.safetensors")
    assert stored.keys() == tensors.keys()
    for name, value in stored.items():
        torch.testing.assert_close(tensors[name], value, atol=1e-6, rtol=0, msg=f"{checkpoint.name}: {name}")
    stored = json.loads((folder / "golden.json").read_text())
    for key in ("prompt", "draft", "block_length"):
        assert manifest.get(key) == stored.get(key), f"{checkpoint.name}: {key}"
    assert [t["tokens"] for t in manifest.get("greedy", [])] == [t["tokens"] for t in stored.get("greedy", [])]
    if checkpoint.records:
        records = json.loads((folder / "diffusion.json").read_text())["texts"]
        assert [r["tokens"] for r in records_of(checkpoint, model)] == [r["tokens"] for r in records]
    print(f"{checkpoint.name}: as stored")


def main():
    torch.set_num_threads(1)  # the products are tiny
    arguments = [a for a in sys.argv[1:] if a not in ("--check", "--records")]
    known = {c.name: c for c in CHECKPOINTS}
    unknown = [a for a in arguments if a not in known]
    if unknown:
        sys.exit(f"no checkpoint named {', '.join(unknown)}; there are {', '.join(known)}")
    task = check if "--check" in sys.argv else records if "--records" in sys.argv else build
    for name in arguments or known:
        task(known[name])


if __name__ == "__main__":
    main()
