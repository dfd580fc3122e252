//! What loading a model would take, from its configs and headers alone: bytes to fetch, memory, and the limit that fails if
//! one does. No byte of a weight is read.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::load::{self, Backend, LoadOptions, Offer, kept_as};
use super::{Model, Sources};
use crate::error::{Error, Result};
use crate::gpu::footprint::{self, Limits};
use crate::model::load::{AdapterFrom, Checkpoint, load_checkpoint};
use crate::model::program::Role;
use crate::weights::source::{ByteSource, Survey};

/// What a caller knows of the device and its storage.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Offered {
    /// Limits of the WebGPU adapter. Does not matter where the CPU is asked for.
    pub gpu: Offer<Limits>,
    /// Bytes that may still be stored, where that is known.
    pub quota_left: Option<u64>,
}

/// What a module of 32 bits can address.
const WASM_BYTES: u64 = 4 << 30;
/// What loading and running take beside weights and cache: a batch and what it packs to, blocks that pass early, the tokenizer,
/// the module itself.
const CPU_WORKING_BYTES: u64 = 256 << 20;

/// What a model takes of a CPU: weights, K/V.
fn cpu_memory(checkpoint: &Checkpoint, context: u32, kv_bytes: u64) -> (u64, u64) {
    let arch = &checkpoint.program.arch;
    let slots = u64::from(context) + u64::from(crate::decode::schedule::SCRATCH_SLOTS);
    (checkpoint.packed_bytes(), 2 * slots * (arch.layers.len() * arch.kv_size()) as u64 * kv_bytes)
}

/// Refuses what a module of 32 bits cannot hold; natively nothing.
///
/// # Errors
/// [`Error::Unsupported`].
pub(super) fn check_cpu(checkpoint: &Checkpoint, context: u32, kv_bytes: u64, wasm: bool) -> Result<()> {
    let (weights, kv_cache) = cpu_memory(checkpoint, context, kv_bytes);
    let needed = weights + kv_cache + CPU_WORKING_BYTES;
    if wasm && needed > WASM_BYTES {
        return Err(Error::Unsupported(format!(
            "on the CPU this model takes {needed} bytes (weights {weights}, K/V {kv_cache}, working memory {CPU_WORKING_BYTES}), but \
             WebAssembly addresses {WASM_BYTES}; use a GPU, `quantize`, or a smaller context or model"
        )));
    }
    Ok(())
}

impl Model {
    /// Says what loading would take and whether this device can do it, as an object: `model_type`, `fits`, `limit` and
    /// `reason` (which limit fails, by how much), `backend` and `backend_reason` (what loading would take and why), `download`, `memory`, `store`, `tokenizer`, `drafter`, `quantization`.
    /// Reads configs and headers, and stores nothing.
    ///
    /// # Errors
    /// As [`Model::load`] for what configs and headers hold.
    pub async fn preflight<S: ByteSource>(sources: &mut Sources<S>, options: &LoadOptions, offered: Offered) -> Result<Value> {
        let checkpoint = load_checkpoint(sources, &kept_as(options)).await?;
        let context = load::context_length(&checkpoint, options.context_length)?;
        let half = load::half_cache(&checkpoint, options.precision);
        let kv_bytes = match (options.backend, half) {
            (Backend::Reference, _) => 8,
            (_, true) => 2,
            (_, false) => 4,
        };
        let (limits, backend_reason, missing) = match offered.gpu.taken(options.backend) {
            Ok((limits, why)) => (limits, why, None),
            // What it would take is worth knowing all the same.
            Err(missing) => (Some(Limits::default()), missing.to_string(), Some(missing)),
        };
        let on_gpu = limits.is_some();
        let (memory, refusal) = if let Some(limits) = limits {
            let unlimited = Limits { max_buffer_size: u64::MAX, max_storage_buffer_binding_size: u64::MAX };
            let of = |limits| footprint::footprint(&checkpoint.program, checkpoint.formats(), context, kv_bytes, limits);
            let (all, refusal) = match of(limits) {
                _ if missing.is_some() => (of(unlimited)?, missing),
                Ok(all) => (all, footprint::check_heads(&checkpoint.program.arch).err()),
                Err(error) => (of(unlimited)?, Some(error)),
            };
            let (bytes, of) = all.largest_binding;
            let memory = json!({
                "weights": all.memory.weights,
                "kv_cache": all.memory.kv_cache,
                "working": all.memory.working,
                "largest_binding": { "bytes": bytes, "of": of },
            });
            (memory, refusal)
        } else {
            let (weights, kv_cache) = cpu_memory(&checkpoint, context, kv_bytes);
            let memory =
                json!({ "weights": weights, "kv_cache": kv_cache, "working": CPU_WORKING_BYTES, "largest_binding": null });
            (memory, check_cpu(&checkpoint, context, kv_bytes, cfg!(target_arch = "wasm32")).err())
        };
        let (base, adapter) = checkpoint.weights.steps();
        let mut surveys = Vec::new();
        match &mut sources.adapter {
            AdapterFrom::Source(source) => {
                surveys.push(sources.base.survey(&base).await?);
                surveys.push(source.survey(&adapter).await?);
            }
            AdapterFrom::Auto | AdapterFrom::None => surveys.push(sources.base.survey(&[base, adapter].concat()).await?),
        }
        let files: Vec<(&String, u64)> = surveys.iter().flat_map(|s| &s.files).map(|(file, bytes)| (file, *bytes)).collect();
        let download: u64 = files.iter().map(|(_, bytes)| bytes).sum();
        let stored = stored_share(&surveys, &checkpoint) + surveys.iter().map(|survey| survey.stored_raw).sum::<u64>();
        // Files that are here already are not stored once more.
        let to_store = if files.is_empty() { 0 } else { checkpoint.packed_bytes().saturating_sub(stored) };
        let reason = refusal.as_ref().map(ToString::to_string);
        let limits = ["maxStorageBufferBindingSize", "maxBufferSize", "WebAssembly", "head_dim"];
        let limit = reason.as_deref().and_then(|reason| limits.into_iter().find(|limit| reason.contains(limit)));
        Ok(json!({
            "model_type": checkpoint.program.arch.model_type,
            "fits": refusal.is_none(),
            "reason": reason,
            "limit": limit,
            "backend": match (on_gpu, options.backend) {
                (true, _) => "webgpu",
                (false, Backend::Reference) => "reference",
                (false, _) => "cpu",
            },
            "backend_reason": backend_reason,
            "context_length": context,
            "download": {
                "bytes": download,
                "stored_bytes": stored,
                "files": files.iter().map(|(file, bytes)| json!({ "file": file, "bytes": bytes })).collect::<Vec<_>>(),
            },
            "memory": memory,
            "store": { "bytes_needed": to_store, "quota_left": offered.quota_left },
            "tokenizer": checkpoint.files.tokenizer.is_some(),
            "drafter": checkpoint.program.draft.is_some(),
            "quantization": quantization(&checkpoint),
        }))
    }
}

/// Packed bytes that are stored, by the share of the steps' bytes that are.
fn stored_share(surveys: &[Survey], checkpoint: &Checkpoint) -> u64 {
    let (base, adapter) = checkpoint.weights.steps();
    let stored = surveys.iter().flat_map(|survey| &survey.stored_steps);
    let (mut have, mut all) = (0_u128, 0_u128);
    for (step, stored) in base.iter().chain(&adapter).zip(stored) {
        let bytes: u64 = step.reads.iter().map(|(_, range)| range.end - range.start).sum();
        all += u128::from(bytes);
        have += if *stored { u128::from(bytes) } else { 0 };
    }
    u64::try_from(u128::from(checkpoint.packed_bytes()) * have / all.max(1)).unwrap_or_default()
}

/// The format that most weights are in, the adapter's aside.
fn quantization(checkpoint: &Checkpoint) -> String {
    let mut values: BTreeMap<String, u64> = BTreeMap::new();
    let matrices = checkpoint.program.matrices.iter().zip(checkpoint.formats());
    for (matrix, format) in matrices.filter(|(matrix, _)| matrix.role != Role::Lora) {
        *values.entry(super::info::format_name(*format)).or_default() += matrix.n as u64 * matrix.k as u64;
    }
    values.into_iter().max_by_key(|(_, values)| *values).map_or_else(String::new, |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::source::FolderSource;

    #[test]
    fn what_a_module_of_32_bits_cannot_hold_is_refused_beforehand() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tiny-llama");
        let mut sources = Sources { base: FolderSource::new(folder).unwrap(), adapter: AdapterFrom::Auto };
        let options = kept_as(&LoadOptions::default());
        let checkpoint = pollster::block_on(load_checkpoint(&mut sources, &options)).unwrap();
        let huge = 1 << 30;
        let refused = check_cpu(&checkpoint, huge, 4, true);
        assert!(matches!(&refused, Err(Error::Unsupported(text)) if text.contains("4294967296")), "{refused:?}");
        // Controls: natively, and with a context that fits.
        assert_eq!(check_cpu(&checkpoint, huge, 4, false), Ok(()));
        assert_eq!(check_cpu(&checkpoint, 4096, 4, true), Ok(()));
    }
}
