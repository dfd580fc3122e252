//! What checkpoints call their tensors: one table per family, canonical names on one side (those of Hugging Face's Llama:
//! `model.embed_tokens.weight`, `model.layers.{i}...`, `model.norm.weight`, `lm_head.weight`), spellings found in the
//! wild on the other.

use crate::error::{Error, Result};

/// Spellings of a family, the most usual first.
#[derive(Debug, PartialEq, Eq)]
pub struct NameTable {
    /// What stands for `model.`.
    pub body: &'static [&'static str],
    /// What stands for `lm_head`.
    pub head: &'static [&'static str],
}

/// Plain Llama-like checkpoints, bare bodies, and language models inside vision models.
pub const LLAMA: NameTable = NameTable {
    body: &["model.", "language_model.model.", "model.language_model.", ""],
    head: &["lm_head", "language_model.lm_head", "model.lm_head"],
};

/// Nemotron-Labs-Diffusion: its own release, and what converters write.
pub const NEMOTRON: NameTable = NameTable {
    body: &["encoder.", "language_model.model.", "language_model.encoder.", "model.encoder.", "model.", ""],
    head: &[
        "diffusion_head",
        "language_model.diffusion_head",
        "model.diffusion_head",
        "lm_head",
        "language_model.lm_head",
        "model.lm_head",
    ],
};

/// SetDLM: a denoiser that holds a backbone that holds a causal language model.
pub const SETDLM: NameTable = NameTable {
    body: &["backbone.model.model.", "backbone.model.", "model.", ""],
    head: &["backbone.model.lm_head", "backbone.lm_head", "lm_head"],
};

/// The spelling one checkpoint uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    body: &'static str,
    head: Option<&'static str>,
}

impl NameTable {
    /// Finds the spelling of a checkpoint; `has` says whether it holds a tensor.
    ///
    /// # Errors
    /// [`Error::BadWeights`] if no spelling of the embedding table is there.
    pub fn resolve(&self, has: impl Fn(&str) -> bool) -> Result<Names> {
        let body = self.body.iter().find(|b| has(&format!("{b}embed_tokens.weight"))).ok_or_else(|| {
            let tried: Vec<_> = self.body.iter().map(|b| format!("`{b}embed_tokens.weight`")).collect();
            Error::BadWeights(format!("the checkpoint has no embedding table; looked for {}", tried.join(", ")))
        })?;
        let head = self.head.iter().find(|h| has(&format!("{h}.weight"))).copied();
        Ok(Names { body, head })
    }

    /// The canonical spelling of a module inside a layer, written in any spelling of this family: `encoder.layers.0.mlp.up_proj`
    /// gives `model.layers.0.mlp.up_proj`. `None` for modules elsewhere.
    #[must_use]
    pub fn canonical_module(&self, name: &str) -> Option<String> {
        self.body
            .iter()
            .filter_map(|b| name.strip_prefix(b))
            .find(|rest| rest.starts_with("layers."))
            .map(|r| format!("model.{r}"))
    }
}

impl Names {
    /// Whether the checkpoint has an output head of its own.
    #[must_use]
    pub fn has_head(&self) -> bool {
        self.head.is_some()
    }

    /// What the checkpoint calls the tensor of a canonical name.
    #[must_use]
    pub fn checkpoint(&self, canonical: &str) -> String {
        match (canonical.strip_prefix("model."), canonical.strip_prefix("lm_head"), self.head) {
            (Some(rest), _, _) => format!("{}{rest}", self.body),
            (_, Some(rest), Some(head)) => format!("{head}{rest}"),
            _ => canonical.to_owned(),
        }
    }

    /// Whether a tensor of the checkpoint belongs to the layers: one that nobody reads there would change the model.
    #[must_use]
    pub fn in_layers(&self, checkpoint: &str) -> bool {
        checkpoint.strip_prefix(self.body).is_some_and(|rest| rest.starts_with("layers."))
    }
}

/// Tensors that say nothing about the model: precomputed frequencies, masks kept as buffers, scales of K/V caches that other
/// runtimes quantise, adapters swept up with the base.
#[must_use]
pub fn ignored(name: &str) -> bool {
    const ENDINGS: [&str; 6] =
        ["rotary_emb.inv_freq", ".k_scale", ".v_scale", ".attention.bias", ".masked_bias", "static_attention_mask"];
    name.starts_with("base_model.") || ENDINGS.iter().any(|e| name.ends_with(e))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(table: &NameTable, tensors: &[&str]) -> Result<Names> {
        table.resolve(|n| tensors.contains(&n))
    }

    #[test]
    fn finds_the_spelling_of_each_converter() -> Result<()> {
        let own = names(&NEMOTRON, &["encoder.embed_tokens.weight", "diffusion_head.weight"])?;
        assert_eq!(own.checkpoint("model.layers.3.mlp.up_proj.weight"), "encoder.layers.3.mlp.up_proj.weight");
        assert_eq!(own.checkpoint("lm_head.weight"), "diffusion_head.weight");
        let mlx = names(&NEMOTRON, &["language_model.model.embed_tokens.weight", "language_model.diffusion_head.weight"])?;
        assert_eq!(mlx.checkpoint("model.norm.weight"), "language_model.model.norm.weight");
        assert_eq!(mlx.checkpoint("lm_head.scales"), "language_model.diffusion_head.scales");
        let set = names(&SETDLM, &["backbone.model.model.embed_tokens.weight"])?;
        assert_eq!(set.checkpoint("model.norm.weight"), "backbone.model.model.norm.weight");
        assert!(!set.has_head());
        let bare = names(&LLAMA, &["embed_tokens.weight"])?;
        assert!(bare.in_layers("layers.0.input_layernorm.weight") && !bare.in_layers("norm.weight"));
        Ok(())
    }

    #[test]
    fn says_what_it_looked_for() {
        let message = names(&LLAMA, &["transformer.wte.weight"]).unwrap_err().to_string();
        assert!(message.contains("`model.embed_tokens.weight`"), "{message}");
    }

    #[test]
    fn modules_become_canonical() {
        assert_eq!(
            NEMOTRON.canonical_module("encoder.layers.0.self_attn.o_proj").as_deref(),
            Some("model.layers.0.self_attn.o_proj")
        );
        assert_eq!(LLAMA.canonical_module("layers.1.mlp.up_proj").as_deref(), Some("model.layers.1.mlp.up_proj"));
        assert_eq!(LLAMA.canonical_module("lm_head"), None);
    }

    #[test]
    fn buffers_are_ignored_and_weights_are_not() {
        assert!(ignored("model.layers.0.self_attn.rotary_emb.inv_freq") && ignored("base_model.model.x.lora_A.weight"));
        assert!(!ignored("model.layers.0.self_attn.q_proj.bias"));
    }
}
