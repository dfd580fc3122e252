//! Is decoding ahead faster here? Autoregressive and packed decoding at several widths, by turns on every held-out prompt, so
//! that a busy machine slows all alike: `cargo bench --bench packed`.
//!
//! Prints, for each, tokens per decode call, rows per call, milliseconds per call and tokens per second against
//! autoregressive: the median over prompts and rounds of the ratio within one turn. Ids are compared; a difference fails.
//!
//! The last two columns leave other work on the machine out, which only ever slows a call down: of the calls with one number
//! of rows they take the time that a tenth of them stayed under, and weigh it by how many such calls there were.
//!
//! Options: `--model DIR`, `--backend cpu|gpu`, `--prompts N`, `--tokens N`, `--rounds N`, `--widths K,w[,K,w ...]`.

mod held_out;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use forecall::engine::{AdapterFrom, Backend, Generate, LoadOptions, Model, Part, Prompt, Sources};
use forecall::weights::source::FolderSource;
use forecall::{Error, Result};

struct Options {
    model: PathBuf,
    backend: Backend,
    prompts: usize,
    tokens: usize,
    rounds: usize,
    widths: Vec<(usize, usize)>,
}

/// What one way of decoding did.
#[derive(Default)]
struct Runs {
    tokens: usize,
    calls: usize,
    rows: usize,
    ms: f64,
    /// Milliseconds of the calls, by their rows.
    by_rows: BTreeMap<usize, Vec<f64>>,
    /// Speed against autoregressive in the same turn.
    ratios: Vec<f64>,
}

fn main() -> std::process::ExitCode {
    held_out::exit(pollster::block_on(run()))
}

impl Runs {
    /// Milliseconds of a call where nothing else runs.
    fn quiet(&mut self) -> f64 {
        let (mut total, mut calls) = (0.0, 0);
        for times in self.by_rows.values_mut() {
            times.sort_by(f64::total_cmp);
            total += times.get(times.len() / 10).copied().unwrap_or(f64::NAN) * times.len() as f64;
            calls += times.len();
        }
        total / f64::from(calls as u32)
    }
}

async fn run() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let options = options(root)?;
    let prompts = held_out::spread(root, options.prompts)?;

    let mut sources = Sources { base: FolderSource::new(&options.model)?, adapter: AdapterFrom::Auto };
    let load = LoadOptions { backend: options.backend, context_length: Some(1024), ..LoadOptions::default() };
    let mut model = Model::load(&mut sources, &load, &mut |_| true).await?;
    let info = model.info();
    println!("{}; default {}: {}", info["device"]["name"], info["default_schedule"], info["default_schedule_reason"]);
    let mut runs: Vec<Runs> = std::iter::repeat_with(Runs::default).take(options.widths.len() + 1).collect();
    for round in 0..options.rounds {
        for prompt in &prompts {
            let mut times = vec![f64::NAN; runs.len()];
            let mut text: Option<Vec<u32>> = None;
            for turn in 0..runs.len() {
                let i = (turn + round) % runs.len();
                let mut request =
                    Generate { max_tokens: options.tokens, ..Generate::new(Prompt::Tokens(prompt.prompt_ids.clone())) };
                match i.checked_sub(1).and_then(|i| options.widths.get(i)) {
                    None => request.schedule = Some("autoregressive".into()),
                    Some(&(verify, draft)) => {
                        request.schedule = Some("packed".into());
                        (request.verify_width, request.draft_width) = (Some(verify), Some(draft));
                    }
                }
                let (mut before, by_rows) = (f64::NAN, &mut runs[i].by_rows);
                let mut keep = |part: &Part| {
                    if !part.prefill && before.is_finite() {
                        by_rows.entry(part.rows).or_default().push(part.at_ms - before);
                    }
                    before = part.at_ms;
                    true
                };
                let done = model.generate(&request, &mut keep).await?;
                if *text.get_or_insert_with(|| done.tokens.clone()) != done.tokens {
                    return Err(Error::Internal("packed gave another text than autoregressive".into()));
                }
                let tokens = done.tokens.len().saturating_sub(1);
                runs[i].tokens += tokens;
                runs[i].calls += done.counts.calls();
                runs[i].rows += done.counts.rows();
                runs[i].ms += done.timings.decode;
                times[i] = done.timings.decode / tokens as f64;
            }
            for (run, time) in runs.iter_mut().zip(&times) {
                run.ratios.push(times[0] / time);
            }
        }
    }
    println!(
        "{:<16} {:>12} {:>10} {:>12} {:>10} {:>24} {:>14} {:>24}",
        "schedule",
        "tokens/call",
        "rows/call",
        "ms/call",
        "tokens/s",
        "against autoregressive",
        "quiet ms/call",
        "against autoregressive"
    );
    let mut alone = f64::NAN;
    for (i, run) in runs.iter_mut().enumerate() {
        let name = match i.checked_sub(1).and_then(|i| options.widths.get(i)) {
            None => "autoregressive".to_owned(),
            Some((verify, draft)) => format!("packed {verify}, {draft}"),
        };
        run.ratios.sort_by(f64::total_cmp);
        let (calls, tokens) = (run.calls as f64, run.tokens as f64);
        let quiet = run.quiet();
        let per_token = quiet * calls / tokens;
        if i == 0 {
            alone = per_token;
        }
        println!(
            "{name:<16} {:>12.3} {:>10.1} {:>12.2} {:>10.1} {:>24.2} {quiet:>14.2} {:>24.2}",
            tokens / calls,
            run.rows as f64 / calls,
            run.ms / calls,
            tokens / run.ms * 1e3,
            run.ratios.get(run.ratios.len() / 2).copied().unwrap_or(f64::NAN),
            alone / per_token,
        );
    }
    Ok(())
}

fn options(root: &Path) -> Result<Options> {
    let mut options = Options {
        model: root.join("models/smollm2-135m-instruct"),
        backend: Backend::Cpu,
        prompts: 8,
        tokens: 64,
        rounds: 2,
        widths: vec![(1, 1), (1, 2), (2, 2), (2, 3)],
    };
    held_out::options(|name, value| {
        let number = || held_out::number(name, value);
        match name {
            "--model" => options.model = PathBuf::from(value),
            "--backend" => options.backend = value.parse()?,
            "--prompts" => options.prompts = number()?,
            "--tokens" => options.tokens = number()?,
            "--rounds" => options.rounds = number()?,
            "--widths" => {
                let numbers = value.split(',').map(|text| held_out::number(name, text)).collect::<Result<Vec<_>>>()?;
                options.widths = numbers.as_chunks::<2>().0.iter().map(|&[verify, draft]| (verify, draft)).collect();
            }
            _ => return Err(Error::InvalidOption(format!("unknown option {name}"))),
        }
        Ok(())
    })?;
    Ok(options)
}
