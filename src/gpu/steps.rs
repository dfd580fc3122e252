//! A program as dispatches: bind groups and parameters made once, grids left open until a call's rows are known.

use super::attention::Attention;
use super::buffers::{Allocator, Kind};
use super::device::Gpu;
use super::matmul::{self, DeviceClass, OutputKind};
use super::model::Activations;
use super::pipelines::{PipelineId, Pipelines};
use super::variants::{self, Access, Kernel, KvStorage};
use super::weights::{Part, Weights, binding};
use crate::decode::schedule::Geometry;
use crate::error::{Error, Result};
use crate::model::call_rows::HEADER_WORDS;
use crate::model::program::{Act, LoraB, Matmul, Op, Output, Program, RowSet};
use crate::weights::packed::{Format, TILE};

/// Offset that stands for no vector (`NONE` in `shaders/shared/call.wgsl`).
pub(super) const NONE: u32 = u32::MAX;
/// Entries of the vocabulary that a workgroup of `argmax.wgsl` owns (`CHUNK` there).
pub(super) const ARGMAX_CHUNK: usize = 4096;
/// Bytes between parameter blocks: the largest alignment a device may ask for.
const PARAMS_STRIDE: u64 = 256;

/// One dispatch of every call that has rows for it.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) work: Work,
    pub(super) bind: wgpu::BindGroup,
    /// Rows it covers.
    pub(super) rows: RowSet,
    /// Bytes of weights that it binds.
    pub(super) weight_bytes: u64,
}

/// Which pipeline a step runs, and its grid.
#[derive(Debug)]
pub(super) enum Work {
    /// A fixed pipeline: `columns` workgroups for every row.
    PerRow { pipeline: PipelineId, columns: u32 },
    /// Attention of a layer with that window.
    Attention { window: Option<u32> },
    /// The merge of attention's parts, where a call is split.
    Merge,
    /// A matrix product of `n` outputs, whose pipeline depends on the rows.
    Product { variant: matmul::Variant, n: u32 },
}

/// Everything a call runs.
#[derive(Debug)]
pub(super) struct Steps {
    pub(super) list: Vec<Step>,
}

/// Workgroups per row of the first pass of the choice of tokens.
pub(super) fn argmax_chunks(program: &Program) -> usize {
    program.arch.vocab_size.div_ceil(ARGMAX_CHUNK)
}

/// Where a program's operations find things.
pub(super) struct Builder<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) program: &'a Program,
    pub(super) geometry: &'a Geometry,
    pub(super) weights: &'a Weights,
    pub(super) acts: &'a Activations,
    pub(super) caches: &'a [wgpu::Buffer],
    pub(super) kv: KvStorage,
    pub(super) attention: Attention,
    pub(super) rotary: &'a wgpu::Buffer,
    pub(super) call: &'a wgpu::Buffer,
    /// What the first pass of the choice of tokens writes, [choosing rows, chunks, 4] words.
    pub(super) parts: &'a wgpu::Buffer,
    /// What attention writes of a call that is split along the cache.
    pub(super) attention_parts: &'a wgpu::Buffer,
    /// Tokens and probabilities, [choosing rows, 2] words.
    pub(super) choices: &'a wgpu::Buffer,
    pub(super) pipelines: &'a mut Pipelines,
    pub(super) allocator: &'a mut Allocator,
}

/// A step before its parameters have a place.
struct Draft<'a> {
    label: String,
    work: Work,
    rows: RowSet,
    weight_bytes: u64,
    params: Vec<u8>,
    bindings: Vec<(u32, Access)>,
    /// In the order of `bindings`; `None` where the parameters go.
    resources: Vec<Option<wgpu::BufferBinding<'a>>>,
}

fn whole(buffer: &wgpu::Buffer) -> Option<wgpu::BufferBinding<'_>> {
    Some(buffer.as_entire_buffer_binding())
}

fn words(values: &[u32]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

impl<'a> Builder<'a> {
    /// Builds all steps.
    ///
    /// # Errors
    /// Failures of the device or of linking; [`Error::Internal`] if weights are missing.
    pub(super) fn build(mut self) -> Result<Steps> {
        let mut drafts = Vec::new();
        for op in &self.program.ops {
            match op {
                Op::Embed { .. } => self.embed(op, &mut drafts)?,
                Op::Matmul(product) => self.product(product, &mut drafts)?,
                Op::RopeKv { .. } => drafts.push(self.rope_kv(op)?),
                Op::Attention { layer, window } => self.attention(*layer, *window, &mut drafts)?,
                Op::ArgMax { banned } => self.argmax(*banned, &mut drafts)?,
            }
        }
        let params = self.allocator.buffer(
            Kind::Working,
            "parameters",
            drafts.len() as u64 * PARAMS_STRIDE,
            wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
        )?;
        let mut bytes = vec![0u8; drafts.len() * PARAMS_STRIDE as usize];
        let mut list = Vec::with_capacity(drafts.len());
        for (i, draft) in drafts.into_iter().enumerate() {
            let at = i as u64 * PARAMS_STRIDE;
            if let Some(place) = bytes.get_mut(at as usize..).and_then(|b| b.get_mut(..draft.params.len())) {
                place.copy_from_slice(&draft.params);
            }
            let own = || binding(&params, at, PARAMS_STRIDE);
            let resources = draft.resources.into_iter().map(|r| r.unwrap_or_else(own)).collect();
            let bind = self.pipelines.bind(&draft.label, &draft.bindings, resources);
            list.push(Step { work: draft.work, bind, rows: draft.rows, weight_bytes: draft.weight_bytes });
        }
        self.gpu.queue.write_buffer(&params, 0, &bytes);
        self.gpu.check()?;
        Ok(Steps { list })
    }

    fn act(&self, act: Act) -> Result<&'a wgpu::Buffer> {
        self.acts.get(act).ok_or_else(|| Error::Internal(format!("the program has no activation {act:?}")))
    }

    fn fixed(&mut self, kernel: &Kernel, columns: usize) -> Result<Work> {
        Ok(Work::PerRow { pipeline: self.pipelines.id(kernel)?, columns: columns as u32 })
    }

    fn embed(&mut self, op: &Op, drafts: &mut Vec<Draft<'a>>) -> Result<()> {
        let Op::Embed { table, mask, gain } = *op else { return Ok(()) };
        let weights = self.weights;
        let matrix = weights.get(table)?;
        let (shape, d) = (matrix.shape(), self.program.arch.hidden_size);
        let kernel = variants::embed(matrix.format);
        for part in &matrix.parts {
            let params = [
                d,
                self.program.stride(Act::H),
                part.first_row,
                part.n,
                shape.blocks(),
                shape.groups(),
                matrix.format.group().unwrap_or(1),
            ];
            let mut params: Vec<u32> = params.iter().map(|&v| v as u32).collect();
            params.extend([weights.at(Some(gain)), weights.at(mask)]);
            drafts.push(Draft {
                label: "embed".to_owned(),
                work: self.fixed(&kernel, d.div_ceil(256))?,
                rows: RowSet::All,
                weight_bytes: 0,
                params: words(&params),
                bindings: kernel.bindings.clone(),
                resources: vec![
                    Some(part.data()),
                    Some(part.scales()),
                    whole(&weights.vectors),
                    whole(self.call),
                    whole(self.act(Act::H)?),
                    whole(self.act(Act::X)?),
                    None,
                ],
            });
        }
        Ok(())
    }

    fn slots(&self) -> u32 {
        self.geometry.context + self.geometry.scratch
    }

    fn cache(&self, layer: usize) -> Result<&'a wgpu::Buffer> {
        self.caches.get(layer).ok_or_else(|| Error::Internal(format!("layer {layer} has no cache")))
    }

    fn rope_kv(&mut self, op: &Op) -> Result<Draft<'a>> {
        let Op::RopeKv { layer, q_norm, k_norm, rope } = *op else {
            return Err(Error::Internal("not a rotary operation".into()));
        };
        let arch = &self.program.arch;
        let kernel = variants::rope_kv(self.kv, self.gpu.info().subgroups);
        let params = [
            arch.num_attention_heads as u32,
            arch.num_key_value_heads as u32,
            arch.head_dim as u32,
            self.program.stride(Act::Qkv) as u32,
            self.slots(),
            self.weights.at(q_norm),
            self.weights.at(k_norm),
            u32::from(rope),
            (arch.rms_norm_eps as f32).to_bits(),
        ];
        Ok(Draft {
            label: format!("rope_kv {layer}"),
            work: self.fixed(&kernel, arch.num_attention_heads + 2 * arch.num_key_value_heads)?,
            rows: RowSet::All,
            weight_bytes: 0,
            params: words(&params),
            bindings: kernel.bindings,
            resources: vec![
                whole(self.act(Act::Qkv)?),
                whole(self.cache(layer)?),
                whole(&self.weights.vectors),
                whole(self.rotary),
                whole(self.call),
                None,
            ],
        })
    }

    fn attention(&self, layer: usize, window: Option<u32>, drafts: &mut Vec<Draft<'a>>) -> Result<()> {
        let arch = &self.program.arch;
        let params = [
            arch.num_attention_heads as u32,
            arch.num_key_value_heads as u32,
            arch.head_dim as u32,
            self.program.stride(Act::Qkv) as u32,
            self.program.stride(Act::Attn) as u32,
            self.slots(),
            window.unwrap_or(0),
            (1.0 / (arch.head_dim as f32).sqrt()).to_bits(),
        ];
        let (attn, parts) = (self.act(Act::Attn)?, self.attention_parts);
        let mut draft = |label, work, kernel: Kernel, resources| {
            let (params, label) = (words(&params), format!("{label} {layer}"));
            drafts.push(Draft { label, work, rows: RowSet::All, weight_bytes: 0, params, bindings: kernel.bindings, resources });
        };
        let (qkv, cache) = (whole(self.act(Act::Qkv)?), whole(self.cache(layer)?));
        let resources = vec![qkv, cache, whole(attn), whole(self.call), None, whole(parts)];
        draft("attention", Work::Attention { window }, self.attention.kernel(1), resources);
        if self.attention.splits() {
            let resources = vec![whole(parts), whole(attn), whole(self.call), None];
            draft("attention merge", Work::Merge, variants::attention_merge(), resources);
        }
        Ok(())
    }

    fn argmax(&mut self, banned: Option<u32>, drafts: &mut Vec<Draft<'a>>) -> Result<()> {
        /// `NO_ID` in the shader.
        const NO_ID: u32 = 0x00ff_ffff;
        let subgroups = self.gpu.info().subgroups;
        let (vocab, stride) = (self.program.arch.vocab_size as u32, self.program.stride(Act::Logits) as u32);
        let first = variants::argmax(subgroups);
        let merge = variants::argmax_merge(subgroups);
        let chunks = argmax_chunks(self.program);
        drafts.push(Draft {
            label: "argmax".to_owned(),
            work: self.fixed(&first, chunks)?,
            rows: RowSet::Choose,
            weight_bytes: 0,
            params: words(&[vocab, stride, banned.unwrap_or(NO_ID)]),
            bindings: first.bindings,
            resources: vec![whole(self.act(Act::Logits)?), whole(self.parts), None],
        });
        drafts.push(Draft {
            label: "argmax merge".to_owned(),
            work: self.fixed(&merge, 1)?,
            rows: RowSet::Choose,
            weight_bytes: 0,
            params: words(&[chunks as u32]),
            bindings: merge.bindings,
            resources: vec![whole(self.parts), whole(self.choices), None],
        });
        Ok(())
    }

    fn product(&mut self, op: &Matmul, drafts: &mut Vec<Draft<'a>>) -> Result<()> {
        let weights = self.weights;
        let matrix = weights.get(op.weight)?;
        let lora = match op.lora {
            Some(lora) => Some((lora, self.lora(&lora)?)),
            None => None,
        };
        let kind = match op.output {
            Output::Store(_) => OutputKind::Store,
            Output::Residual { .. } => OutputKind::Residual,
            Output::SwiGlu(_) => OutputKind::SwiGlu,
        };
        let (target, gain) = match op.output {
            Output::Store(act) | Output::SwiGlu(act) => (act, None),
            Output::Residual { gain } => (Act::X, Some(gain)),
        };
        let tile = matmul::tile(self.gpu.class(), 1, matrix.n as u32);
        let variant = matmul::Variant {
            weight: without_group(matrix.format),
            norm: op.norm,
            bias: op.bias.is_some(),
            lora: lora.as_ref().map(|(_, b)| b.format),
            output: kind,
            tile,
        };
        let bindings = variants::product(&variant).bindings;
        for part in &matrix.parts {
            let first = part.first_row as u32;
            let mut shape = matrix.shape();
            shape.n = part.n;
            let mut params = matmul::Params::new(&shape, tile);
            params.input_stride = self.program.stride(op.input) as u32;
            params.output_stride = self.program.stride(target) as u32;
            params.hidden = self.program.width(Act::H) as u32;
            params.hidden_stride = self.program.stride(Act::H) as u32;
            params.eps = self.program.arch.rms_norm_eps as f32;
            // A part's kernel counts outputs from 0: everything it indexes by output begins at the part's first.
            params.bias_at = op.bias.map_or(0, |id| weights.at(Some(id)) + first);
            params.gain_at = gain.map_or(0, |id| weights.at(Some(id)) + first);
            params.set_rows(op.rows);
            if let Some((lora, b)) = &lora {
                params.set_lora(lora, b.format, self.program.stride(Act::Lora) as u32);
                params.segment_1 = params.segment_1.saturating_sub(first);
                params.segment_2 = params.segment_2.saturating_sub(first);
            }
            let mut resources = Vec::with_capacity(bindings.len());
            let mut weight_bytes = part.data_bytes + part.scales_bytes;
            for binding in variant.bindings() {
                use matmul::Binding as B;
                resources.push(match binding {
                    B::Params => None,
                    B::Call => Some(super::weights::binding(self.call, 0, HEADER_WORDS as u64 * 4)),
                    B::Weights => Some(part.data()),
                    B::Scales => Some(part.scales()),
                    B::Input => whole(self.act(op.input)?),
                    B::NormInput => whole(self.act(Act::H)?),
                    B::Output => {
                        let outputs = if kind == OutputKind::SwiGlu { first / 2 } else { first };
                        behind(self.act(target)?, u64::from(outputs) * 4)
                    }
                    B::Vectors => whole(&weights.vectors),
                    B::LoraB => match &lora {
                        Some((_, b)) => {
                            let per_tile = (b.data_bytes / b.n.div_ceil(TILE).max(1) as u64).max(1);
                            let skipped = u64::from(first) / TILE as u64 * per_tile;
                            weight_bytes += per_tile * part.n.div_ceil(TILE) as u64;
                            Some(super::weights::binding(&b.part.buffer, skipped, b.data_bytes - skipped))
                        }
                        None => None,
                    },
                    B::Lora => whole(self.act(Act::Lora)?),
                    B::Hidden => behind(self.act(Act::H)?, u64::from(first) * 4),
                });
            }
            drafts.push(Draft {
                label: format!("matmul {:?}", op.output),
                work: Work::Product { variant, n: part.n as u32 },
                rows: op.rows,
                weight_bytes,
                params: bytemuck::bytes_of(&params).to_vec(),
                bindings: bindings.clone(),
                resources,
            });
        }
        Ok(())
    }

    fn lora(&self, lora: &LoraB) -> Result<LoraPart<'a>> {
        let matrix = self.weights.get(lora.b)?;
        match matrix.parts.as_slice() {
            [part] => Ok(LoraPart { format: matrix.format, n: matrix.n, data_bytes: part.data_bytes, part }),
            _ => Err(Error::Unsupported(
                "a draft adapter's B is larger than this GPU binds at once (maxStorageBufferBindingSize)".into(),
            )),
        }
    }
}

/// A LoRA's B, which is never cut.
struct LoraPart<'a> {
    format: Format,
    n: usize,
    data_bytes: u64,
    part: &'a Part,
}

/// What remains of a buffer behind `offset`.
fn behind(buffer: &wgpu::Buffer, offset: u64) -> Option<wgpu::BufferBinding<'_>> {
    Some(binding(buffer, offset, buffer.size().saturating_sub(offset)))
}

/// The format as far as compiled kernels depend on it.
fn without_group(format: Format) -> Format {
    match format {
        Format::Affine { bits, scale, .. } => Format::Affine { bits, group: 32, scale },
        other => other,
    }
}

/// The pipeline for a product over `rows` rows, and its grid.
pub(super) fn product_for(class: DeviceClass, variant: &matmul::Variant, n: u32, rows: u32) -> (matmul::Variant, [u32; 3]) {
    let tile = matmul::tile(class, rows, n);
    (matmul::Variant { tile, ..*variant }, tile.grid(rows, n))
}
