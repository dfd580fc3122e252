//! A call's rows as the words that kernels read: the one upload of a call.
//!
//! `[HEADER_WORDS]` then [`ROW_WORDS`] per row, all u32:
//!
//! | header word | meaning |
//! | --- | --- |
//! | 0 | T, rows |
//! | 1, 2 | adapter rows, start and end |
//! | 3, 4 | choosing rows, start and end |
//! | 5.. | zero |
//!
//! | row word | meaning |
//! | --- | --- |
//! | 0 | token id; [`MASK_EMBEDDING`] for the adapter's learned mask |
//! | 1 | position |
//! | 2 | slot its K/V is written to |
//! | 3, 4 | cache slots it sees, start and end |
//! | 5, 6 | scratch slots it sees, start and end (counted like cache slots: scratch slot `s` is `context + s`) |
//! | 7 | factor of its query (f32 bits) |

use super::arch::Mask;
use super::program::Program;
use crate::decode::plan::{CallPlan, Keep, RowToken};
use crate::decode::schedule::Geometry;
use crate::error::{Error, Result};

/// Words before the first row.
pub const HEADER_WORDS: usize = 16;
/// Words per row.
pub const ROW_WORDS: usize = 8;
/// Token word of a row whose input is the learned mask embedding.
pub const MASK_EMBEDDING: u32 = u32::MAX;

/// Writes `plan` into `out` (cleared first), checking everything that a kernel would index with.
///
/// # Errors
/// [`Error::InvalidOption`] naming the row and the bound it breaks.
pub fn encode(plan: &CallPlan, program: &Program, geometry: &Geometry, out: &mut Vec<u32>) -> Result<()> {
    let (t, choose, adapter) = (plan.rows().len(), plan.choose(), plan.adapter());
    let refuse = |what: String| Err(Error::InvalidOption(what));
    if t == 0 || t > geometry.max_rows {
        return refuse(format!("a call has {t} rows; this model was set up for 1 to {}", geometry.max_rows));
    }
    if choose.len() > geometry.max_choose {
        return refuse(format!("a call chooses on {} rows; this model was set up for {}", choose.len(), geometry.max_choose));
    }
    out.clear();
    out.resize(HEADER_WORDS, 0);
    let header = [t, adapter.start, adapter.end, choose.start, choose.end];
    for (word, value) in out.iter_mut().zip(header) {
        *word = value as u32;
    }
    for (i, row) in plan.rows().iter().enumerate() {
        let token = match (row.token, program.mask) {
            (RowToken::Id(id), _) if (id as usize) < geometry.vocab_size => id,
            (RowToken::Id(id), _) => {
                return refuse(format!("token id {id} is out of range: the vocabulary has {} entries", geometry.vocab_size));
            }
            (RowToken::Mask, Some(Mask::Embedding)) => MASK_EMBEDDING,
            (RowToken::Mask, Some(Mask::Token(id))) => id,
            (RowToken::Mask, None) => {
                return refuse("a draft row needs a mask, but the model has neither a draft adapter nor a mask token".into());
            }
        };
        let slot = match row.keep {
            Keep::Cache(slot) if slot < geometry.context => slot,
            Keep::Scratch(slot) if slot < geometry.scratch => geometry.context + slot,
            Keep::Cache(slot) => {
                return refuse(format!("row {i} goes to cache slot {slot}, but the context has {} positions", geometry.context));
            }
            Keep::Scratch(slot) => {
                return refuse(format!("row {i} goes to scratch slot {slot}, but there are {}", geometry.scratch));
            }
        };
        let (cache, scratch) = (&row.sees.cache, &row.sees.scratch);
        if cache.end > geometry.context || scratch.end > geometry.scratch {
            return refuse(format!(
                "row {i} sees cache slots to {} and scratch slots to {}; there are {} and {}",
                cache.end, scratch.end, geometry.context, geometry.scratch
            ));
        }
        if cache.is_empty() && scratch.is_empty() {
            return refuse(format!("row {i} sees no key"));
        }
        if row.position >= geometry.context + geometry.scratch {
            return refuse(format!("row {i} stands at position {}, beyond the rotary table", row.position));
        }
        out.extend([
            token,
            row.position,
            slot,
            cache.start,
            cache.end,
            geometry.context + scratch.start,
            geometry.context + scratch.end,
            query_scale(program, row.position).to_bits(),
        ]);
    }
    Ok(())
}

/// Llama-4 query factor of a position; 1 for models without.
fn query_scale(program: &Program, position: u32) -> f32 {
    program.arch.query_scaling.map_or(1.0, |s| {
        let steps = (f64::from(position) / s.original).floor();
        (1.0 + s.beta * (1.0 + steps).ln()) as f32
    })
}
