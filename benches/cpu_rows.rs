//! What a call costs on the CPU against its rows: `cargo bench --bench cpu_rows` natively, `node benches/cpu_rows.mjs` for
//! WebAssembly (which builds this file for wasm32 and times the exported calls from JavaScript).
//!
//! The model has SmolLM2-135M's shape, 4-bit projections and an 8-bit tied embedding in groups of 32, and random weights:
//! speed does not depend on their values. Calls are decode calls of clean rows behind a cache of 256 positions, all choosing.

use forecall::cpu::{CpuModel, CpuOptions};
use forecall::decode::plan::{CallKind, CallPlan, Keep, Row, RowToken, Sees};
use forecall::decode::schedule::ModelCalls;
use forecall::model::arch::{Arch, Layer, Rope, RopeScaling};
use forecall::model::forward;
use forecall::model::program::{MatrixId, Role, VectorId};
use forecall::weights::WeightSink;
use forecall::weights::packed::{Format, PackedRows, ScaleFormat, TILE};

const CACHED: u32 = 256;

fn model() -> forecall::Result<CpuModel> {
    let arch = Arch {
        model_type: "llama".into(),
        hidden_size: 576,
        intermediate_size: 1536,
        layers: vec![Layer { rope: true, window: None }; 30],
        num_attention_heads: 9,
        num_key_value_heads: 3,
        head_dim: 64,
        vocab_size: 49152,
        rms_norm_eps: 1e-5,
        rope: Rope { theta: 100_000.0, scaling: RopeScaling::Default },
        max_position_embeddings: 8192,
        tie_word_embeddings: true,
        attention_bias: false,
        output_bias: false,
        mlp_bias: false,
        qk_norm: false,
        query_scaling: None,
        mask_token_id: None,
        eos_token_ids: vec![],
        draft: None,
        diffusion: None,
        horizon: None,
    };
    let program = forward::build(arch, None);
    let mut model = CpuModel::new(program.clone(), CpuOptions { context: 2048, half_cache: true });
    let mut state = 1u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state
    };
    for (i, spec) in program.matrices.iter().enumerate() {
        let bits = if spec.role == Role::Embedding { 8 } else { 4 };
        let format = Format::Affine { bits, group: 32, scale: ScaleFormat::F16 };
        let step = 2048; // rows a chunk, so that little beside the model is in memory
        for first_row in (0..spec.n).step_by(step) {
            let n = step.min(spec.n - first_row);
            let mut rows = PackedRows { format, first_row, n, k: spec.k, data: vec![], scales: vec![] };
            let tiles = n.div_ceil(TILE);
            rows.data = (0..tiles * rows.blocks() * TILE * 4).map(|_| random()).collect();
            // Scale and bias that keep activations at one size: 0.004 and -0.03 for 4 bits, 0.00024 and -0.03 for 8.
            let pair = if bits == 4 { 0xA7AE_1C18 } else { 0xA7AE_0BE0 };
            rows.scales = vec![pair; tiles * rows.groups() * TILE];
            model.matrix(MatrixId(i), rows)?;
        }
    }
    for (i, spec) in program.vectors.iter().enumerate() {
        model.vector(VectorId(i), vec![1.0; spec.n])?;
    }
    Ok(model)
}

/// A call of `rows` clean rows at positions `first ..`, of which the last `choose` choose.
fn call(model: &mut CpuModel, kind: CallKind, first: u32, rows: u32, choose: u32) -> forecall::Result<()> {
    let row = |i: u32| Row {
        token: RowToken::Id((i * 7919) % 49152),
        position: first + i,
        adapter: false,
        keep: Keep::Cache(first + i),
        sees: Sees { cache: 0..first + i + 1, scratch: 0..0 },
        choose: i + choose >= rows,
    };
    model.submit(&CallPlan::new(kind, (0..rows).map(row).collect())).map(|_| ())
}

#[cfg(not(target_arch = "wasm32"))]
fn main() -> forecall::Result<()> {
    use std::time::Instant;

    // Seconds per width, where given (cargo itself passes `--bench`).
    let budget = std::env::args().filter_map(|a| a.parse().ok()).next().unwrap_or(1.0);
    let mut model = model()?;
    let bytes = model.weight_bytes() as f64;
    println!("{}; {:.1} MB of weights", model.describe(), bytes / 1e6);
    let start = Instant::now();
    call(&mut model, CallKind::Prefill, 0, CACHED, 1)?;
    let start = (start.elapsed(), Instant::now());
    call(&mut model, CallKind::Prefill, 0, CACHED, 1)?;
    let prefill = start.1.elapsed().min(start.0).as_secs_f64();
    println!("prefill of {CACHED}: {:.1} ms, {:.0} tokens/s", prefill * 1e3, f64::from(CACHED) / prefill);
    println!("rows | ms per call | against 1 row | GB/s | rows/s");
    let mut one = f64::NAN;
    for rows in [1, 2, 3, 4, 6, 8, 12, 16, 24, 32] {
        // The fastest of as many calls as fit into the budget: other work on the machine only ever slows one down.
        let mut times = Vec::new();
        let begin = Instant::now();
        while times.len() < 5 || begin.elapsed().as_secs_f64() < budget {
            let start = Instant::now();
            call(&mut model, CallKind::Decode, CACHED, rows, rows)?;
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        let time = times[0];
        if rows == 1 {
            one = time;
        }
        println!(
            "{rows:4} | {:11.2} | {:13.2} | {:4.1} | {:.0}",
            time * 1e3,
            time / one,
            bytes / time / 1e9,
            f64::from(rows) / time
        );
    }
    Ok(())
}

#[cfg(target_arch = "wasm32")]
mod exports {
    //! What `cpu_rows.mjs` calls. The model lives in a thread-local: a page has one thread.
    use std::cell::RefCell;

    use super::*;

    thread_local! {
        static MODEL: RefCell<Option<CpuModel>> = const { RefCell::new(None) };
    }

    /// Makes the model; returns its bytes of weights, 0 if that failed.
    #[unsafe(no_mangle)]
    extern "C" fn setup() -> f64 {
        let made = model().ok();
        let bytes = made.as_ref().map_or(0, CpuModel::weight_bytes);
        MODEL.set(made);
        bytes as f64
    }

    /// Runs one call; returns 1 if it succeeded.
    #[unsafe(no_mangle)]
    extern "C" fn run(prefill: u32, first: u32, rows: u32, choose: u32) -> u32 {
        let kind = if prefill == 1 { CallKind::Prefill } else { CallKind::Decode };
        MODEL.with_borrow_mut(|m| m.as_mut().is_some_and(|m| call(m, kind, first, rows, choose).is_ok())).into()
    }
}

#[cfg(target_arch = "wasm32")]
fn main() {}
