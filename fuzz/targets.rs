//! What is fuzzed: one function for each parser of outside data, from the bytes of a file to a value or a typed error.
//!
//! Shared by the coverage-guided runs (`cargo fuzz`, in this folder) and by `tests/fuzz.rs`, which mutates the same corpus
//! for a fixed number of rounds on any stable compiler. A panic is a failure, and so is an allocation that the input does
//! not justify: [`run`] looks at the peak that [`Counting`] counted.
//!
//! Inputs of several files are written `~~~ NAME`, a newline, the file's bytes, a newline, and so on.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use forecall::fetch::locator::{Listing, Locator};
use forecall::fetch::store::{self, StoredListing};
use forecall::model::load::{AdapterFrom, LoadOptions, Sources, load_checkpoint, stream_weights};
use forecall::model::program::{MatrixId, VectorId};
use forecall::model::{adapter, config, fields, forward};
use forecall::text::written_out::{self, Marked};
use forecall::text::{ChatRequest, ChatTemplate, Detokenizer, DetokenizerOptions, Tokenizer, TokenizerConfig};
use forecall::weights::WeightSink;
use forecall::weights::index::TensorIndex;
use forecall::weights::packed::{Format, PackedRows, ScaleFormat};
use forecall::weights::plan::PlainFormat;
use forecall::weights::quantization::Quantization;
use forecall::weights::safetensors_header;
use forecall::weights::source::ByteSource;
use forecall::weights::stored_block::{self, BlobReader};
use pollster::block_on;

/// A parser to fuzz.
pub struct Target {
    /// As corpus and dictionary are named.
    pub name: &'static str,
    /// Feeds it.
    pub parse: fn(&[u8]),
    /// Bytes it may hold at most: so many, and so many more for each byte of input.
    pub memory: (usize, usize),
}

/// All of them.
pub const TARGETS: [Target; 13] = [
    Target { name: "safetensors_header", parse: header, memory: (1 << 20, 64) },
    Target { name: "shard_index", parse: shard_index, memory: (1 << 20, 128) },
    // A thousand layers, which take a few kilobytes each, are said in a few bytes.
    Target { name: "config", parse: model_config, memory: (32 << 20, 64) },
    Target { name: "quantization", parse: quantization, memory: (1 << 20, 128) },
    // A regular expression of a few bytes may compile to megabytes; the library bounds it.
    Target { name: "tokenizer", parse: tokenizer, memory: (128 << 20, 1024) },
    Target { name: "tokenizer_config", parse: tokenizer_config, memory: (1 << 20, 64) },
    // A template is a program; what it may make is bounded at 32 MB, of which some is held twice and more.
    Target { name: "chat_template", parse: chat_template, memory: (256 << 20, 64) },
    Target { name: "adapter", parse: draft_adapter, memory: (2 << 20, 128) },
    Target { name: "checkpoint", parse: checkpoint, memory: (32 << 20, 256) },
    Target { name: "hub_listing", parse: hub_listing, memory: (1 << 20, 128) },
    Target { name: "store_manifest", parse: store_manifest, memory: (1 << 20, 128) },
    Target { name: "store_resume", parse: store_resume, memory: (1 << 20, 128) },
    Target { name: "stored_block", parse: stored_blob, memory: (1 << 20, 8) },
];

/// Runs one target on one input and checks the memory it took.
///
/// # Panics
/// If the parser does, or if it took more than the input justifies.
pub fn run(target: &Target, input: &[u8]) {
    let before = HELD.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    (target.parse)(input);
    let took = PEAK.load(Ordering::Relaxed).saturating_sub(before);
    let (fixed, each) = target.memory;
    assert!(took <= fixed + each * input.len(), "{} held {took} bytes for an input of {}", target.name, input.len());
}

/// Runs the target of that name.
///
/// # Panics
/// As [`run`].
pub fn run_named(name: &str, input: &[u8]) {
    TARGETS.iter().filter(|target| target.name == name).for_each(|target| run(target, input));
}

/// Counts what is allocated. For `#[global_allocator]`.
pub struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: hands everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(held, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// The files of an input.
fn files(input: &[u8]) -> BTreeMap<String, Vec<u8>> {
    const MARK: &[u8] = b"~~~ ";
    let mut files = BTreeMap::new();
    let mut rest = input;
    while let Some(after) = rest.strip_prefix(MARK) {
        let Some(line) = after.iter().position(|b| *b == b'\n') else { break };
        let (name, body) = (after.get(..line).unwrap_or_default(), after.get(line + 1..).unwrap_or_default());
        let end = (0..body.len()).find(|at| body.get(*at..).is_some_and(|b| b.starts_with(b"\n~~~ "))).unwrap_or(body.len());
        files.insert(String::from_utf8_lossy(name).into_owned(), body.get(..end).unwrap_or_default().to_vec());
        rest = body.get(end + 1..).unwrap_or_default();
    }
    files
}

/// Files in memory, which is all a parser may ask for.
struct Files(BTreeMap<String, Vec<u8>>);

impl ByteSource for Files {
    async fn size(&mut self, file: &str) -> forecall::Result<Option<u64>> {
        Ok(self.0.get(file).map(|f| f.len() as u64))
    }

    async fn read(&mut self, file: &str, range: Range<u64>) -> forecall::Result<Vec<u8>> {
        let bytes = self.0.get(file).map(Vec::as_slice).unwrap_or_default();
        assert!(range.start <= range.end && range.end <= bytes.len() as u64, "{file}: asked for {range:?} of {}", bytes.len());
        Ok(bytes[range.start as usize..range.end as usize].to_vec())
    }
}

fn header(input: &[u8]) {
    let size = input.len() as u64;
    for size in [size, size * 1000, u64::MAX] {
        if let Ok(tensors) = safetensors_header::parse_header("f", input, size) {
            let data: u64 = tensors.values().map(|t| t.bytes.end - t.bytes.start).sum();
            assert!(data <= size && tensors.values().all(|t| t.bytes.end <= size));
        }
    }
    let mut source = Files(BTreeMap::from([("f".to_owned(), input.to_vec())]));
    let read = block_on(safetensors_header::read_header(&mut source, "f", size));
    assert_eq!(read.ok(), safetensors_header::parse_header("f", input, size).ok());
}

fn shard_index(input: &[u8]) {
    if let Ok(index) = block_on(TensorIndex::checkpoint(&mut Files(files(input)))) {
        assert!(index.tensors.values().all(|(file, _)| *file < index.files.len()));
    }
}

fn model_config(input: &[u8]) {
    let files = files(input);
    let Some(bytes) = files.get("config.json") else { return };
    if let Ok(parsed) = config::parse(bytes, files.get("generation_config.json").map(Vec::as_slice)) {
        assert!(parsed.arch.vocab_size > 0 && parsed.arch.num_attention_heads.is_multiple_of(parsed.arch.num_key_value_heads));
        let program = forward::build(parsed.arch, None);
        assert!(!program.ops.is_empty());
    }
}

fn quantization(input: &[u8]) {
    let Ok(map) = fields::parse_object("config.json", input) else { return };
    if let Ok(Some(found)) = Quantization::from_config(&fields::Fields::new("config.json", &map)) {
        assert!(matches!(found.default.bits, 4 | 8) && matches!(found.default.group, 32 | 64 | 128));
    }
}

fn hub_listing(input: &[u8]) {
    if let Ok(listing) = Listing::parse("o/m", input) {
        let stored = StoredListing::from(&listing);
        assert_eq!(Listing::from(&stored), listing);
        let url = Locator::parse("o/m", None, None).unwrap().file_url("a b", Some(&listing.commit));
        assert!(url.bytes().all(|c| c.is_ascii_graphic()), "{url}");
    }
}

fn store_manifest(input: &[u8]) {
    if let Some(manifest) = store::read_manifest(input) {
        let again = store::read_manifest(&serde_json::to_vec(&manifest).unwrap());
        assert_eq!(again.as_ref(), Some(&manifest));
        let _ = manifest.listing.as_ref().map(Listing::from);
    }
}

fn store_resume(input: &[u8]) {
    let _ = store::read_resume(input);
    // Damage is seen by the sum; what lies behind it must hold all the same.
    if let Some(points) = store::read_resume(&stored_block::seal(input)) {
        assert_eq!(store::read_resume(&store::write_resume(&points)), Some(points));
    }
}

fn stored_blob(input: &[u8]) {
    let _ = stored_block::unseal(input);
    // Damage is seen by the sum; what lies behind it must hold all the same.
    let sealed = stored_block::seal(input);
    let Some(mut reader) = BlobReader::new(&sealed) else { panic!("a sealed blob is whole") };
    if let Some(rows) = reader.matrix(Format::Affine { bits: 4, group: 32, scale: ScaleFormat::F16 }, 8, 5, 40) {
        assert_eq!((rows.data.len(), rows.scales.len()), (2 * 8 * 4, 2 * 8));
        let _ = reader.vector(3);
    }
}

fn tokenizer(input: &[u8]) {
    let Ok(tokenizer) = Tokenizer::from_json(input) else { return };
    let tokenizer = Arc::new(tokenizer);
    let texts = ["", "ab é <s> 12", " \n\t a-b  c\u{301}👩‍👧", "<|im_start|>user\nhello<|im_end|>", "aaaaaaaaaaaaaaaaaaaaaaab"];
    for text in texts {
        // Its guard against panics of the library does not exist in a browser.
        let no_panic = |said: String| assert!(!said.contains("library failed"), "{said}");
        match tokenizer.encode(text, true) {
            Err(error) => no_panic(error.to_string()),
            Ok(ids) => {
                if let Err(error) = tokenizer.decode(&ids, false) {
                    no_panic(error.to_string());
                }
                let options = DetokenizerOptions { skip_special_tokens: true, stop: vec!["ab".to_owned()] };
                let Ok(mut stream) = Detokenizer::new(tokenizer.clone(), options) else { continue };
                if let Err(error) = stream.push(&ids).and_then(|_| stream.finish()) {
                    no_panic(error.to_string());
                }
            }
        }
    }
    for ids in [&[0, 3, 2, 9, u32::MAX][..], &[1; 40], &[]] {
        if let Err(error) = tokenizer.decode(ids, true) {
            assert!(!error.to_string().contains("library failed"), "{error}");
        }
    }
}

fn tokenizer_config(input: &[u8]) {
    let Ok(config) = TokenizerConfig::from_json(input) else { return };
    if let Some(template) = ChatTemplate::new(None, &config) {
        let _ = template.render(&ChatRequest::user("hello"));
    }
}

fn chat_template(input: &[u8]) {
    let files = files(input);
    let json = |name: &str| files.get(name).and_then(|bytes| serde_json::from_slice::<serde_json::Value>(bytes).ok());
    let config = files.get("tokenizer_config.json").and_then(|bytes| TokenizerConfig::from_json(bytes).ok()).unwrap_or_default();
    let jinja = files.get("chat_template.jinja").map(Vec::as_slice);
    let Some(template) = ChatTemplate::new(jinja, &config) else { return };
    let messages = match json("messages.json") {
        Some(serde_json::Value::Array(messages)) => messages,
        _ => ChatRequest::user("hello").messages,
    };
    let mut request = ChatRequest::new(messages);
    if let Some(serde_json::Value::Object(variables)) = json("variables.json") {
        request.variables = variables;
    }
    if let Ok(Marked { text, mark }) = written_out::render(&template, &request, &BYTES)
        // A token takes many times its bytes while it is made.
        && text.len() < 1 << 16
    {
        let ids = match mark {
            None => BYTES.encode(&text, false),
            Some(mark) => BYTES.encode_marked(&text, mark),
        };
        let plain = text.replace(|c| Some(c) == mark, "");
        assert_eq!(ids.and_then(|ids| BYTES.decode(&ids, false)), Ok(plain), "bytes are never lost");
    }
}

/// A tokenizer of bytes and two special tokens, `<|end|>` and `<|fim_middle|>`.
static BYTES: LazyLock<Tokenizer> = LazyLock::new(|| {
    Tokenizer::from_json(include_bytes!("../tests/golden/tiny-setdlm-trained/tokenizer.json")).expect("a tokenizer of the tests")
});

/// The model that adapters are read for: two layers of four.
const ADAPTED: &str = r#"{"model_type": "llama", "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2, "vocab_size": 7, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5}"#;

fn draft_adapter(input: &[u8]) {
    let mut files = Files(files(input));
    let Some(bytes) = files.0.get(adapter::CONFIG).cloned() else { return };
    let Ok(Some(index)) = block_on(TensorIndex::single(&mut files, adapter::WEIGHTS)) else { return };
    let Ok(base) = config::parse(ADAPTED.as_bytes(), None) else { panic!("the model above is valid") };
    if let Ok(adapter) = adapter::parse(&bytes, &index, &base.arch, base.family) {
        assert!(!forward::build(base.arch, Some(&adapter.spec)).ops.is_empty());
    }
}

/// Counts what comes.
#[derive(Default)]
struct Sink {
    rows: BTreeMap<MatrixId, usize>,
    vectors: usize,
}

impl WeightSink for Sink {
    fn matrix(&mut self, id: MatrixId, rows: PackedRows) -> forecall::Result<()> {
        let next = self.rows.entry(id).or_default();
        assert_eq!(rows.first_row, *next);
        *next += rows.n;
        Ok(())
    }

    fn vector(&mut self, _: VectorId, _: Vec<f32>) -> forecall::Result<()> {
        self.vectors += 1;
        Ok(())
    }
}

fn checkpoint(input: &[u8]) {
    let base = Files(files(input));
    let mut sources = Sources { base, adapter: AdapterFrom::Auto };
    for plain in [PlainFormat::Auto, PlainFormat::Affine { bits: 4, group: 32 }] {
        let options = LoadOptions { plain };
        let Ok(loaded) = block_on(load_checkpoint(&mut sources, &options)) else { return };
        let mut sink = Sink::default();
        if block_on(stream_weights(&mut sources, &loaded, &mut sink, &mut |_| Ok(()))).is_ok() {
            assert!(sink.rows.len() == loaded.program.matrices.len() && sink.vectors == loaded.program.vectors.len());
        }
    }
}
