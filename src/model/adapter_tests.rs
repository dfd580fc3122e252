use serde_json::{Value, json};

use super::*;
use crate::model::config;
use crate::model::families::family;
use crate::weights::safetensors_header::{Dtype, TensorInfo, parse_header};

fn model(model_type: &str, mask: Option<u32>) -> Arch {
    let config = json!({
        "model_type": model_type, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 100, "max_position_embeddings": 512, "mask_token_id": mask
    });
    config::parse(config.to_string().as_bytes(), None).unwrap().arch
}

/// An index of one file with tensors of these names and shapes.
fn index(tensors: &[(String, [u64; 2])]) -> TensorIndex {
    let info = |shape: [u64; 2]| TensorInfo { dtype: Dtype::F32, shape: shape.to_vec(), bytes: 0..4 * shape[0] * shape[1] };
    let tensors = tensors.iter().map(|(name, shape)| (name.clone(), (0, info(*shape)))).collect();
    TensorIndex { files: vec![WEIGHTS.to_owned()], tensors }
}

/// A and B of o_proj (24 inputs, 8 outputs) in both layers, with ranks of their own.
fn o_projections(body: &str, ranks: [u64; 2]) -> Vec<(String, [u64; 2])> {
    let module = |l: usize, half: &str| format!("base_model.model.{body}layers.{l}.self_attn.o_proj.{half}.weight");
    (0..2).flat_map(|l| [(module(l, "lora_A"), [ranks[l], 24]), (module(l, "lora_B"), [8, ranks[l]])]).collect()
}

fn read(config: Value, tensors: &[(String, [u64; 2])], arch: &Arch) -> Result<Adapter> {
    let family = family(&arch.model_type).unwrap();
    parse(config.to_string().as_bytes(), &index(tensors), arch, family)
}

#[test]
fn the_demo_adapter_is_read() {
    let base = config::parse(include_bytes!("../../tools/demo-model/config.json"), None).unwrap();
    let file = include_bytes!("../../adapters/smollm2-135m/adapter_model.safetensors");
    let tensors = parse_header(WEIGHTS, file, file.len() as u64).unwrap();
    let index = TensorIndex { files: vec![WEIGHTS.into()], tensors: tensors.into_iter().map(|(n, i)| (n, (0, i))).collect() };
    let config = include_bytes!("../../adapters/smollm2-135m/adapter_config.json");
    let a = parse(config, &index, &base.arch, base.family).unwrap();
    assert_eq!((a.spec.rank, a.spec.scale, a.spec.modules.len(), a.spec.mask_embedding), (32, 2.0, 210, true));
    assert_eq!((a.spec.rules.logit_shift, a.spec.rules.anchor, a.spec.rules.bidirectional), (1, Anchor::InBlock, true));
    assert_eq!(a.tensors.len(), 421);
    assert!(a.tensors.values().all(|(_, factor)| *factor == 1.0));
}

#[test]
fn nemotrons_adapter_follows_its_family() {
    let arch = model("nemotron_labs_diffusion", Some(90));
    let a =
        read(json!({"peft_type": "LORA", "r": 4, "lora_alpha": 16, "bias": "none"}), &o_projections("encoder.", [4, 4]), &arch)
            .unwrap();
    assert_eq!((a.spec.scale, a.spec.rank, a.spec.mask_embedding), (4.0, 4, false));
    assert_eq!(
        a.spec.modules.iter().map(String::as_str).collect::<Vec<_>>(),
        ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"]
    );
    assert_eq!(a.spec.rules, arch.draft.unwrap());
    assert!(a.tensors.contains_key("model.layers.1.self_attn.o_proj.lora_B.weight"));
}

#[test]
fn ranks_and_scales_by_module() {
    let arch = model("llama", None);
    let draft = json!({"logit_shift": 1, "mask_token_id": 99});
    let tensors = o_projections("model.", [4, 2]);
    let config = json!({"r": 4, "lora_alpha": 8, "rank_pattern": {"layers.1.self_attn.o_proj": 2}, "draft": draft});
    let a = read(config, &tensors, &arch).unwrap();
    assert_eq!((a.spec.rank, a.spec.scale, a.mask_token_id), (4, 2.0, Some(99)));
    // alpha / r is 2 in layer 0 and 4 in layer 1: B carries the rest.
    let factor = |name: &str| a.tensors[&format!("model.layers.{name}.weight")].1;
    assert_eq!(
        [factor("0.self_attn.o_proj.lora_B"), factor("1.self_attn.o_proj.lora_B"), factor("1.self_attn.o_proj.lora_A")],
        [1.0, 2.0, 1.0]
    );
    let config = json!({"r": 4, "lora_alpha": 8, "use_rslora": true, "draft": draft});
    assert_eq!(read(config, &o_projections("model.", [4, 4]), &arch).unwrap().spec.scale, 4.0);
    let config = json!({"r": 4, "lora_alpha": 8, "rank_pattern": {".*o_proj": 2}, "draft": draft});
    assert!(read(config, &tensors, &arch).unwrap_err().to_string().contains("regular expressions"));
}

#[test]
fn what_is_not_plain_lora_is_refused() {
    let arch = model("llama", Some(1));
    let good = json!({"r": 4, "lora_alpha": 8, "target_modules": ["o_proj"], "draft": {"logit_shift": 1}});
    let tensors = o_projections("model.", [4, 4]);
    assert!(read(good.clone(), &tensors, &arch).is_ok(), "control");
    let configs = [
        (json!({"r": 3}), "BadWeights", "expected [3, 24]"),
        (json!({"r": 0}), "BadConfig", "`r` is 0"),
        (json!({"lora_alpha": -1}), "BadConfig", "`lora_alpha`"),
        (json!({"peft_type": "IA3"}), "Unsupported", "IA3"),
        (json!({"use_dora": true}), "Unsupported", "use_dora"),
        (json!({"bias": "all"}), "Unsupported", "`bias`"),
        (json!({"modules_to_save": ["lm_head"]}), "Unsupported", "modules_to_save"),
        (json!({"target_modules": ["o_proj", "up_proj"]}), "BadWeights", "`model.layers.0.mlp.up_proj` are missing"),
        (json!({"draft": null}), "BadConfig", "no rules of its own"),
        (json!({"draft": {}}), "BadConfig", "`draft.logit_shift` is missing"),
        (json!({"draft": {"logit_shift": 2}}), "BadConfig", "`draft.logit_shift` is 2"),
        (json!({"draft": {"logit_shift": 0, "anchor": "x"}}), "BadConfig", "`draft.anchor`"),
        (json!({"draft": {"logit_shift": 0, "mask_embedding": "mask"}}), "BadWeights", "`mask` is missing"),
        (json!({"draft": {"logit_shift": 0, "mask_token_id": 100}}), "BadConfig", "below `vocab_size` = 100"),
    ];
    for (edit, code, part) in configs {
        let mut config = good.clone();
        config.as_object_mut().unwrap().extend(edit.as_object().unwrap().clone());
        let err = read(config, &tensors, &arch).unwrap_err();
        assert!(err.code() == code && err.to_string().contains(part), "{part}: {err}");
    }
    let no_mask = read(good.clone(), &tensors, &model("llama", None)).unwrap_err();
    assert!(no_mask.to_string().contains("nothing stands at mask rows"));

    let tensor = |name: &str| vec![(format!("base_model.model.{name}"), [4, 24])];
    for (extra, part) in [
        (tensor("model.layers.2.self_attn.o_proj.lora_A.weight"), "this model's 2 layers"),
        (tensor("model.layers.00.self_attn.o_proj.lora_A.weight"), "is not lora_A"),
        (tensor("model.layers.0.self_attn.out_proj.lora_A.weight"), "is not lora_A"),
        (tensor("model.embed_tokens.lora_embedding_A"), "is not lora_A"),
        (tensor("layers.0.self_attn.o_proj.lora_A.weight"), "there twice"),
        (tensor("model.layers.0.self_attn.q_proj.lora_A.weight"), "but not both"),
        (vec![("mask".into(), [1, 8])], "names no mask embedding"),
    ] {
        let all: Vec<_> = tensors.iter().cloned().chain(extra).collect();
        let err = read(good.clone(), &all, &arch).unwrap_err();
        assert!(err.code() == "BadWeights" && err.to_string().contains(part), "{part}: {err}");
    }
    assert!(read(good, &[], &arch).unwrap_err().to_string().contains("holds no lora_A"));
}
