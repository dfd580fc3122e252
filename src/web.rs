//! The edge to JavaScript, wasm32 only. Converts types and decides nothing: requests and answers cross as JSON text in the
//! crate's own words, bytes as `Uint8Array`, failures as objects `{ code, message }`.
//!
//! A panic cannot be caught on this target: it traps, and a promise that waits for it never settles. So whoever loads the
//! module names a function with [`on_panic`] that hears of it.

use std::cell::RefCell;
use std::ops::Range;

use js_sys::{Function, Object, Reflect, Uint8Array};
use serde::Deserialize;
use serde_json::json;
use wasm_bindgen::prelude::*;

use crate::engine::{self, Backend, Generate, LoadOptions, Model, Precision, Prompt, Sources};
use crate::error::{Error, Result};
use crate::gpu::device::DeviceOptions;
use crate::model::load::AdapterFrom;
use crate::text::chat_template::ChatRequest;
use crate::weights::source::ByteSource;

#[wasm_bindgen]
extern "C" {
    /// `ByteSource` of the npm package: `size(file) -> Promise<number | null>`, `read(file, start, end) -> Promise<Uint8Array>`.
    pub type JsByteSource;

    #[wasm_bindgen(method, catch)]
    async fn size(this: &JsByteSource, file: &str) -> std::result::Result<JsValue, JsValue>;

    #[wasm_bindgen(method, catch)]
    async fn read(this: &JsByteSource, file: &str, start: f64, end: f64) -> std::result::Result<JsValue, JsValue>;
}

impl ByteSource for JsByteSource {
    async fn size(&mut self, file: &str) -> Result<Option<u64>> {
        let size = JsByteSource::size(self, file).await.map_err(|e| fetch_error(file, &e))?;
        match size.as_f64() {
            Some(bytes) if bytes >= 0.0 => Ok(Some(bytes as u64)),
            Some(bytes) => Err(Error::Internal(format!("{file}: the page says it has {bytes} bytes"))),
            None => Ok(None),
        }
    }

    async fn read(&mut self, file: &str, range: Range<u64>) -> Result<Vec<u8>> {
        // Exact: offsets stay far below 2^53.
        let bytes = JsByteSource::read(self, file, range.start as f64, range.end as f64).await;
        let bytes = bytes.map_err(|e| fetch_error(file, &e))?;
        bytes
            .dyn_ref::<Uint8Array>()
            .map(Uint8Array::to_vec)
            .ok_or_else(|| Error::Internal(format!("{file}: the page answered a read with something other than bytes")))
    }
}

/// The page's words, which name the file already.
fn fetch_error(file: &str, thrown: &JsValue) -> Error {
    let message = Reflect::get(thrown, &"message".into()).ok().and_then(|m| m.as_string());
    Error::Fetch(message.unwrap_or_else(|| format!("{file} could not be read")))
}

/// `{ code, message }`.
fn to_js(error: &Error) -> JsValue {
    let object = Object::new();
    for (key, value) in [("code", error.code().to_owned()), ("message", error.to_string())] {
        // Setting a property of a fresh object cannot fail.
        let _ = Reflect::set(&object, &key.into(), &value.into());
    }
    object.into()
}

fn from_json<'a, T: Deserialize<'a>>(json: &'a str, what: &str) -> Result<T> {
    serde_json::from_str(json).map_err(|e| Error::InvalidOption(format!("{what}: {e}")))
}

thread_local! {
    static PANIC_HEARER: RefCell<Option<Function>> = const { RefCell::new(None) };
}

/// Names the function that hears of a panic, as text.
#[wasm_bindgen(js_name = onPanic)]
pub fn on_panic(hear: Function) {
    PANIC_HEARER.with(|hearer| hearer.replace(Some(hear)));
    std::panic::set_hook(Box::new(|info| {
        console_error_panic_hook::hook(info);
        let message = JsValue::from(info.to_string());
        PANIC_HEARER.with(|hearer| {
            if let Ok(hearer) = hearer.try_borrow()
                && let Some(hear) = hearer.as_ref()
            {
                // Nothing is left to be done if the hearer throws.
                let _ = hear.call1(&JsValue::NULL, &message);
            }
        });
    }));
}

/// `EngineOptions` of the npm package.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct WebLoadOptions {
    precision: String,
    context_length: Option<usize>,
    backend: String,
    adapter: WebAdapter,
    drafter: DrafterPlace,
}

/// What only the page can see of the WebGPU adapter.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct WebAdapter {
    subgroups: bool,
    subgroup_sizes: (u32, u32),
    software: bool,
}

/// Where the draft adapter is.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum DrafterPlace {
    /// Beside the weights, if at all.
    Auto,
    /// Not wanted.
    None,
    /// At the source handed over.
    Source,
}

/// `GenerateRequest` of the npm package.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct WebGenerate {
    prompt: WebPrompt,
    max_tokens: usize,
    schedule: Option<String>,
    verify_width: Option<usize>,
    draft_width: Option<usize>,
    anchors: Option<usize>,
    block_length: Option<usize>,
    threshold: Option<f32>,
    steps: Option<usize>,
    ignore_eos: bool,
    stop: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum WebPrompt {
    Text(String),
    Messages(Vec<serde_json::Value>),
    Tokens(Vec<u32>),
}

impl From<WebGenerate> for Generate {
    fn from(request: WebGenerate) -> Self {
        Self {
            prompt: match request.prompt {
                WebPrompt::Text(text) => Prompt::Text(text),
                WebPrompt::Messages(messages) => Prompt::Chat(ChatRequest::new(messages)),
                WebPrompt::Tokens(tokens) => Prompt::Tokens(tokens),
            },
            max_tokens: request.max_tokens,
            schedule: request.schedule,
            verify_width: request.verify_width,
            draft_width: request.draft_width,
            anchors: request.anchors,
            block_length: request.block_length,
            threshold: request.threshold,
            steps: request.steps,
            ignore_eos: request.ignore_eos,
            stop: request.stop,
        }
    }
}

/// Loads a model. `on_event` hears of progress, as JSON `{ phase, done, total }`.
///
/// # Errors
/// `{ code, message }`, by [`engine::Model::load`].
#[wasm_bindgen]
pub async fn load(
    options_json: String,
    checkpoint: JsByteSource,
    drafter: Option<JsByteSource>,
    on_event: Function,
) -> std::result::Result<WebModel, JsValue> {
    load_model(&options_json, checkpoint, drafter, &on_event).await.map(|model| WebModel { model }).map_err(|e| to_js(&e))
}

async fn load_model(
    options_json: &str,
    checkpoint: JsByteSource,
    drafter: Option<JsByteSource>,
    on_event: &Function,
) -> Result<Model> {
    let web: WebLoadOptions = from_json(options_json, "load")?;
    let options = LoadOptions {
        backend: web.backend.parse::<Backend>()?,
        precision: web.precision.parse::<Precision>()?,
        context_length: web.context_length,
        gpu: DeviceOptions {
            web_subgroups: web.adapter.subgroups,
            web_subgroup_sizes: web.adapter.subgroup_sizes,
            web_software: web.adapter.software,
            plain: false,
        },
        ..LoadOptions::default()
    };
    let adapter = match (web.drafter, drafter) {
        (DrafterPlace::Auto, _) => AdapterFrom::Auto,
        (DrafterPlace::None, _) => AdapterFrom::None,
        (DrafterPlace::Source, Some(source)) => AdapterFrom::Source(source),
        (DrafterPlace::Source, None) => return Err(Error::Internal("the page announced an adapter and handed none over".into())),
    };
    let mut sources = Sources { base: checkpoint, adapter };
    let mut tell = |event: engine::LoadEvent| {
        let event = json!({ "phase": event.phase.name(), "done": event.done, "total": event.total });
        on_event.call1(&JsValue::NULL, &event.to_string().into()).is_ok()
    };
    Model::load(&mut sources, &options, &mut tell).await
}

/// A loaded model. JavaScript must not call it while a generation runs.
#[wasm_bindgen]
pub struct WebModel {
    model: Model,
}

#[wasm_bindgen]
impl WebModel {
    /// [`engine::Model::info`] as JSON.
    #[must_use]
    pub fn info(&self) -> String {
        self.model.info().to_string()
    }

    /// Runs a request, given as JSON; answers [`engine::Generated::to_json`]. `on_part` hears of every call, as JSON, and
    /// stops the generation by returning `false`.
    ///
    /// # Errors
    /// `{ code, message }`, by [`engine::Model::generate`].
    pub async fn generate(&mut self, request_json: String, on_part: Function) -> std::result::Result<String, JsValue> {
        self.run(&request_json, &on_part).await.map_err(|e| to_js(&e))
    }

    async fn run(&mut self, request_json: &str, on_part: &Function) -> Result<String> {
        let request = Generate::from(from_json::<WebGenerate>(request_json, "generate")?);
        let mut hear = |part: &engine::Part| {
            let pieces: Vec<_> =
                part.pieces.iter().map(|piece| json!({ "text": piece.text, "accepted": piece.accepted })).collect();
            let part = json!({
                "pieces": pieces,
                "tokens": part.tokens,
                "drafted": part.drafted,
                "accepted": part.accepted,
                "rows": part.rows,
                "prefill": part.prefill,
            });
            // A page whose listener throws wants no more.
            on_part.call1(&JsValue::NULL, &part.to_string().into()).is_ok_and(|go_on| go_on.is_truthy())
        };
        Ok(self.model.generate(&request, &mut hear).await?.to_json().to_string())
    }

    /// [`engine::Model::measure_rows_json`] as JSON: what calls cost against their rows here.
    ///
    /// # Errors
    /// `{ code, message }`, by [`engine::Model::measure_rows`].
    pub async fn measure(&mut self, rows: Vec<usize>, rounds: usize) -> std::result::Result<String, JsValue> {
        self.model.measure_rows_json(&rows, rounds).await.map(|table| table.to_string()).map_err(|e| to_js(&e))
    }

    /// Frees the model, on the device too.
    pub fn dispose(self) {
        drop(self);
    }
}
