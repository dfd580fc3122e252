//! The judge: a program run through the kernels' twins in f64, activations and K/V included. Slow and simple.

use std::collections::BTreeMap;

use crate::decode::plan::{CallPlan, Choice};
use crate::decode::schedule::{Geometry, MAX_ROWS, ModelCalls, SCRATCH_SLOTS, Ticket};
use crate::error::{Error, Result};
use crate::kernels::argmax::argmax;
use crate::kernels::attention::{KeyValues, attention};
use crate::kernels::embed::embed;
use crate::kernels::matmul::{Lora, Norm, Operands, product, residual, store, swiglu};
use crate::kernels::rope_kv::{Frequencies, RopeKv, rope_kv};
use crate::kernels::{CallRows, Heads};
use crate::model::call_rows;
use crate::model::program::{Act, Matmul, MatrixId, Op, Output, Program, RowSet, VectorId};
use crate::weights::WeightSink;
use crate::weights::arrivals::Arrivals;
use crate::weights::packed::PackedRows;

/// A model in f64: `ModelCalls` by the twins. Give it its weights through [`WeightSink`], then submit calls.
///
/// K/V take `2 L Hkv Dh (context + scratch)` f64; a call computes when it is submitted.
#[derive(Debug)]
pub struct Reference {
    program: Program,
    geometry: Geometry,
    frequencies: Frequencies,
    arrivals: Arrivals,
    matrices: Vec<Option<PackedRows>>,
    vectors: Vec<Vec<f32>>,
    /// Per layer, `[slots, Hkv Dh]`.
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
    acts: BTreeMap<Act, Vec<f64>>,
    words: Vec<u32>,
    tickets: u64,
    answers: BTreeMap<u64, Vec<Choice>>,
}

impl Reference {
    /// A model of `program` with `context` cache slots, still without weights. Every row of a call may choose.
    #[must_use]
    pub fn new(program: Program, context: u32) -> Self {
        let geometry = Geometry {
            context,
            scratch: SCRATCH_SLOTS,
            max_rows: MAX_ROWS,
            max_choose: MAX_ROWS,
            vocab_size: program.arch.vocab_size,
        };
        let slots = (context + SCRATCH_SLOTS) as usize * program.arch.kv_size();
        let cache = || program.arch.layers.iter().map(|_| vec![0.0; slots]).collect();
        Self {
            geometry,
            frequencies: Frequencies::new(&program.arch.rope, program.arch.head_dim),
            arrivals: Arrivals::new(&program),
            matrices: vec![None; program.matrices.len()],
            vectors: vec![Vec::new(); program.vectors.len()],
            keys: cache(),
            values: cache(),
            acts: BTreeMap::new(),
            words: Vec::new(),
            tickets: 0,
            answers: BTreeMap::new(),
            program,
        }
    }

    /// The program it runs.
    #[must_use]
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// An activation of the last call, `[rows, stride]`, for comparing other backends op by op (empty before the first
    /// call). `Logits` has a row per choosing row.
    #[must_use]
    pub fn activation(&self, act: Act) -> &[f64] {
        self.acts.get(&act).map_or(&[], Vec::as_slice)
    }

    /// A layer's keys and values `[slots, Hkv Dh]`; empty for a layer the model does not have.
    #[must_use]
    pub fn cache(&self, layer: usize) -> KeyValues<'_, f64> {
        KeyValues {
            keys: self.keys.get(layer).map_or(&[], Vec::as_slice),
            values: self.values.get(layer).map_or(&[], Vec::as_slice),
        }
    }

    fn weight(&self, id: MatrixId) -> Result<&PackedRows> {
        self.matrices.get(id.0).and_then(Option::as_ref).ok_or_else(|| Error::Internal(format!("matrix {} is missing", id.0)))
    }

    /// Takes an activation out for writing; a fresh one is NaN but for the padding.
    fn take(&mut self, act: Act, rows: usize) -> Vec<f64> {
        let (width, stride) = (self.program.width(act), self.program.stride(act));
        let mut values = self.acts.remove(&act).unwrap_or_default();
        if values.len() != rows * stride {
            values.clear();
            values.resize(rows * stride, 0.0);
            for row in values.chunks_exact_mut(stride.max(1)) {
                row[..width].fill(f64::NAN);
            }
        }
        values
    }

    fn run(&mut self) -> Result<Vec<Choice>> {
        let words = std::mem::take(&mut self.words);
        let rows = CallRows::new(&words);
        self.acts.clear();
        let mut choices = Vec::new();
        for op in self.program.ops.clone() {
            match op {
                Op::Embed { table, mask, gain } => {
                    let (mut h, mut x) = (self.take(Act::H, rows.len()), self.take(Act::X, rows.len()));
                    let mask = mask.map(|id| self.vectors[id.0].as_slice());
                    let stride = self.program.stride(Act::H);
                    embed(rows, self.weight(table)?, mask, &self.vectors[gain.0], stride, &mut h, &mut x);
                    self.acts.extend([(Act::H, h), (Act::X, x)]);
                }
                Op::Matmul(op) => self.matmul(rows, &op)?,
                Op::RopeKv { layer, q_norm, k_norm, rope } => {
                    let gain = |id: Option<VectorId>| id.map(|id| self.vectors[id.0].clone());
                    let (q_norm, k_norm) = (gain(q_norm), gain(k_norm));
                    let mut qkv = self.take(Act::Qkv, rows.len());
                    let op = RopeKv {
                        heads: self.heads(),
                        eps: self.program.arch.rms_norm_eps,
                        q_norm: q_norm.as_deref(),
                        k_norm: k_norm.as_deref(),
                        rope: rope.then_some(&self.frequencies),
                    };
                    let stride = self.program.stride(Act::Qkv);
                    rope_kv(rows, &op, stride, &mut qkv, &mut self.keys[layer], &mut self.values[layer]);
                    self.acts.insert(Act::Qkv, qkv);
                }
                Op::Attention { layer, window } => {
                    let mut attn = self.take(Act::Attn, rows.len());
                    let (stride, attn_stride) = (self.program.stride(Act::Qkv), self.program.stride(Act::Attn));
                    let qkv = self.activation(Act::Qkv);
                    attention(rows, self.heads(), window, qkv, stride, self.cache(layer), &mut attn, attn_stride);
                    self.acts.insert(Act::Attn, attn);
                }
                Op::ArgMax { banned } => {
                    let width = self.program.width(Act::Logits);
                    let logits = self.activation(Act::Logits).chunks_exact(self.program.stride(Act::Logits).max(1));
                    choices = logits.map(|row| argmax(&row[..width], banned)).collect();
                }
            }
        }
        self.words = words;
        Ok(choices)
    }

    fn matmul(&mut self, call: CallRows<'_>, op: &Matmul) -> Result<()> {
        let rows = match op.rows {
            RowSet::All => 0..call.len(),
            RowSet::Adapter => call.adapter(),
            RowSet::Choose => call.choose(),
        };
        if rows.is_empty() {
            return Ok(());
        }
        let eps = self.program.arch.rms_norm_eps;
        let (h, h_stride) = (self.activation(Act::H), self.program.stride(Act::H));
        let lora = match op.lora.filter(|_| !call.adapter().is_empty()) {
            Some(spec) => Some(Lora {
                b: self.weight(spec.b)?,
                spec,
                inner: self.activation(Act::Lora),
                stride: self.program.stride(Act::Lora),
                adapter: call.adapter(),
            }),
            None => None,
        };
        let weight = self.weight(op.weight)?;
        let n = weight.n;
        let y = product(&Operands {
            weight,
            input: self.activation(op.input),
            stride: self.program.stride(op.input),
            rows: rows.clone(),
            norm: op.norm.then_some(Norm { h, stride: h_stride, width: self.program.width(Act::H), eps }),
            bias: op.bias.map(|id| self.vectors[id.0].as_slice()),
            lora,
        });
        match op.output {
            Output::Store(act) => {
                // Logits have a row per choosing row; everything else a row per row of the call.
                let (first, count) = if op.rows == RowSet::Choose { (0, rows.len()) } else { (rows.start, call.len()) };
                let mut out = self.take(act, count);
                store(&y, n, first, self.program.stride(act), &mut out);
                self.acts.insert(act, out);
            }
            Output::Residual { gain } => {
                let (mut h, mut x) = (self.take(Act::H, call.len()), self.take(Act::X, call.len()));
                residual(&y, n, &self.vectors[gain.0], h_stride, &mut h, &mut x);
                self.acts.extend([(Act::H, h), (Act::X, x)]);
            }
            Output::SwiGlu(act) => {
                let mut out = self.take(act, call.len());
                swiglu(&y, n, self.program.stride(act), &mut out);
                self.acts.insert(act, out);
            }
        }
        Ok(())
    }

    fn heads(&self) -> Heads {
        let arch = &self.program.arch;
        Heads { query: arch.num_attention_heads, key_value: arch.num_key_value_heads, dim: arch.head_dim }
    }
}

impl WeightSink for Reference {
    fn matrix(&mut self, id: MatrixId, rows: PackedRows) -> Result<()> {
        self.arrivals.matrix(&self.program, id, &rows)?;
        match self.matrices.get_mut(id.0) {
            Some(Some(have)) => {
                have.n += rows.n;
                have.data.extend(rows.data);
                have.scales.extend(rows.scales);
            }
            Some(none) => *none = Some(rows),
            None => {}
        }
        Ok(())
    }

    fn vector(&mut self, id: VectorId, values: Vec<f32>) -> Result<()> {
        self.arrivals.vector(&self.program, id, &values)?;
        if let Some(slot) = self.vectors.get_mut(id.0) {
            *slot = values;
        }
        Ok(())
    }
}

impl ModelCalls for Reference {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&mut self, plan: &CallPlan) -> Result<Ticket> {
        self.arrivals.complete(&self.program)?;
        call_rows::encode(plan, &self.program, &self.geometry, &mut self.words)?;
        let choices = self.run()?;
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
        let width = self.program.width(Act::Logits);
        let rows = self.activation(Act::Logits).chunks_exact(self.program.stride(Act::Logits).max(1));
        Ok(rows.map(|row| row[..width].iter().map(|&v| v as f32).collect()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Tiny, block, clean, plan};
    use super::*;
    use crate::kernels::testing::{Q4, Q8};
    use crate::weights::packed::Format;

    fn model(tiny: &Tiny) -> Reference {
        let program = tiny.program();
        let mut model = Reference::new(program.clone(), 32);
        tiny.fill(&program, 5, &mut model);
        model
    }

    /// Runs the rows as one call; returns choices and the f64 logits.
    fn call(model: &mut Reference, rows: Vec<crate::decode::plan::Row>) -> (Vec<Choice>, Vec<Vec<f64>>) {
        let plan = plan(rows);
        let ticket = model.submit(&plan).unwrap();
        let choices = pollster::block_on(model.answer(ticket)).unwrap();
        let width = model.program.width(Act::Logits);
        let logits = model.activation(Act::Logits).chunks_exact(model.program.stride(Act::Logits));
        (choices, logits.map(|row| row[..width].to_vec()).collect())
    }

    fn variants() -> [Tiny; 3] {
        let full = Tiny { tied: false, bias: true, qk_norm: true, window: Some(3), ..Tiny::new(Q8) };
        [Tiny::new(Q4), full, Tiny { adapter_rank: 0, ..Tiny::new(Format::F32) }]
    }

    #[test]
    fn a_row_alone_equals_the_row_in_a_wide_call() {
        for tiny in variants() {
            let tokens = [3, 14, 15, 9, 26, 5];
            let rows = || tokens.iter().zip(0..).map(|(&t, p)| clean(t, p));
            let mut wide = model(&tiny);
            let (choices, logits) = call(&mut wide, rows().collect());
            assert_eq!(logits.len(), tokens.len());
            let mut alone = model(&tiny);
            for (i, row) in rows().enumerate() {
                let (choice, row) = call(&mut alone, vec![row]);
                assert_eq!((choice[0], &row[0]), (choices[i], &logits[i]));
            }
            assert_eq!(wide.keys, alone.keys);
            assert!(logits.iter().flatten().all(|v| v.is_finite()));
            // Control: other tokens before a row change it.
            let mut other = model(&tiny);
            call(&mut other, vec![clean(4, 0)]);
            let (_, changed) = call(&mut other, vec![clean(tokens[1], 1)]);
            assert_ne!(changed[0], logits[1]);
        }
    }

    #[test]
    fn draft_rows_never_change_causal_rows() {
        let tiny = &variants()[0];
        let prompt = || vec![clean(7, 0), clean(8, 1), clean(9, 2)];
        let (mut with, mut without) = (model(tiny), model(tiny));
        call(&mut with, prompt());
        call(&mut without, prompt());
        let verify = || vec![clean(1, 3), clean(2, 4)];
        let (_, plain) = call(&mut without, verify());
        let mut rows = verify();
        rows.extend(block(1, 3, 3, 0));
        // Device order puts the block's three choosing rows before the verify rows.
        let (_, packed) = call(&mut with, rows);
        assert_eq!(packed[3..], plain);
        let cached = 32 * with.program.arch.kv_size();
        for layer in 0..2 {
            assert_eq!(with.keys[layer][..cached], without.keys[layer][..cached]);
            assert_eq!(with.values[layer][..cached], without.values[layer][..cached]);
        }
        // Controls: the adapter matters to draft rows, and so does a block's other end.
        let mut rows = verify();
        rows.extend(block(1, 3, 3, 0).into_iter().map(|r| crate::decode::plan::Row { adapter: false, ..r }));
        let (_, off) = call(&mut with, rows);
        assert_ne!(off[1..], packed[..3]);
        let mut rows = verify();
        rows.extend(block(1, 3, 2, 0));
        let (_, shorter) = call(&mut with, rows);
        assert_ne!(shorter[0], packed[0]);
    }

    #[test]
    fn refuses_what_it_cannot_run() {
        let tiny = Tiny::new(Q4);
        let mut empty = Reference::new(tiny.program(), 32);
        assert!(matches!(empty.submit(&plan(vec![clean(0, 0)])), Err(Error::Internal(m)) if m.contains("embed_tokens")));
        assert!(pollster::block_on(empty.logits()).is_err());
        let mut model = model(&tiny);
        assert!(matches!(model.submit(&plan(vec![clean(50, 0)])), Err(Error::InvalidOption(_))));
        assert!(matches!(model.submit(&plan(vec![clean(0, 32)])), Err(Error::InvalidOption(_))));
        assert!(pollster::block_on(model.answer(Ticket(9))).is_err());
        let chunk = model.matrices[0].clone().unwrap();
        assert!(model.matrix(MatrixId(0), chunk).is_err(), "a chunk too many");
        assert!(model.vector(VectorId(0), vec![0.0; 3]).is_err());
    }
}
