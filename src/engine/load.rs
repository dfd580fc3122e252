//! From a checkpoint's files to a model that runs.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use super::calls::{Calls, Runs};
use super::info::Facts;
use super::{Model, choose, preflight};
#[cfg(not(target_arch = "wasm32"))]
use crate::cpu::reference::Reference;
use crate::cpu::{CpuModel, CpuOptions};
use crate::decode::ScheduleOptions;
use crate::decode::schedule::{Geometry, ModelCalls};
use crate::error::{Error, Result};
use crate::gpu::footprint::{Limits, footprint};
use crate::gpu::{DeviceOptions, Gpu, GpuModel, ModelOptions};
use crate::model::arch::ModelRules;
use crate::model::load::{self, Checkpoint, Sources};
use crate::text::Tokenizer;
use crate::text::chat_template::{ChatTemplate, TokenizerConfig};
use crate::weights::packed::Format;
use crate::weights::plan::PlainFormat;
use crate::weights::source::{ByteSource, Traffic, Warning};

/// What runs the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backend {
    /// The GPU where there is a real one, else the CPU.
    #[default]
    Auto,
    /// WebGPU (natively: Vulkan, Metal or D3D12 through the same shaders).
    Gpu,
    /// The production CPU path.
    Cpu,
    /// The f64 twins: the judge, slow.
    Reference,
}

impl std::str::FromStr for Backend {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Ok(match name {
            "auto" => Self::Auto,
            "webgpu" | "gpu" => Self::Gpu,
            "cpu" => Self::Cpu,
            "reference" => Self::Reference,
            _ => {
                return Err(Error::option(
                    "backend",
                    format!("unknown backend \"{name}\"; the backends are auto, webgpu, cpu and reference"),
                ));
            }
        })
    }
}

/// How values that are not quantised are stored: plain weights, and K/V. Sums are always f32. The f64 twins keep K/V in f64,
/// whatever is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// Weights that the checkpoint has in f32 stay f32, f16 and bf16 become f16; K/V are f32 if all weights are, else f16.
    /// From bf16 that rounds values below 6.1e-5 and cuts those beyond 65504, far from a language model's weights;
    /// [`Self::F32`] keeps all as they are.
    #[default]
    Auto,
    /// f32 weights and K/V.
    F32,
    /// f16 weights and K/V.
    F16,
}

impl std::str::FromStr for Precision {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Ok(match name {
            "auto" => Self::Auto,
            "f32" => Self::F32,
            "f16" => Self::F16,
            _ => {
                return Err(Error::option(
                    "precision",
                    format!("unknown precision \"{name}\"; the choices are auto, f32 and f16"),
                ));
            }
        })
    }
}

/// Affine groups that a plain checkpoint's weights are turned into while loading. Groups are 64 inputs wide, the last of a row
/// what is left; embedding and head take 8 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantize {
    /// 4 bits.
    Q4,
    /// 8 bits.
    Q8,
}

/// How to load. The default suits most callers.
#[derive(Debug, Clone, Copy, Default)]
pub struct LoadOptions {
    /// What runs the model.
    pub backend: Backend,
    /// How plain weights and K/V are stored.
    pub precision: Precision,
    /// Quantise a plain checkpoint while loading.
    pub quantize: Option<Quantize>,
    /// Positions the K/V cache holds; by default the smaller of the model's and 4096.
    pub context_length: Option<usize>,
    /// What a page knows of its GPU that the crate cannot see.
    pub gpu: DeviceOptions,
}

/// What loading is busy with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Configs, tokenizer and headers; counted in bytes from the network.
    Config,
    /// Weights that come from the network, in bytes of this loading.
    Download,
    /// Weights that are handed to the backend, in bytes of the checkpoint. Goes on side by side with the download.
    Upload,
    /// GPU pipelines; counted in pipelines.
    Compile,
    /// Done.
    Ready,
}

impl Phase {
    /// The name that events carry: `config`, `download`, `upload`, `compile`, `ready`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::Download => "download",
            Self::Upload => "upload",
            Self::Compile => "compile",
            Self::Ready => "ready",
        }
    }
}

/// How far loading is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// What it is busy with.
    pub phase: Phase,
    /// The file that bytes came from last.
    pub file: Option<String>,
    /// Bytes or pipelines done.
    pub done: u64,
    /// Bytes or pipelines in all; 0 while not known.
    pub total: u64,
}

/// What is told of loading.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoadEvent {
    /// How far it is.
    Progress(Progress),
    /// Something that does not stop it.
    Warning(Warning),
}

impl LoadEvent {
    fn progress(phase: Phase, done: u64, total: u64) -> Self {
        Self::Progress(Progress { phase, file: None, done, total })
    }

    /// The event as the npm package hears it: `{ phase, file, done, total }` or `{ warning: { code, message } }`.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        match self {
            Self::Progress(Progress { phase, file, done, total }) => {
                serde_json::json!({ "phase": phase.name(), "file": file, "done": done, "total": total })
            }
            Self::Warning(Warning { code, message }) => serde_json::json!({ "warning": { "code": code, "message": message } }),
        }
    }
}

impl fmt::Display for LoadEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Warning(warning) => f.write_str(&warning.message),
            Self::Progress(Progress { phase, done, total, .. }) => match phase {
                Phase::Download => write!(f, "fetching weights: {} of {} MB", done / 1_000_000, total / 1_000_000),
                Phase::Upload => write!(f, "loading weights: {} of {} MB", done / 1_000_000, total / 1_000_000),
                Phase::Compile => write!(f, "compiling pipelines: {done} of {total}"),
                Phase::Config => write!(f, "reading the checkpoint's configuration"),
                Phase::Ready => write!(f, "ready"),
            },
        }
    }
}

/// Tells a caller of progress, and hears whether to go on.
struct Teller<'a> {
    on_event: RefCell<&'a mut dyn FnMut(LoadEvent) -> bool>,
    traffic: Vec<Rc<Traffic>>,
    /// Bytes that were told of.
    told: Cell<u64>,
    /// Bytes that came before the weights, which are not counted among them.
    before: Cell<u64>,
}

impl Teller<'_> {
    fn tell(&self, event: LoadEvent) -> Result<()> {
        match (self.on_event.borrow_mut())(event) {
            true => Ok(()),
            false => Err(Error::Aborted("loading was stopped by its caller".into())),
        }
    }

    /// Tells of bytes that have come since the last time.
    fn look(&self, phase: Phase) -> Result<()> {
        let done = self.traffic.iter().map(|traffic| traffic.bytes()).sum();
        if done == self.told.replace(done) {
            return Ok(());
        }
        let expected: u64 = self.traffic.iter().map(|traffic| traffic.expected()).sum();
        // Some bytes may come twice.
        let (done, expected) = (done - self.before.get(), expected.max(done) - self.before.get());
        let total = if phase == Phase::Config { 0 } else { expected };
        let file = self.traffic.iter().map(|traffic| traffic.file()).rfind(|file| !file.is_empty());
        self.tell(LoadEvent::Progress(Progress { phase, file, done, total }))
    }

    /// Waits for `work`, telling of the bytes that come meanwhile. An unwilling caller ends it there.
    async fn watching<R>(&self, phase: Phase, work: impl Future<Output = Result<R>>) -> Result<R> {
        let mut work = std::pin::pin!(work);
        std::future::poll_fn(|context| {
            let polled = work.as_mut().poll(context);
            match self.look(phase) {
                Err(error) => Poll::Ready(Err(error)),
                Ok(()) => polled,
            }
        })
        .await
    }
}

impl Model {
    /// Loads a checkpoint. `on_event` is told of progress and stops the loading by returning `false`.
    ///
    /// # Errors
    /// [`Error::Fetch`], [`Error::BadConfig`], [`Error::BadWeights`], [`Error::BadTokenizer`] for what the files hold,
    /// [`Error::Unsupported`] and [`Error::OutOfMemory`] for what the device lacks, [`Error::Aborted`].
    pub async fn load<S: ByteSource>(
        sources: &mut Sources<S>,
        options: &LoadOptions,
        on_event: &mut dyn FnMut(LoadEvent) -> bool,
    ) -> Result<Self> {
        let teller = Teller {
            on_event: RefCell::new(on_event),
            traffic: sources.traffic(),
            told: Cell::default(),
            before: Cell::default(),
        };
        let tell = |event| teller.tell(event);
        tell(LoadEvent::progress(Phase::Config, 0, 0))?;
        let kept_as = kept_as(options);
        let reading = load::load_checkpoint(sources, &kept_as);
        let checkpoint = teller.watching(Phase::Config, reading).await?;
        let warn = |warnings: Vec<Warning>| warnings.into_iter().try_for_each(|warning| tell(LoadEvent::Warning(warning)));
        warn(sources.warnings())?;
        if options.quantize.is_some() && checkpoint.quantization.is_some() {
            let message = "the checkpoint is quantised already and stays as it is: quantising while loading is for plain weights";
            warn(vec![Warning { code: "quantized-already", message: message.into() }])?;
        }
        let context = context_length(&checkpoint, options.context_length)?;
        let files = &checkpoint.files;
        let tokenizer = files.tokenizer.as_deref().map(Tokenizer::from_json).transpose()?.map(Arc::new);
        let config = files.tokenizer_config.as_deref().map(TokenizerConfig::from_json).transpose()?.unwrap_or_default();
        let template = ChatTemplate::new(files.chat_template.as_deref(), &config);
        let end_ids = end_ids(&checkpoint, &config, tokenizer.as_deref());
        load::check_mask(&checkpoint.program, &end_ids)?;

        let half_cache = half_cache(&checkpoint, options.precision);
        let (mut calls, reason) = open(options, &checkpoint, context, half_cache).await?;
        // Before a weight is fetched.
        let kv_bytes = if half_cache { 2 } else { 4 };
        match &calls.on {
            Runs::Gpu(model) => {
                let limits = model.gpu().info().limits();
                footprint(&checkpoint.program, checkpoint.formats(), context, kv_bytes, limits)?;
            }
            _ => {
                preflight::check_cpu(&checkpoint, context, kv_bytes, cfg!(target_arch = "wasm32"))?;
            }
        }
        let mut handed_over =
            |progress: load::WeightsRead| tell(LoadEvent::progress(Phase::Upload, progress.bytes, progress.total));
        let streaming = load::stream_weights(sources, &checkpoint, &mut calls, &mut handed_over);
        teller.before.set(teller.told.get());
        teller.watching(Phase::Download, streaming).await?;
        warn(sources.warnings())?;
        if let Runs::Gpu(gpu) = &mut calls.on {
            gpu.ready().await?;
            let widths = usual_widths(&checkpoint.program.rules(), &gpu.geometry());
            let mut stopped = Ok(());
            gpu.prepare(&widths, |done, total| {
                if stopped.is_ok() {
                    stopped = tell(LoadEvent::progress(Phase::Compile, done as u64, total as u64));
                }
            })
            .await?;
            stopped?;
        }
        if let Runs::Cpu(cpu) = &mut calls.on {
            cpu.settle()?;
        }
        let facts = Facts::new(&checkpoint, &calls, context, half_cache, reason);
        let default = choose::Chosen::unmeasured(&checkpoint.program.rules());
        let mut model = Self { calls, program: checkpoint.program, tokenizer, template, end_ids, facts, default };
        model.default = model.choose_default().await?;
        tell(LoadEvent::progress(Phase::Ready, 1, 1))?;
        Ok(model)
    }
}

/// How weights are kept.
pub(super) fn kept_as(options: &LoadOptions) -> load::LoadOptions {
    let plain = match (options.quantize, options.precision) {
        (Some(Quantize::Q4), _) => PlainFormat::Affine { bits: 4, group: 64 },
        (Some(Quantize::Q8), _) => PlainFormat::Affine { bits: 8, group: 64 },
        (None, Precision::Auto) => PlainFormat::Auto,
        (None, Precision::F32) => PlainFormat::F32,
        (None, Precision::F16) => PlainFormat::F16,
    };
    load::LoadOptions { plain }
}

/// Whether K/V are stored in halves.
pub(super) fn half_cache(checkpoint: &Checkpoint, precision: Precision) -> bool {
    match precision {
        Precision::F32 => false,
        Precision::F16 => true,
        Precision::Auto => checkpoint.formats().iter().any(|f| *f != Format::F32),
    }
}

/// What there is of a GPU, `T` being the device or what is known of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Offer<T> {
    /// A GPU.
    Real(T),
    /// A software adapter, and its name: several times slower than the CPU path on the same cores.
    Software(T, String),
    /// None, and why.
    Missing(String),
}

impl<T> Default for Offer<T> {
    fn default() -> Self {
        Self::Missing("no WebGPU adapter was looked for".into())
    }
}

impl Offer<Gpu> {
    /// Looks for a GPU as loading does.
    ///
    /// # Errors
    /// Failures of a device that is there.
    pub async fn look(options: DeviceOptions) -> Result<Self> {
        match Gpu::open(options).await {
            Ok(gpu) if gpu.info().device_type == "software" => {
                let name = gpu.info().name.clone();
                Ok(Self::Software(gpu, name))
            }
            Ok(gpu) => Ok(Self::Real(gpu)),
            Err(Error::Unsupported(why)) => Ok(Self::Missing(why)),
            Err(error) => Err(error),
        }
    }

    /// What the device allows.
    #[must_use]
    pub fn limits(&self) -> Offer<Limits> {
        match self {
            Self::Real(gpu) => Offer::Real(gpu.info().limits()),
            Self::Software(gpu, name) => Offer::Software(gpu.info().limits(), name.clone()),
            Self::Missing(why) => Offer::Missing(why.clone()),
        }
    }
}

impl<T> Offer<T> {
    /// The GPU if `backend` takes it, `None` for the CPU; and why. The one place where that is decided.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if a GPU was asked for and there is none.
    pub(super) fn taken(self, backend: Backend) -> Result<(Option<T>, String)> {
        let asked = || "asked for".to_owned();
        match (backend, self) {
            (Backend::Cpu | Backend::Reference, _) => Ok((None, asked())),
            (Backend::Gpu, Self::Real(gpu) | Self::Software(gpu, _)) => Ok((Some(gpu), asked())),
            (Backend::Gpu, Self::Missing(why)) => Err(Error::Unsupported(why)),
            (Backend::Auto, Self::Real(gpu)) => Ok((Some(gpu), "there is a GPU".into())),
            (Backend::Auto, Self::Software(_, name)) => Ok((None, format!("the GPU adapter {name} is a software one"))),
            (Backend::Auto, Self::Missing(why)) => Ok((None, why)),
        }
    }
}

/// The backend, still without weights, and why it was chosen.
async fn open(options: &LoadOptions, checkpoint: &Checkpoint, context: u32, half_cache: bool) -> Result<(Calls, String)> {
    let program = || checkpoint.program.clone();
    let cpu = || Calls::from(Runs::Cpu(Box::new(CpuModel::new(program(), CpuOptions { context, half_cache }))));
    let found = match options.backend {
        #[cfg(not(target_arch = "wasm32"))]
        Backend::Reference => {
            let reference = Reference::new(program(), context);
            return Ok((Runs::Reference(Box::new(reference)).into(), "asked for".into()));
        }
        #[cfg(target_arch = "wasm32")]
        Backend::Reference => {
            return Err(Error::Unsupported("the reference backend is native only; use webgpu or cpu".into()));
        }
        Backend::Cpu => Offer::default(),
        // Not even opened: that takes a browser its time.
        Backend::Auto if options.gpu.web_software => {
            return Ok((cpu(), "the browser's WebGPU adapter is a software one".into()));
        }
        Backend::Auto | Backend::Gpu => Offer::look(options.gpu).await?,
    };
    Ok(match found.taken(options.backend)? {
        (Some(gpu), why) => {
            let model = GpuModel::new(&gpu, program(), ModelOptions { context, half_cache })?;
            (Runs::Gpu(Box::new(model)).into(), why)
        }
        (None, why) => (cpu(), why),
    })
}

/// Row counts of the calls that a default generation makes, for compiling ahead.
fn usual_widths(rules: &ModelRules, geometry: &Geometry) -> Vec<usize> {
    let most = ScheduleOptions::default().resolve(*rules, geometry).map_or(1, |resolved| resolved.decode_rows());
    (1..=most).collect()
}

/// Ids that end a text: those of the config and the generation config, and the tokenizer's own end token.
fn end_ids(checkpoint: &Checkpoint, config: &TokenizerConfig, tokenizer: Option<&Tokenizer>) -> Vec<u32> {
    let mut ids = checkpoint.program.arch.eos_token_ids.clone();
    let named = config.special_tokens.iter().filter(|(name, _)| name == "eos_token");
    ids.extend(named.filter_map(|(_, token)| tokenizer.and_then(|t| t.token_to_id(token))));
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// The default context, in positions.
const DEFAULT_CONTEXT: usize = 4096;

pub(super) fn context_length(checkpoint: &Checkpoint, asked: Option<usize>) -> Result<u32> {
    let most = checkpoint.program.arch.max_position_embeddings;
    let context = asked.unwrap_or(most.min(DEFAULT_CONTEXT));
    if context == 0 || context > most {
        return Err(Error::option(
            "context_length",
            format!("the context length is {context}; this model takes 1 to {most} positions"),
        ));
    }
    u32::try_from(context).map_err(|_| Error::option("context_length", format!("the context length {context} is out of range")))
}
