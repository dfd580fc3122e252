"""Writes the seeds in corpus/ from the tiny checkpoints in tests/ and from a few files made here.

    python3 fuzz/make_seeds.py

Seeds are small, since a fuzzer gets through small inputs faster. What fuzzing found stays in corpus/ beside them, named
`found-*`; this script does not touch it.
"""

import json
import pathlib
import struct

ROOT = pathlib.Path(__file__).resolve().parent.parent
CORPUS = ROOT / "fuzz" / "corpus"


def write(target, name, data):
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)


def container(files):
    parts = []
    for name, data in files.items():
        data = data.encode() if isinstance(data, str) else data
        parts.append(b"~~~ " + name.encode() + b"\n" + data + b"\n")
    return b"".join(parts)[:-1]


def safetensors(tensors):
    """{name: (dtype, shape)} to a file whose values are small numbers."""
    size = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4}
    header, data = {}, b""
    for name, (dtype, shape) in tensors.items():
        count = 1
        for n in shape:
            count *= n
        one = {"F32": struct.pack("<f", 0.5), "F16": b"\x00\x38", "BF16": b"\x00\x3f", "U32": b"\x21\x43\x65\x87"}[dtype]
        assert len(one) == size[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + count * len(one)]}
        data += one * count
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def layers(count, hidden, inner, heads, kv_heads, dim, dtype, body="model."):
    tensors = {f"{body}embed_tokens.weight": (dtype, [7, hidden]), f"{body}norm.weight": (dtype, [hidden])}
    for i in range(count):
        at = f"{body}layers.{i}."
        tensors |= {
            at + "input_layernorm.weight": (dtype, [hidden]),
            at + "post_attention_layernorm.weight": (dtype, [hidden]),
            at + "self_attn.q_proj.weight": (dtype, [heads * dim, hidden]),
            at + "self_attn.k_proj.weight": (dtype, [kv_heads * dim, hidden]),
            at + "self_attn.v_proj.weight": (dtype, [kv_heads * dim, hidden]),
            at + "self_attn.o_proj.weight": (dtype, [hidden, heads * dim]),
            at + "mlp.gate_proj.weight": (dtype, [inner, hidden]),
            at + "mlp.up_proj.weight": (dtype, [inner, hidden]),
            at + "mlp.down_proj.weight": (dtype, [hidden, inner]),
        }
    return tensors


def config(**more):
    base = {
        "model_type": "llama", "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 2, "vocab_size": 7, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    return json.dumps(base | more)


def lora(rank, dtype="F32", count=2):
    tensors = {}
    for i in range(count):
        for module, out in [("q_proj", 4), ("v_proj", 2)]:
            at = f"base_model.model.model.layers.{i}.self_attn.{module}.lora_"
            tensors[at + "A.weight"] = (dtype, [rank, 4])
            tensors[at + "B.weight"] = (dtype, [out, rank])
    return tensors


def main():
    golden = ROOT / "tests" / "golden"
    generation = json.dumps({"eos_token_id": [1, 2], "bos_token_id": 0})
    for folder in sorted(golden.iterdir()):
        if not (folder / "config.json").is_file():
            continue
        text = (folder / "config.json").read_text()
        write("config", folder.name, container({"config.json": text, "generation_config.json": generation}))
        if "quantization" in json.loads(text):
            write("quantization", folder.name, text)
        raw = (folder / "model.safetensors").read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        write("safetensors_header", folder.name, raw[: 8 + length])
        if (folder / "tokenizer.json").is_file():
            write("tokenizer", folder.name, (folder / "tokenizer.json").read_bytes())
    write("quantization", "overrides", json.dumps({"quantization": {
        "group_size": 64, "bits": 4, "mode": "affine", "model.embed_tokens": {"group_size": 32, "bits": 8},
        "lm_head": False, "model.norm": True}}))
    write("quantization", "config", json.dumps({"quantization_config": {"quant_method": "affine", "group_size": 128, "bits": 8}}))
    small = safetensors({"a": ("F32", [2, 3]), "b": ("BF16", [4]), "c": ("U32", [1, 1])})
    write("safetensors_header", "small", small)
    write("safetensors_header", "metadata", safetensors({}).replace(b"{}", b"{}"))
    index = json.dumps({"metadata": {"total_size": 36}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    write("shard_index", "two", container({
        "model.safetensors.index.json": index, "one.safetensors": safetensors({"a": ("F32", [2])}),
        "two.safetensors": safetensors({"b": ("F16", [2, 2]), "c": ("F16", [1])})}))
    write("shard_index", "single", container({"model.safetensors": small}))

    bpe = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
           "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
           "vocab": {"a": 0, "b": 1, "ab": 2, "<0x41>": 4, "_": 5, "<unk>": 6}, "merges": [["a", "b"]]}
    special = {"id": 3, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    plain = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [special], "normalizer": None,
             "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": bpe}
    write("tokenizer", "plain", json.dumps(plain))
    rich = plain | {
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "NFC"}, {"type": "Replace", "pattern": {"String": " "}, "content": "_"}, {"type": "Prepend", "prepend": "_"},
            {"type": "Lowercase"}, {"type": "StripAccents"}, {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "Split", "pattern": {"Regex": "\\s+|\\p{N}{1,3}"}, "behavior": "Isolated", "invert": False},
            {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": False},
            {"type": "Punctuation", "behavior": "Contiguous"}, {"type": "WhitespaceSplit"},
            {"type": "CharDelimiterSplit", "delimiter": "-"},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]},
        "post_processor": {"type": "Sequence", "processors": [
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
            {"type": "TemplateProcessing",
             "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
             "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
             "special_tokens": {"<s>": {"id": "<s>", "ids": [3], "tokens": ["<s>"]}}}]},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "_"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
                    "pad_token": "<s>"},
        "model": bpe | {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}}
    write("tokenizer", "rich", json.dumps(rich))
    write("tokenizer", "lines", json.dumps(plain | {"model": bpe | {"merges": ["#version: 0.2", "a b"]}}))
    for name, model in {
        "wordpiece": {"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
                      "vocab": {"a": 0, "##b": 1, "<unk>": 2}},
        "wordlevel": {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"},
        "unigram": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.5], ["b", -2.5]], "byte_fallback": False},
    }.items():
        write("tokenizer", name, json.dumps(plain | {"model": model}))

    chatml = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>' }}\n"
              "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
    write("tokenizer_config", "chatml", json.dumps({
        "bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None, "chat_template": chatml}))
    write("tokenizer_config", "named", json.dumps({"chat_template": [
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"}, {"name": "tool_use", "template": "{{ tools | tojson }}"}]}))
    write("tokenizer_config", "tiny", (golden / "tiny-llama-tied" / "tokenizer_config.json").read_bytes())
    demo = (ROOT / "tools" / "demo-model" / "tokenizer_config.json").read_text()
    write("tokenizer_config", "demo", json.dumps({k: v for k, v in json.loads(demo).items() if k != "added_tokens_decoder"}))
    write("chat_template", "written-out", container({
        "chat_template.jinja": chatml.replace("<|im_", "<|"),
        "messages.json": json.dumps([{"role": "user<|end|>", "content": "a<|end|><|fim_<|end|>middle|>", "x<|end|>": ["\ue000<|end|>"]}])}))
    write("chat_template", "demo", container({
        "chat_template.jinja": (ROOT / "tools" / "demo-model" / "chat_template.jinja").read_bytes(), "tokenizer_config.json": demo}))
    cases = json.loads((ROOT / "tests" / "data" / "chat" / "golden.json").read_text())["cases"]
    for i, case in enumerate(cases):
        files = {"messages.json": json.dumps(case["messages"]), "variables.json": json.dumps(case["variables"])}
        if isinstance(case["template"], str):
            files = {"chat_template.jinja": case["template"]} | files
        else:
            files["tokenizer_config.json"] = json.dumps(case["special_tokens"] | {"chat_template": case["template"]})
        if len(container(files)) < 6000:
            write("chat_template", f"golden-{i:02}", container(files))

    peft = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "bias": "none",
            "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {"layers.0.self_attn.q_proj": 8}, "use_dora": False,
            "draft": {"logit_shift": 1, "anchor": "in-block", "mask_embedding": "mask_embedding", "bidirectional": True}}
    weights = safetensors(lora(2) | {"mask_embedding": ("F32", [4])})
    write("adapter", "lora", container({"adapter_config.json": json.dumps(peft), "adapter_model.safetensors": weights}))
    write("adapter", "token", container({
        "adapter_config.json": json.dumps(peft | {"draft": {"logit_shift": 0, "anchor": "shared", "mask_token_id": 3}}),
        "adapter_model.safetensors": safetensors(lora(2))}))

    tiny = {"config.json": config(), "generation_config.json": generation, "tokenizer_config.json": "{}",
            "chat_template.jinja": chatml}
    for dtype in ["F32", "F16", "BF16"]:
        weights = safetensors(layers(1, 4, 6, 2, 1, 2, dtype))
        write("checkpoint", dtype.lower(), container({**tiny, "model.safetensors": weights}))
    one = safetensors(layers(1, 4, 6, 2, 1, 2, "F16"))
    adapter = {"draft_adapter/adapter_config.json": json.dumps(peft),
               "draft_adapter/adapter_model.safetensors": safetensors(lora(2, "F16", 1) | {"mask_embedding": ("F16", [4])})}
    write("checkpoint", "adapter", container({**tiny, "model.safetensors": one, **adapter}))
    names = layers(1, 4, 6, 2, 1, 2, "F32")
    halves = [dict(list(names.items())[:5]), dict(list(names.items())[5:])]
    write("checkpoint", "shards", container({
        **tiny, "model.safetensors.index.json": json.dumps({"weight_map": {n: f"{i}.safetensors" for i, h in enumerate(halves) for n in h}}),
        "0.safetensors": safetensors(halves[0]), "1.safetensors": safetensors(halves[1])}))
    affine = {}
    for name, (dtype, shape) in layers(1, 32, 32, 2, 1, 2, "F16").items():
        if len(shape) == 2 and shape[1] == 32:
            module = name.removesuffix(".weight")
            affine |= {name: ("U32", [shape[0], 4]), module + ".scales": ("F16", [shape[0], 1]), module + ".biases": ("F16", [shape[0], 1])}
        else:
            affine[name] = (dtype, shape)
    write("checkpoint", "affine", container({
        "config.json": config(hidden_size=32, intermediate_size=32, quantization={
            "group_size": 32, "bits": 4, "model.layers.0.self_attn.o_proj": False}), "model.safetensors": safetensors(affine)}))
    diffusion = layers(1, 4, 6, 2, 1, 2, "BF16", "encoder.") | {"diffusion_head.weight": ("BF16", [7, 4])}
    nemotron = json.loads((golden / "tiny-nemotron" / "config.json").read_text())
    nemotron |= {k: v for k, v in json.loads(config()).items() if k not in ("model_type", "tie_word_embeddings", "rms_norm_eps")}
    nemotron |= {"mask_token_id": 5, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    write("checkpoint", "nemotron", container({"config.json": json.dumps(nemotron), "model.safetensors": safetensors(diffusion)}))
    at = "backbone.model.model."
    norms = {f"{at}layers.0.self_attn.{part}_norm.weight": ("F16", [2]) for part in "qk"}
    named = {"architectures": ["SetDLM"], "length": 64, "mask_token_id": None,
             "backbone_config": {"_target_": "backbone_automodel.AutoModelFromPreTrained", "config": {"rms_norm_eps": 1e-6}},
             "noise_config": {"desired_block_size": 4}, "tokenization_config": {"mask_token_id": 5, "eos_token_id": 1}}
    write("checkpoint", "setdlm-nested", container({
        "config.json": json.dumps(named), "model.safetensors": safetensors(layers(1, 4, 6, 2, 1, 2, "F16", at) | norms)}))

    sha = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    files = {"config.json": [12, None], "model.safetensors": [7, sha], "a/b": [None, None]}
    siblings = [{"rfilename": "config.json", "size": 12}, {"rfilename": "a/b"},
                {"rfilename": "model.safetensors", "size": 7, "lfs": {"sha256": sha, "size": 7, "pointerSize": 130}}]
    write("hub_listing", "three", json.dumps({"id": "o/m", "sha": "c0ffee", "private": False, "siblings": siblings}))
    write("hub_listing", "empty", json.dumps({"sha": "c0ffee", "siblings": []}))
    manifest = {"version": 1, "source": "o/m", "revision": "c0ffee", "asked": "main", "role": "model", "complete": True,
                "created": 1, "used": 2, "listing": {"commit": "c0ffee", "files": files}, "missing": ["a"], "small": {"b": 3},
                "weights": {"model.safetensors": {"size": 7, "version": '"x"', "verified": True}}}
    write("store_manifest", "hub", json.dumps(manifest))
    write("store_manifest", "address", json.dumps(manifest | {"asked": None, "listing": None, "weights": {}}))
    state = "6a09e667" * 26
    write("store_resume", "two", f"8388608 4194304 {state} 0:7 1:{1 << 63}\tmodel.safetensors\n0 4194304 {state}\tb.safetensors\n")
    write("store_resume", "none", "")
    words = lambda count: struct.pack("<Q", count) + bytes(4 * count)
    write("stored_block", "rows", words(64) + words(16) + words(3))
    write("stored_block", "short", words(64) + words(16)[:-4])

main()
