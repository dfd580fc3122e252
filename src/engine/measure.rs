//! What the device does, found by running it: whether rows are invariant, and what a call costs against its rows.

use serde_json::{Value, json};
use web_time::Instant;

use super::Model;
use super::calls::Runs;
use super::probe::{causal_call, causal_rows, run_plan};
use crate::decode::plan::{CallKind, CallPlan, Row};
use crate::decode::schedule::ModelCalls;
use crate::decode::{draft_rows, packed_rows, target_rows};
use crate::error::{Error, Result};
use crate::model::arch::{DraftRules, VerifyRows};

/// The time of calls with some number of rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowTiming {
    /// Rows of the call, all of them causal and choosing.
    pub rows: usize,
    /// Fastest call, in milliseconds.
    pub min_ms: f64,
    /// Median call, in milliseconds.
    pub median_ms: f64,
}

/// Most timed rounds.
const MOST_ROUNDS: usize = 1000;
/// Positions in the cache while calls are timed or compared.
const PREFIX: u32 = 24;
/// Tokens whose rows are compared.
const COMPARED: u32 = 6;
/// Rows of the self-test's widest calls: those of the kernel that GPUs take for long inputs.
const WIDE: u32 = 64;

impl Model {
    /// [`row_invariance`] of this model on this device.
    ///
    /// # Errors
    /// As there.
    pub async fn row_invariance(&mut self) -> Result<bool> {
        row_invariance(&mut self.calls, self.program.draft).await
    }

    /// Times decode calls of `rows` causal rows each behind a short prefix; every round visits all row counts, so that a
    /// noisy machine hurts all alike. One untimed round comes first.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for row counts that do not fit a call, failures of the device.
    pub async fn measure_rows(&mut self, rows: &[usize], rounds: usize) -> Result<Vec<RowTiming>> {
        let geometry = self.calls.geometry();
        let vocab = geometry.vocab_size as u32;
        let most = geometry.max_choose.min(geometry.max_rows).min((geometry.context.saturating_sub(PREFIX)) as usize);
        if let Some(rows) = rows.iter().find(|&&rows| rows == 0 || rows > most) {
            return Err(Error::InvalidOption(format!(
                "cannot time calls of {rows} rows; at most {most} fit this model and context"
            )));
        }
        if rounds == 0 || rounds > MOST_ROUNDS {
            return Err(Error::InvalidOption(format!("cannot time {rounds} rounds; 1 to {MOST_ROUNDS} are allowed")));
        }
        let token = |position: u32| (position.wrapping_mul(7919) + 13) % vocab.max(1);
        let head: Vec<u32> = (0..PREFIX).map(token).collect();
        self.run_plan(&causal_call(CallKind::Prefill, 0, &head)).await?;
        let plans: Vec<_> = rows
            .iter()
            .map(|&rows| {
                let ids: Vec<u32> = (PREFIX..PREFIX + rows as u32).map(token).collect();
                causal_call(CallKind::Decode, PREFIX, &ids)
            })
            .collect();
        let mut times = vec![Vec::with_capacity(rounds); plans.len()];
        for round in 0..=rounds {
            for (plan, times) in plans.iter().zip(&mut times) {
                let begun = Instant::now();
                let ticket = self.calls.submit(plan)?;
                self.calls.answer(ticket).await?;
                if round > 0 {
                    times.push(begun.elapsed().as_secs_f64() * 1000.0);
                }
            }
        }
        Ok(rows
            .iter()
            .zip(times)
            .map(|(&rows, mut times)| {
                times.sort_by(f64::total_cmp);
                RowTiming {
                    rows,
                    min_ms: times.first().copied().unwrap_or(0.0),
                    median_ms: times.get(times.len() / 2).copied().unwrap_or(0.0),
                }
            })
            .collect())
    }

    /// [`Model::measure_rows`] as JSON, with each row count's ratio to the first one's, the rate of weight bytes and the
    /// arithmetic rate.
    ///
    /// # Errors
    /// As [`Model::measure_rows`].
    pub async fn measure_rows_json(&mut self, rows: &[usize], rounds: usize) -> Result<Value> {
        let timings = self.measure_rows(rows, rounds).await?;
        let first = timings.first().map_or(1.0, |t| t.median_ms);
        let weights = self.facts.weight_bytes as f64;
        let flops = 2.0 * self.facts.multiplied_weights as f64;
        let table: Vec<_> = timings
            .iter()
            .map(|t| {
                json!({
                    "rows": t.rows,
                    "min_ms": t.min_ms,
                    "median_ms": t.median_ms,
                    "ratio": t.median_ms / first,
                    "gb_per_s": weights / t.median_ms / 1e6,
                    "gflop_per_s": flops * t.rows as f64 / t.median_ms / 1e6,
                })
            })
            .collect();
        let work = self.call_work().await?;
        Ok(json!({
            "backend": self.facts.backend_name(),
            "weight_bytes": self.facts.weight_bytes,
            "layers": self.program.arch.layers.len(),
            "calls": table,
            "work": work,
        }))
    }

    /// Exact counts of a call's work on the GPU, without draft rows and with a default draft block: dispatches, bytes of
    /// weights and adapter bound, and bytes of keys and values that workgroups read. Null on other backends.
    async fn call_work(&mut self) -> Result<Value> {
        let plain = causal_call(CallKind::Decode, PREFIX, &[0]);
        let mut plans = vec![("autoregressive", plain)];
        if let Some(rules) = self.program.draft {
            let mut rows = causal_rows(PREFIX, &[0; 5]);
            rows.extend(draft_rows(rules, PREFIX, 0, 7));
            plans.push(("packed", CallPlan::new(CallKind::Decode, rows)));
        }
        let mut work = serde_json::Map::new();
        for (name, plan) in plans {
            let ticket = self.calls.submit(&plan)?;
            self.calls.answer(ticket).await?;
            let Runs::Gpu(gpu) = &self.calls.on else { return Ok(Value::Null) };
            let counters = gpu.counters();
            work.insert(
                name.into(),
                json!({
                    "rows": plan.rows().len(),
                    "dispatches": counters.dispatches,
                    "weight_bytes_bound": counters.weight_bytes,
                    "kv_bytes_read": counters.kv_bytes,
                }),
            );
        }
        Ok(Value::Object(work))
    }
}

/// Compares, bit for bit, the logits of a row that is the target's and alone in its call with those of the same row in wider
/// calls: beside other verify rows (mask rows, where those verify), beside draft rows, and in calls of so many rows that a
/// GPU takes another kernel. Lossless decoding rests on their being equal on this device.
///
/// # Errors
/// [`Error::InvalidOption`] for a context that is too short for it; failures of the device.
pub async fn row_invariance(calls: &mut impl ModelCalls, rules: Option<DraftRules>) -> Result<bool> {
    let geometry = calls.geometry();
    let vocab = geometry.vocab_size as u32;
    let verify = rules.map_or(VerifyRows::Clean, |rules| rules.verify);
    let prefix = PREFIX.min(geometry.context / 2).max(1);
    if geometry.context < prefix + COMPARED {
        return Err(Error::InvalidOption(format!("a context of {} is too short for the self-test", geometry.context)));
    }
    let token = |position: u32| (position.wrapping_mul(7919) + 13) % vocab.max(1);
    let ids: Vec<u32> = (0..prefix + COMPARED).map(token).collect();
    let (head, tail) = ids.split_at(prefix as usize);
    run_plan(calls, &causal_call(CallKind::Prefill, 0, head)).await?;
    let mut alone = Vec::new();
    for (position, id) in (prefix..).zip(tail) {
        let rows = target_rows(verify, position, std::slice::from_ref(id));
        alone.extend(run_plan(calls, &CallPlan::new(CallKind::Decode, rows)).await?);
    }
    let same = |a: &[Vec<f32>], b: &[Vec<f32>]| {
        a.len() == b.len()
            && a.iter().zip(b).all(|(a, b)| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()))
    };
    // Where among the choosing rows those begin that are compared, how many they are, and the call.
    let mut plans: Vec<(usize, usize, Vec<Row>)> =
        (2..=tail.len()).map(|m| (0, m, target_rows(verify, prefix, tail.get(..m).unwrap_or(tail)))).collect();
    if let Some(rules) = rules {
        plans.extend([(1, 3), (2, 7), (5, 7), (5, 11)].map(|(m, width)| {
            let ids = tail.get(..m).unwrap_or(tail);
            (0, m, packed_rows(rules, prefix, ids, &[0], width))
        }));
    }
    if geometry.context >= WIDE && geometry.max_rows >= WIDE as usize {
        // The whole text in one call, so that what the rows see was computed in it too; and the same with a draft block.
        let all_choose = geometry.max_choose >= WIDE as usize;
        let mut targets = vec![target_rows(verify, prefix, tail)];
        targets.extend(rules.map(|rules| packed_rows(rules, prefix, tail, &[0], 7)));
        for (choose, targets) in [all_choose, false].into_iter().zip(targets) {
            let silent = |from: u32, count: u32| {
                let ids: Vec<u32> = (from..from + count).map(token).collect();
                let mut rows = causal_rows(from, &ids);
                rows.iter_mut().for_each(|row| row.choose = choose);
                rows
            };
            let behind = WIDE.saturating_sub(prefix + targets.len() as u32);
            let rows = [silent(0, prefix), targets, silent(prefix + COMPARED, behind)].concat();
            plans.push((if choose { head.len() } else { 0 }, tail.len(), rows));
        }
    }
    for (from, m, rows) in plans {
        let together = run_plan(calls, &CallPlan::new(CallKind::Decode, rows)).await?;
        let (Some(wide), Some(alone)) = (together.get(from..from + m), alone.get(..m)) else {
            return Err(Error::Internal("the self-test read back too few rows".into()));
        };
        if !same(wide, alone) {
            return Ok(false);
        }
    }
    // Far behind, where narrow calls are split along the cache and wide ones are not; what the slots before hold does not
    // matter.
    const MANY: u32 = 20;
    let far = geometry.context.saturating_sub(MANY).min(1020);
    if far >= prefix + 6 && geometry.max_choose >= MANY as usize {
        let ids: Vec<u32> = (far..far + MANY).map(token).collect();
        let together = run_plan(calls, &causal_call(CallKind::Decode, far, &ids)).await?;
        for (i, id) in ids.iter().enumerate().step_by(5) {
            let alone = run_plan(calls, &causal_call(CallKind::Decode, far + i as u32, std::slice::from_ref(id))).await?;
            if !same(&alone, together.get(i..=i).unwrap_or_default()) {
                return Ok(false);
            }
        }
    }
    Ok(true)
}
