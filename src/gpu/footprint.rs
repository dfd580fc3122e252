//! What a model will take of a GPU, known from its sizes alone, before there is a device or a weight.

use super::attention::part_bytes;
use super::buffers::MemoryUse;
use super::model::{ACTS, CALLS_IN_FLIGHT, geometry};
use super::steps::argmax_chunks;
use super::weights::tiles_per_part;
use crate::decode::schedule::Geometry;
use crate::error::{Error, Result};
use crate::kernels::Heads;
use crate::model::arch::Arch;
use crate::model::call_rows::{HEADER_WORDS, ROW_WORDS};
use crate::model::program::{Act, Program};
use crate::weights::packed::{Format, PackedRows, TILE};

/// Limits of a device that a model can run into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes of a buffer.
    pub max_buffer_size: u64,
    /// Most bytes that a kernel can bind at once.
    pub max_storage_buffer_binding_size: u64,
}

impl Default for Limits {
    /// What every WebGPU device has.
    fn default() -> Self {
        Self { max_buffer_size: 256 << 20, max_storage_buffer_binding_size: 128 << 20 }
    }
}

/// Bytes that a model takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footprint {
    /// By use. Parameters of dispatches, some tens of kilobytes, are not among them.
    pub memory: MemoryUse,
    /// The largest binding and what it is of.
    pub largest_binding: (u64, String),
}

/// Refuses heads that no kernel is made for.
///
/// # Errors
/// [`Error::Unsupported`].
pub fn check_heads(arch: &Arch) -> Result<()> {
    let Arch { head_dim, num_attention_heads, num_key_value_heads, .. } = *arch;
    if head_dim == 0 || head_dim > 256 || !head_dim.is_multiple_of(2) {
        return Err(Error::Unsupported(format!("head_dim is {head_dim}; the GPU's kernels take even sizes up to 256")));
    }
    if num_key_value_heads == 0 || !num_attention_heads.is_multiple_of(num_key_value_heads) {
        return Err(Error::Unsupported(format!(
            "{num_attention_heads} attention heads do not divide into {num_key_value_heads} key heads"
        )));
    }
    Ok(())
}

/// What `program` takes with its matrices in `formats` (by matrix), K/V of `context` positions in values of `kv_bytes` bytes.
///
/// # Errors
/// [`Error::Unsupported`] naming the limit that fails, what it would have to be and what it is.
pub fn footprint(program: &Program, formats: &[Format], context: u32, kv_bytes: u64, limits: Limits) -> Result<Footprint> {
    let geometry = geometry(program, context);
    let mut sum = Sum { limits, memory: MemoryUse::default(), largest: (0, String::new()) };
    for (spec, format) in program.matrices.iter().zip(formats) {
        let shape = PackedRows { format: *format, first_row: 0, n: spec.n, k: spec.k, data: Vec::new(), scales: Vec::new() };
        let most = tiles_per_part(&shape, &spec.label, limits.max_storage_buffer_binding_size, limits.max_buffer_size)?;
        let tiles = shape.n.div_ceil(TILE) as u64;
        let (tile_data, tile_scales) = ((shape.blocks() * TILE * 16) as u64, (shape.groups() * TILE * 4) as u64);
        let mut first = 0;
        while first < tiles {
            let count = most.min(tiles - first);
            let data = count * tile_data;
            sum.binds(data, &spec.label);
            sum.memory.weights += allocated(data.next_multiple_of(256) + count * tile_scales);
            first += count;
        }
    }
    let vectors: usize = program.vectors.iter().map(|spec| spec.n.next_multiple_of(4)).sum();
    sum.memory.weights += sum.storage("norms and biases", vectors as u64 * 4, "")?;
    for act in ACTS.into_iter().filter(|act| *act != Act::Lora || program.lora_width > 0) {
        let rows = if act == Act::Logits { geometry.max_choose } else { geometry.max_rows };
        let bytes = (rows * program.stride(act) * 4) as u64;
        sum.memory.working += sum.storage(&format!("activations {act:?}"), bytes, "")?;
    }
    let arch = &program.arch;
    let Geometry { scratch, max_choose, max_rows, .. } = geometry;
    let slots = u64::from(context) + u64::from(scratch);
    let per_slot = 2 * (arch.num_key_value_heads * arch.head_dim.next_multiple_of(4)) as u64 * kv_bytes;
    let most = (limits.max_storage_buffer_binding_size / per_slot.max(1)).saturating_sub(u64::from(scratch));
    let remedy = format!("; use a context of at most {most} positions");
    let cache = sum.storage(&format!("the K/V cache of a layer for {context} positions"), slots * per_slot, &remedy)?;
    sum.memory.kv_cache = cache * arch.layers.len() as u64;
    let rotary = slots * (arch.head_dim as u64) * 4;
    sum.memory.working += sum.storage("the rotary table", rotary, "; use a smaller context")?;
    let heads = Heads { query: arch.num_attention_heads, key_value: arch.num_key_value_heads, dim: arch.head_dim };
    sum.memory.working += sum.storage("attention parts", part_bytes(heads, context, limits), "; use a smaller context")?;
    let rows = max_choose as u64;
    let call = (HEADER_WORDS + max_rows * ROW_WORDS) as u64 * 4;
    sum.memory.working += allocated(call) + allocated(rows * argmax_chunks(program) as u64 * 16);
    sum.memory.working += (1 + CALLS_IN_FLIGHT as u64) * allocated(rows * 8);
    Ok(Footprint { memory: sum.memory, largest_binding: sum.largest })
}

/// What the allocator makes of `bytes`.
fn allocated(bytes: u64) -> u64 {
    bytes.next_multiple_of(16).max(256)
}

struct Sum {
    limits: Limits,
    memory: MemoryUse,
    largest: (u64, String),
}

impl Sum {
    fn binds(&mut self, bytes: u64, label: &str) {
        if bytes > self.largest.0 {
            self.largest = (bytes, label.to_owned());
        }
    }

    /// Bytes of a buffer that is bound as a whole.
    fn storage(&mut self, label: &str, bytes: u64, remedy: &str) -> Result<u64> {
        self.binds(bytes, label);
        let Limits { max_buffer_size, max_storage_buffer_binding_size } = self.limits;
        for (limit, most) in
            [("maxStorageBufferBindingSize", max_storage_buffer_binding_size), ("maxBufferSize", max_buffer_size)]
        {
            if bytes > most {
                return Err(Error::Unsupported(format!(
                    "{label} takes {bytes} bytes, but this GPU allows {most} ({limit}){remedy}"
                )));
            }
        }
        Ok(allocated(bytes))
    }
}
