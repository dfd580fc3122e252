//! Loading a checkpoint: configs and headers first, from which everything about the model is known (architecture, forward
//! pass, the format of every matrix); then the weights, streamed in batches of a few megabytes.
//!
//! Waits for nothing but its [`ByteSource`].

use std::collections::BTreeSet;

use super::adapter::{self, Adapter};
use super::arch::{DiffusionRules, Mask};
use super::config::{self, ModelConfig};
use super::families::family_of_tensors;
use super::fields::{MAX_JSON_BYTES, parse_object};
use super::forward;
use super::names::{self, Names};
use super::nested;
use super::program::{Origin, Program, Source};
use crate::error::{Error, Result};
use crate::weights::WeightSink;
use crate::weights::index::TensorIndex;
use crate::weights::packed::Format;
use crate::weights::plan::{Found, Lookup, PlainFormat, PlannedFile, WeightPlan};
use crate::weights::quantization::Quantization;
use crate::weights::source::{ByteSource, Traffic, Warning, read_exactly, read_small};

/// Folders beside the weights in which a draft adapter is looked for, in this order.
pub const ADAPTER_FOLDERS: [&str; 2] = ["linear_spec_lora/", "draft_adapter/"];

/// Where the draft adapter comes from.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum AdapterFrom<S> {
    /// A folder of [`ADAPTER_FOLDERS`] beside the weights, if there is one.
    #[default]
    Auto,
    /// Nowhere: the model runs without.
    None,
    /// A source of its own.
    Source(S),
}

/// A checkpoint's files and its adapter's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sources<S> {
    /// The checkpoint.
    pub base: S,
    /// The draft adapter.
    pub adapter: AdapterFrom<S>,
}

impl<S: ByteSource> Sources<S> {
    async fn read(&mut self, file: &PlannedFile, range: std::ops::Range<u64>) -> Result<Vec<u8>> {
        read_exactly(self.of(file.origin), &file.name, range).await
    }

    /// Whether what is of `origin` has a source of its own.
    fn is_apart(&self, origin: Origin) -> bool {
        matches!((&self.adapter, origin), (AdapterFrom::Source(_), Origin::Adapter))
    }

    /// The source of what is of `origin`.
    fn of(&mut self, origin: Origin) -> &mut S {
        match (&mut self.adapter, origin) {
            (AdapterFrom::Source(source), Origin::Adapter) => source,
            _ => &mut self.base,
        }
    }

    /// Tells each source the steps that are its own.
    async fn begin(&mut self, plan: &WeightPlan) -> Result<()> {
        let (mut base, adapter) = plan.steps();
        match &mut self.adapter {
            AdapterFrom::Source(source) => source.begin(&adapter).await?,
            AdapterFrom::Auto | AdapterFrom::None => base.extend(adapter),
        }
        self.base.begin(&base).await
    }

    /// What the sources have to tell.
    pub fn warnings(&mut self) -> Vec<Warning> {
        let mut warnings = self.base.warnings();
        if let AdapterFrom::Source(source) = &mut self.adapter {
            warnings.extend(source.warnings());
        }
        warnings
    }

    /// What the sources count of their networks.
    #[must_use]
    pub fn traffic(&self) -> Vec<std::rc::Rc<Traffic>> {
        let adapter = match &self.adapter {
            AdapterFrom::Source(source) => source.traffic(),
            AdapterFrom::Auto | AdapterFrom::None => None,
        };
        self.base.traffic().into_iter().chain(adapter).collect()
    }
}

/// How to load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LoadOptions {
    /// How plain weights are kept; quantised ones stay as they are.
    pub plain: PlainFormat,
}

/// How much of the weights was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightsRead {
    /// Bytes read of `total`.
    pub bytes: u64,
    /// Bytes in all.
    pub total: u64,
}

/// Is told of progress; an error it returns (such as [`Error::Aborted`]) stops the loading.
pub type Watch<'a> = dyn FnMut(WeightsRead) -> Result<()> + 'a;

/// The files beside the weights that other rooms read, as they came.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SideFiles {
    /// `config.json`.
    pub config: Vec<u8>,
    /// `generation_config.json`.
    pub generation_config: Option<Vec<u8>>,
    /// `tokenizer.json`.
    pub tokenizer: Option<Vec<u8>>,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<Vec<u8>>,
    /// `chat_template.jinja`.
    pub chat_template: Option<Vec<u8>>,
}

/// A checkpoint of which everything is known but the weights.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    /// The forward pass; its `arch` has the sizes.
    pub program: Program,
    /// What the config says of quantisation.
    pub quantization: Option<Quantization>,
    /// The draft adapter, if there is one.
    pub adapter: Option<Adapter>,
    /// Files for other rooms.
    pub files: SideFiles,
    /// How the weights will be read.
    pub weights: WeightPlan,
}

impl Checkpoint {
    /// The format of each matrix, by [`super::program::MatrixId`].
    #[must_use]
    pub fn formats(&self) -> &[Format] {
        &self.weights.formats
    }

    /// Bytes of all packed matrices and vectors.
    #[must_use]
    pub fn packed_bytes(&self) -> u64 {
        let matrices = self.program.matrices.iter().zip(self.formats());
        // In 64 bits before multiplying: a page's module has 32, and a matrix may have more bytes than those count.
        let matrices: u64 = matrices.map(|(m, f)| m.n.next_multiple_of(8) as u64 * f.bytes_per_row(m.k) as u64).sum();
        matrices + self.program.vectors.iter().map(|v| 4 * v.n as u64).sum::<u64>()
    }
}

/// Reads configs and headers.
///
/// # Errors
/// [`Error::Fetch`], [`Error::BadConfig`], [`Error::BadWeights`], [`Error::Unsupported`], each naming file and field or tensor.
pub async fn load_checkpoint<S: ByteSource>(sources: &mut Sources<S>, options: &LoadOptions) -> Result<Checkpoint> {
    check_options(options)?;
    let base = &mut sources.base;
    let config = read_small(base, "config.json", MAX_JSON_BYTES).await?;
    let config = config.ok_or_else(|| {
        let missing = || {
            Error::Fetch("the checkpoint has no config.json; give the folder that holds it, or pick that folder's files".into())
        };
        base.why_absent("config.json").unwrap_or_else(missing)
    })?;
    let mut files = SideFiles { config, ..SideFiles::default() };
    files.generation_config = read_small(base, "generation_config.json", MAX_JSON_BYTES).await?;
    files.tokenizer = read_small(base, "tokenizer.json", MAX_JSON_BYTES).await?;
    files.tokenizer_config = read_small(base, "tokenizer_config.json", MAX_JSON_BYTES).await?;
    files.chat_template = read_small(base, "chat_template.jinja", MAX_JSON_BYTES).await?;

    let generation_config = files.generation_config.as_deref();
    let by_config = config::parse(&files.config, generation_config);
    let base_index = match (TensorIndex::checkpoint(base).await, &by_config) {
        (Ok(index), _) => index,
        // The config was read first; what is wrong with it is told first.
        (Err(_), Err(error)) => return Err(error.clone()),
        (Err(error), Ok(_)) => return Err(error),
    };
    let flat = nested::flatten(&files.config, &base_index)?;
    let config = flat.as_deref().unwrap_or(&files.config);
    let by_tensors = family_of_tensors(base_index.tensors.keys().map(String::as_str));
    let ModelConfig { mut arch, family, quantization } = match (by_tensors, &flat) {
        (None, None) => by_config?,
        (known, _) => config::parse_as(known, config, generation_config)?,
    };
    if let (None, Some(token)) = (arch.mask_token_id, family.mask_token) {
        arch.mask_token_id = Some(mask_token(&files, token, arch.vocab_size)?);
    }
    if let (None, Some(DiffusionRules { only: true, .. })) = (arch.mask_token_id, &arch.diffusion) {
        return Err(Error::BadConfig(format!(
            "config.json: `mask_token_id` is missing, and a model of type {} does nothing but fill masks; expected an id below \
             `vocab_size` = {}",
            arch.model_type, arch.vocab_size
        )));
    }
    let names = family.names.resolve(|name| base_index.tensors.contains_key(name))?;
    if family.head_if_present {
        arch.tie_word_embeddings = !names.has_head();
    }
    if !names.has_head() && !arch.tie_word_embeddings {
        return Err(Error::BadWeights(format!(
            "the checkpoint has no output head (tensor {}), and config.json does not set `tie_word_embeddings`",
            family.names.head.iter().map(|h| format!("`{h}.weight`")).collect::<Vec<_>>().join(", ")
        )));
    }

    let found = find_adapter(sources).await?;
    let mut adapter_index = TensorIndex::default();
    let mut adapter = None;
    if let Some((config, index)) = found {
        let parsed = adapter::parse(&config, &index, &arch, family)?;
        arch.mask_token_id = parsed.mask_token_id.or(arch.mask_token_id);
        (adapter, adapter_index) = (Some(parsed), index);
    }
    let program = forward::build(arch, adapter.as_ref().map(|a| &a.spec));
    check_mask(&program, &program.arch.eos_token_ids)?;
    let planned = |origin, index: &TensorIndex| -> Vec<_> {
        index.files.iter().map(|name| PlannedFile { origin, name: name.clone() }).collect()
    };
    let mut all_files = planned(Origin::Base, &base_index);
    all_files.extend(planned(Origin::Adapter, &adapter_index));
    let finder = Finder {
        base: &base_index,
        names: &names,
        quantization: quantization.as_ref(),
        adapter: adapter.as_ref(),
        adapter_index: &adapter_index,
    };
    finder.check_all_used(&program)?;
    let weights = WeightPlan::new(&program, &finder, all_files, options.plain)?;
    Ok(Checkpoint { program, quantization, adapter, files, weights })
}

/// Reads the weights and hands them to `sink`: every matrix in ascending chunks of whole tiles, every vector whole, in the
/// order they lie in the files. At most a batch's bytes and what they pack to are held at a time. What a source has kept of
/// another time is not read again.
///
/// # Errors
/// As [`load_checkpoint`], and whatever `sink` and `watch` return.
pub async fn stream_weights<S: ByteSource>(
    sources: &mut Sources<S>,
    checkpoint: &Checkpoint,
    sink: &mut impl WeightSink,
    watch: &mut Watch<'_>,
) -> Result<()> {
    let plan = &checkpoint.weights;
    let mut progress = WeightsRead { bytes: 0, total: plan.total_bytes };
    sources.begin(plan).await?;
    watch(progress)?;
    let mut steps = [0; 2];
    for batch in &plan.batches {
        let owner = usize::from(sources.is_apart(batch.origin));
        let step = steps[owner];
        steps[owner] += 1;
        let stored = sources.of(batch.origin).stored(step).await?;
        let unpacked = match stored {
            Some(blob) => plan.unpack(batch, &blob, sink)?,
            None => false,
        };
        let mut made = None;
        if !unpacked {
            let mut bytes = Vec::with_capacity(batch.reads.len());
            for (file, range) in &batch.reads {
                let file = plan.files.get(*file).ok_or_else(|| Error::Internal("a plan reads a file it does not list".into()))?;
                bytes.push(sources.read(file, range.clone()).await?);
            }
            match sources.of(batch.origin).stores() {
                true => made = Some(plan.pack_and_keep(batch, &bytes, sink)?),
                false => plan.pack(batch, &bytes, sink)?,
            }
        }
        sources.of(batch.origin).end_step(step, made).await?;
        progress.bytes += batch.reads.iter().map(|(_, range)| range.end - range.start).sum::<u64>();
        watch(progress)?;
    }
    sources.base.end().await?;
    match &mut sources.adapter {
        AdapterFrom::Source(source) => source.end().await,
        AdapterFrom::Auto | AdapterFrom::None => Ok(()),
    }
}

/// The id of the special token `text` in the tokenizer, for a config that names no `mask_token_id`.
fn mask_token(files: &SideFiles, text: &str, vocab_size: usize) -> Result<u32> {
    let missing = |found: &str| {
        Error::BadConfig(format!(
            "config.json: `mask_token_id` is missing, and the tokenizer {found}; expected an id below `vocab_size` = {vocab_size}, or \
             the token \"{text}\" among the `added_tokens` of tokenizer.json"
        ))
    };
    let tokenizer = files.tokenizer.as_deref().ok_or_else(|| missing("is not there either"))?;
    let map = parse_object("tokenizer.json", tokenizer)?;
    let tokens = map.get("added_tokens").and_then(serde_json::Value::as_array);
    let named = tokens.into_iter().flatten().find(|token| token.get("content").and_then(serde_json::Value::as_str) == Some(text));
    let id = named.and_then(|token| token.get("id")).and_then(serde_json::Value::as_u64);
    match id.map(|id| (id, usize::try_from(id))) {
        None => Err(missing(&format!("has no \"{text}\""))),
        Some((id, Ok(at))) if at < vocab_size => Ok(id as u32),
        Some((id, _)) => Err(missing(&format!("gives \"{text}\" the id {id}"))),
    }
}

/// Refuses a mask token that ends texts: since no row chooses it, texts would not end.
///
/// # Errors
/// [`Error::BadConfig`].
pub(crate) fn check_mask(program: &Program, end_ids: &[u32]) -> Result<()> {
    match program.mask {
        Some(Mask::Token(id)) if end_ids.contains(&id) => Err(Error::BadConfig(format!(
            "the mask token {id} (`mask_token_id` of config.json, or of `draft` in {}) is an end id too; a mask is never chosen, so \
             texts would not end there; expected another token",
            adapter::CONFIG
        ))),
        _ => Ok(()),
    }
}

fn check_options(options: &LoadOptions) -> Result<()> {
    match options.plain {
        PlainFormat::Affine { bits, group } if !matches!((bits, group), (4 | 8, 32 | 64 | 128)) => Err(Error::InvalidOption(
            format!("quantising to {bits} bits in groups of {group}; expected 4 or 8 bits and groups of 32, 64 or 128"),
        )),
        _ => Ok(()),
    }
}

/// The adapter's config and tensors, its file named as the source it comes from names it.
async fn find_adapter<S: ByteSource>(sources: &mut Sources<S>) -> Result<Option<(Vec<u8>, TensorIndex)>> {
    match &mut sources.adapter {
        AdapterFrom::None => Ok(None),
        AdapterFrom::Source(source) => {
            let config = read_small(source, adapter::CONFIG, MAX_JSON_BYTES).await?;
            let config = config.ok_or_else(|| {
                let missing = || Error::Fetch(format!("the draft adapter has no {}", adapter::CONFIG));
                source.why_absent(adapter::CONFIG).unwrap_or_else(missing)
            })?;
            read_adapter(source, "", config).await.map(Some)
        }
        AdapterFrom::Auto => {
            for folder in ADAPTER_FOLDERS {
                let file = format!("{folder}{}", adapter::CONFIG);
                if let Some(config) = read_small(&mut sources.base, &file, MAX_JSON_BYTES).await? {
                    return read_adapter(&mut sources.base, folder, config).await.map(Some);
                }
            }
            Ok(None)
        }
    }
}

async fn read_adapter<S: ByteSource>(source: &mut S, folder: &str, config: Vec<u8>) -> Result<(Vec<u8>, TensorIndex)> {
    let file = format!("{folder}{}", adapter::WEIGHTS);
    let index = TensorIndex::single(source, &file).await?;
    let index = index.ok_or_else(|| Error::Fetch(format!("{file}: no such file; the adapter's config is beside it")))?;
    Ok((config, index))
}

struct Finder<'a> {
    base: &'a TensorIndex,
    names: &'a Names,
    quantization: Option<&'a Quantization>,
    adapter: Option<&'a Adapter>,
    adapter_index: &'a TensorIndex,
}

impl Lookup for Finder<'_> {
    fn find(&self, origin: Origin, canonical: &str) -> Result<Found<'_>> {
        let offset = self.base.files.len();
        let (name, index, offset, factor) = match origin {
            Origin::Base => (self.names.checkpoint(canonical), self.base, 0, 1.0),
            Origin::Adapter => {
                let tensor = self.adapter.and_then(|a| a.tensors.get(canonical));
                let (name, factor) = tensor.map_or((canonical, 1.0), |(name, factor)| (name.as_str(), *factor));
                (name.to_owned(), self.adapter_index, offset, factor)
            }
        };
        let get = |name: &str| index.tensors.get(name).map(|(file, info)| (file + offset, info));
        let Some((file, info)) = get(&name) else {
            let whose = if origin == Origin::Base { "the checkpoint" } else { "the draft adapter" };
            return Err(Error::BadWeights(format!("{whose} has no tensor `{name}`")));
        };
        let module = name.strip_suffix(".weight");
        let affine = module.and_then(|m| Some([get(&format!("{m}.scales"))?, get(&format!("{m}.biases"))?]));
        Ok(Found { name, file, info, affine, factor })
    }

    fn quantization(&self) -> Option<&Quantization> {
        self.quantization
    }
}

impl Finder<'_> {
    /// Refuses tensors inside the layers that the program does not read: with them the model would be another.
    fn check_all_used(&self, program: &Program) -> Result<()> {
        let sources = program.matrices.iter().flat_map(|m| &m.sources).chain(program.vectors.iter().flat_map(|v| &v.sources));
        let used: BTreeSet<String> = sources
            .filter_map(|s| match s {
                Source::Tensor { origin: Origin::Base, name, .. } => Some(self.names.checkpoint(name)),
                _ => None,
            })
            .collect();
        for name in self.base.tensors.keys() {
            let module = name.strip_suffix(".scales").or(name.strip_suffix(".biases"));
            let weight = module.map_or_else(|| name.clone(), |m| format!("{m}.weight"));
            if self.names.in_layers(name) && !names::ignored(name) && !used.contains(&weight) {
                return Err(Error::BadWeights(format!(
                    "the checkpoint holds tensor `{name}`, which a model of type {} with {} layers and this config.json does not use",
                    program.arch.model_type,
                    program.arch.layers.len()
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "load_tests.rs"]
mod tests;
