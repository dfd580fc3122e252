//! The edge to JavaScript, wasm32 only. Converts types and decides nothing: requests and answers cross as JSON text in the
//! crate's own words, bytes as `Uint8Array`, failures as objects `{ code, message }`.
//!
//! A panic cannot be caught on this target: it traps, and a promise that waits for it never settles. So whoever loads the
//! module names a function with [`on_panic`] that hears of it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use js_sys::{Float32Array, Function, Object, Reflect, Uint8Array};
use serde::Deserialize;
use serde_json::json;
use wasm_bindgen::prelude::*;

use crate::engine::{self, Backend, Generate, LoadOptions, Model, Offer, Offered, Precision, Prompt, Quantize, Sources};
use crate::error::{Error, HttpFailure, Result};
use crate::fetch::http_source::HttpOptions;
use crate::fetch::locator::Locator;
use crate::fetch::remote::{RemoteSource, Role};
use crate::fetch::store::{BlobStore, StoreFailure};
use crate::fetch::transport::{Answer, Body, Failure, Transport};
use crate::gpu::device::DeviceOptions;
use crate::gpu::footprint::Limits;
use crate::model::load::AdapterFrom;
use crate::text::chat_template::ChatRequest;
use crate::weights::source::{ByteSource, Either};

type Thrown<T> = std::result::Result<T, JsValue>;

#[wasm_bindgen]
extern "C" {
    /// `EngineIo` of the npm package: what the page lends.
    pub type JsIo;

    #[wasm_bindgen(method, catch)]
    async fn get(this: &JsIo, url: &str, headers_json: &str) -> Thrown<JsValue>;

    #[wasm_bindgen(method, catch)]
    async fn sleep(this: &JsIo, milliseconds: f64) -> Thrown<JsValue>;

    #[wasm_bindgen(method, getter)]
    fn picked(this: &JsIo) -> Option<JsByteSource>;

    #[wasm_bindgen(method, getter, js_name = pickedAdapter)]
    fn picked_adapter(this: &JsIo) -> Option<JsByteSource>;

    /// `EngineResponse` of the npm package: an answer whose body is read piece by piece.
    #[derive(Debug)]
    pub type JsResponse;

    #[wasm_bindgen(method, getter)]
    fn status(this: &JsResponse) -> u16;

    #[wasm_bindgen(method, getter, js_name = headersJson)]
    fn headers_json(this: &JsResponse) -> String;

    #[wasm_bindgen(method, catch)]
    async fn next(this: &JsResponse) -> Thrown<JsValue>;

    #[wasm_bindgen(method, catch)]
    fn cancel(this: &JsResponse) -> Thrown<JsValue>;

    #[wasm_bindgen(method, getter)]
    fn store(this: &JsIo) -> Option<JsStore>;

    /// The store of the npm package: blobs named `entry/blob`.
    #[derive(Debug)]
    pub type JsStore;

    #[wasm_bindgen(method, catch, js_name = get)]
    async fn get_blob(this: &JsStore, name: &str) -> Thrown<JsValue>;

    #[wasm_bindgen(method, catch)]
    async fn put(this: &JsStore, name: &str, bytes: Uint8Array) -> Thrown<JsValue>;

    #[wasm_bindgen(method, catch)]
    async fn list(this: &JsStore, prefix: &str) -> Thrown<JsValue>;

    #[wasm_bindgen(method, catch)]
    async fn remove(this: &JsStore, prefix: &str) -> Thrown<JsValue>;

    #[wasm_bindgen(method, catch)]
    async fn lock(this: &JsStore, entry: &str) -> Thrown<JsValue>;

    /// Files the user picked: `size(file) -> Promise<number | null>`, `read(file, start, end) -> Promise<Uint8Array>`.
    pub type JsByteSource;

    #[wasm_bindgen(method, catch)]
    async fn size(this: &JsByteSource, file: &str) -> Thrown<JsValue>;

    #[wasm_bindgen(method, catch)]
    async fn read(this: &JsByteSource, file: &str, start: f64, end: f64) -> Thrown<JsValue>;
}

impl ByteSource for JsByteSource {
    async fn size(&mut self, file: &str) -> Result<Option<u64>> {
        let size = JsByteSource::size(self, file).await.map_err(|e| picked_error(file, &e))?;
        match size.as_f64() {
            Some(bytes) if bytes >= 0.0 => Ok(Some(bytes as u64)),
            Some(bytes) => Err(Error::Internal(format!("{file}: the page says it has {bytes} bytes"))),
            None => Ok(None),
        }
    }

    async fn read(&mut self, file: &str, range: Range<u64>) -> Result<Vec<u8>> {
        // Exact: offsets stay far below 2^53.
        let bytes = JsByteSource::read(self, file, range.start as f64, range.end as f64).await;
        bytes_of(&bytes.map_err(|e| picked_error(file, &e))?)
            .ok_or_else(|| Error::Internal(format!("{file}: the page answered a read with something other than bytes")))
    }
}

/// Requests by the page's `fetch`, whose browser sees to redirects and to what is sent where.
struct JsTransport(JsIo);

impl Transport for JsTransport {
    type Body = JsBody;

    async fn get(
        &self,
        url: &str,
        headers: &[(String, String)],
        private: &[(String, String)],
    ) -> std::result::Result<Answer<JsBody>, Failure> {
        let headers: BTreeMap<&str, &str> = private.iter().chain(headers).map(|(k, v)| (k.as_str(), v.as_str())).collect();
        let response = self.0.get(url, &json!(headers).to_string()).await.map_err(|e| failure(&e))?;
        let response: JsResponse = response.unchecked_into();
        let headers: BTreeMap<String, String> = serde_json::from_str(&response.headers_json()).unwrap_or_default();
        Ok(Answer { status: response.status(), headers: headers.into_iter().collect(), body: JsBody(response) })
    }

    async fn pause(&self, time: Duration) -> std::result::Result<(), Failure> {
        self.0.sleep(time.as_secs_f64() * 1000.0).await.map(drop).map_err(|e| failure(&e))
    }
}

/// A body; the page is told when nobody wants more of it.
#[derive(Debug)]
struct JsBody(JsResponse);

impl Body for JsBody {
    async fn next(&mut self) -> std::result::Result<Option<Vec<u8>>, Failure> {
        self.0.next().await.map(|bytes| bytes_of(&bytes)).map_err(|e| failure(&e))
    }
}

impl Drop for JsBody {
    fn drop(&mut self) {
        // What cannot be cancelled has ended.
        let _ = self.0.cancel();
    }
}

impl BlobStore for JsStore {
    async fn get(&self, name: &str) -> Option<Vec<u8>> {
        self.get_blob(name).await.ok().as_ref().and_then(bytes_of)
    }

    async fn put(&self, name: &str, bytes: &[u8]) -> std::result::Result<(), StoreFailure> {
        let stored = JsStore::put(self, name, Uint8Array::from(bytes)).await;
        stored.map(drop).map_err(|thrown| match text_of(&thrown, "name").as_deref() {
            Some("QuotaExceededError") => StoreFailure::Full,
            _ => StoreFailure::Other(text_of(&thrown, "message").unwrap_or_else(|| "the browser refuses to store".into())),
        })
    }

    async fn list(&self, prefix: &str) -> Vec<(String, u64)> {
        let json = JsStore::list(self, prefix).await.ok().and_then(|json| json.as_string());
        json.and_then(|json| serde_json::from_str(&json).ok()).unwrap_or_default()
    }

    async fn remove(&self, name: &str) {
        // What cannot be removed stays; it is found again when it is next listed.
        let _ = JsStore::remove(self, name).await;
    }

    async fn lock(&self, entry: &str) -> std::result::Result<bool, StoreFailure> {
        Ok(JsStore::lock(self, entry).await.is_ok_and(|locked| locked.is_truthy()))
    }
}

fn bytes_of(value: &JsValue) -> Option<Vec<u8>> {
    value.dyn_ref::<Uint8Array>().map(Uint8Array::to_vec)
}

fn text_of(thrown: &JsValue, key: &str) -> Option<String> {
    Reflect::get(thrown, &key.into()).ok().and_then(|value| value.as_string())
}

/// An `AbortError` is the caller's wish; anything else is the network.
fn failure(thrown: &JsValue) -> Failure {
    match text_of(thrown, "name").as_deref() {
        Some("AbortError") => Failure::Stopped,
        _ => Failure::Broken(text_of(thrown, "message").unwrap_or_else(|| "no answer".into())),
    }
}

/// The page's words, which name the file already.
fn picked_error(file: &str, thrown: &JsValue) -> Error {
    Error::Fetch(text_of(thrown, "message").unwrap_or_else(|| format!("{file} could not be read")))
}

/// `{ code, message }`, of a request that failed `{ file, url, status, missing }`, and `{ option }`, as the crate spells it.
fn to_js(error: &Error) -> JsValue {
    let object = Object::new();
    // Setting a property of a fresh object cannot fail.
    let set = |key: &str, value: JsValue| drop(Reflect::set(&object, &key.into(), &value));
    set("code", error.code().into());
    set("message", error.to_string().into());
    if let Error::Http(failure) = error {
        let HttpFailure { file, url, status, missing, .. } = failure.as_ref();
        set("file", file.into());
        set("url", url.into());
        if let Some(status) = status {
            set("status", (*status).into());
        }
        if *missing {
            set("missing", true.into());
        }
    }
    if let Error::BadOption(failure) = error {
        set("option", failure.option.into());
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
    source: WebPlace,
    drafter: WebDrafter,
    precision: String,
    quantize: Option<WebQuantize>,
    context_length: Option<usize>,
    backend: String,
    adapter: WebAdapter,
    /// Whether what comes from the network is stored.
    store: bool,
    /// For [`preflight`]: limits of the WebGPU adapter.
    limits: Option<WebLimits>,
    /// For [`preflight`]: what the browser's storage holds and may hold.
    quota: Option<WebQuota>,
}

/// Limits of a WebGPU adapter; others than these do not matter here.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WebLimits {
    max_buffer_size: f64,
    max_storage_buffer_binding_size: f64,
}

/// `navigator.storage.estimate()`.
#[derive(Deserialize)]
struct WebQuota {
    usage: f64,
    quota: f64,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "lowercase")]
enum WebQuantize {
    Q4,
    Q8,
}

/// Where files are.
#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", rename_all_fields = "camelCase", deny_unknown_fields)]
enum WebPlace {
    /// At an address or in a repository.
    Remote { location: String, revision: Option<String>, hub_url: Option<String>, headers: BTreeMap<String, String> },
    /// On the user's disk.
    Files,
}

/// Where the draft adapter is.
#[derive(Deserialize)]
#[serde(untagged)]
enum WebDrafter {
    /// `auto`: beside the weights, if at all; `none`: not wanted.
    Word(WebDrafterWord),
    /// At a place of its own.
    Place(WebPlace),
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum WebDrafterWord {
    Auto,
    None,
}

type WebSource = Either<RemoteSource<JsTransport, JsStore>, JsByteSource>;

impl WebPlace {
    fn open(self, io: &JsIo, picked: Option<JsByteSource>, role: Role, stores: bool) -> Result<WebSource> {
        match self {
            Self::Files => {
                picked.map(Either::Right).ok_or_else(|| Error::Internal("the page announced files and gave none".into()))
            }
            Self::Remote { location, revision, hub_url, headers } => {
                let locator = Locator::parse(&location, revision.as_deref(), hub_url.as_deref())?;
                let options = HttpOptions { headers: headers.into_iter().collect(), ..HttpOptions::default() };
                let store = io.store().filter(|_| stores);
                let io: JsIo = JsValue::from(io).unchecked_into();
                Ok(Either::Left(RemoteSource::new(JsTransport(io), &location, locator, options, role, store)))
            }
        }
    }
}

/// What only the page can see of the WebGPU adapter.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct WebAdapter {
    subgroups: bool,
    subgroup_sizes: (u32, u32),
    software: bool,
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
    cache_prompt: bool,
    /// Further variables of the chat template.
    template_variables: serde_json::Map<String, serde_json::Value>,
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
                WebPrompt::Messages(messages) => {
                    Prompt::Chat(ChatRequest { variables: request.template_variables, ..ChatRequest::new(messages) })
                }
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
            reuse_cache: request.cache_prompt,
        }
    }
}

/// Loads a model. `on_event` hears of progress and warnings, as JSON by [`engine::LoadEvent::to_json`], and stops the
/// loading by returning `false`.
///
/// # Errors
/// `{ code, message }`, by [`engine::Model::load`].
#[wasm_bindgen]
pub async fn load(options_json: String, io: JsIo, on_event: Function) -> Thrown<WebModel> {
    load_model(&options_json, &io, &on_event).await.map(|model| WebModel { model }).map_err(|e| to_js(&e))
}

/// Says what loading would take: [`engine::Model::preflight`] as JSON.
///
/// # Errors
/// `{ code, message }`, by [`engine::Model::preflight`].
#[wasm_bindgen]
pub async fn preflight(options_json: String, io: JsIo) -> Thrown<String> {
    let work = async {
        let (mut sources, options, offered) = open(&options_json, &io)?;
        Model::preflight(&mut sources, &options, offered).await
    };
    work.await.map(|outcome| outcome.to_string()).map_err(|e| to_js(&e))
}

fn open(options_json: &str, io: &JsIo) -> Result<(Sources<WebSource>, LoadOptions, Offered)> {
    let web: WebLoadOptions = from_json(options_json, "load")?;
    let offered = Offered {
        // Exact: browsers name no limit above 2^53.
        gpu: match web.limits.map(|WebLimits { max_buffer_size, max_storage_buffer_binding_size }| Limits {
            max_buffer_size: max_buffer_size as u64,
            max_storage_buffer_binding_size: max_storage_buffer_binding_size as u64,
        }) {
            Some(limits) if web.adapter.software => Offer::Software(limits, "of the browser".into()),
            Some(limits) => Offer::Real(limits),
            None => Offer::Missing("no WebGPU adapter".into()),
        },
        quota_left: web.quota.map(|WebQuota { usage, quota }| (quota - usage).max(0.0) as u64),
    };
    let options = LoadOptions {
        backend: web.backend.parse::<Backend>()?,
        precision: web.precision.parse::<Precision>()?,
        quantize: web.quantize.map(|quantize| match quantize {
            WebQuantize::Q4 => Quantize::Q4,
            WebQuantize::Q8 => Quantize::Q8,
        }),
        context_length: web.context_length,
        gpu: DeviceOptions {
            web_subgroups: web.adapter.subgroups,
            web_subgroup_sizes: web.adapter.subgroup_sizes,
            web_software: web.adapter.software,
            plain: false,
            default_limits: false,
        },
    };
    let adapter = match web.drafter {
        WebDrafter::Word(WebDrafterWord::Auto) => AdapterFrom::Auto,
        WebDrafter::Word(WebDrafterWord::None) => AdapterFrom::None,
        WebDrafter::Place(place) => AdapterFrom::Source(place.open(io, io.picked_adapter(), Role::Adapter, web.store)?),
    };
    let base = web.source.open(io, io.picked(), Role::Model, web.store)?;
    Ok((Sources { base, adapter }, options, offered))
}

async fn load_model(options_json: &str, io: &JsIo, on_event: &Function) -> Result<Model> {
    let (mut sources, options, _) = open(options_json, io)?;
    let mut tell = |event: engine::LoadEvent| {
        // A page whose listener throws wants no more.
        let heard = on_event.call1(&JsValue::NULL, &event.to_json().to_string().into());
        heard.is_ok_and(|go_on| go_on.as_bool() != Some(false))
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
    pub async fn generate(&mut self, request_json: String, on_part: Function) -> Thrown<String> {
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
    pub async fn measure(&mut self, rows: Vec<usize>, rounds: usize) -> Thrown<String> {
        self.model.measure_rows_json(&rows, rounds).await.map(|table| table.to_string()).map_err(|e| to_js(&e))
    }

    /// [`engine::Model::logits`] as values `[rows, V]`, a draft block's rows behind the tokens': how tests hold this module's
    /// arithmetic against golden vectors.
    ///
    /// # Errors
    /// `{ code, message }`, by [`engine::Model::logits`].
    pub async fn logits(&mut self, tokens: Vec<u32>, draft_width: Option<usize>) -> Thrown<Float32Array> {
        let rows = self.model.logits(&tokens, draft_width).await.map_err(|e| to_js(&e))?;
        let values: Vec<f32> = rows.causal.into_iter().chain(rows.draft.into_iter().flatten()).flatten().collect();
        Ok(Float32Array::from(values.as_slice()))
    }

    /// Frees the model, on the device too.
    pub fn dispose(self) {
        drop(self);
    }
}
