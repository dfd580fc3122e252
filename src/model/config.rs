//! `config.json` (and `generation_config.json`) to [`Arch`]: parsed once, checked in full, never looked at again.
//!
//! A config holds only what differs from its class's defaults, so each family brings its own ([`super::families`]).
//! Whatever would change the forward pass and is not covered is an error, never ignored.

use serde_json::Value;

use super::arch::{Arch, DiffusionLayout, DiffusionRules, Layer, QueryScaling, Rope, RopeScaling};
use super::families::{Bias, FAMILIES, Family, Windows, family};
use super::fields::{Fields, parse_object};
use crate::error::{Error, Result};
use crate::weights::quantization::Quantization;

/// What a checkpoint's configs say.
#[derive(Debug, Clone)]
pub struct ModelConfig {
    /// Sizes and formulas.
    pub arch: Arch,
    /// Table entry of its family.
    pub family: &'static Family,
    /// How its weights are quantised; `None` for plain ones.
    pub quantization: Option<Quantization>,
}

const FILE: &str = "config.json";
// Bounds far beyond any model that a browser will hold; they keep products of two sizes inside 2^40.
const MAX_WIDTH: usize = 1 << 20;
const MAX_HIDDEN: usize = 1 << 16;
const MAX_LAYERS: usize = 1024;
const MAX_HEADS: usize = 1024;
const MAX_HEAD_DIM: usize = 1024;
const MAX_VOCAB: usize = 1 << 22;
const MAX_POSITIONS: usize = (1 << 31) - 1;
const MAX_BLOCK: usize = 1 << 16;
/// Of SetDLM's checkpoints, whose names say it: smax 8, 16 and 32.
const SMALLEST_REACH: u32 = 8;

/// Reads `config.json` and, where the checkpoint has one, `generation_config.json`.
///
/// # Errors
/// [`Error::BadConfig`] naming file and field, or [`Error::Unsupported`] for a model family or feature that is not covered.
pub fn parse(config: &[u8], generation_config: Option<&[u8]>) -> Result<ModelConfig> {
    parse_as(None, config, generation_config)
}

/// [`parse`] for a family that is known from elsewhere, whatever the config calls itself.
///
/// # Errors
/// As [`parse`].
pub fn parse_as(known: Option<&'static Family>, config: &[u8], generation_config: Option<&[u8]>) -> Result<ModelConfig> {
    let map = parse_object(FILE, config)?;
    let top = Fields::new(FILE, &map);
    let generation_map = generation_config.map(|bytes| parse_object("generation_config.json", bytes)).transpose()?;
    let generation = generation_map.as_ref().map(|map| Fields::new("generation_config.json", map));

    let (model_type, fields, family) = match known {
        Some(family) => (family.model_type, top.clone(), family),
        None => find_family(&top)?,
    };
    let mut arch = architecture(model_type, &fields, family)?;
    let mut eos = fields.tokens("eos_token_id")?;
    eos.extend(top.tokens("eos_token_id")?);
    if let Some(generation) = &generation {
        eos.extend(generation.tokens("eos_token_id")?);
    }
    eos.extend(family.end_ids.iter().filter(|&&id| (id as usize) < arch.vocab_size));
    eos.sort_unstable();
    eos.dedup();
    arch.eos_token_ids = eos;
    Ok(ModelConfig { arch, family, quantization: Quantization::from_config(&top)? })
}

/// The family, and the object that holds the language model's fields: the whole file, or `text_config` in vision models.
fn find_family<'a>(top: &Fields<'a>) -> Result<(&'a str, Fields<'a>, &'static Family)> {
    let model_type = top.text("model_type")?;
    if let Some(found) = model_type.and_then(family) {
        return Ok((found.model_type, top.clone(), found));
    }
    if let Some(text) = top.object("text_config")?
        && let Some(found) = text.text("model_type")?.and_then(family)
    {
        return Ok((found.model_type, text, found));
    }
    let architectures = top.list("architectures")?.unwrap_or_default();
    let is_setdlm = |a: &Value| a.as_str().is_some_and(|a| a.starts_with("SetDLM"));
    if architectures.iter().any(is_setdlm)
        && let Some(found) = family("setdlm")
    {
        return Ok((found.model_type, top.clone(), found));
    }
    let known: Vec<_> = FAMILIES.iter().map(|f| f.model_type).collect();
    Err(match model_type {
        None => top.wrong("model_type", &format!("one of {}", known.join(", "))),
        Some(other) => Error::Unsupported(format!("{FILE}: `model_type` is \"{other}\"; this build runs {}", known.join(", "))),
    })
}

fn architecture(model_type: &str, fields: &Fields, family: &'static Family) -> Result<Arch> {
    let hidden_size = fields.required_size("hidden_size", MAX_HIDDEN)?;
    let intermediate_size = fields.required_size("intermediate_size", MAX_WIDTH)?;
    let layer_count = fields.required_size("num_hidden_layers", MAX_LAYERS)?;
    let num_attention_heads = fields.required_size("num_attention_heads", MAX_HEADS)?;
    let default_heads = match fields.has("num_key_value_heads") {
        true => num_attention_heads,
        false => family.key_value_heads.unwrap_or(num_attention_heads),
    };
    let num_key_value_heads = fields.size("num_key_value_heads", MAX_HEADS)?.unwrap_or(default_heads);
    if num_attention_heads % num_key_value_heads != 0 {
        return Err(fields.wrong(
            "num_key_value_heads",
            &format!("a divisor of `num_attention_heads` = {num_attention_heads}, not {num_key_value_heads}"),
        ));
    }
    let default_dim = if fields.has("head_dim") { None } else { family.head_dim };
    let head_dim = match fields.size("head_dim", MAX_HEAD_DIM)?.or(default_dim) {
        Some(dim) => dim,
        None if hidden_size.is_multiple_of(num_attention_heads) => hidden_size / num_attention_heads,
        None => {
            return Err(fields.wrong(
                "head_dim",
                &format!("a size: `hidden_size` = {hidden_size} is no multiple of `num_attention_heads` = {num_attention_heads}"),
            ));
        }
    };
    if head_dim % 2 != 0 || head_dim > MAX_HEAD_DIM {
        return Err(fields.wrong("head_dim", &format!("an even size up to {MAX_HEAD_DIM}, not {head_dim}")));
    }
    let vocab_size = fields.required_size("vocab_size", MAX_VOCAB)?;
    let max_position_embeddings = fields.required_size("max_position_embeddings", MAX_POSITIONS)?;
    for name in ["hidden_act", "hidden_activation"] {
        if let Some(act) = fields.text(name)?
            && act != "silu"
        {
            return Err(Error::Unsupported(format!("{FILE}: `{name}` is \"{act}\"; this build has silu only")));
        }
    }
    let bias = |rule: Bias, name: &str| match rule {
        Bias::Never => Ok(false),
        Bias::Always => Ok(true),
        Bias::Config => fields.flag(name).map(|f| f.unwrap_or(false)),
    };
    let known = family.mask_id.filter(|&id| (id as usize) < vocab_size);
    let mask_token_id = fields.token("mask_token_id")?.or(known);
    if mask_token_id.is_some_and(|id| id as usize >= vocab_size) {
        return Err(fields.wrong("mask_token_id", &format!("an id below `vocab_size` = {vocab_size}")));
    }
    let (rope, query_scaling) = rope(fields, family, max_position_embeddings)?;
    let horizon = horizon(fields, family)?;
    let (mut draft, mut diffusion) = (family.draft, diffusion(fields, family, horizon)?);
    if let (Some(rules), Some(kind)) = (&mut draft, fields.text("dlm_type")?) {
        rules.logit_shift = match kind {
            "llada" => 0,
            "dream" => 1,
            _ => return Err(fields.wrong("dlm_type", "\"llada\" or \"dream\"")),
        };
        diffusion = diffusion.map(|own| DiffusionRules { logit_shift: rules.logit_shift, ..own });
    }
    Ok(Arch {
        model_type: model_type.to_owned(),
        hidden_size,
        intermediate_size,
        layers: layers(fields, family, layer_count)?,
        num_attention_heads,
        num_key_value_heads,
        head_dim,
        vocab_size,
        rms_norm_eps: match fields.positive("rms_norm_eps")?.unwrap_or(1e-6) {
            eps if eps < 1.0 => eps,
            _ => return Err(fields.wrong("rms_norm_eps", "a number between 0 and 1")),
        },
        rope,
        max_position_embeddings,
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(family.tied),
        attention_bias: bias(family.qkv_bias, "attention_bias")?,
        output_bias: bias(family.output_bias, "attention_bias")?,
        mlp_bias: bias(family.mlp_bias, "mlp_bias")?,
        qk_norm: family.qk_norm,
        query_scaling,
        mask_token_id,
        eos_token_ids: Vec::new(),
        draft,
        diffusion,
        horizon,
    })
}

/// How the checkpoint decodes by diffusion, with the block length it names.
fn diffusion(fields: &Fields, family: &Family, horizon: Option<u32>) -> Result<Option<DiffusionRules>> {
    let Some(rules) = family.diffusion else { return Ok(None) };
    let named = family.block_field.map(|name| fields.size(name, MAX_BLOCK)).transpose()?.flatten();
    let block_length = match rules.layout {
        // The published windows are half as wide as the reach.
        DiffusionLayout::Window => horizon.map(|reach| (reach / 2).max(1)),
        _ => named.map(|length| length as u32),
    };
    Ok(Some(DiffusionRules { block_length: block_length.unwrap_or(rules.block_length), ..rules }))
}

/// SetDLM's orders of training let a position be predicted at most twice the desired block size ahead; the smallest
/// published reach where a checkpoint does not tell its own.
fn horizon(fields: &Fields, family: &Family) -> Result<Option<u32>> {
    if !matches!(family.diffusion, Some(DiffusionRules { layout: DiffusionLayout::Window, .. })) {
        return Ok(None);
    }
    let noise = fields.object("noise_config")?;
    let desired = noise.map(|noise| noise.size("desired_block_size", MAX_BLOCK)).transpose()?.flatten();
    Ok(Some(desired.map_or(SMALLEST_REACH, |desired| 2 * desired as u32)))
}

/// RoPE's fields: `rope_parameters` (new), else `rope_scaling` beside a top-level `rope_theta` (old).
fn rope(fields: &Fields, family: &Family, max_positions: usize) -> Result<(Rope, Option<QueryScaling>)> {
    let inner = match fields.object("rope_parameters")? {
        Some(parameters) => Some(parameters),
        None => fields.object("rope_scaling")?,
    };
    let inner_theta = inner.as_ref().map(|p| p.positive("rope_theta")).transpose()?.flatten();
    let theta = inner_theta.or(fields.positive("rope_theta")?).unwrap_or(f64::from(family.rope_theta));
    if theta <= 1.0 {
        return Err(fields.wrong("rope_theta", &format!("a base above 1, not {theta}")));
    }
    for holder in [Some(fields), inner.as_ref()].into_iter().flatten() {
        if let Some(part) = holder.number("partial_rotary_factor")?
            && part != 1.0
        {
            return Err(Error::Unsupported(format!("{FILE}: `partial_rotary_factor` is {part}; this build rotates whole heads")));
        }
    }
    let Some(p) = inner else { return Ok((Rope { theta, scaling: RopeScaling::Default }, None)) };
    let original = || -> Result<f64> {
        let field = p.positive("original_max_position_embeddings")?;
        let outer = fields.positive("original_max_position_embeddings")?;
        Ok(field.or(outer).unwrap_or(max_positions as f64))
    };
    let kind = match p.text("rope_type")? {
        Some(kind) => kind,
        None => p.text("type")?.unwrap_or("default"),
    };
    let scaling = match kind {
        "default" => RopeScaling::Default,
        "linear" => RopeScaling::Linear { factor: p.required_positive("factor")? },
        "llama3" => {
            let low_freq_factor = p.required_positive("low_freq_factor")?;
            let high_freq_factor = p.required_positive("high_freq_factor")?;
            if high_freq_factor <= low_freq_factor {
                return Err(p.wrong("high_freq_factor", &format!("a number above `low_freq_factor` = {low_freq_factor}")));
            }
            RopeScaling::Llama3 {
                factor: p.required_positive("factor")?,
                low_freq_factor,
                high_freq_factor,
                original: original()?,
            }
        }
        "yarn" => yarn(&p, original()?, max_positions)?,
        other => {
            return Err(Error::Unsupported(format!(
                "{FILE}: RoPE of type \"{other}\"; this build has default, linear, llama3 and yarn"
            )));
        }
    };
    let query_scaling = match p.number("llama_4_scaling_beta")? {
        Some(beta) if beta < 0.0 => return Err(p.wrong("llama_4_scaling_beta", "a number not below 0")),
        Some(beta) => Some(QueryScaling { beta, original: original()? }),
        None => None,
    };
    Ok((Rope { theta, scaling }, query_scaling))
}

fn yarn(p: &Fields, original: f64, max_positions: usize) -> Result<RopeScaling> {
    let factor = p.positive("factor")?.unwrap_or(max_positions as f64 / original);
    let scale = |k: f64| if factor <= 1.0 { 1.0 } else { 0.1 * k * factor.ln() + 1.0 };
    // A zero counts as absent here, as it does for transformers.
    let given = |name: &str| p.number(name).map(|v| v.filter(|v| *v != 0.0));
    let attention_factor = match (p.positive("attention_factor")?, given("mscale")?, given("mscale_all_dim")?) {
        (Some(f), _, _) => f,
        (None, Some(m), Some(all)) => scale(m) / scale(all),
        _ => scale(1.0),
    };
    if !(attention_factor.is_finite() && attention_factor > 0.0) {
        return Err(p.wrong("mscale", "numbers that give a positive attention factor"));
    }
    let beta_fast = given("beta_fast")?.unwrap_or(32.0);
    let beta_slow = given("beta_slow")?.unwrap_or(1.0);
    if !(beta_slow > 0.0 && beta_fast >= beta_slow) {
        return Err(p.wrong("beta_fast", &format!("a number not below `beta_slow` = {beta_slow}, both above 0")));
    }
    let truncate = p.flag("truncate")?.unwrap_or(true);
    Ok(RopeScaling::Yarn { factor, original, beta_fast, beta_slow, attention_factor, truncate })
}

/// What differs from layer to layer: rotation and window.
fn layers(fields: &Fields, family: &Family, count: usize) -> Result<Vec<Layer>> {
    let ropes = match family.no_rope_layers {
        true => rope_layers(fields, count)?,
        false => vec![true; count],
    };
    let window = match (family.windows, fields.has("sliding_window")) {
        (Windows::Never, _) => None,
        (Windows::Every(default), false) => default,
        (Windows::Every(_), true) => fields.size("sliding_window", MAX_POSITIONS)?,
        (Windows::Upper | Windows::WithoutRope, _) => match fields.flag("use_sliding_window")?.unwrap_or(false) {
            true => fields.size("sliding_window", MAX_POSITIONS)?,
            false => None,
        },
    };
    let by_type = match (family.windows, fields.list("layer_types")?) {
        (Windows::Upper | Windows::WithoutRope, Some(types)) => Some(layer_types(fields, types, count)?),
        _ => None,
    };
    let full_below = match family.windows {
        Windows::Upper => max_window_layers(fields)?,
        _ => 0,
    };
    let layer = |(i, rope): (usize, bool)| {
        let slides = match (&by_type, family.windows) {
            (Some(types), _) => types.get(i).copied().unwrap_or(false),
            (None, Windows::Upper) => i >= full_below,
            (None, Windows::WithoutRope) => !rope,
            (None, _) => true,
        };
        Layer { rope, window: window.filter(|_| slides).map(|w| w as u32) }
    };
    Ok(ropes.into_iter().enumerate().map(layer).collect())
}

/// `max_window_layers`, which may be 0; 28 where absent.
fn max_window_layers(fields: &Fields) -> Result<usize> {
    let Some(value) = fields.get("max_window_layers") else { return Ok(28) };
    let value = value.as_u64().and_then(|v| usize::try_from(v).ok());
    value.ok_or_else(|| fields.wrong("max_window_layers", "an integer from 0"))
}

fn rope_layers(fields: &Fields, count: usize) -> Result<Vec<bool>> {
    if let Some(list) = fields.list("no_rope_layers")? {
        let flags: Option<Vec<bool>> = list
            .iter()
            .map(|v| match (v.as_u64(), v.as_bool()) {
                (Some(0), _) | (_, Some(false)) => Some(false),
                (Some(1), _) | (_, Some(true)) => Some(true),
                _ => None,
            })
            .collect();
        return match flags {
            Some(mut flags) if flags.len() >= count => {
                flags.truncate(count);
                Ok(flags)
            }
            _ => Err(fields.wrong("no_rope_layers", &format!("a list of at least {count} zeros (no RoPE) and ones"))),
        };
    }
    let interval = fields.size("no_rope_layer_interval", MAX_LAYERS)?.unwrap_or(4);
    Ok((1..=count).map(|i| i % interval != 0).collect())
}

/// Whether each layer slides.
fn layer_types(fields: &Fields, types: &[Value], count: usize) -> Result<Vec<bool>> {
    let slides = |v: &Value| match v.as_str() {
        Some("sliding_attention") => Some(true),
        Some("full_attention") => Some(false),
        _ => None,
    };
    match types.iter().map(slides).collect::<Option<Vec<_>>>() {
        Some(types) if types.len() == count => Ok(types),
        _ => Err(fields.wrong("layer_types", &format!("{count} times \"full_attention\" or \"sliding_attention\""))),
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
