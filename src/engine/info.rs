//! What a loaded model is and needs, for people and for pages.

use serde_json::{Value, json};

use super::Model;
use super::calls::{Calls, Runs};
use crate::decode::options::Resolved;
use crate::decode::schedule::ModelCalls;
use crate::error::{Error, Result};
use crate::gpu::{GpuInfo, GpuModel};
use crate::model::load::Checkpoint;
use crate::model::program::{Op, Role};
use crate::text::chat_template::ChatTemplate;
use crate::weights::packed::Format;

/// What was learned while loading.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    /// Bytes of all weights as the backend holds them, each counted once.
    pub weight_bytes: u64,
    /// Weights that every row of a call is multiplied with (the head included, the embedding and the adapter not).
    pub multiplied_weights: u64,
    backend: &'static str,
    reason: String,
    context: u32,
    half_cache: bool,
    formats: Vec<(String, usize)>,
    has_adapter: bool,
}

impl Facts {
    pub fn new(checkpoint: &Checkpoint, calls: &Calls, context: u32, half_cache: bool, reason: String) -> Self {
        let program = &checkpoint.program;
        let mut formats: Vec<(String, usize)> = Vec::new();
        for format in checkpoint.formats() {
            let name = format_name(*format);
            match formats.iter_mut().find(|(known, _)| *known == name) {
                Some((_, count)) => *count += 1,
                None => formats.push((name, 1)),
            }
        }
        let multiplied = program.ops.iter().filter_map(|op| match op {
            Op::Matmul(m) => program.matrices.get(m.weight.0),
            _ => None,
        });
        Self {
            weight_bytes: match &calls.on {
                Runs::Cpu(cpu) => cpu.weight_bytes() as u64,
                _ => checkpoint.packed_bytes(),
            },
            multiplied_weights: multiplied.filter(|m| m.role != Role::Lora).map(|m| m.n as u64 * m.k as u64).sum(),
            backend: match &calls.on {
                Runs::Gpu(_) => "webgpu",
                Runs::Cpu(_) => "cpu",
                #[cfg(not(target_arch = "wasm32"))]
                Runs::Reference(_) => "reference",
            },
            reason,
            context,
            half_cache,
            formats,
            has_adapter: checkpoint.adapter.is_some(),
        }
    }

    pub fn backend_name(&self) -> &'static str {
        self.backend
    }
}

impl Model {
    /// Architecture, sizes, quantisation, memory, drafter, backend and device, as the object that `forecall info --json`
    /// prints and `model.info` holds.
    #[must_use]
    pub fn info(&self) -> Value {
        let arch = &self.program.arch;
        let geometry = self.calls.geometry();
        let slots = u64::from(geometry.context + geometry.scratch);
        let (kv_precision, value) = match (self.facts.backend, self.facts.half_cache) {
            ("reference", _) => ("f64", 8),
            (_, true) => ("f16", 2),
            (_, false) => ("f32", 4),
        };
        let kv_bytes = 2 * slots * (arch.layers.len() * arch.kv_size() * value) as u64;
        let default = self.default.options.resolve(self.program.rules(), &geometry).ok();
        let drafter = self.program.draft.map(|rules| {
            let widths = match default {
                Some(Resolved::Drafting { verify_width, draft_width, .. }) => {
                    json!({ "verify": verify_width, "draft": draft_width })
                }
                _ => Value::Null,
            };
            json!({ "adapter": self.facts.has_adapter, "logit_shift": rules.logit_shift, "default_widths": widths })
        });
        let diffusion = self.program.rules().diffusion.map(|rules| {
            json!({ "block_length": rules.block_length, "threshold": f64::from(rules.threshold), "logit_shift": rules.logit_shift })
        });
        let formats: serde_json::Map<_, _> =
            self.facts.formats.iter().map(|(name, count)| (name.clone(), json!(count))).collect();
        let (device, gpu_memory) = match &self.calls.on {
            Runs::Gpu(gpu) => (device(gpu.gpu().info()), memory(gpu)),
            Runs::Cpu(cpu) => (json!({ "name": cpu.describe() }), Value::Null),
            #[cfg(not(target_arch = "wasm32"))]
            Runs::Reference(_) => (json!({ "name": "CPU, f64" }), Value::Null),
        };
        json!({
            "model_type": arch.model_type,
            "hidden_size": arch.hidden_size,
            "intermediate_size": arch.intermediate_size,
            "num_hidden_layers": arch.layers.len(),
            "num_attention_heads": arch.num_attention_heads,
            "num_key_value_heads": arch.num_key_value_heads,
            "head_dim": arch.head_dim,
            "vocab_size": arch.vocab_size,
            "max_position_embeddings": arch.max_position_embeddings,
            "tie_word_embeddings": arch.tie_word_embeddings,
            "end_ids": self.end_ids,
            "matrix_formats": formats,
            "kv_precision": kv_precision,
            "drafter": drafter,
            "diffusion": diffusion,
            "default_schedule": default.map(|resolved| resolved.kind().to_string()),
            "default_schedule_reason": self.default.reason,
            "tokenizer": self.tokenizer.is_some(),
            "chat_template": self.template.as_ref().is_some_and(ChatTemplate::is_usable),
            "chat_template_error": self.template.as_ref().and_then(ChatTemplate::problem).map(|error| error.to_string()),
            "context_length": self.facts.context,
            "memory_bytes": { "weights": self.facts.weight_bytes, "kv_cache": kv_bytes, "gpu": gpu_memory },
            "backend": self.facts.backend,
            "backend_reason": self.facts.reason,
            "device": device,
        })
    }

    /// [`Model::info`] with the outcome of [`Model::row_invariance`] as `row_invariant`; null where the context is too short
    /// for that test.
    ///
    /// # Errors
    /// As [`Model::row_invariance`].
    pub async fn info_with_self_test(&mut self) -> Result<Value> {
        let invariant = match self.row_invariance().await {
            Err(Error::InvalidOption(_)) => None,
            outcome => Some(outcome?),
        };
        let mut info = self.info();
        if let Some(object) = info.as_object_mut() {
            object.insert("row_invariant".into(), json!(invariant));
        }
        Ok(info)
    }
}

fn device(info: &GpuInfo) -> Value {
    json!({
        "name": info.name,
        "api": info.backend,
        "type": info.device_type,
        "driver": info.driver,
        "shader_f16": info.shader_f16,
        "subgroups": info.subgroups,
        "subgroup_sizes": [info.subgroup_sizes.0, info.subgroup_sizes.1],
        "max_buffer_size": info.max_buffer_size,
        "max_storage_buffer_binding_size": info.max_storage_buffer_binding_size,
        "max_storage_buffers_per_shader_stage": info.max_storage_buffers_per_shader_stage,
        "max_compute_workgroup_storage_size": info.max_compute_workgroup_storage_size,
        "max_compute_invocations_per_workgroup": info.max_compute_invocations_per_workgroup,
    })
}

fn memory(gpu: &GpuModel) -> Value {
    let used = gpu.memory();
    json!({ "weights": used.weights, "kv_cache": used.kv_cache, "working": used.working, "pipelines": gpu.compiled_kernels() })
}

pub(super) fn format_name(format: Format) -> String {
    match format {
        Format::Affine { bits, group, .. } => format!("{bits}-bit, groups of {group}"),
        Format::F16 => "f16".into(),
        Format::F32 => "f32".into(),
    }
}
