//! A model on the GPU: [`ModelCalls`] over buffers, bind groups and pipelines that are made once.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use super::attention::{Attention, part_bytes};
use super::buffers::{Allocator, Kind, MemoryUse};
use super::device::Gpu;
use super::footprint::check_heads;
use super::matmul::{self, DeviceClass};
use super::pipelines::{PipelineId, Pipelines};
use super::readback::{self, Mapping};
use super::steps::{Builder, Steps, Work, argmax_chunks, product_for};
use super::variants::{self, KvStorage};
use super::weights::Weights;
use crate::decode::plan::{CallPlan, Choice};
use crate::decode::schedule::{Geometry, MAX_CHOOSE, MAX_ROWS, ModelCalls, SCRATCH_SLOTS, Ticket};
use crate::error::{Error, Result};
use crate::kernels::Heads;
use crate::kernels::rope_kv::Frequencies;
use crate::model::call_rows::{self, HEADER_WORDS, ROW_WORDS};
use crate::model::program::{Act, MatrixId, Program, RowSet, VectorId};
use crate::weights::WeightSink;
use crate::weights::packed::PackedRows;

/// Calls that may be submitted before the first of them is answered.
pub const CALLS_IN_FLIGHT: usize = 2;
/// Bytes that logits may take: fewer rows may choose in models with huge vocabularies. Enough for the widest default calls,
/// 81 rows (K = 8 with a block for every acceptance), of vocabularies up to 180,000.
const LOGITS_BYTES: usize = 56 << 20;
/// Rows that may choose at least, however large the vocabulary.
const LEAST_CHOOSE: usize = 16;

/// How a model is set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelOptions {
    /// Cache slots.
    pub context: u32,
    /// Whether K and V are stored in f16 rather than f32 (arithmetic is f32 always).
    pub half_cache: bool,
}

/// What a model of `program` takes on a GPU.
pub(super) fn geometry(program: &Program, context: u32) -> Geometry {
    let logits_row = program.stride(Act::Logits) * 4;
    Geometry {
        context,
        scratch: SCRATCH_SLOTS,
        max_rows: MAX_ROWS,
        max_choose: (LOGITS_BYTES / logits_row.max(1)).clamp(LEAST_CHOOSE, MAX_CHOOSE),
        vocab_size: program.arch.vocab_size,
    }
}

/// What the last call did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CallCounters {
    /// Dispatches.
    pub dispatches: u32,
    /// Bytes of weights and adapter bound by matrix products, each once.
    pub weight_bytes: u64,
    /// Bytes of keys and values that attention's workgroups read, each once for every workgroup that reads it.
    pub kv_bytes: u64,
}

/// Activations that have buffers.
pub(super) const ACTS: [Act; 7] = [Act::H, Act::X, Act::Qkv, Act::Attn, Act::Ff, Act::Lora, Act::Logits];

/// A call's activations, one buffer each.
#[derive(Debug)]
pub(super) struct Activations(BTreeMap<Act, wgpu::Buffer>);

impl Activations {
    fn new(program: &Program, geometry: &Geometry, allocator: &mut Allocator) -> Result<Self> {
        let mut buffers = BTreeMap::new();
        for act in ACTS {
            if act == Act::Lora && program.lora_width == 0 {
                continue;
            }
            let rows = if act == Act::Logits { geometry.max_choose } else { geometry.max_rows };
            let bytes = (rows * program.stride(act) * 4) as u64;
            let buffer = allocator.storage(Kind::Working, &format!("activations {act:?}"), bytes, "a smaller model is needed")?;
            buffers.insert(act, buffer);
        }
        Ok(Self(buffers))
    }

    pub(super) fn get(&self, act: Act) -> Option<&wgpu::Buffer> {
        self.0.get(&act)
    }
}

#[derive(Debug)]
struct InFlight {
    ticket: Ticket,
    staging: usize,
    rows: usize,
    mapping: Mapping,
}

/// A model on the GPU. Give it its weights through [`WeightSink`], then [`GpuModel::ready`], then submit calls.
#[derive(Debug)]
pub struct GpuModel {
    gpu: Gpu,
    program: Program,
    geometry: Geometry,
    kv: KvStorage,
    attention: Attention,
    allocator: Allocator,
    weights: Weights,
    acts: Activations,
    /// Per layer: keys `[slots, Hkv, ceil(Dh / 4) * 4]`, then values.
    caches: Vec<wgpu::Buffer>,
    rotary: wgpu::Buffer,
    call: wgpu::Buffer,
    parts: wgpu::Buffer,
    attention_parts: wgpu::Buffer,
    choices: wgpu::Buffer,
    staging: Vec<wgpu::Buffer>,
    pipelines: Pipelines,
    products: HashMap<matmul::Variant, PipelineId>,
    /// By rows of a workgroup; the merge by 0.
    attentions: HashMap<u32, PipelineId>,
    steps: Option<Steps>,
    words: Vec<u32>,
    in_flight: VecDeque<InFlight>,
    tickets: u64,
    last_choosing: usize,
    counters: CallCounters,
}

impl GpuModel {
    /// Allocates everything but the matrices, whose formats come with their first rows.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for a context of 0; [`Error::Unsupported`] naming a limit or size the kernels cannot serve;
    /// [`Error::OutOfMemory`].
    pub fn new(gpu: &Gpu, program: Program, options: ModelOptions) -> Result<Self> {
        gpu.check()?;
        let arch = &program.arch;
        if options.context == 0 {
            return Err(Error::InvalidOption("a context of 0 positions holds no token; give at least 1".into()));
        }
        check_heads(arch)?;
        // A software adapter pays for every load, and loads packed halves in half as many.
        let kv = match (options.half_cache, gpu.info().shader_f16 && gpu.class() == DeviceClass::Gpu) {
            (false, _) => KvStorage::F32,
            (true, true) => KvStorage::F16,
            (true, false) => KvStorage::Pack16,
        };
        let geometry = geometry(&program, options.context);
        let mut allocator = Allocator::new(gpu.clone());
        let weights = Weights::new(&program, gpu, &mut allocator)?;
        let acts = Activations::new(&program, &geometry, &mut allocator)?;

        let slots = u64::from(geometry.context) + u64::from(geometry.scratch);
        let per_slot = 2 * (arch.num_key_value_heads * arch.head_dim.next_multiple_of(4)) as u64 * kv.bytes();
        let most = (gpu.info().max_storage_buffer_binding_size / per_slot).saturating_sub(u64::from(SCRATCH_SLOTS));
        let remedy = format!("use a context of at most {most} positions");
        let label = format!("the K/V cache of a layer for {} positions", options.context);
        let caches = arch
            .layers
            .iter()
            .map(|_| allocator.storage(Kind::KvCache, &label, slots * per_slot, &remedy))
            .collect::<Result<Vec<_>>>()?;

        let table = Frequencies::new(&arch.rope, arch.head_dim).table(slots as usize);
        let rotary = allocator.storage(Kind::Working, "the rotary table", table.len() as u64 * 4, "use a smaller context")?;
        gpu.queue.write_buffer(&rotary, 0, bytemuck::cast_slice(&table));

        let call_words = (HEADER_WORDS + geometry.max_rows * ROW_WORDS) as u64;
        let call = allocator.storage(Kind::Working, "call words", call_words * 4, "")?;
        let (rows, chunks) = (geometry.max_choose as u64, argmax_chunks(&program) as u64);
        let parts = allocator.storage(Kind::Working, "argmax parts", rows * chunks * 16, "")?;
        let heads = Heads { query: arch.num_attention_heads, key_value: arch.num_key_value_heads, dim: arch.head_dim };
        let parts_size = part_bytes(heads, geometry.context, gpu.info().limits());
        let attention = Attention::new(gpu.class(), kv, heads, parts_size);
        let attention_parts = allocator.storage(Kind::Working, "attention parts", parts_size, "use a smaller context")?;
        let choices = allocator.storage(Kind::Working, "choices", rows * 8, "")?;
        let usage = wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::MAP_READ;
        let staging = (0..CALLS_IN_FLIGHT)
            .map(|_| allocator.buffer(Kind::Working, "choices to read back", rows * 8, usage))
            .collect::<Result<Vec<_>>>()?;
        gpu.check()?;
        Ok(Self {
            gpu: gpu.clone(),
            geometry,
            kv,
            attention,
            allocator,
            weights,
            acts,
            caches,
            rotary,
            call,
            parts,
            attention_parts,
            choices,
            staging,
            pipelines: Pipelines::new(gpu.clone()),
            products: HashMap::new(),
            attentions: HashMap::new(),
            steps: None,
            words: Vec::new(),
            in_flight: VecDeque::with_capacity(CALLS_IN_FLIGHT),
            tickets: 0,
            last_choosing: 0,
            counters: CallCounters::default(),
            program,
        })
    }

    /// The program it runs.
    #[must_use]
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The device it runs on.
    #[must_use]
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// How K and V are stored.
    #[must_use]
    pub fn kv_storage(&self) -> KvStorage {
        self.kv
    }

    /// GPU memory by use.
    #[must_use]
    pub fn memory(&self) -> MemoryUse {
        self.allocator.used
    }

    /// What the last submitted call did.
    #[must_use]
    pub fn counters(&self) -> CallCounters {
        self.counters
    }

    /// Kernels compiled so far.
    #[must_use]
    pub fn compiled_kernels(&self) -> usize {
        self.pipelines.len()
    }

    /// Checks that all weights came and waits until they are on the GPU; a device that ran out of memory says so here.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::DeviceLost`]; [`Error::Internal`] if weights are missing.
    pub async fn ready(&mut self) -> Result<()> {
        self.build()?;
        self.settle().await
    }

    /// Compiles the kernels of calls of these widths, so that generation does not stop for it; tells `progress` how many
    /// of how many are done.
    ///
    /// # Errors
    /// As for [`GpuModel::ready`].
    pub async fn prepare(&mut self, widths: &[usize], mut progress: impl FnMut(usize, usize)) -> Result<()> {
        self.build()?;
        let tiles: BTreeSet<u32> = widths.iter().map(|&rows| self.attention.rows(rows as u32)).collect();
        let tiles = tiles.into_iter().chain(self.attention.splits().then_some(0));
        let tiles: Vec<u32> = tiles.filter(|rows| !self.attentions.contains_key(rows)).collect();
        let mut missing = Vec::new();
        for step in self.steps.iter().flat_map(|s| &s.list) {
            if let Work::Product { variant, n } = step.work {
                for &rows in widths {
                    let (variant, _) = product_for(self.gpu.class(), &variant, n, rows as u32);
                    if !self.products.contains_key(&variant) && !missing.contains(&variant) {
                        missing.push(variant);
                    }
                }
            }
        }
        let all = self.pipelines.len() + missing.len() + tiles.len();
        progress(self.pipelines.len(), all);
        let products = missing.into_iter().map(Err);
        for kernel in tiles.into_iter().map(Ok).chain(products) {
            match kernel {
                Ok(rows) => self.attention_pipeline(rows)?,
                Err(variant) => self.product_pipeline(&variant)?,
            };
            // The wait is what makes a browser compile now rather than in the first call.
            self.settle().await?;
            progress(self.pipelines.len(), all);
        }
        Ok(())
    }

    /// Waits until everything submitted is through.
    async fn settle(&self) -> Result<()> {
        readback::read(&self.gpu, &self.choices, 0, 8).await.map(|_| ())?;
        self.gpu.check()
    }

    fn product_pipeline(&mut self, variant: &matmul::Variant) -> Result<PipelineId> {
        if let Some(&id) = self.products.get(variant) {
            return Ok(id);
        }
        let id = self.pipelines.id(&variants::product(variant))?;
        self.products.insert(*variant, id);
        Ok(id)
    }

    /// Attention's kernel for workgroups of so many rows; the one that merges parts for 0.
    fn attention_pipeline(&mut self, rows: u32) -> Result<PipelineId> {
        if let Some(&id) = self.attentions.get(&rows) {
            return Ok(id);
        }
        let kernel = if rows == 0 { variants::attention_merge() } else { self.attention.kernel(rows) };
        let id = self.pipelines.id(&kernel)?;
        self.attentions.insert(rows, id);
        Ok(id)
    }

    fn build(&mut self) -> Result<()> {
        if self.steps.is_some() {
            return Ok(());
        }
        self.weights.complete(&self.program)?;
        let builder = Builder {
            gpu: &self.gpu,
            program: &self.program,
            geometry: &self.geometry,
            weights: &self.weights,
            acts: &self.acts,
            caches: &self.caches,
            kv: self.kv,
            attention: self.attention,
            rotary: &self.rotary,
            call: &self.call,
            parts: &self.parts,
            attention_parts: &self.attention_parts,
            choices: &self.choices,
            pipelines: &mut self.pipelines,
            allocator: &mut self.allocator,
        };
        self.steps = Some(builder.build()?);
        Ok(())
    }

    /// Records a call's one compute pass.
    fn record(&mut self, plan: &CallPlan, steps: &Steps) -> Result<wgpu::CommandEncoder> {
        let class = self.gpu.class();
        self.counters = CallCounters::default();
        let (all, end) = (plan.rows().len() as u32, plan.rows().iter().map(|row| row.sees.cache.end).max().unwrap_or(0));
        let parts = self.attention.parts(all, end);
        let unit_bytes = (self.program.arch.head_dim.next_multiple_of(4)) as u64 * self.kv.bytes();
        let mut slots_read = BTreeMap::new();
        let mut runs = Vec::with_capacity(steps.list.len());
        for step in &steps.list {
            let rows = match step.rows {
                RowSet::All => plan.rows().len(),
                RowSet::Adapter => plan.adapter().len(),
                RowSet::Choose => plan.choose().len(),
            } as u32;
            if rows == 0 {
                continue;
            }
            let (pipeline, grid) = match &step.work {
                Work::PerRow { pipeline, columns } => (*pipeline, [*columns, rows, 1]),
                Work::Attention { window } => {
                    let slots = slots_read.entry(*window).or_insert_with(|| self.attention.slots_read(plan.rows(), *window));
                    self.counters.kv_bytes += 2 * *slots * unit_bytes;
                    (self.attention_pipeline(self.attention.rows(rows))?, self.attention.grid(rows, parts))
                }
                Work::Merge if parts == 1 => continue,
                Work::Merge => (self.attention_pipeline(0)?, self.attention.merge_grid(rows)),
                Work::Product { variant, n } => {
                    let (variant, grid) = product_for(class, variant, *n, rows);
                    (self.product_pipeline(&variant)?, grid)
                }
            };
            runs.push((pipeline, grid, step));
        }
        let mut encoder = self.gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            let mut current = None;
            for (pipeline, [x, y, z], step) in runs {
                if current != Some(pipeline) {
                    let compiled = self.pipelines.get(pipeline);
                    pass.set_pipeline(compiled.ok_or_else(|| Error::Internal("a kernel was not compiled".into()))?);
                    current = Some(pipeline);
                }
                pass.set_bind_group(0, &step.bind, &[]);
                pass.dispatch_workgroups(x, y, z);
                self.counters.dispatches += 1;
                self.counters.weight_bytes += step.weight_bytes;
            }
        }
        Ok(encoder)
    }

    /// An activation of the last call, `[rows, stride]`, for comparing with other backends op by op.
    ///
    /// # Errors
    /// Failures of the device; [`Error::InvalidOption`] if there is no such activation or row.
    pub async fn activation(&self, act: Act, rows: usize) -> Result<Vec<f32>> {
        let bytes = (rows * self.program.stride(act) * 4) as u64;
        match self.acts.get(act) {
            Some(buffer) if bytes <= buffer.size() && bytes > 0 => {
                Ok(readback::read(&self.gpu, buffer, 0, bytes).await?.into_iter().map(f32::from_bits).collect())
            }
            _ => Err(Error::InvalidOption(format!("there are no {rows} rows of {act:?}"))),
        }
    }

    /// A layer's keys and values as `[slots, Hkv Dh]` each, for comparing with other backends.
    ///
    /// # Errors
    /// Failures of the device; [`Error::InvalidOption`] if there is no such layer.
    pub async fn cache(&self, layer: usize) -> Result<(Vec<f32>, Vec<f32>)> {
        let buffer = self.caches.get(layer).ok_or_else(|| Error::InvalidOption(format!("the model has no layer {layer}")))?;
        let arch = &self.program.arch;
        let padded = arch.head_dim.next_multiple_of(4);
        let slots = (self.geometry.context + self.geometry.scratch) as usize;
        let values = 2 * slots * arch.num_key_value_heads * padded;
        let words = readback::read(&self.gpu, buffer, 0, values as u64 * self.kv.bytes()).await?;
        let all: Vec<f32> = match self.kv {
            KvStorage::F32 => words.into_iter().map(f32::from_bits).collect(),
            _ => words.into_iter().flat_map(|w| [w as u16, (w >> 16) as u16]).map(|h| half::f16::from_bits(h).to_f32()).collect(),
        };
        let mut heads = all.chunks_exact(padded).map(|head| head.get(..arch.head_dim).unwrap_or_default());
        let keys = heads.by_ref().take(slots * arch.num_key_value_heads).flatten().copied().collect();
        Ok((keys, heads.flatten().copied().collect()))
    }
}

impl WeightSink for GpuModel {
    fn matrix(&mut self, id: MatrixId, rows: PackedRows) -> Result<()> {
        self.weights.matrix(&self.program, id, &rows, &mut self.allocator)
    }

    fn vector(&mut self, id: VectorId, values: Vec<f32>) -> Result<()> {
        self.weights.vector(&self.program, id, &values)
    }
}

impl ModelCalls for GpuModel {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&mut self, plan: &CallPlan) -> Result<Ticket> {
        self.gpu.check()?;
        let used = |staging: usize| self.in_flight.iter().any(|call| call.staging == staging);
        let Some(staging) = (0..self.staging.len()).find(|&s| !used(s)) else {
            return Err(Error::Busy(format!("{CALLS_IN_FLIGHT} calls are in flight already; take an answer first")));
        };
        self.build()?;
        call_rows::encode(plan, &self.program, &self.geometry, &mut self.words)?;
        let steps = self.steps.take().ok_or_else(|| Error::Internal("the program was not built".into()))?;
        let recorded = self.record(plan, &steps);
        self.steps = Some(steps);
        let mut encoder = recorded?;
        let rows = plan.choose().len();
        let bytes = (rows * 8).max(8) as u64;
        let target = self.staging.get(staging).ok_or_else(|| Error::Internal("no staging buffer".into()))?;
        encoder.copy_buffer_to_buffer(&self.choices, 0, target, 0, bytes);
        self.gpu.queue.write_buffer(&self.call, 0, bytemuck::cast_slice(&self.words));
        let submission = self.gpu.queue.submit([encoder.finish()]);
        let mapping = Mapping::new(&self.gpu, submission, target, bytes);
        self.gpu.check()?;
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        self.last_choosing = rows;
        self.in_flight.push_back(InFlight { ticket, staging, rows, mapping });
        Ok(ticket)
    }

    async fn answer(&mut self, ticket: Ticket) -> Result<Vec<Choice>> {
        let missing = || Error::Internal(format!("call {} has no answer to give", ticket.0));
        let at = self.in_flight.iter().position(|call| call.ticket == ticket).ok_or_else(missing)?;
        // The call stays in flight until it is read, so that a dropped future loses nothing.
        self.in_flight.get_mut(at).ok_or_else(missing)?.mapping.ready().await?;
        let call = self.in_flight.remove(at).ok_or_else(missing)?;
        let buffer = self.staging.get(call.staging).ok_or_else(missing)?;
        let words = readback::take(buffer, (call.rows * 8).max(8) as u64)?;
        let choice = |pair: &[u32]| match pair {
            [token, probability] => Choice { token: *token, probability: f32::from_bits(*probability) },
            _ => Choice { token: 0, probability: f32::NAN },
        };
        Ok(words.chunks_exact(2).take(call.rows).map(choice).collect())
    }

    async fn logits(&mut self) -> Result<Vec<Vec<f32>>> {
        if self.tickets == 0 {
            return Err(Error::InvalidOption("no call was submitted yet, so there are no logits".into()));
        }
        if self.last_choosing == 0 {
            return Ok(Vec::new());
        }
        let values = self.activation(Act::Logits, self.last_choosing).await?;
        let (width, stride) = (self.program.width(Act::Logits), self.program.stride(Act::Logits));
        Ok(values.chunks_exact(stride.max(1)).map(|row| row.get(..width).unwrap_or_default().to_vec()).collect())
    }
}
