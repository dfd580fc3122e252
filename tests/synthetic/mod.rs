//! Checkpoints of any size, made as they are needed: a config and a safetensors header; the values are zeros, or small ones
//! that depend on a seed.

// Each test program uses what it needs of this.
#![allow(dead_code)]

use serde_json::{Value, json};

/// Sizes of a checkpoint.
#[derive(Debug, Clone)]
pub struct Shape {
    pub config: Value,
    /// Names and shapes, in the file's order.
    pub tensors: Vec<(String, Vec<u64>)>,
}

/// A matrix in affine groups, as its config and name say; all else is bf16.
fn is_packed(config: &Value, name: &str, shape: &[u64]) -> bool {
    config.get("quantization").is_some() && shape.len() == 2 && name.ends_with(".weight")
}

impl Shape {
    /// A plain Llama.
    pub fn llama(hidden: u64, layers: u64, intermediate: u64, vocab: u64) -> Self {
        let config = json!({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "num_hidden_layers": layers,
            "intermediate_size": intermediate, "num_attention_heads": hidden / 64, "num_key_value_heads": hidden / 128,
            "vocab_size": vocab, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512,
            "tie_word_embeddings": true, "hidden_act": "silu", "eos_token_id": 2,
        });
        let mut tensors = vec![("model.embed_tokens.weight".to_owned(), vec![vocab, hidden])];
        tensors.extend(layers_of("model.layers", layers, hidden, hidden, hidden / 2, intermediate));
        tensors.push(("model.norm.weight".to_owned(), vec![hidden]));
        Self { config, tensors }
    }

    /// Nemotron-Labs-Diffusion 3B: 7.66 GB in one file.
    pub fn nemotron_3b() -> Self {
        Self::nemotron(3072, 26, 9216)
    }

    /// Nemotron-Labs-Diffusion 8B.
    pub fn nemotron_8b() -> Self {
        Self::nemotron(4096, 34, 14_336)
    }

    /// Nemotron-Labs-Diffusion 14B.
    pub fn nemotron_14b() -> Self {
        Self::nemotron(5120, 40, 16_384)
    }

    fn nemotron(hidden: u64, layers: u64, intermediate: u64) -> Self {
        let config = json!({
            "model_type": "nemotron_labs_diffusion", "architectures": ["NemotronLabsDiffusionModel"], "hidden_size": hidden,
            "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": intermediate, "vocab_size": 131_072, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "attention_bias": false, "mlp_bias": false, "tie_word_embeddings": false, "sliding_window": null,
            "bos_token_id": 1, "eos_token_id": 11, "mask_token_id": 100, "block_size": 32, "dlm_paradigm": "bidirectional",
            "max_position_embeddings": 262_144, "torch_dtype": "bfloat16",
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
                "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
            },
        });
        let mut tensors = vec![
            ("diffusion_head.weight".to_owned(), vec![131_072, hidden]),
            ("encoder.embed_tokens.weight".to_owned(), vec![131_072, hidden]),
        ];
        tensors.extend(layers_of("encoder.layers", layers, hidden, 4096, 1024, intermediate));
        tensors.push(("encoder.norm.weight".to_owned(), vec![hidden]));
        Self { config, tensors }
    }

    /// The tensors of a few layers only.
    pub fn with_layers(mut self, layers: u64) -> Self {
        self.config["num_hidden_layers"] = layers.into();
        self.tensors.retain(|(name, _)| {
            let layer = name.split("layers.").nth(1).and_then(|rest| rest.split('.').next()).map(|n| n.parse::<u64>().unwrap());
            layer.is_none_or(|layer| layer < layers)
        });
        self
    }

    /// Its matrices in affine groups of 64, in the order in which safetensors writes them: by type, so that all scales lie
    /// behind all weights.
    pub fn sorted_by_type(mut self, bits: u64) -> Self {
        self.config["quantization"] = json!({ "group_size": 64, "bits": bits });
        let (mut packed, mut rest) = (Vec::new(), Vec::new());
        for (name, shape) in self.tensors {
            match (shape.as_slice(), name.strip_suffix(".weight")) {
                ([n, k], Some(module)) => {
                    rest.push((format!("{module}.scales"), vec![*n, k / 64]));
                    rest.push((format!("{module}.biases"), vec![*n, k / 64]));
                    packed.push((name, vec![*n, k * bits / 32]));
                }
                _ => rest.push((name, shape)),
            }
        }
        packed.sort();
        rest.sort();
        self.tensors = packed.into_iter().chain(rest).collect();
        self
    }

    /// Its gates first and what they are multiplied with last, so that what is read together lies as far apart as can be.
    pub fn torn_apart(mut self) -> Self {
        self.tensors.sort_by_key(|(name, _)| (name.contains("up_proj"), !name.contains("gate_proj")));
        self
    }

    /// Bytes of all tensors.
    pub fn data_bytes(&self) -> u64 {
        self.tensors.iter().map(|(name, shape)| self.bytes_of(name, shape)).sum()
    }

    fn bytes_of(&self, name: &str, shape: &[u64]) -> u64 {
        let width = if is_packed(&self.config, name, shape) { 4 } else { 2 };
        width * shape.iter().product::<u64>()
    }

    /// A safetensors header for those tensors whose place in the list `wanted` takes.
    pub fn header(&self, wanted: impl Fn(usize) -> bool) -> (Vec<u8>, u64) {
        let mut entries = serde_json::Map::new();
        let mut at = 0;
        for (_, (name, shape)) in self.tensors.iter().enumerate().filter(|(i, _)| wanted(*i)) {
            let end = at + self.bytes_of(name, shape);
            let dtype = if is_packed(&self.config, name, shape) { "U32" } else { "BF16" };
            entries.insert(name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": [at, end] }));
            at = end;
        }
        let text = Value::Object(entries).to_string();
        let header = [(text.len() as u64).to_le_bytes().as_slice(), text.as_bytes()].concat();
        let size = header.len() as u64 + at;
        (header, size)
    }

    /// A whole file with small values.
    pub fn file(&self, seed: u64) -> Vec<u8> {
        let (mut bytes, size) = self.header(|_| true);
        let mut state = seed | 1;
        while (bytes.len() as u64) < size {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // A sign, an exponent of 2^-5 to 2^-8, seven bits.
            let value = ((state >> 48) as u16 & 0x81FF) | 0x3C80;
            bytes.extend(value.to_le_bytes());
        }
        bytes
    }
}

/// In the order of safetensors files: by name, layers as text.
fn layers_of(prefix: &str, layers: u64, hidden: u64, q: u64, kv: u64, intermediate: u64) -> Vec<(String, Vec<u64>)> {
    let mut all: Vec<_> = (0..layers)
        .flat_map(|i| {
            [
                ("input_layernorm", vec![hidden]),
                ("mlp.down_proj", vec![hidden, intermediate]),
                ("mlp.gate_proj", vec![intermediate, hidden]),
                ("mlp.up_proj", vec![intermediate, hidden]),
                ("post_attention_layernorm", vec![hidden]),
                ("self_attn.k_proj", vec![kv, hidden]),
                ("self_attn.o_proj", vec![hidden, q]),
                ("self_attn.q_proj", vec![q, hidden]),
                ("self_attn.v_proj", vec![kv, hidden]),
            ]
            .map(|(name, shape)| (format!("{prefix}.{i}.{name}.weight"), shape))
        })
        .collect();
    all.sort();
    all
}
