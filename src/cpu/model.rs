//! [`CpuModel`]: a program run by the fast kernels.

use std::collections::BTreeMap;
use std::ops::Range;

use super::activations::{Panel, Quantised};
use super::cache::{LayerCache, attend, shared};
use super::elementwise::{Column, argmax, inverse_rms, residual, rotate, store, swiglu};
use super::matrix::{Matrix, Values};
use super::product::{Inner, Input, LoraPart, Product, Segments, product};
use super::simd::{LANES, Level, Line};
use super::threads::{Crew, share, threads};
use crate::decode::plan::{CallPlan, Choice};
use crate::decode::schedule::{Geometry, MAX_CHOOSE, MAX_ROWS, ModelCalls, SCRATCH_SLOTS, Ticket};
use crate::error::{Error, Result};
use crate::kernels::matmul::segment;
use crate::kernels::rope_kv::Frequencies;
use crate::kernels::{CallRow, CallRows, Heads};
use crate::model::call_rows::{self, MASK_EMBEDDING};
use crate::model::program::{Act, Matmul, MatrixId, Op, Output, Program, Role, RowSet, VectorId};
use crate::weights::WeightSink;
use crate::weights::arrivals::Arrivals;
use crate::weights::packed::{Format, PackedRows};

/// A model on the CPU. Give it its weights through [`WeightSink`], then submit calls; a call computes when it is submitted
/// and blocks its thread for as long.
///
/// Memory: the packed weights, `2 L Hkv Dh (context + scratch)` values of K/V, which are reserved with the first call, and a
/// call's activations.
#[derive(Debug)]
pub struct CpuModel {
    program: Program,
    geometry: Geometry,
    half_cache: bool,
    level: Level,
    arrivals: Arrivals,
    matrices: Vec<Option<Matrix>>,
    /// Padded with zeros to whole tiles.
    vectors: Vec<Vec<f32>>,
    /// Rotary table `[positions, Dh / 2, 2]`.
    rotary: Vec<f32>,
    layers: Vec<LayerCache>,
    /// Which segments outputs read, per low-rank B.
    segments: BTreeMap<MatrixId, Segments>,
    acts: Activations,
    words: Vec<u32>,
    tickets: u64,
    answers: BTreeMap<u64, Vec<Choice>>,
}

/// A call's buffers, kept from call to call. Activations are `[rows, width]`.
#[derive(Debug, Default)]
struct Activations {
    /// Threads that help.
    crew: Crew,
    acts: BTreeMap<Act, Vec<f32>>,
    quantised: Quantised,
    /// What is in `quantised`: activation, inputs per group and rows, as long as they are the call's.
    held: Option<(Act, usize, Range<usize>)>,
    panel: Panel,
    /// The low-rank inner activations, by segment, in the form B wants.
    inner: Vec<Panel>,
    inner_quantised: Vec<Quantised>,
    norms: Vec<f32>,
    /// A product's output, `[tiles][rows][16]`.
    tiles: Vec<Line<f32>>,
    /// The head's, kept for [`ModelCalls::logits`].
    logits: Vec<Line<f32>>,
    logit_rows: usize,
    /// Attention's output as it is computed, `[group of rows][Hkv][row][Hq / Hkv, Dh]`.
    attended: Vec<f32>,
}

/// How a [`CpuModel`] is set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuOptions {
    /// Cache slots.
    pub context: u32,
    /// Whether K/V are f16 (else f32).
    pub half_cache: bool,
}

impl CpuModel {
    /// A model of `program`, still without weights.
    #[must_use]
    pub fn new(program: Program, options: CpuOptions) -> Self {
        Self::at_level(program, options, Level::best())
    }

    fn at_level(program: Program, options: CpuOptions, level: Level) -> Self {
        let geometry = Geometry {
            context: options.context,
            scratch: SCRATCH_SLOTS,
            max_rows: MAX_ROWS,
            max_choose: MAX_CHOOSE,
            vocab_size: program.arch.vocab_size,
        };
        let segments = program.ops.iter().filter_map(|op| match op {
            Op::Matmul(Matmul { lora: Some(lora), .. }) => {
                let n = program.matrices.get(lora.b.0)?.n;
                Some((lora.b, Segments::new(n, lora.scale, |o| segment(lora, o))))
            }
            _ => None,
        });
        Self {
            geometry,
            half_cache: options.half_cache,
            level,
            arrivals: Arrivals::new(&program),
            matrices: vec![None; program.matrices.len()],
            vectors: vec![Vec::new(); program.vectors.len()],
            rotary: Vec::new(),
            layers: Vec::new(),
            segments: segments.collect(),
            acts: Activations::default(),
            words: Vec::new(),
            tickets: 0,
            answers: BTreeMap::new(),
            program,
        }
    }

    /// What computes, for a model's info: the instruction set and the number of threads.
    #[must_use]
    pub fn describe(&self) -> String {
        match threads() {
            1 => format!("CPU, {}, one thread", self.level.name()),
            n => format!("CPU, {}, {n} threads", self.level.name()),
        }
    }

    /// The program it runs.
    #[must_use]
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Bytes of weights held, padding included: an adapter's are what they will stay once the model is
    /// [settled](CpuModel::settle).
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        let vectors: usize = self.vectors.iter().map(|v| size_of_val(v.as_slice())).sum();
        self.matrices.iter().flatten().map(Matrix::bytes).sum::<usize>() + vectors
    }

    /// Ends loading: checks that all weights are there, and brings the adapter into the form in which it is used. The first call
    /// does it otherwise.
    ///
    /// # Errors
    /// [`Error::Internal`] if weights are missing, [`Error::OutOfMemory`].
    pub fn settle(&mut self) -> Result<()> {
        self.arrivals.complete(&self.program)?;
        self.quantise_adapter()
    }

    /// A layer's keys and values as `[slots, Hkv Dh]` each, scratch slots last, for comparing with other backends; empty
    /// before the first call and for a layer the model does not have.
    #[must_use]
    pub fn cache(&self, layer: usize) -> (Vec<f32>, Vec<f32>) {
        self.layers.get(layer).map_or_else(Default::default, |cache| cache.read(self.geometry.scratch as usize))
    }

    fn heads(&self) -> Heads {
        let arch = &self.program.arch;
        Heads { query: arch.num_attention_heads, key_value: arch.num_key_value_heads, dim: arch.head_dim }
    }

    /// Makes the cache and the rotary table, and sets the adapter up, once.
    fn prepare(&mut self) -> Result<()> {
        if !self.layers.is_empty() {
            return Ok(());
        }
        self.settle()?;
        let arch = &self.program.arch;
        let (context, scratch) = (self.geometry.context as usize, self.geometry.scratch as usize);
        let layers: Result<Vec<_>> =
            arch.layers.iter().map(|_| LayerCache::new(self.heads(), context, scratch, self.half_cache)).collect();
        self.rotary = Frequencies::new(&arch.rope, arch.head_dim).table(context + scratch);
        self.layers = layers?;
        Ok(())
    }

    /// Turns the low-rank matrices of quantised ones into 8-bit groups: half the bytes, and integer products. They act on
    /// draft rows only, which are verified before they become text.
    fn quantise_adapter(&mut self) -> Result<()> {
        let mut a = None;
        for op in &self.program.ops {
            let Op::Matmul(op) = op else { continue };
            if op.rows == RowSet::Adapter {
                a = Some(op.weight);
            }
            let Some(lora) = &op.lora else { continue };
            let Some(group) = self.weight(op.weight)?.group() else { continue };
            // A reads what the weights read, in the same groups.
            for (id, group) in a.map(|a| (a, group)).into_iter().chain([(lora.b, 32)]) {
                if let Some(slot) = self.matrices.get_mut(id.0)
                    && let Some(matrix) = slot
                    && !matches!(matrix.values, Values::Affine { .. })
                {
                    *matrix = matrix.quantised(group)?;
                }
            }
        }
        Ok(())
    }

    fn weight(&self, id: MatrixId) -> Result<&Matrix> {
        self.matrices.get(id.0).and_then(Option::as_ref).ok_or_else(|| Error::Internal(format!("matrix {} is missing", id.0)))
    }

    fn values(&self, id: VectorId) -> Result<&[f32]> {
        let vector = self.vectors.get(id.0).map(Vec::as_slice);
        vector.ok_or_else(|| Error::Internal(format!("vector {} is missing", id.0)))
    }

    fn segments(&self, b: MatrixId) -> Result<&Segments> {
        self.segments.get(&b).ok_or_else(|| Error::Internal(format!("matrix {} is no low-rank part", b.0)))
    }

    fn run(&mut self, acts: &mut Activations, rows: CallRows<'_>) -> Result<Vec<Choice>> {
        let mut choices = Vec::new();
        acts.held = None;
        acts.crew.call();
        for op in self.program.ops.clone() {
            match op {
                Op::Embed { table, mask, gain } => self.embed(acts, rows, table, mask, gain)?,
                Op::Matmul(op) => self.matmul(acts, rows, &op)?,
                Op::RopeKv { layer, q_norm, k_norm, rope } => self.rope_kv(acts, rows, layer, [q_norm, k_norm], rope)?,
                Op::Attention { layer, window } => self.attention(acts, rows, layer, window)?,
                Op::ArgMax { banned } => {
                    let n = self.program.arch.vocab_size;
                    let count = acts.logit_rows;
                    let mut found = vec![Choice { token: 0, probability: 0.0 }; count];
                    let y = &acts.logits;
                    acts.crew.pieces(&mut found, 1, |row, to| {
                        to.fill(argmax(self.level, Column { y, rows: count, row }, n, banned));
                    });
                    choices = found;
                }
            }
        }
        Ok(choices)
    }

    fn embed(
        &self,
        acts: &mut Activations,
        rows: CallRows<'_>,
        table: MatrixId,
        mask: Option<VectorId>,
        gain: VectorId,
    ) -> Result<()> {
        let (table, gain, d) = (self.weight(table)?, self.values(gain)?, self.program.arch.hidden_size);
        let mask = mask.map(|id| self.values(id)).transpose()?;
        let mut h = acts.take(Act::H, rows.len() * d);
        let mut x = acts.take(Act::X, rows.len() * d);
        for ((h, x), row) in h.chunks_exact_mut(d).zip(x.chunks_exact_mut(d)).zip(rows.iter()) {
            match (row.token, mask) {
                (MASK_EMBEDDING, Some(mask)) => h.copy_from_slice(&mask[..d]),
                (token, _) => table.row(token as usize, h),
            }
            for ((x, h), gain) in x.iter_mut().zip(h).zip(gain) {
                *x = *h * gain;
            }
        }
        acts.put(Act::H, h);
        acts.put(Act::X, x);
        Ok(())
    }

    fn matmul(&self, acts: &mut Activations, call: CallRows<'_>, op: &Matmul) -> Result<()> {
        let rows = match op.rows {
            RowSet::All => 0..call.len(),
            RowSet::Adapter => call.adapter(),
            RowSet::Choose => call.choose(),
        };
        let is_head = op.output == Output::Store(Act::Logits);
        if is_head {
            acts.logit_rows = rows.len();
        }
        if rows.is_empty() {
            return Ok(());
        }
        let (level, count) = (self.level, rows.len());
        let lora = op.lora.filter(|_| !call.adapter().is_empty());
        if let Some(lora) = &lora {
            let (b, segments) = (self.weight(lora.b)?, self.segments(lora.b)?.count());
            acts.cut_low_rank(level, b.group(), segments, lora.rank, self.program.lora_width, call.adapter());
        }
        let matrix = self.weight(op.weight)?;
        let width = self.program.width(op.input);
        let input = match matrix.group() {
            Some(group) => {
                let held = |(act, size, held): &&(Act, usize, Range<usize>)| {
                    *act == op.input && *size == group && held.start <= rows.start && rows.end <= held.end
                };
                let first = match acts.held.as_ref().filter(held) {
                    Some((_, _, held)) => held.start,
                    None => {
                        // What A reads of the adapter rows, the weights read of all rows right after it.
                        let all = if op.rows == RowSet::Adapter { 0..call.len() } else { rows.clone() };
                        let x = &acts.acts.get(&op.input).map_or(&[][..], Vec::as_slice)[all.start * width..];
                        acts.quantised.fill(&mut acts.crew, level, x, width, all.len(), matrix.k, group);
                        let first = all.start;
                        acts.held = Some((op.input, group, all));
                        first
                    }
                };
                Input::Integers(&acts.quantised, rows.start - first)
            }
            None => {
                let x = &acts.acts.get(&op.input).map_or(&[][..], Vec::as_slice)[rows.start * width..];
                acts.panel.fill(x, width, count, matrix.k);
                Input::Floats(&acts.panel)
            }
        };
        acts.norms.clear();
        if op.norm {
            let (d, eps) = (self.program.arch.hidden_size, self.program.arch.rms_norm_eps as f32);
            let h = acts.acts.get(&Act::H).map_or(&[][..], Vec::as_slice);
            acts.norms.extend(rows.clone().map(|r| inverse_rms(level, &h[r * d..][..d], eps)));
        }
        let lora = match lora {
            Some(lora) => {
                let b = self.weight(lora.b)?;
                Some(LoraPart {
                    b,
                    inner: if b.group().is_some() { Inner::Integers(&acts.inner_quantised) } else { Inner::Floats(&acts.inner) },
                    rows: call.adapter(),
                    segments: self.segments(lora.b)?,
                })
            }
            None => None,
        };
        let bias = op.bias.map(|id| self.values(id)).transpose()?.unwrap_or_default();
        let job = Product { matrix, input, rows: count, norm: &acts.norms, bias, lora };
        let y = if is_head { &mut acts.logits } else { &mut acts.tiles };
        y.resize(matrix.tiles * count, Line([0.0; LANES]));
        let tiles = share(matrix.tiles);
        acts.crew.pieces(y, tiles * count, |i, y| product(level, &job, i * tiles, y));
        self.output(acts, op, rows, call.len(), matrix.n)
    }

    /// Brings a product from tiles into rows.
    fn output(&self, acts: &mut Activations, op: &Matmul, rows: Range<usize>, call_rows: usize, n: usize) -> Result<()> {
        let (level, count) = (self.level, rows.len());
        let column = |y, row| Column { y, rows: count, row };
        match op.output {
            Output::Store(Act::Logits) => {}
            Output::Store(act) => {
                let width = self.program.width(act);
                let mut out = acts.take(act, call_rows * width);
                let y = &acts.tiles;
                let share = share(count);
                acts.crew.pieces(&mut out[rows.start * width..][..count * width], width * share, |i, out| {
                    for (r, out) in out.chunks_exact_mut(width).enumerate() {
                        store(level, column(y, i * share + r), out);
                    }
                });
                acts.put(act, out);
            }
            Output::Residual { gain } => {
                let gain = &self.values(gain)?[..n];
                let mut h = acts.take(Act::H, call_rows * n);
                let mut x = acts.take(Act::X, call_rows * n);
                for (r, (h, x)) in h.chunks_exact_mut(n).zip(x.chunks_exact_mut(n)).enumerate() {
                    residual(level, column(&acts.tiles, r), gain, h, x);
                }
                acts.put(Act::H, h);
                acts.put(Act::X, x);
            }
            Output::SwiGlu(act) => {
                let width = self.program.width(act);
                let mut out = acts.take(act, call_rows * width);
                let y = &acts.tiles;
                let share = share(count);
                acts.crew.pieces(&mut out, width * share, |i, out| {
                    for (r, out) in out.chunks_exact_mut(width).enumerate() {
                        swiglu(level, column(y, i * share + r), out);
                    }
                });
                acts.put(act, out);
            }
        }
        Ok(())
    }

    fn rope_kv(
        &mut self,
        acts: &mut Activations,
        rows: CallRows<'_>,
        layer: usize,
        norms: [Option<VectorId>; 2],
        rope: bool,
    ) -> Result<()> {
        let Heads { query, key_value, dim } = self.heads();
        let (level, eps, width) = (self.level, self.program.arch.rms_norm_eps as f32, self.program.width(Act::Qkv));
        let mut qkv = acts.take(Act::Qkv, rows.len() * width);
        for (row, qkv) in rows.iter().zip(qkv.chunks_exact_mut(width)) {
            for (h, head) in qkv.chunks_exact_mut(dim).take(query + key_value).enumerate() {
                if let Some(gain) = norms[usize::from(h >= query)] {
                    let factor = inverse_rms(level, head, eps);
                    for (v, gain) in head.iter_mut().zip(self.values(gain)?) {
                        *v *= factor * gain;
                    }
                }
                let factor = if h < query { row.query_scale } else { 1.0 };
                if rope {
                    rotate(level, head, &self.rotary[row.position * dim..][..dim], factor);
                } else if factor != 1.0 {
                    head.iter_mut().for_each(|v| *v *= factor);
                }
            }
            let (k, v) = qkv[query * dim..].split_at(key_value * dim);
            if let Some(cache) = self.layers.get_mut(layer) {
                cache.set(row.slot, k, v);
            }
        }
        acts.put(Act::Qkv, qkv);
        Ok(())
    }

    fn attention(&self, acts: &mut Activations, rows: CallRows<'_>, layer: usize, window: Option<u32>) -> Result<()> {
        let Heads { query, key_value, dim } = self.heads();
        let (group, width) = (query / key_value * dim, self.program.width(Act::Qkv));
        let Some(cache) = self.layers.get(layer) else {
            return Err(Error::Internal(format!("layer {layer} has no cache")));
        };
        let mut attn = acts.take(Act::Attn, rows.len() * query * dim);
        let qkv = acts.acts.get(&Act::Qkv).map_or(&[][..], Vec::as_slice);
        let call: Vec<CallRow> = rows.iter().collect();
        let shared = shared(self.level, &call, window, query / key_value, key_value);
        let size = shared.iter().map(Range::len).max().unwrap_or(0) * group;
        acts.attended.resize(shared.len() * key_value * size, 0.0);
        // One piece: the query heads that share a key head, of a few rows.
        acts.crew.pieces(&mut acts.attended, size, |i, out| {
            let (rows, kv) = (shared[i / key_value].clone(), i % key_value);
            let q = &qkv[rows.start * width + kv * group..];
            attend(self.level, cache, &call[rows.clone()], window, kv, q, width, &mut out[..rows.len() * group]);
        });
        for (i, from) in acts.attended.chunks_exact(size).enumerate() {
            for (row, from) in shared[i / key_value].clone().zip(from.chunks_exact(group)) {
                attn[row * query * dim + i % key_value * group..][..group].copy_from_slice(from);
            }
        }
        acts.put(Act::Attn, attn);
        Ok(())
    }
}

impl Activations {
    /// Cuts the low-rank inner activations of the adapter rows by segment; `group` is B's, where it has groups.
    fn cut_low_rank(
        &mut self,
        level: Level,
        group: Option<usize>,
        segments: usize,
        rank: usize,
        stride: usize,
        rows: Range<usize>,
    ) {
        let inner = self.acts.get(&Act::Lora).map_or(&[][..], Vec::as_slice);
        let from = |segment: usize| &inner[rows.start * stride + segment * rank..];
        match group {
            Some(group) => {
                self.inner_quantised.resize(segments, Quantised::default());
                for (segment, to) in self.inner_quantised.iter_mut().enumerate() {
                    to.fill(&mut self.crew, level, from(segment), stride, rows.len(), rank, group);
                }
            }
            None => {
                self.inner.resize(segments, Panel::default());
                for (segment, to) in self.inner.iter_mut().enumerate() {
                    to.fill(from(segment), stride, rows.len(), rank);
                }
            }
        }
    }

    fn take(&mut self, act: Act, len: usize) -> Vec<f32> {
        let mut values = self.acts.remove(&act).unwrap_or_default();
        values.resize(len, 0.0);
        values
    }

    fn put(&mut self, act: Act, values: Vec<f32>) {
        self.held.take_if(|(held, _, _)| *held == act);
        self.acts.insert(act, values);
    }
}

impl WeightSink for CpuModel {
    fn matrix(&mut self, id: MatrixId, rows: PackedRows) -> Result<()> {
        self.arrivals.matrix(&self.program, id, &rows)?;
        let (Some(spec), Some(slot)) = (self.program.matrices.get(id.0), self.matrices.get_mut(id.0)) else {
            return Ok(());
        };
        if spec.role == Role::Lora && matches!(rows.format, Format::Affine { .. }) {
            return Err(Error::Internal(format!("matrix {}: a low-rank matrix came quantised", spec.label)));
        }
        let matrix = match slot {
            Some(matrix) => matrix,
            None => slot.insert(Matrix::zeros(rows.format, spec.n, spec.k)?),
        };
        let named = |e: Error| match e {
            Error::BadWeights(what) => Error::BadWeights(format!("{}: {what}", spec.label)),
            e => e,
        };
        matrix.take(&rows).map_err(named)
    }

    fn vector(&mut self, id: VectorId, mut values: Vec<f32>) -> Result<()> {
        self.arrivals.vector(&self.program, id, &values)?;
        values.resize(values.len().next_multiple_of(LANES), 0.0);
        if let Some(slot) = self.vectors.get_mut(id.0) {
            *slot = values;
        }
        Ok(())
    }
}

impl ModelCalls for CpuModel {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&mut self, plan: &CallPlan) -> Result<Ticket> {
        self.prepare()?;
        let (mut words, mut acts) = (std::mem::take(&mut self.words), std::mem::take(&mut self.acts));
        let choices = call_rows::encode(plan, &self.program, &self.geometry, &mut words)
            .and_then(|()| self.run(&mut acts, CallRows::new(&words)));
        (self.words, self.acts) = (words, acts);
        let choices = choices?;
        self.tickets += 1;
        self.answers.insert(self.tickets, choices);
        Ok(Ticket(self.tickets))
    }

    async fn answer(&mut self, ticket: Ticket) -> Result<Vec<Choice>> {
        self.answers.remove(&ticket.0).ok_or_else(|| Error::Internal(format!("call {} has no answer to give", ticket.0)))
    }

    async fn logits(&mut self) -> Result<Vec<Vec<f32>>> {
        if self.tickets == 0 {
            return Err(Error::InvalidOption("no call was submitted yet, so there are no logits".into()));
        }
        let (rows, y) = (self.acts.logit_rows, &self.acts.logits);
        let row = |row| {
            let mut out = vec![0.0; self.program.arch.vocab_size];
            store(self.level, Column { y, rows, row }, &mut out);
            out
        };
        Ok((0..rows).map(row).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::super::reference::Reference;
    use super::super::testing::{Tiny, block, clean, plan};
    use super::*;
    use crate::decode::plan::Row;
    use crate::kernels::testing::{Q4, Q8};

    fn options(tiny: &Tiny) -> CpuOptions {
        CpuOptions { context: 40, half_cache: tiny.format != Format::F32 }
    }

    fn fast(tiny: &Tiny, level: Level) -> CpuModel {
        let program = tiny.program();
        let mut model = CpuModel::at_level(program.clone(), options(tiny), level);
        tiny.fill(&program, 5, &mut model);
        model
    }

    fn call(model: &mut impl ModelCalls, rows: Vec<Row>) -> (Vec<Choice>, Vec<Vec<f32>>) {
        let ticket = model.submit(&plan(rows)).unwrap();
        let choices = pollster::block_on(model.answer(ticket)).unwrap();
        (choices, pollster::block_on(model.logits()).unwrap())
    }

    fn variants() -> Vec<Tiny> {
        let q4 = Tiny::new(Q4);
        vec![
            // Odd sizes: no width a multiple of a tile, three segments that end inside tiles.
            Tiny { hidden: 70, intermediate: 45, heads: (6, 3, 10), vocab: 61, ..q4.clone() },
            Tiny { tied: false, bias: true, qk_norm: true, window: Some(3), ..Tiny::new(Q8) },
            Tiny { adapter_rank: 5, bias: true, ..Tiny::new(Format::F16) },
            Tiny { adapter_rank: 0, heads: (4, 1, 24), ..Tiny::new(Format::F32) },
            q4,
        ]
    }

    fn prompt() -> Vec<Row> {
        [7, 8, 9, 10, 11].iter().zip(0..).map(|(&t, p)| clean(t, p)).collect()
    }

    #[test]
    fn logits_agree_with_the_reference() {
        for tiny in variants() {
            let program = tiny.program();
            let mut judge = Reference::new(program.clone(), 40);
            tiny.fill(&program, 5, &mut judge);
            let mut model = fast(&tiny, Level::best());
            let mut rows = vec![clean(1, 5), clean(2, 6)];
            if program.draft.is_some() {
                rows.extend(block(1, 5, 3, 0));
            }
            for rows in [prompt(), rows] {
                // Draft rows come first.
                let drafts = rows.iter().filter(|row| row.adapter && row.choose).count();
                let (want_choices, want) = call(&mut judge, rows.clone());
                let (choices, got) = call(&mut model, rows);
                let largest = want.iter().flatten().fold(0f32, |m, v| m.max(v.abs()));
                // f16 K/V rounds at 2^-11; f32 checkpoints keep f32. The adapter of quantised weights has 8 bits, and in this
                // random model it is as strong as the weights themselves.
                let bound = largest * if tiny.format == Format::F32 { 1e-5 } else { 3e-3 };
                let draft_bound = if matches!(tiny.format, Format::Affine { .. }) { largest * 3e-2 } else { bound };
                let distance = |a: &[Vec<f32>], b: &[Vec<f32>]| {
                    a.iter().flatten().zip(b.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max)
                };
                assert_eq!(got.len(), want.len());
                for (part, bound) in [(0..drafts, draft_bound), (drafts..got.len(), bound)] {
                    let far = distance(&got[part.clone()], &want[part]);
                    assert!(far <= bound, "{:?}: {far} > {bound}", tiny.format);
                }
                for (a, b) in choices.iter().zip(&want_choices) {
                    assert!((a.probability - b.probability).abs() < 0.02);
                }
                // Control: rows in another order are told apart.
                let mut turned = got.clone();
                turned.rotate_left(1);
                assert!(distance(&turned, &want) > draft_bound);
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_in_wide_calls_at_every_level() {
        for tiny in variants() {
            let bits = |logits: &[f32]| logits.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            let tokens: Vec<Row> = (0..11).map(|p| clean(3 + 2 * p, p)).collect();
            let (choices, wide) = call(&mut fast(&tiny, Level::best()), tokens.clone());
            for level in Level::all() {
                for width in [1, 2, 3, 8] {
                    let mut model = fast(&tiny, level);
                    for (i, rows) in tokens.chunks(width).enumerate() {
                        let (choice, logits) = call(&mut model, rows.to_vec());
                        for (r, row) in logits.iter().enumerate() {
                            assert_eq!(bits(row), bits(&wide[i * width + r]), "{:?} {}", tiny.format, level.name());
                            assert_eq!(choice[r], choices[i * width + r]);
                        }
                    }
                }
            }
            assert_ne!(bits(&wide[0]), bits(&wide[1]), "control");
        }
    }

    #[test]
    fn draft_rows_never_change_causal_rows() {
        let tiny = &variants()[0];
        let mut with = fast(tiny, Level::best());
        let mut without = fast(tiny, Level::best());
        call(&mut with, prompt());
        call(&mut without, prompt());
        for step in 0..3 {
            let verify = || vec![clean(step, 5 + 2 * step), clean(20, 6 + 2 * step)];
            let (_, plain) = call(&mut without, verify());
            let mut rows = verify();
            rows.extend(block(step, 5 + 2 * step, 3, 7));
            let (_, packed) = call(&mut with, rows.clone());
            assert_eq!(packed[3..], plain);
            // Control: without its adapter the draft is another one.
            let off = rows.into_iter().map(|r| Row { adapter: false, ..r }).collect();
            assert_ne!(call(&mut with, off).1, packed);
        }
    }

    #[test]
    fn an_adapter_on_quantised_weights_is_counted_as_it_is_held() {
        let tiny = Tiny::new(Q4);
        let program = tiny.program();
        let mut model = CpuModel::new(program.clone(), options(&tiny));
        assert!(matches!(model.settle(), Err(Error::Internal(_))));
        tiny.fill(&program, 5, &mut model);
        let of = |bits: usize, scale: usize| {
            let lora = program.matrices.iter().filter(|m| m.role == Role::Lora);
            lora.map(|m| m.n.next_multiple_of(LANES) * (m.k.next_multiple_of(32) * bits / 8 + m.k.div_ceil(32) * scale))
                .sum::<usize>()
        };
        // f16 is padded to sixteen inputs only.
        let lora = program.matrices.iter().filter(|m| m.role == Role::Lora);
        let arrived: usize = lora.map(|m| m.n.next_multiple_of(LANES) * m.k.next_multiple_of(16) * 2).sum();
        let before = model.weight_bytes();
        model.settle().unwrap();
        let after = model.weight_bytes();
        assert_eq!(before - arrived, after - of(8, 4));
        assert_ne!(arrived, of(8, 4), "control");
        call(&mut model, prompt());
        assert_eq!(model.weight_bytes(), after);
    }

    #[test]
    fn refuses_what_it_cannot_run() {
        let tiny = Tiny::new(Q4);
        let mut empty = CpuModel::new(tiny.program(), options(&tiny));
        assert!(matches!(empty.submit(&plan(vec![clean(0, 0)])), Err(Error::Internal(_))));
        assert!(pollster::block_on(empty.logits()).is_err());
        let mut model = fast(&tiny, Level::best());
        assert!(matches!(model.submit(&plan(vec![clean(50, 0)])), Err(Error::InvalidOption(_))));
        assert!(matches!(model.submit(&plan(vec![clean(0, 40)])), Err(Error::InvalidOption(_))));
        call(&mut model, prompt());
        assert!(pollster::block_on(model.answer(Ticket(9))).is_err());
        assert!(model.weight_bytes() > 0);
    }
}
