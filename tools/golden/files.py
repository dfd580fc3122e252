"""Checkpoints as files: written in the hub's layout, and read back."""

import dataclasses
import json
import math
import re

import torch
from checkpoints import END, FIM_MIDDLE
from families import FAMILIES
from model import Adapter, Model, adapted_roles, shapes
from safetensors.torch import load_file, save_file

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
HUB_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


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


def half(value, towards):
    """The f16 nearest to a float64 value on the side of `towards`, -inf or inf."""
    near = value.to(torch.float16)
    wrong = near.double() > value if towards < 0 else near.double() < value
    return torch.where(wrong, torch.nextafter(near, torch.full_like(near, towards)), near).double()


def quantized_while_loading(model, bits):
    """The model with the weights that quantising a plain checkpoint leaves, as the README says: groups of 64 inputs (a row's
    last group has what is left), starting at their minimum rounded down to f16, in steps of the rest's share rounded up to
    f16; embedding and head in 8 bits; vectors and the adapter as they are."""

    def rounded(weight, levels):
        parts = []
        for group in weight.split(64, -1):
            start = half(group.amin(-1, keepdim=True), -math.inf)
            step = half((group.amax(-1, keepdim=True) - start) / levels, math.inf)
            # In f32: a value in the middle between two steps may go either way, and which is not what is tested.
            steps = ((group.float() - start.float()) * (1 / step.float()) + 0.5).floor().clamp(0, levels)
            near = (group - start) / step
            assert ((steps - near).abs() < 0.5001).all()
            parts.append(start + step * steps)
        return torch.cat(parts, -1)

    weights = {
        role: value if value.dim() < 2 else rounded(value, 2 ** (bits if isinstance(role, tuple) else 8) - 1)
        for role, value in model.weights.items()
    }
    return dataclasses.replace(model, weights=weights)


def byte_tokenizer(with_mask):
    """tokenizer.json whose id is the byte, without merges, with special tokens behind the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in plain}
    letters |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in letters)}
    special = {"<|end|>": END} | ({"<|fim_middle|>": FIM_MIDDLE} if with_mask else {})
    bare = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": text, "special": True} | bare for text, i in special.items()],
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
            "vocab": {letters[b]: b for b in range(256)} | special,
            "merges": [],
        },
    }


def write_json(path, value):
    text = json.dumps(value, indent=1, ensure_ascii=False)
    flat = re.compile(r"\[[-\d.,\s]*\]")  # a list of numbers stays on one line
    path.write_text(flat.sub(lambda m: " ".join(m[0].split()).replace("[ ", "[").replace(" ]", "]"), text) + "\n")


def adapter_config(checkpoint, family):
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": checkpoint.adapter_rank,
        "lora_alpha": checkpoint.adapter_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(family.adapter_modules),
    }
    if family.mask_embedding:
        config["draft"] = {
            "mask_embedding": "mask_embedding",
            "logit_shift": family.logit_shift,
            "anchor": "in-block",
            "adapter_rows": "draft",
        }
    return config


def write_checkpoint(folder, checkpoint, model):
    family, dtype = model.family, DTYPES[checkpoint.dtype]
    config = family.config | checkpoint.config | {"torch_dtype": HUB_DTYPES[checkpoint.dtype]}
    quantization = checkpoint.quantization
    if quantization:
        config["quantization"] = quantization
    write_json(folder / "config.json", config)
    tensors = {}
    for role, value in model.weights.items():
        name = family.tensor_name(role)
        module = name.removesuffix(".weight")
        if quantization and value.dim() == 2:
            own = quantization.get(module, quantization)
            words, scales, biases = quantize(value, own["group_size"], own["bits"], dtype)
            tensors |= {f"{module}.weight": words, f"{module}.scales": scales, f"{module}.biases": biases}
        else:
            tensors[name] = value.to(dtype)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    if checkpoint.trained:
        write_json(folder / "tokenizer.json", byte_tokenizer(checkpoint.mask is not None))
        write_json(folder / "tokenizer_config.json", {"eos_token": "<|end|>", "add_bos_token": False})
    if model.adapter is None:
        return
    adapter_folder = folder / family.adapter_folder
    adapter_folder.mkdir()
    write_json(adapter_folder / "adapter_config.json", adapter_config(checkpoint, family))
    tensors = {} if model.adapter.mask_embedding is None else {"mask_embedding": model.adapter.mask_embedding}
    for role, (a, b) in model.adapter.pairs.items():
        name = f"base_model.model.{family.tensor_name(role)}"
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    tensors = {k: v.to(dtype).contiguous() for k, v in tensors.items()}
    save_file(tensors, adapter_folder / "adapter_model.safetensors")


def read_checkpoint(folder, checkpoint):
    """What was written, read back: the truth belongs to the bytes on disk, not to what they were made from."""
    family = FAMILIES[checkpoint.family]
    stored = load_file(folder / "model.safetensors")
    weights = {}
    for role in shapes(checkpoint.config, family):
        name = family.tensor_name(role)
        value, module = stored.pop(name), name.removesuffix(".weight")
        if value.dtype == torch.uint32:
            own = checkpoint.quantization.get(module, checkpoint.quantization)
            value = dequantize(value, stored.pop(f"{module}.scales"), stored.pop(f"{module}.biases"), own["bits"])
        weights[role] = value.double()
    assert not stored, f"tensors nobody reads: {list(stored)}"
    adapter = None
    if family.adapter_modules:
        stored = load_file(folder / family.adapter_folder / "adapter_model.safetensors")
        pairs = {}
        for role in adapted_roles(checkpoint.config, family):
            name = f"base_model.model.{family.tensor_name(role)}"
            pairs[role] = tuple(stored.pop(f"{name}.lora_{x}.weight").double() for x in "AB")
        embedding = stored.pop("mask_embedding").double() if family.mask_embedding else None
        adapter = Adapter(pairs, checkpoint.adapter_alpha / checkpoint.adapter_rank, embedding)
        assert not stored, f"adapter tensors nobody reads: {list(stored)}"
    return Model(family, family.config | checkpoint.config, weights, adapter, checkpoint.mask)
