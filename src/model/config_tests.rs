use serde_json::{Map, Value, json};

use super::*;
use crate::model::arch::{Anchor, VerifyRows};

fn with(fields: Value) -> Value {
    let mut config = json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "vocab_size": 100, "max_position_embeddings": 512, "rms_norm_eps": 1e-5
    });
    let (Value::Object(config), Value::Object(fields)) = (&mut config, fields) else { panic!("objects") };
    config.extend(fields);
    Value::Object(std::mem::take(config))
}

fn read(fields: Value) -> Result<ModelConfig> {
    parse(with(fields).to_string().as_bytes(), None)
}

fn arch(fields: Value) -> Arch {
    read(fields).unwrap().arch
}

#[test]
fn the_demo_model_is_read() {
    let config = include_bytes!("../../tools/demo-model/config.json");
    let generation = br#"{"eos_token_id": [2, 0]}"#;
    let a = parse(config, Some(generation)).unwrap().arch;
    assert_eq!((a.hidden_size, a.intermediate_size, a.layers.len(), a.vocab_size), (576, 1536, 30, 49152));
    assert_eq!((a.num_attention_heads, a.num_key_value_heads, a.head_dim), (9, 3, 64));
    assert_eq!(a.rope, Rope { theta: 1e5, scaling: RopeScaling::Default });
    assert!(a.tie_word_embeddings && !a.attention_bias && !a.qk_norm && a.draft.is_none());
    assert_eq!((a.eos_token_ids, a.rms_norm_eps), (vec![0, 2], 1e-5));
    assert!(a.layers.iter().all(|l| *l == Layer { rope: true, window: None }));
}

#[test]
fn families_bring_their_defaults() {
    let a = arch(json!({}));
    assert_eq!((a.num_key_value_heads, a.head_dim, a.tie_word_embeddings, a.rope.theta), (4, 16, false, 1e4));
    let a = arch(json!({"attention_bias": true, "mlp_bias": true}));
    assert!(a.attention_bias && a.output_bias && a.mlp_bias);
    let a = arch(json!({"model_type": "qwen2", "num_key_value_heads": 2}));
    assert!(a.attention_bias && !a.output_bias && !a.qk_norm);
    let a = arch(json!({"model_type": "qwen3", "num_key_value_heads": 2}));
    assert!(a.qk_norm && !a.attention_bias && a.head_dim == 128);
    let a = arch(json!({"model_type": "qwen3", "head_dim": null}));
    assert_eq!(a.head_dim, 16);
    let a = arch(json!({"model_type": "mistral", "num_attention_heads": 8}));
    assert_eq!((a.num_key_value_heads, a.layers[0].window), (8, Some(4096)));
    let a = arch(json!({"model_type": "mistral", "num_attention_heads": 8, "sliding_window": null}));
    assert_eq!(a.layers[0].window, None);
    let text =
        json!({"model_type": "mistral3", "text_config": with(json!({"model_type": "ministral3", "num_key_value_heads": 2}))});
    let a = parse(text.to_string().as_bytes(), None).unwrap().arch;
    assert_eq!((a.model_type.as_str(), a.head_dim), ("ministral3", 128));
}

#[test]
fn layers_differ_as_the_config_says() {
    let a = arch(json!({"model_type": "smollm3", "num_hidden_layers": 5}));
    assert_eq!(a.layers.iter().map(|l| l.rope).collect::<Vec<_>>(), [true, true, true, false, true]);
    assert!(a.tie_word_embeddings && a.layers.iter().all(|l| l.window.is_none()) && a.rope.theta == 2e6);
    let a = arch(json!({"model_type": "smollm3", "no_rope_layers": [0, 1, 1], "use_sliding_window": true, "sliding_window": 8}));
    let (no, yes) = (Layer { rope: false, window: Some(8) }, Layer { rope: true, window: None });
    assert_eq!(a.layers, [no, yes, yes]);
    let windows = |fields| arch(fields).layers.iter().map(|l| l.window).collect::<Vec<_>>();
    let qwen = |more: Value| {
        let mut base = json!({"model_type": "qwen2", "sliding_window": 16, "max_window_layers": 1});
        base.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        base
    };
    assert_eq!(windows(qwen(json!({}))), [None; 3]);
    assert_eq!(windows(qwen(json!({"use_sliding_window": true}))), [None, Some(16), Some(16)]);
    let types = json!({"use_sliding_window": true, "layer_types": ["sliding_attention", "full_attention", "full_attention"]});
    assert_eq!(windows(qwen(types)), [Some(16), None, None]);
    let err = read(qwen(json!({"use_sliding_window": true, "layer_types": ["full_attention"]}))).unwrap_err();
    assert!(err.to_string().contains("`layer_types`") && err.to_string().contains("3 times"), "{err}");
}

#[test]
fn rope_parameters_come_before_top_level_fields() {
    let yarn = json!({
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1
    });
    let a = arch(json!({"rope_theta": 5.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": yarn}));
    let expected = RopeScaling::Yarn {
        factor: 16.0,
        original: 16384.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: 1.0,
        truncate: true,
    };
    assert_eq!(a.rope, Rope { theta: 1e6, scaling: expected });
    assert_eq!(a.query_scaling, Some(QueryScaling { beta: 0.1, original: 16384.0 }));

    let factor = |more: Value| {
        let mut p = json!({"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32});
        p.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        match arch(json!({"rope_scaling": p})).rope.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            other => panic!("{other:?}"),
        }
    };
    let plain = 0.1 * 16_f64.ln() + 1.0;
    assert_eq!(factor(json!({})), plain);
    assert_eq!(factor(json!({"mscale": 1.0})), plain);
    assert_eq!(factor(json!({"mscale": 0.5, "mscale_all_dim": 1.0})), (0.05 * 16_f64.ln() + 1.0) / plain);
    assert_eq!(factor(json!({"attention_factor": 1.25})), 1.25);
    assert_eq!(factor(json!({"factor": 0.25})), 1.0);

    let a = arch(json!({"rope_theta": 5e5, "rope_scaling": {
        "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
    }}));
    let expected = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original: 8192.0 };
    assert_eq!(a.rope, Rope { theta: 5e5, scaling: expected });
    assert_eq!(arch(json!({"rope_scaling": null, "rope_theta": 7e4})).rope.theta, 7e4);
}

#[test]
fn diffusion_families_bring_their_rules() {
    let nemotron = |more: Value| {
        let mut c =
            json!({"model_type": "nemotron_labs_diffusion", "num_key_value_heads": 2, "mask_token_id": 90, "head_dim": 32});
        c.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        read(c)
    };
    let a = nemotron(json!({})).unwrap().arch;
    let rules = DraftRulesOf(&a).get();
    assert_eq!((rules.logit_shift, rules.anchor, rules.verify), (0, Anchor::InBlock, VerifyRows::Clean));
    assert!(rules.bidirectional && rules.adapter && a.mask_token_id == Some(90) && a.head_dim == 32);
    let a = nemotron(json!({"dlm_type": "dream"})).unwrap().arch;
    assert_eq!(DraftRulesOf(&a).get().logit_shift, 1);
    assert!(nemotron(json!({"dlm_type": "other"})).unwrap_err().to_string().contains("dlm_type"));
    assert!(nemotron(json!({"mask_token_id": 100})).unwrap_err().to_string().contains("below `vocab_size` = 100"));

    for recognised in [json!({"model_type": "setdlm"}), json!({"model_type": "custom", "architectures": ["SetDLM"]})] {
        let a = arch(recognised);
        let rules = DraftRulesOf(&a).get();
        assert_eq!(
            (rules.anchor, rules.verify, rules.bidirectional, rules.adapter),
            (Anchor::Shared, VerifyRows::Mask, false, false)
        );
        assert!(a.qk_norm && a.tie_word_embeddings && a.model_type == "setdlm");
    }
}

struct DraftRulesOf<'a>(&'a Arch);

impl DraftRulesOf<'_> {
    fn get(&self) -> crate::model::arch::DraftRules {
        self.0.draft.unwrap()
    }
}

#[test]
fn quantisation_is_read_with_its_exceptions() {
    let section = json!({"group_size": 64, "bits": 4, "mode": "affine",
        "model.embed_tokens": {"group_size": 32, "bits": 8}, "lm_head": false, "model.norm": true});
    let q = read(json!({"quantization": section, "quantization_config": section})).unwrap().quantization.unwrap();
    let params = |module: &str| q.of(module).map(|p| (p.bits, p.group));
    assert_eq!((params("model.embed_tokens"), params("lm_head"), params("x")), (Some((8, 32)), None, Some((4, 64))));
    assert!(read(json!({})).unwrap().quantization.is_none());
    for (section, part) in [
        (json!({"group_size": 64, "bits": 3}), "`quantization.bits` is 3; expected 4 or 8"),
        (json!({"group_size": 16, "bits": 4}), "`quantization.group_size` is 16"),
        (json!({"bits": 4}), "`quantization.group_size` is missing"),
        (json!({"group_size": 64, "bits": 4, "a.b": {"bits": 5}}), "`quantization.a.b.bits` is 5"),
        (json!({"group_size": 32, "bits": 4, "mode": "mxfp4"}), "mxfp4"),
    ] {
        let message = read(json!({"quantization": section})).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
    let gptq = read(json!({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}})).unwrap_err();
    assert!(matches!(&gptq, Error::Unsupported(m) if m.contains("gptq")));
}

#[test]
fn impossible_values_name_their_field() {
    for (fields, part) in [
        (json!({"hidden_size": 0}), "`hidden_size` is 0; expected an integer from 1 to 65536"),
        (json!({"hidden_size": 1e12 as u64}), "`hidden_size` is 1000000000000"),
        (json!({"hidden_size": -1}), "`hidden_size` is -1"),
        (json!({"hidden_size": "64"}), "`hidden_size` is \"64\""),
        (json!({"hidden_size": null}), "`hidden_size` is null"),
        (json!({"intermediate_size": 1.5}), "`intermediate_size` is 1.5"),
        (json!({"num_hidden_layers": 100_000}), "`num_hidden_layers`"),
        (json!({"num_key_value_heads": 3}), "a divisor of `num_attention_heads` = 4"),
        (json!({"num_attention_heads": 5}), "no multiple of `num_attention_heads` = 5"),
        (json!({"head_dim": 15}), "an even size"),
        (json!({"vocab_size": u64::MAX}), "`vocab_size`"),
        (json!({"rms_norm_eps": -1.0}), "`rms_norm_eps` is -1.0"),
        (json!({"rope_theta": 1.0}), "`rope_theta` is 1.0"),
        (json!({"eos_token_id": "x"}), "`eos_token_id` is \"x\"; expected a token id or a list"),
        (json!({"eos_token_id": [1, -2]}), "`eos_token_id`"),
        (json!({"rope_scaling": {"rope_type": "linear"}}), "`rope_scaling.factor` is missing"),
        (json!({"rope_scaling": 5}), "`rope_scaling` is 5; expected an object"),
        (json!({"tie_word_embeddings": 1}), "`tie_word_embeddings` is 1; expected true or false"),
    ] {
        let err = read(fields).unwrap_err();
        assert!(matches!(&err, Error::BadConfig(m) if m.contains("config.json: ") && m.contains(part)), "{part}: {err}");
    }
    for (fields, part) in [
        (json!({"hidden_act": "gelu"}), "\"gelu\"; this build has silu"),
        (json!({"model_type": "mamba"}), "runs llama, mistral, qwen2"),
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (json!({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}), "\"longrope\""),
    ] {
        let err = read(fields).unwrap_err();
        assert!(matches!(&err, Error::Unsupported(m) if m.contains(part)), "{part}: {err}");
    }
    assert!(read(json!({"model_type": null})).unwrap_err().to_string().contains("one of llama"));
    assert!(parse(b"<html>", None).unwrap_err().to_string().contains("config.json: not readable as JSON"));
    assert!(parse(b"[1]", None).unwrap_err().to_string().contains("expected a JSON object"));
    assert!(parse(&[b'['; 100_000], None).is_err());
}

#[test]
fn every_field_survives_every_kind_of_value() {
    let Value::Object(base) = with(json!({
        "model_type": "smollm3", "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": {"rope_type": "yarn", "factor": 4},
        "no_rope_layers": [1, 1, 1], "layer_types": null, "use_sliding_window": true, "sliding_window": 4, "eos_token_id": 1,
        "quantization": {"bits": 4, "group_size": 32}, "architectures": ["A"], "text_config": {}
    })) else {
        panic!("an object")
    };
    let values = [
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(1e300),
        json!(u64::MAX),
        json!("x"),
        json!([]),
        json!([[]]),
        json!({}),
    ];
    let try_all = |map: &Map<String, Value>, inner: Option<&str>| {
        for key in map.keys() {
            for value in &values {
                let mut config = base.clone();
                match inner {
                    None => drop(config.insert(key.clone(), value.clone())),
                    Some(name) => drop(config[name].as_object_mut().unwrap().insert(key.clone(), value.clone())),
                }
                // An error or a model; never a panic.
                let _ = parse(Value::Object(config).to_string().as_bytes(), Some(b"{}"));
            }
        }
    };
    assert!(parse(Value::Object(base.clone()).to_string().as_bytes(), None).is_ok(), "control");
    try_all(&base, None);
    try_all(base["rope_parameters"].as_object().unwrap(), Some("rope_parameters"));
    try_all(base["quantization"].as_object().unwrap(), Some("quantization"));
}
