//! One generation: prompt in, parts of text out, counts at the end.

use std::sync::Arc;

use serde_json::json;
use web_time::Instant;

use super::Model;
use crate::decode::options::Anchors;
use crate::decode::plan::CallKind;
use crate::decode::schedule::ModelCalls;
use crate::decode::{BlockOptions, Counts, FinishReason, Generation, ScheduleKind, ScheduleOptions, StopRules};
use crate::error::{Error, Result};
use crate::text::Tokenizer;
use crate::text::chat_template::ChatRequest;
use crate::text::detokenizer::{Detokenizer, DetokenizerOptions};
use crate::text::written_out::{self, Marked};

/// What to continue.
#[derive(Debug, Clone)]
pub enum Prompt {
    /// Text, encoded as the checkpoint's tokenizer does, its special tokens (BOS) included, and those written out in it.
    Text(String),
    /// A conversation, rendered with the checkpoint's chat template. Special tokens written out in messages are text.
    Chat(ChatRequest),
    /// Token ids; nothing is added.
    Tokens(Vec<u32>),
}

/// A request. Everything left out has a default that depends on the model.
#[derive(Debug, Clone)]
pub struct Generate {
    /// What to continue.
    pub prompt: Prompt,
    /// New tokens at most; exactly this many unless the text ends before or the context is full.
    pub max_tokens: usize,
    /// One of [`ScheduleKind::NAMES`]; by default `block-diffusion` for models trained for nothing else, `packed` where the
    /// model can draft (on the CPU: where measuring says that it pays), else `autoregressive`.
    pub schedule: Option<String>,
    /// K, draft tokens verified in one call.
    pub verify_width: Option<usize>,
    /// w, masks in a draft block.
    pub draft_width: Option<usize>,
    /// H, draft blocks per call of the `anchored` schedule.
    pub anchors: Option<usize>,
    /// L, tokens of a block (positions of SetDLM's window) of the `block-diffusion` schedule.
    pub block_length: Option<usize>,
    /// Probability from which guesses of the `block-diffusion` schedule are taken over together; above 1 none is.
    pub threshold: Option<f32>,
    /// Steps that fill a block of the `block-diffusion` schedule at most; without a threshold, in equal shares.
    pub steps: Option<usize>,
    /// Whether end ids are ordinary tokens.
    pub ignore_eos: bool,
    /// Texts that end the answer and are no part of it. The whole text of a special token (`<|endoftext|>`) is met by that
    /// token, also with `ignore_eos`.
    pub stop: Vec<String>,
    /// Whether what the cache holds of the prompt's beginning (an earlier turn of a chat) is used again. The text is the
    /// same either way, bit for bit; measuring a prompt's cost needs `false`.
    pub reuse_cache: bool,
}

impl Generate {
    /// A request with every default: 256 tokens.
    #[must_use]
    pub fn new(prompt: Prompt) -> Self {
        Self {
            prompt,
            max_tokens: 256,
            schedule: None,
            verify_width: None,
            draft_width: None,
            anchors: None,
            block_length: None,
            threshold: None,
            steps: None,
            ignore_eos: false,
            stop: Vec::new(),
            reuse_cache: true,
        }
    }
}

/// A stretch of text that came from one source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Whole characters.
    pub text: String,
    /// Whether its last token was drafted and then accepted, as opposed to chosen by the verifying row itself.
    pub accepted: bool,
}

/// What one call brought.
#[derive(Debug, Clone)]
pub struct Part {
    /// New text, cut by where it came from; whole characters only. Often there is none.
    pub pieces: Vec<Piece>,
    /// New ids; the end id that stopped the text is among them.
    pub tokens: Vec<u32>,
    /// Draft tokens the call verified.
    pub drafted: usize,
    /// How many of them were accepted.
    pub accepted: usize,
    /// Rows of the call.
    pub rows: usize,
    /// Whether it was a prefill call.
    pub prefill: bool,
    /// Milliseconds since the request.
    pub at_ms: f64,
}

impl Part {
    /// The new text.
    #[must_use]
    pub fn text(&self) -> String {
        self.pieces.iter().map(|piece| piece.text.as_str()).collect()
    }
}

/// Milliseconds, by phase.
#[derive(Debug, Clone, Copy, Default)]
pub struct Timings {
    /// Encoding the prompt.
    pub tokenize: f64,
    /// From the request to the first token.
    pub first_token: f64,
    /// Prefill calls.
    pub prefill: f64,
    /// Decode calls.
    pub decode: f64,
    /// The whole request.
    pub total: f64,
}

/// A finished generation.
#[derive(Debug, Clone)]
pub struct Generated {
    /// New ids, with the end id that stopped it.
    pub tokens: Vec<u32>,
    /// The new text, without the end id's; `None` if the checkpoint has no tokenizer.
    pub text: Option<String>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// The schedule that ran.
    pub schedule: ScheduleKind,
    /// Why it was taken.
    pub schedule_reason: String,
    /// Tokens in the prompt.
    pub prompt_tokens: usize,
    /// How many of them were in the cache already.
    pub cached_tokens: usize,
    /// New tokens that prefill calls yielded.
    pub prefill_tokens: usize,
    /// Calls and rows.
    pub counts: Counts,
    /// Where the time went.
    pub timings: Timings,
}

impl Generated {
    /// New tokens per decode call; what prefill yields (one token, or none where blocks are filled) is not counted. 0 without
    /// decode calls.
    #[must_use]
    pub fn tokens_per_call(&self) -> f64 {
        ratio(self.decoded() as f64, self.counts.calls() as f64)
    }

    /// New tokens per second of decode time, the prefill's not counted.
    #[must_use]
    pub fn tokens_per_second(&self) -> f64 {
        ratio(self.decoded() as f64 * 1000.0, self.timings.decode)
    }

    /// New tokens of decode calls.
    fn decoded(&self) -> usize {
        self.tokens.len().saturating_sub(self.prefill_tokens)
    }

    /// The object that `forecall generate --json` prints.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        let per_call: Vec<_> = self
            .counts
            .per_call
            .iter()
            .map(|call| json!({ "rows": call.rows, "drafted": call.drafted, "accepted": call.accepted }))
            .collect();
        json!({
            "tokens": self.tokens,
            "text": self.text,
            "finish_reason": self.finish_reason.name(),
            "schedule": self.schedule.to_string(),
            "schedule_reason": self.schedule_reason,
            "prompt_tokens": self.prompt_tokens,
            "calls": self.counts.calls(),
            "rows": self.counts.rows(),
            "prefill": { "calls": self.counts.prefill.calls, "rows": self.counts.prefill.rows, "cached": self.cached_tokens },
            "tokens_per_call": self.tokens_per_call(),
            "per_call": per_call,
            "timings_ms": {
                "tokenize": self.timings.tokenize,
                "first_token": self.timings.first_token,
                "prefill": self.timings.prefill,
                "decode": self.timings.decode,
                "total": self.timings.total,
            },
        })
    }

    /// One line for people.
    #[must_use]
    pub fn summary(&self) -> String {
        format!(
            "{} tokens, {} calls ({:.2} tokens per call, {} of {} drafted tokens accepted), {:.1} tokens/s, {}, finish: {}",
            self.tokens.len(),
            self.counts.calls(),
            self.tokens_per_call(),
            self.counts.accepted(),
            self.counts.drafted(),
            self.tokens_per_second(),
            self.schedule,
            self.finish_reason.name(),
        )
    }
}

fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}

impl Model {
    /// Continues a prompt. `on_part` is told after every call, with or without new text, and ends the generation by
    /// returning `false`; the model is then as good as new.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for what the request asks, [`Error::BadTokenizer`] for text without a tokenizer or messages
    /// without a template, failures of the device.
    pub async fn generate(&mut self, request: &Generate, on_part: &mut dyn FnMut(&Part) -> bool) -> Result<Generated> {
        let begun = Instant::now();
        let prompt = self.encode(&request.prompt)?;
        let mut timings = Timings { tokenize: ms(begun), ..Timings::default() };

        let asked = schedule_options(request)?;
        let (options, reason) = match asked == ScheduleOptions::default() {
            true => (self.default.options, self.default.reason.clone()),
            false => (asked, "asked for".to_owned()),
        };
        let geometry = self.calls.geometry();
        let schedule = options.resolve(self.program.rules(), &geometry)?.kind();
        let rules =
            StopRules { end_ids: self.end_ids.clone(), ignore_eos: request.ignore_eos, max_tokens: Some(request.max_tokens) };
        let reuse = request.reuse_cache && schedule != ScheduleKind::BlockDiffusion;
        let cached = if reuse { self.calls.cached(&prompt) } else { 0 };
        let (mut generation, mut plan) = Generation::start(&prompt, cached, self.program.rules(), &options, &geometry, rules)?;
        let mut answer = Answer::new(self.tokenizer.as_ref(), &request.stop)?;
        let mut prefill_tokens = 0;

        loop {
            let sent = Instant::now();
            let ticket = self.calls.submit(&plan)?;
            let choices = self.calls.answer(ticket).await?;
            let progress = generation.advance(&plan.answer(&choices)?)?;
            let prefill = plan.kind() == CallKind::Prefill;
            *(if prefill { &mut timings.prefill } else { &mut timings.decode }) += ms(sent);
            if answer.tokens.is_empty() && !progress.tokens.is_empty() {
                timings.first_token = ms(begun);
            }
            let call = if prefill { None } else { generation.counts().per_call.last().copied() };
            let (drafted, accepted) = call.map_or((0, 0), |call| (call.drafted, call.accepted));
            let added = answer.add(progress.tokens, accepted, generation.finish_reason())?;
            if added.stopped {
                generation.end(FinishReason::Stop, answer.tokens.len());
            }
            if prefill {
                prefill_tokens += added.tokens.len();
            }
            let part = Part {
                pieces: added.pieces,
                tokens: added.tokens,
                drafted,
                accepted,
                rows: plan.rows().len(),
                prefill,
                at_ms: ms(begun),
            };
            let go_on = on_part(&part);
            match progress.next {
                Some(next) if go_on && generation.finish_reason().is_none() => plan = next,
                Some(_) => {
                    if generation.finish_reason().is_none() {
                        answer.finish()?;
                        generation.end(FinishReason::Aborted, answer.tokens.len());
                    }
                    break;
                }
                None => break,
            }
        }
        timings.total = ms(begun);
        let finish_reason =
            generation.finish_reason().ok_or_else(|| Error::Internal("a generation ended without saying why".into()))?;
        Ok(Generated {
            tokens: answer.tokens,
            text: answer.text.map(|(_, whole)| whole),
            finish_reason,
            schedule,
            schedule_reason: reason,
            prompt_tokens: prompt.len(),
            cached_tokens: cached,
            prefill_tokens,
            counts: generation.counts().clone(),
            timings,
        })
    }

    /// The ids of a prompt.
    ///
    /// # Errors
    /// [`Error::BadTokenizer`] if the checkpoint lacks the tokenizer or the template that the prompt needs.
    pub fn encode(&self, prompt: &Prompt) -> Result<Vec<u32>> {
        let tokenizer = || {
            self.tokenizer.as_ref().ok_or_else(|| {
                Error::BadTokenizer(
                    "the checkpoint has no tokenizer.json, so a text prompt cannot be encoded; give token ids".into(),
                )
            })
        };
        match prompt {
            Prompt::Tokens(tokens) => Ok(tokens.clone()),
            Prompt::Text(text) => Ok(tokenizer()?.encode(text, true)?),
            Prompt::Chat(request) => {
                let template = self.template.as_ref().ok_or_else(|| {
                    Error::BadTokenizer(
                        "the checkpoint has no chat template (chat_template.jinja or tokenizer_config.json), so messages cannot be \
                         rendered; give the prompt as text"
                            .into(),
                    )
                })?;
                let tokenizer = tokenizer()?;
                let Marked { text, mark } = written_out::render(template, request, tokenizer)?;
                Ok(match mark {
                    None => tokenizer.encode(&text, false)?,
                    Some(mark) => tokenizer.encode_marked(&text, mark)?,
                })
            }
        }
    }
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

/// The answer as it grows: ids, and text where there is a tokenizer.
struct Answer {
    tokens: Vec<u32>,
    text: Option<(Detokenizer, String)>,
}

/// What one call added.
struct Added {
    pieces: Vec<Piece>,
    tokens: Vec<u32>,
    /// Whether a stop string was met.
    stopped: bool,
}

impl Answer {
    fn new(tokenizer: Option<&Arc<Tokenizer>>, stop: &[String]) -> Result<Self> {
        if tokenizer.is_none() && !stop.is_empty() {
            return Err(Error::BadTokenizer("stop strings need a tokenizer.json, and the checkpoint has none".into()));
        }
        let options = DetokenizerOptions { skip_special_tokens: true, stop: stop.to_vec() };
        let text = tokenizer.map(|tokenizer| Detokenizer::new(Arc::clone(tokenizer), options)).transpose()?;
        Ok(Self { tokens: Vec::new(), text: text.map(|detokenizer| (detokenizer, String::new())) })
    }

    /// Adds a call's tokens, of which the first `accepted` were drafted; `finish` is set with the last ones.
    fn add(&mut self, mut tokens: Vec<u32>, accepted: usize, finish: Option<FinishReason>) -> Result<Added> {
        let mut pieces: Vec<Piece> = Vec::new();
        let mut stopped = false;
        if let Some((detokenizer, whole)) = &mut self.text {
            let mut add = |text: String, accepted: bool| {
                whole.push_str(&text);
                match pieces.last_mut() {
                    Some(last) if last.accepted == accepted => last.text.push_str(&text),
                    _ if text.is_empty() => {}
                    _ => pieces.push(Piece { text, accepted }),
                }
            };
            // The end id is a token of the answer but no part of its text.
            let readable = tokens.len() - usize::from(finish == Some(FinishReason::Stop) && !tokens.is_empty());
            for (i, token) in tokens.iter().take(readable).enumerate() {
                let piece = detokenizer.push(std::slice::from_ref(token))?;
                add(piece.text, i < accepted);
                if let Some(hit) = piece.stop {
                    stopped = true;
                    tokens.truncate(hit.saturating_sub(self.tokens.len()));
                    break;
                }
            }
            if finish.is_some() || stopped {
                add(detokenizer.finish()?.text, accepted >= tokens.len());
            }
        }
        self.tokens.extend_from_slice(&tokens);
        Ok(Added { pieces, tokens, stopped })
    }

    /// Ends an answer that its reader stopped: what was held back is text now.
    fn finish(&mut self) -> Result<()> {
        if let Some((detokenizer, whole)) = &mut self.text {
            whole.push_str(&detokenizer.finish()?.text);
        }
        Ok(())
    }
}

/// The request's wishes about the schedule.
fn schedule_options(request: &Generate) -> Result<ScheduleOptions> {
    let width = |option: &'static str, value: Option<usize>| {
        let out_of_range =
            |v| move |_| Error::option(option, format!("the {} is {v}, which is out of range", option.replace('_', " ")));
        value.map(|v| u32::try_from(v).map_err(out_of_range(v))).transpose()
    };
    let mut kind = request.schedule.as_deref().map(str::parse::<ScheduleKind>).transpose()?;
    if let Some(anchors) = width("anchors", request.anchors)? {
        kind = match kind {
            Some(ScheduleKind::Packed { anchors: Anchors::Count(count), shared }) if count > 1 => {
                Some(ScheduleKind::Packed { anchors: Anchors::Count(anchors), shared })
            }
            _ => {
                return Err(Error::option(
                    "anchors",
                    "the number of anchors was given, but only the schedule \"anchored\" takes one",
                ));
            }
        };
    }
    Ok(ScheduleOptions {
        kind,
        verify_width: width("verify_width", request.verify_width)?,
        draft_width: width("draft_width", request.draft_width)?,
        block: BlockOptions {
            length: width("block_length", request.block_length)?,
            threshold: request.threshold,
            steps: width("number of steps", request.steps)?,
        },
    })
}

#[cfg(test)]
mod tests {
    use pollster::block_on;

    use super::*;
    use crate::engine::{AdapterFrom, Backend, LoadOptions, Sources};
    use crate::weights::source::FolderSource;

    /// A model of one token a byte.
    fn model() -> Model {
        let base = FolderSource::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/tiny-llama-tied")).unwrap();
        let mut sources = Sources { base, adapter: AdapterFrom::Auto };
        let options = LoadOptions { backend: Backend::Cpu, ..LoadOptions::default() };
        block_on(Model::load(&mut sources, &options, &mut |_| true)).unwrap()
    }

    /// Continues "every morning" by 20 tokens; stops reading after `read` of them.
    fn every_morning(model: &mut Model, schedule: &str, stop: &str, read: usize) -> (Generated, String) {
        let request = Generate {
            max_tokens: 20,
            schedule: Some(schedule.to_owned()),
            stop: vec![stop.to_owned()],
            ..Generate::new(Prompt::Text("every morning".to_owned()))
        };
        let (mut streamed, mut count) = (String::new(), 0);
        let done = block_on(model.generate(&request, &mut |part| {
            streamed.push_str(&part.text());
            count += part.tokens.len();
            count < read
        }));
        (done.unwrap(), streamed)
    }

    #[test]
    fn counts_are_of_the_tokens_that_are_the_text() {
        let mut model = model();
        let text = " the baker gets up b";
        let mut inside = 0;
        for schedule in ["autoregressive", "packed"] {
            for end in 3..text.len() {
                let (done, _) = every_morning(&mut model, schedule, &text[end - 3..end], usize::MAX);
                assert_eq!((done.counts.tokens, done.tokens.len(), done.finish_reason), (end, end, FinishReason::Stop));
                assert_eq!(done.text.as_deref(), Some(&text[..end - 3]), "{schedule}");
                let committed = 1 + done.counts.accepted() + done.counts.calls();
                inside += usize::from(committed > end);
            }
        }
        assert!(inside > 3, "control: a stop string ended inside an accepted run {inside} times");
        let (done, _) = every_morning(&mut model, "packed", "#", usize::MAX);
        assert_eq!((done.counts.tokens, done.text.as_deref()), (20, Some(text)), "control");
    }

    #[test]
    fn a_reader_that_stops_gets_the_text_of_all_tokens() {
        let (done, streamed) = every_morning(&mut model(), "autoregressive", "ba#", 7);
        assert_eq!((done.finish_reason, done.counts.tokens, done.tokens.len()), (FinishReason::Aborted, 7, 7));
        assert_eq!((streamed.as_str(), done.text.as_deref()), (" the ", Some(" the ba")));
    }

    fn tokenizer() -> Arc<Tokenizer> {
        Arc::new(Tokenizer::from_json(include_bytes!("../../tools/demo-model/tokenizer.json")).unwrap())
    }

    #[test]
    fn an_answer_that_is_stopped_by_its_reader_has_what_was_held_back() {
        let tokenizer = tokenizer();
        for (text, held) in [("so # #", " #"), ("so 👩", "👩")] {
            let ids = tokenizer.encode(text, false).unwrap();
            let mut answer = Answer::new(Some(&tokenizer), &[" ##".to_owned()]).unwrap();
            let added = answer.add(ids.clone(), 0, None).unwrap();
            let streamed: String = added.pieces.iter().map(|piece| piece.text.as_str()).collect();
            assert_eq!(format!("{streamed}{held}"), text, "control: something was held back");
            answer.finish().unwrap();
            assert_eq!((answer.tokens, answer.text.unwrap().1.as_str()), (ids, text));
        }
    }

    #[test]
    fn a_special_token_given_as_stop_string_ends_the_answer_with_it() {
        let tokenizer = tokenizer();
        let ids = tokenizer.encode("to be<|endoftext|> or", false).unwrap();
        let with = |stop: &str| {
            let mut answer = Answer::new(Some(&tokenizer), &[stop.to_owned()]).unwrap();
            let stopped = answer.add(ids.clone(), 2, None).unwrap().stopped;
            (stopped, answer.tokens.len(), answer.text.unwrap().1)
        };
        assert_eq!(with("<|endoftext|>"), (true, 3, "to be".to_owned()));
        assert_eq!(with("<|im_end|>"), (false, 4, "to be or".to_owned()), "control");
    }
}
