//! What schedules are counted in: tokens per decode call and rows per call, on held-out prompts with the demo model.
//!
//! `cargo bench --bench schedules` runs 8 prompts of different kinds for 64 tokens each; `-- --prompts 50 --tokens 128` runs
//! what the adapter's published figures were measured on. Counts are exact; times are of one run and only good for ratios.
//! Every schedule's ids are compared with the autoregressive schedule's: a difference fails the run.
//!
//! Options: `--model DIR`, `--backend cpu|gpu|reference`, `--prompts N`, `--tokens N`, `--verify-width K`, `--draft-width W`.

mod held_out;

use std::path::{Path, PathBuf};

use forecall::engine::{AdapterFrom, Backend, Generate, LoadOptions, Model, Prompt, Sources};
use forecall::weights::source::FolderSource;
use forecall::{Error, Result};
use held_out::HeldOut;

/// Schedule, and H where it takes one.
const SCHEDULES: [(&str, Option<usize>); 8] = [
    ("autoregressive", None),
    ("two-call", None),
    ("two-call-seed", None),
    ("packed", None),
    ("anchored", Some(2)),
    ("anchored", Some(3)),
    ("quadratic", None),
    ("quadratic-shared", None),
];

struct Options {
    model: PathBuf,
    backend: Backend,
    prompts: usize,
    tokens: usize,
    verify_width: Option<usize>,
    draft_width: Option<usize>,
}

fn main() -> std::process::ExitCode {
    held_out::exit(pollster::block_on(run()))
}

async fn run() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let options = options(root)?;
    let prompts = held_out::spread(root, options.prompts)?;

    let mut sources = Sources { base: FolderSource::new(&options.model)?, adapter: AdapterFrom::Auto };
    let load = LoadOptions { backend: options.backend, context_length: Some(2048), ..LoadOptions::default() };
    let mut model = Model::load(&mut sources, &load, &mut |_| true).await?;
    println!("{} prompts ({}), {} tokens each, {:?}", prompts.len(), kinds(&prompts), options.tokens, options.backend);
    println!(
        "{:<18} {:>14} {:>10} {:>10} {:>10} {:>12}",
        "schedule", "tokens/call", "rows/call", "calls", "accepted", "time ratio"
    );

    let mut texts: Vec<Vec<u32>> = Vec::new();
    let mut base = 0.0;
    for (schedule, anchors) in SCHEDULES {
        let (mut tokens, mut calls, mut rows, mut drafted, mut accepted, mut decode) = (0, 0, 0, 0, 0, 0.0);
        for (i, prompt) in prompts.iter().enumerate() {
            let request = Generate {
                max_tokens: options.tokens,
                schedule: Some(schedule.into()),
                anchors,
                verify_width: options.verify_width,
                draft_width: options.draft_width,
                reuse_cache: false,
                ..Generate::new(Prompt::Tokens(prompt.prompt_ids.clone()))
            };
            let done = model.generate(&request, &mut |_| true).await?;
            match texts.get(i) {
                None => texts.push(done.tokens.clone()),
                Some(text) if *text == done.tokens => {}
                Some(_) => {
                    return Err(Error::Internal(format!("{schedule} gave another text than autoregressive for prompt {i}")));
                }
            }
            tokens += done.tokens.len().saturating_sub(1);
            calls += done.counts.calls();
            rows += done.counts.rows();
            drafted += done.counts.drafted();
            accepted += done.counts.accepted();
            decode += done.timings.decode;
        }
        let name = anchors.map_or_else(|| schedule.to_owned(), |h| format!("{schedule} H={h}"));
        let per_token = decode / tokens as f64;
        if base == 0.0 {
            base = per_token;
        }
        println!(
            "{name:<18} {:>14.3} {:>10.1} {calls:>10} {:>10} {:>12.2}",
            tokens as f64 / calls as f64,
            rows as f64 / calls as f64,
            if drafted > 0 { format!("{:.0} %", 100.0 * accepted as f64 / drafted as f64) } else { "-".into() },
            per_token / base,
        );
    }
    println!("time ratio: decode time per token against autoregressive; under 1 is faster");
    Ok(())
}

fn kinds(prompts: &[HeldOut]) -> String {
    let mut kinds: Vec<_> = prompts.iter().map(|p| p.category.as_str()).collect();
    kinds.dedup();
    kinds.join(", ")
}

fn options(root: &Path) -> Result<Options> {
    let mut options = Options {
        model: root.join("models/smollm2-135m-instruct"),
        backend: Backend::Cpu,
        prompts: 8,
        tokens: 64,
        verify_width: None,
        draft_width: None,
    };
    held_out::options(|name, value| {
        let number = || held_out::number(name, value);
        match name {
            "--model" => options.model = PathBuf::from(value),
            "--backend" => options.backend = value.parse()?,
            "--prompts" => options.prompts = number()?,
            "--tokens" => options.tokens = number()?,
            "--verify-width" => options.verify_width = Some(number()?),
            "--draft-width" => options.draft_width = Some(number()?),
            _ => return Err(Error::InvalidOption(format!("unknown option {name}"))),
        }
        Ok(())
    })?;
    Ok(options)
}
