//! Configs that name a model's body instead of describing it: SetDLM's hold a `backbone_config` that says which published
//! model the body was made from, and no sizes. Those are read from the weights' shapes.

use serde_json::{Map, Value, json};

use super::fields::parse_object;
use super::names::SETDLM;
use crate::error::{Error, Result};
use crate::weights::index::TensorIndex;

/// A SetDLM config made flat, as JSON: its own entries, what its backbone's and its tokenizer's entries add, and the sizes of
/// the weights. `None` for configs without a `backbone_config`.
///
/// # Errors
/// [`Error::Unsupported`] for SetDLM's models with a DiT backbone and for the other denoisers that come in this form;
/// [`Error::BadConfig`] if the bytes are no JSON object.
pub fn flatten(config: &[u8], index: &TensorIndex) -> Result<Option<Vec<u8>>> {
    let mut flat = parse_object("config.json", config)?;
    let Some(Value::Object(backbone)) = flat.remove("backbone_config") else { return Ok(None) };
    let has = |name: &str| index.tensors.contains_key(name);
    let target = backbone.get("_target_").and_then(Value::as_str).unwrap_or_default().to_lowercase();
    if target.contains("dit") || index.tensors.keys().any(|name| name.contains(".attn_qkv.")) {
        return Err(Error::Unsupported(
            "this checkpoint's backbone is a DiT (SetDLM's models for OWT and LM1B): LayerNorm, a GELU MLP with biases and a fused \
             attn_qkv, where this build's forward pass has RMSNorm and a gated SiLU MLP; the SetDLM models with a Qwen3 body run \
             (GSM8K, CNN/DM)"
                .into(),
        ));
    }
    let architectures = flat.get("architectures").and_then(Value::as_array).cloned().unwrap_or_default();
    let mut names = architectures.iter().filter_map(Value::as_str);
    if let Some(other) = names.find(|name| ["BD3LM", "MDLM", "AR", "SEDD", "E2D2"].contains(name)) {
        return Err(Error::Unsupported(format!(
            "config.json: the architecture is {other}, a denoiser of the SetDLM family's authors that decodes in other ways; this build \
             runs SetDLM"
        )));
    }
    if let Some(Value::Object(tokens)) = flat.remove("tokenization_config") {
        add(&mut flat, tokens);
    }
    if let Some(length) = flat.get("length").cloned() {
        flat.entry("max_position_embeddings").or_insert(length);
    }
    let mut inner = backbone;
    let config = inner.remove("config");
    add(&mut flat, inner);
    if let Some(Value::Object(config)) = config {
        add(&mut flat, config);
    }
    if let Ok(names) = SETDLM.resolve(has) {
        let size = |canonical: &str, axis: usize| {
            let module = canonical.strip_suffix(".weight").unwrap_or(canonical);
            // A packed tensor's shape is not its matrix's.
            let packed = has(&format!("{}.scales", names.checkpoint(module)));
            let (_, tensor) = index.tensors.get(&names.checkpoint(canonical)).filter(|_| !packed)?;
            tensor.shape.get(axis).copied()
        };
        let layer = |part: &str, axis| size(&format!("model.layers.0.{part}.weight"), axis);
        let head_dim = layer("self_attn.q_norm", 0).filter(|&dim| dim > 0);
        let heads = |part: &str| Some(layer(part, 0)? / head_dim?);
        let layers = (0u64..).take_while(|i| has(&names.checkpoint(&format!("model.layers.{i}.input_layernorm.weight")))).count();
        for (name, found) in [
            ("vocab_size", size("model.embed_tokens.weight", 0)),
            ("hidden_size", size("model.embed_tokens.weight", 1)),
            ("intermediate_size", layer("mlp.gate_proj", 0)),
            ("head_dim", head_dim),
            ("num_attention_heads", heads("self_attn.q_proj")),
            ("num_key_value_heads", heads("self_attn.k_proj")),
            ("num_hidden_layers", Some(layers as u64).filter(|&n| n > 0)),
        ] {
            // The weights are the truth: a body's config may be that of the model it was cut from.
            if let Some(found) = found {
                flat.insert(name.into(), json!(found));
            }
        }
    }
    flat.insert("model_type".into(), json!("setdlm"));
    Ok(Some(serde_json::to_vec(&flat).map_err(|e| Error::Internal(format!("a config cannot be written: {e}")))?))
}

/// Entries of `more` that `flat` lacks.
fn add(flat: &mut Map<String, Value>, more: Map<String, Value>) {
    for (name, value) in more {
        let missing = flat.get(&name).is_none_or(Value::is_null);
        if missing && !value.is_null() {
            flat.insert(name, value);
        }
    }
}
