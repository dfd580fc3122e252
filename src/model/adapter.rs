//! A draft adapter: LoRA in PEFT's layout, with what a runtime needs to know about drafting under `draft`.
//!
//! `adapter_config.json` beside `adapter_model.safetensors`. The section, a field of ours:
//!
//! | field of `draft` | meaning | default |
//! | --- | --- | --- |
//! | `logit_shift` | 0: a draft row at p predicts p; 1: p+1 | required |
//! | `anchor` | `in-block`: the block's first row is the anchor token; `shared`: masks only | `in-block` |
//! | `mask_embedding` | name of the tensor `[D]` that stands at mask rows | none: the mask token |
//! | `mask_token_id` | the token that stands at mask rows, no end id; no text holds it then, drafted or not | the checkpoint's |
//! | `bidirectional` | whether rows of a block see each other both ways | true |
//! | `adapter_rows` | `draft` | `draft` |
//!
//! Adapters without the section (Nemotron's `linear_spec_lora`) draft by the rules of the model's family.

use std::collections::{BTreeMap, BTreeSet};

use super::arch::{Anchor, Arch, DraftRules, VerifyRows};
use super::families::Family;
use super::fields::{Fields, parse_object};
use super::program::AdapterSpec;
use crate::error::{Error, Result};
use crate::weights::index::TensorIndex;

/// Name of the config.
pub const CONFIG: &str = "adapter_config.json";
/// Name of the weights.
pub const WEIGHTS: &str = "adapter_model.safetensors";

const MAX_RANK: usize = 4096;
const PROJECTIONS: [&str; 7] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

/// A draft adapter, ready to be built into a program.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    /// What the forward pass needs to know.
    pub spec: AdapterSpec,
    /// A mask token that the adapter's config names.
    pub mask_token_id: Option<u32>,
    /// The file's name of a canonical one (`model.layers.0.mlp.up_proj.lora_A.weight`, `mask_embedding`), and what its values
    /// are multiplied by: where modules differ in `alpha / r`, B carries the difference from [`AdapterSpec::scale`].
    pub tensors: BTreeMap<String, (String, f32)>,
}

/// Reads an adapter's config against the tensors of its file.
///
/// # Errors
/// [`Error::BadConfig`] naming the field, [`Error::BadWeights`] naming the tensor, [`Error::Unsupported`] for kinds of
/// adapters that are not covered.
pub fn parse(config: &[u8], index: &TensorIndex, arch: &Arch, family: &Family) -> Result<Adapter> {
    let map = parse_object(CONFIG, config)?;
    let fields = Fields::new(CONFIG, &map);
    check_kind(&fields)?;
    let r = fields.required_size("r", MAX_RANK)?;
    let alpha = fields.positive("lora_alpha")?.unwrap_or(8.0);
    let rslora = fields.flag("use_rslora")?.unwrap_or(false);
    let ranks = pattern(&fields, "rank_pattern")?;
    let alphas = pattern(&fields, "alpha_pattern")?;

    let draft = fields.object("draft")?;
    let mask_name = draft.as_ref().map(|d| d.text("mask_embedding")).transpose()?.flatten();
    let mut found = Modules { tensors: BTreeMap::new(), halves: BTreeMap::new() };
    for name in index.tensors.keys() {
        found.take(name, mask_name, arch, family)?;
    }
    let has_mask = found.tensors.contains_key("mask_embedding");
    if let (Some(name), false) = (mask_name, has_mask) {
        return Err(Error::BadWeights(format!("{WEIGHTS}: tensor `{name}` is missing; {CONFIG} names it as the mask embedding")));
    }

    let (mut rank, mut scales) = (0, BTreeMap::new());
    for (module, halves) in &found.halves {
        let [Some(a), Some(b)] = halves else {
            return Err(Error::BadWeights(format!("{WEIGHTS}: module `{module}` has lora_A or lora_B, but not both")));
        };
        let module_rank = ranks.iter().find(|(key, _)| applies(key, module)).map_or(r as f64, |(_, v)| *v);
        let module_alpha = alphas.iter().find(|(key, _)| applies(key, module)).map_or(alpha, |(_, v)| *v);
        let (inputs, outputs) = projection_size(arch, module);
        check_shape(index, a, module_rank, inputs as f64)?;
        check_shape(index, b, outputs as f64, module_rank)?;
        rank = rank.max(module_rank as usize);
        scales.insert(module.clone(), module_alpha / if rslora { module_rank.sqrt() } else { module_rank });
    }
    if scales.is_empty() && !has_mask {
        return Err(Error::BadWeights(format!("{WEIGHTS}: holds no lora_A and lora_B of a projection")));
    }
    check_complete(&fields, &found, arch)?;
    let usual = alpha / if rslora { (r as f64).sqrt() } else { r as f64 };
    let scale = match scales.values().next() {
        Some(first) if !scales.values().any(|s| *s == usual) => *first,
        _ => usual,
    };
    for (module, own) in &scales {
        if let Some((_, factor)) = found.tensors.get_mut(&format!("{module}.lora_B.weight")) {
            *factor = (own / scale) as f32;
        }
    }
    let mask_token_id = draft.as_ref().map(|d| d.token("mask_token_id")).transpose()?.flatten();
    if let (Some(d), Some(id)) = (&draft, mask_token_id)
        && id as usize >= arch.vocab_size
    {
        return Err(d.wrong("mask_token_id", &format!("an id below `vocab_size` = {}", arch.vocab_size)));
    }
    let rules = match (&draft, arch.draft) {
        (_, Some(DraftRules { verify: VerifyRows::Mask, .. })) => {
            return Err(Error::Unsupported(format!(
                "a draft adapter for a model of type {}: its mask rows verify and draft alike, so it takes none",
                arch.model_type
            )));
        }
        (Some(draft), _) => rules(draft)?,
        (None, Some(rules)) => DraftRules { adapter: true, ..rules },
        (None, None) => {
            return Err(fields
                .wrong("draft", &format!("how to draft with it: a model of type {} has no rules of its own", arch.model_type)));
        }
    };
    if !has_mask && mask_token_id.or(arch.mask_token_id).is_none() {
        return Err(Error::BadConfig(format!(
            "{CONFIG}: nothing stands at mask rows; expected `draft.mask_embedding` or `draft.mask_token_id`, or a `mask_token_id` in config.json"
        )));
    }
    let spec = AdapterSpec { rank, scale: scale as f32, modules: scales.into_keys().collect(), mask_embedding: has_mask, rules };
    Ok(Adapter { spec, mask_token_id, tensors: found.tensors })
}

/// Refuses what would need other arithmetic than `W x + scale * B (A x)` on the layers' projections.
fn check_kind(fields: &Fields) -> Result<()> {
    match fields.text("peft_type")? {
        None | Some("LORA") => {}
        Some(other) => return Err(Error::Unsupported(format!("{CONFIG}: `peft_type` is \"{other}\"; this build applies LORA"))),
    }
    for name in ["use_dora", "fan_in_fan_out", "lora_bias", "use_qalora"] {
        if fields.flag(name)?.unwrap_or(false) {
            return Err(Error::Unsupported(format!("{CONFIG}: `{name}` is set; this build applies plain LoRA")));
        }
    }
    if let Some(bias) = fields.text("bias")?
        && bias != "none"
    {
        return Err(Error::Unsupported(format!("{CONFIG}: `bias` is \"{bias}\"; this build applies adapters without biases")));
    }
    if fields.list("modules_to_save")?.is_some_and(|list| !list.is_empty()) {
        return Err(Error::Unsupported(format!("{CONFIG}: `modules_to_save` holds modules; this build applies LoRA only")));
    }
    Ok(())
}

/// `rank_pattern` or `alpha_pattern`: plain module names only, whole or the end of one.
fn pattern(fields: &Fields, name: &str) -> Result<Vec<(String, f64)>> {
    let Some(map) = fields.object(name)? else { return Ok(Vec::new()) };
    let mut entries = Vec::new();
    for (key, _) in map.iter() {
        if !key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '.') {
            return Err(map.wrong(key, "a plain module name as key; regular expressions are not read"));
        }
        let value = if name == "rank_pattern" { map.required_size(key, MAX_RANK)? as f64 } else { map.required_positive(key)? };
        entries.push((key.to_owned(), value));
    }
    Ok(entries)
}

fn applies(key: &str, module: &str) -> bool {
    let key = key.strip_prefix("base_model.model.").unwrap_or(key);
    module.strip_suffix(key).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

fn rules(draft: &Fields) -> Result<DraftRules> {
    let logit_shift = match draft.get("logit_shift").and_then(serde_json::Value::as_u64) {
        Some(shift @ (0 | 1)) => shift as u32,
        _ => return Err(draft.wrong("logit_shift", "0 (a row at p predicts p) or 1 (it predicts p+1)")),
    };
    let anchor = match draft.text("anchor")? {
        None | Some("in-block") => Anchor::InBlock,
        Some("shared") => Anchor::Shared,
        Some(_) => return Err(draft.wrong("anchor", "\"in-block\" or \"shared\"")),
    };
    if draft.text("adapter_rows")?.is_some_and(|rows| rows != "draft") {
        return Err(draft.wrong("adapter_rows", "\"draft\""));
    }
    let bidirectional = draft.flag("bidirectional")?.unwrap_or(true);
    Ok(DraftRules { logit_shift, anchor, verify: VerifyRows::Clean, bidirectional, adapter: true })
}

struct Modules {
    tensors: BTreeMap<String, (String, f32)>,
    /// Names in the file of A and B, by canonical module.
    halves: BTreeMap<String, [Option<String>; 2]>,
}

impl Modules {
    fn take(&mut self, name: &str, mask_name: Option<&str>, arch: &Arch, family: &Family) -> Result<()> {
        if mask_name == Some(name) {
            self.tensors.insert("mask_embedding".to_owned(), (name.to_owned(), 1.0));
            return Ok(());
        }
        let unknown = || {
            Error::BadWeights(format!(
                "{WEIGHTS}: tensor `{name}` is not lora_A.weight or lora_B.weight of a projection of this model's {} layers{}",
                arch.layers.len(),
                if mask_name.is_none() { ", and the config names no mask embedding" } else { "" }
            ))
        };
        let stripped = name.strip_prefix("base_model.model.").unwrap_or(name);
        let split = [("lora_A", 0), ("lora_B", 1)].into_iter().find_map(|(half, i)| {
            let module = [".weight", ".default.weight"].iter().find_map(|end| stripped.strip_suffix(end)?.strip_suffix(half));
            Some((module?.strip_suffix('.')?, half, i))
        });
        let (module, half, i) = split.ok_or_else(unknown)?;
        let module = family.names.canonical_module(module).filter(|m| is_projection(m, arch)).ok_or_else(unknown)?;
        let canonical = format!("{module}.{half}.weight");
        if self.tensors.insert(canonical, (name.to_owned(), 1.0)).is_some() {
            return Err(Error::BadWeights(format!("{WEIGHTS}: {half} of `{module}` is there twice, once as `{name}`")));
        }
        if let Some(slot) = self.halves.entry(module).or_default().get_mut(i) {
            *slot = Some(name.to_owned());
        }
        Ok(())
    }
}

fn is_projection(module: &str, arch: &Arch) -> bool {
    let rest = module.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    rest.is_some_and(|(layer, projection)| {
        layer.parse::<usize>().is_ok_and(|l| l < arch.layers.len() && l.to_string() == layer) && PROJECTIONS.contains(&projection)
    })
}

/// Inputs and outputs of a projection.
fn projection_size(arch: &Arch, module: &str) -> (usize, usize) {
    let (d, f) = (arch.hidden_size, arch.intermediate_size);
    match module.rsplit('.').next() {
        Some("q_proj") => (d, arch.q_size()),
        Some("k_proj" | "v_proj") => (d, arch.kv_size()),
        Some("o_proj") => (arch.q_size(), d),
        Some("down_proj") => (f, d),
        _ => (d, f),
    }
}

fn check_shape(index: &TensorIndex, name: &str, rows: f64, k: f64) -> Result<()> {
    let shape = index.tensors.get(name).map(|(_, info)| info.shape.clone()).unwrap_or_default();
    match shape.as_slice() {
        [got_rows, got_k] if *got_rows as f64 == rows && *got_k as f64 == k => Ok(()),
        _ => Err(Error::BadWeights(format!("{WEIGHTS}: tensor `{name}` has shape {shape:?}; expected [{rows}, {k}]"))),
    }
}

/// Every layer has every projection that `target_modules` lists by a simple name, unless the config picks layers.
fn check_complete(fields: &Fields, found: &Modules, arch: &Arch) -> Result<()> {
    if ["layers_to_transform", "layers_pattern", "exclude_modules"].iter().any(|n| fields.get(n).is_some()) {
        return Ok(());
    }
    let Some(targets) = fields.get("target_modules").and_then(serde_json::Value::as_array) else { return Ok(()) };
    let targets: BTreeSet<&str> = targets.iter().filter_map(serde_json::Value::as_str).collect();
    for projection in PROJECTIONS.iter().filter(|p| targets.contains(p.rsplit('.').next().unwrap_or(p))) {
        for layer in 0..arch.layers.len() {
            let module = format!("model.layers.{layer}.{projection}");
            if !found.halves.contains_key(&module) {
                return Err(Error::BadWeights(format!(
                    "{WEIGHTS}: lora_A and lora_B of `{module}` are missing; `target_modules` lists it"
                )));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "adapter_tests.rs"]
mod tests;
