//! Loading from a network that behaves and from one that does not: the same model as from a folder, or a refusal that names
//! what is wrong; what is stored is right, or is not there.

mod checkpoints;
mod server;
mod synthetic;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use checkpoints::{golden_folder, ids};
use forecall::engine::{AdapterFrom, Backend, LoadEvent, LoadOptions, Model, Offer, Offered, Phase, Quantize, Sources};
use forecall::fetch::http_source::HttpOptions;
use forecall::fetch::locator::Locator;
use forecall::fetch::native::{FolderStore, UreqTransport};
use forecall::fetch::remote::{RemoteSource, Role};
use forecall::fetch::store::{BlobStore, StoreFailure};
use forecall::gpu::footprint::Limits;
use forecall::weights::source::{ByteSource, FolderSource};
use forecall::{Error, Result};
use pollster::block_on;
use serde_json::{Value, json};
use server::{Content, Reply, Request, Server};
use sha2::{Digest, Sha256};
use synthetic::Shape;

/// A folder that is gone with the value.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("loading-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    /// Files below it, by name, locks aside.
    fn files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path());
        let entries = entries.filter(|entry| !entry.ends_with(".locks"));
        let mut files: Vec<_> = entries.flat_map(|e| std::fs::read_dir(e).unwrap().map(|file| file.unwrap().path())).collect();
        files.sort();
        files
    }

    /// Blocks as they came.
    fn raw(&self) -> Vec<PathBuf> {
        self.files().into_iter().filter(|file| name_of(file).starts_with("raw-")).collect()
    }

    fn blocks(&self) -> Vec<PathBuf> {
        self.files().into_iter().filter(|file| name_of(file).starts_with("block-")).collect()
    }

    fn manifests(&self) -> Vec<Value> {
        self.files().iter().filter(|file| name_of(file) == "manifest.json").map(|file| checkpoints::json(file)).collect()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn name_of(file: &Path) -> String {
    file.file_name().unwrap().to_string_lossy().into_owned()
}

/// Files of a checkpoint by name.
type Files = BTreeMap<String, Content>;

const WEIGHTS: &str = "model.safetensors";

/// 41 MB in some batches, so that there is something to interrupt.
static BIG: LazyLock<Files> = LazyLock::new(|| big(1));

fn big_shape() -> Shape {
    Shape::llama(512, 3, 3072, 8000)
}

fn big(seed: u64) -> Files {
    files_of(&big_shape(), seed)
}

fn files_of(shape: &Shape, seed: u64) -> Files {
    let config = shape.config.to_string();
    [("config.json", config.into_bytes()), (WEIGHTS, shape.file(seed))]
        .into_iter()
        .map(|(name, bytes)| (name.to_owned(), Content::Bytes(Arc::new(bytes))))
        .collect()
}

fn golden(name: &str) -> Files {
    let folder = golden_folder(name);
    let mut files = Files::new();
    for part in ["", "draft_adapter/", "linear_spec_lora/"] {
        let Ok(entries) = std::fs::read_dir(folder.join(part)) else { continue };
        for file in entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_file()) {
            let bytes = std::fs::read(&file).unwrap();
            files.insert(format!("{part}{}", name_of(&file)), Content::from(bytes.as_slice()));
        }
    }
    files
}

fn bytes(content: &Content) -> &[u8] {
    match content {
        Content::Bytes(bytes) | Content::Padded(bytes, _) => bytes,
    }
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A hub's listing of `files` at `commit`, with the hash of those that end in safetensors.
fn listing(files: &Files, commit: &str) -> Value {
    let siblings: Vec<_> = files
        .iter()
        .map(|(name, content)| {
            let mut sibling = json!({ "rfilename": name, "size": content.len() });
            if name.ends_with(".safetensors") {
                sibling["lfs"] = json!({ "sha256": sha256(bytes(content)), "size": content.len() });
            }
            sibling
        })
        .collect();
    json!({ "sha": commit, "siblings": siblings })
}

/// What a well-behaved server answers: `files` below `/m/`, and as the repository `o/m` at branch `v1`.
fn serve(files: &Files, commit: &str, listing: &Value, request: &Request) -> Reply {
    if request.path == "/api/models/o/m/revision/v1?blobs=true" || request.path == "/api/models/o/m/revision/main?blobs=true" {
        return Reply::whole(&Content::from(listing.to_string().as_bytes()));
    }
    let hub = format!("/o/m/resolve/{commit}/");
    let name = request.path.strip_prefix("/m/").or(request.path.strip_prefix(&hub));
    match name.and_then(|name| files.get(name)) {
        Some(content) => Reply::ranged(request, content, &format!("\"{commit}\"")),
        None => Reply::status(404),
    }
}

fn server(files: &Files) -> Server {
    faulty(files, |_, reply| reply)
}

/// A server that does to each answer what `fault` does.
fn faulty(files: &Files, fault: impl Fn(&Request, Reply) -> Reply + Send + Sync + 'static) -> Server {
    let (files, listing) = (files.clone(), listing(files, "c0ffee"));
    Server::start(move |request| fault(request, serve(&files, "c0ffee", &listing, request)))
}

fn http_options() -> HttpOptions {
    HttpOptions { first_pause: Duration::from_millis(1), ..HttpOptions::default() }
}

type Remote<B = FolderStore> = RemoteSource<UreqTransport, B>;

fn remote<B: BlobStore>(location: &str, hub: Option<&str>, options: HttpOptions, store: Option<B>) -> Remote<B> {
    let locator = Locator::parse(location, None, hub).unwrap();
    RemoteSource::new(UreqTransport::new(Duration::from_secs(3)), location, locator, options, Role::Model, store)
}

fn url(server: &Server, store: Option<&Scratch>) -> Sources<Remote> {
    let base = remote(&format!("{}/m/", server.address), None, http_options(), store.map(|s| FolderStore::new(&s.0)));
    Sources { base, adapter: AdapterFrom::Auto }
}

fn hub(server: &Server, store: Option<&Scratch>) -> Sources<Remote> {
    let base = remote("o/m@v1", Some(&server.address), http_options(), store.map(|s| FolderStore::new(&s.0)));
    Sources { base, adapter: AdapterFrom::Auto }
}

/// What a model computes, and what was told while it was loaded.
#[derive(Debug)]
struct Loaded {
    logits: Vec<Vec<f32>>,
    phases: Vec<Phase>,
    warnings: Vec<&'static str>,
}

async fn loaded<S: ByteSource>(
    sources: &mut Sources<S>,
    quantize: Option<Quantize>,
    mut go_on: impl FnMut(&LoadEvent) -> bool,
) -> Result<Loaded> {
    let options = LoadOptions { backend: Backend::Cpu, quantize, context_length: Some(64), ..LoadOptions::default() };
    let (mut phases, mut warnings) = (Vec::new(), Vec::new());
    let model = Model::load(sources, &options, &mut |event| {
        match &event {
            LoadEvent::Progress(progress) if phases.last() != Some(&progress.phase) => phases.push(progress.phase),
            LoadEvent::Progress(_) => {}
            LoadEvent::Warning(warning) => warnings.push(warning.code),
        }
        go_on(&event)
    })
    .await;
    // A model is ready, or there is none.
    assert_eq!(phases.contains(&Phase::Ready), model.is_ok(), "{phases:?}");
    let logits = model?.logits(&[1, 5, 9, 3], None).await?.causal;
    Ok(Loaded { logits, phases, warnings })
}

fn load<S: ByteSource>(mut sources: Sources<S>, quantize: Option<Quantize>) -> Result<Loaded> {
    block_on(loaded(&mut sources, quantize, |_| true))
}

fn from_folder(files: &Files, quantize: Option<Quantize>) -> Vec<Vec<f32>> {
    let folder = Scratch::new();
    for (name, content) in files {
        let path = folder.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes(content)).unwrap();
    }
    load(Sources { base: FolderSource::new(&folder.0).unwrap(), adapter: AdapterFrom::Auto }, quantize).unwrap().logits
}

static EXPECTED: LazyLock<Vec<Vec<f32>>> = LazyLock::new(|| from_folder(&BIG, None));
static EXPECTED_Q4: LazyLock<Vec<Vec<f32>>> = LazyLock::new(|| from_folder(&BIG, Some(Quantize::Q4)));

fn refused<R: std::fmt::Debug>(result: Result<R>, about: &[&str]) -> Error {
    match result {
        Err(error) => {
            let text = error.to_string();
            assert!(about.iter().all(|word| text.contains(word)), "{about:?} are not named: {text}");
            assert_eq!(error.code(), "Fetch", "{text}");
            error
        }
        Ok(_) => panic!("it was loaded; expected a refusal about {about:?}"),
    }
}

fn data_bytes() -> u64 {
    BIG[WEIGHTS].len()
}

#[test]
fn the_same_model_from_everywhere_and_without_a_network_after_one_load() {
    let q4 = Some(Quantize::Q4);
    assert_ne!(*EXPECTED, *EXPECTED_Q4, "control: another form is another model");
    assert_ne!(*EXPECTED, from_folder(&big(2), None), "control: another seed is another model");
    let (store, server) = (Scratch::new(), server(&BIG));
    for sources in [url, hub] {
        let first = load(sources(&server, None), None).unwrap();
        assert_eq!(first.logits, *EXPECTED);
        assert_eq!(first.phases.first(), Some(&Phase::Config));
        assert!([Phase::Download, Phase::Upload, Phase::Ready].iter().all(|phase| first.phases.contains(phase)), "{first:?}");
        assert!(first.warnings.is_empty());

        // Stored: the second time no weight travels, and nothing at all where a commit pins it but the listing.
        server.forget();
        assert_eq!(load(sources(&server, Some(&store)), None).unwrap().logits, *EXPECTED);
        let sent = server.sent();
        assert!((data_bytes()..data_bytes() + (2 << 20)).contains(&sent), "each byte travels once: {sent}");
        server.forget();
        assert_eq!(load(sources(&server, Some(&store)), None).unwrap().logits, *EXPECTED);
        assert!(server.sent() < 8 << 20, "{} bytes travelled for a model that is stored", server.sent());

        // Another form reuses no block, and stands beside the first.
        let before = store.blocks().len();
        server.forget();
        assert_eq!(load(sources(&server, Some(&store)), q4).unwrap().logits, *EXPECTED_Q4);
        assert!(server.sent() >= data_bytes() - (1 << 20));
        assert!(store.blocks().len() > before);
    }
    let manifests = store.manifests();
    assert_eq!(manifests.len(), 2);
    for manifest in &manifests {
        assert_eq!((&manifest["complete"], &manifest["role"], &manifest["version"]), (&json!(true), &json!("model"), &json!(1)));
        assert!(manifest["source"] == "o/m@v1" || manifest["source"] == format!("{}/m/", server.address), "{manifest}");
        assert!(manifest["created"].as_u64().unwrap() <= manifest["used"].as_u64().unwrap());
    }
    // Converted, not as it came: f16 takes as much as bf16, q4 a good quarter of it.
    let stored: u64 = store.blocks().iter().map(|block| block.metadata().unwrap().len()).sum();
    assert!(stored < 2 * data_bytes() * 14 / 10, "{stored}");

    server.stop();
    for sources in [url, hub] {
        let offline = load(sources(&server, Some(&store)), None).unwrap();
        assert_eq!(offline.logits, *EXPECTED);
        assert_eq!(offline.warnings, ["store-offline"]);
        assert_eq!(load(sources(&server, Some(&store)), q4).unwrap().logits, *EXPECTED_Q4);
        // Control: what is not stored does not load.
        refused(load(sources(&server, None), None), &["cannot be reached"]);
        refused(load(sources(&server, Some(&store)), Some(Quantize::Q8)), &["cannot be reached"]);
    }
}

#[test]
fn adapters_tokenizers_and_shards_come_too() {
    let files = golden("tiny-llama-tied");
    let (store, server) = (Scratch::new(), server(&files));
    let expected = from_folder(&files, None);
    for _ in 0..2 {
        assert_eq!(load(url(&server, Some(&store)), None).unwrap().logits, expected);
        assert_eq!(load(hub(&server, Some(&store)), None).unwrap().logits, expected);
    }
    // The adapter's blocks are apart from the base's: without it, those of the base are reused.
    let blocks = store.blocks().len();
    let mut without = hub(&server, Some(&store));
    without.adapter = AdapterFrom::None;
    load(without, None).unwrap();
    assert_eq!(store.blocks().len(), blocks);
    // An adapter from a place of its own has an entry of its own.
    let adapter: Files =
        files.iter().filter_map(|(name, c)| Some((name.strip_prefix("draft_adapter/")?.to_owned(), c.clone()))).collect();
    let other = self::server(&adapter);
    let mut apart = hub(&server, Some(&store));
    let location = format!("{}/m/", other.address);
    let locator = Locator::parse(&location, None, None).unwrap();
    let folder = Some(FolderStore::new(&store.0));
    let transport = UreqTransport::default();
    apart.adapter = AdapterFrom::Source(RemoteSource::new(transport, &location, locator, http_options(), Role::Adapter, folder));
    assert_eq!(load(apart, None).unwrap().logits, expected);
    assert_eq!(store.manifests().iter().filter(|manifest| manifest["role"] == "adapter").count(), 1);

    // Two shards and an index.
    let shape = big_shape();
    let whole = bytes(&BIG[WEIGHTS]);
    let (full_header, _) = shape.header(|_| true);
    let mut files: Files = [("config.json".to_owned(), BIG["config.json"].clone())].into();
    let mut map = serde_json::Map::new();
    for half in 0..2 {
        let wanted = |i: usize| (i >= 20) == (half == 1);
        let (mut shard, size) = shape.header(wanted);
        let mut at = full_header.len();
        for (i, (name, sizes)) in shape.tensors.iter().enumerate() {
            let length = 2 * sizes.iter().product::<u64>() as usize;
            if wanted(i) {
                shard.extend_from_slice(&whole[at..at + length]);
                map.insert(name.clone(), format!("model-{half}.safetensors").into());
            }
            at += length;
        }
        assert_eq!(shard.len() as u64, size);
        files.insert(format!("model-{half}.safetensors"), Content::from(shard.as_slice()));
    }
    files.insert("model.safetensors.index.json".into(), Content::from(json!({ "weight_map": map }).to_string().as_bytes()));
    let (store, server) = (Scratch::new(), self::server(&files));
    for sources in [url, hub] {
        assert_eq!(load(sources(&server, Some(&store)), None).unwrap().logits, *EXPECTED);
        server.forget();
        assert_eq!(load(sources(&server, Some(&store)), None).unwrap().logits, *EXPECTED);
        assert!(server.sent() < 8 << 20, "{}", server.sent());
    }
}

#[test]
fn a_network_that_breaks_gives_the_same_model() {
    type Fault = fn(u64, &Request, Reply) -> Reply;
    let faults: [(&str, Fault); 6] = [
        (
            "cut after 3 MB, every time",
            |_, _, reply| if reply.to - reply.from > 3_000_001 { reply.cut(3_000_001) } else { reply },
        ),
        ("cut in the header", |n, _, reply| if n < 3 { reply.cut(5) } else { reply }),
        ("stalls", |n, _, reply| if n == 1 { reply.stall(9_000_000) } else { reply }),
        ("busy", |n, _, reply| if n % 2 == 0 { Reply::status(503) } else { reply.cut(9_999_999) }),
        ("no ranges", |_, _, reply| Reply::whole(&reply.content)),
        ("no ranges, and breaks once", |n, _, reply| {
            if n == 0 { Reply::whole(&reply.content).cut(20_000_000) } else { Reply::whole(&reply.content) }
        }),
    ];
    for (name, fault) in faults {
        for from_hub in [false, true] {
            let count = AtomicU64::new(0);
            let server = faulty(&BIG, move |request, reply| match request.path.ends_with(WEIGHTS) {
                true => fault(count.fetch_add(1, Ordering::SeqCst), request, reply),
                false => reply,
            });
            let store = Scratch::new();
            let sources = if from_hub { hub(&server, Some(&store)) } else { url(&server, Some(&store)) };
            let done = load(sources, None).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(done.logits, *EXPECTED, "{name}");
            assert!(store.manifests().iter().all(|manifest| manifest["complete"] == true), "{name}");
            if name.starts_with("cut after") {
                let starts: Vec<_> = server.asked_for(WEIGHTS).iter().map(|request| request.range.unwrap().0).collect();
                // Behind the request for the header.
                let starts = &starts[1..];
                assert!(starts.windows(2).all(|pair| pair[1] == pair[0] + 3_000_001), "taken up at its byte: {starts:?}");
            }
        }
    }
}

#[test]
fn what_is_wrong_is_refused_by_name_and_never_kept() {
    type Fault = fn(u64, &Request, Reply) -> Reply;
    const HTML: &[u8] = b"<!doctype html><title>Welcome</title>";
    fn html() -> Reply {
        Reply::whole(&Content::from(HTML)).with("content-type", "text/html")
    }
    let faults: [(&str, Fault, &[&str]); 12] = [
        ("everything is a page", |_, _, _| html(), &["web page"]),
        ("weights are a page", |_, r, reply| if r.path.ends_with(WEIGHTS) { html() } else { reply }, &["web page"]),
        (
            "a page that does not say so",
            |_, r, reply| if r.path.ends_with(WEIGHTS) { html().with("content-type", "application/octet-stream") } else { reply },
            &["web page"],
        ),
        ("401", |_, _, _| Reply::status(401), &["401", "permission"]),
        ("403", |_, r, reply| if r.path.ends_with(WEIGHTS) { Reply::status(403) } else { reply }, &["403", "permission"]),
        ("404", |_, _, _| Reply::status(404), &[]),
        ("500", |_, r, reply| if r.path.ends_with(WEIGHTS) { Reply::status(500) } else { reply }, &["500", "later"]),
        (
            "shorter than it says",
            |_, r, reply| if r.path.ends_with(WEIGHTS) { Reply { to: reply.to - 1, ..reply }.cut(u64::MAX / 2) } else { reply },
            &[WEIGHTS],
        ),
        (
            "another version after a break",
            |n, r, reply| match (r.path.ends_with(WEIGHTS), n) {
                (false, _) => reply,
                (true, 0..3) => reply.cut(10_000_000),
                (true, _) => reply.with("etag", "\"other\""),
            },
            &["changed on the server"],
        ),
        (
            "another size after a break",
            |n, r, reply| match (r.path.ends_with(WEIGHTS), n) {
                (false, _) => reply,
                (true, 0..3) => reply.cut(10_000_000),
                (true, _) => {
                    let from = reply.from;
                    reply.with("content-range", &format!("bytes {from}-39999999/40000000"))
                }
            },
            &["bytes"],
        ),
        (
            "ranges that begin elsewhere",
            |n, r, reply| match (r.path.ends_with(WEIGHTS), n) {
                (false, _) => reply,
                (true, 0..3) => reply.cut(10_000_000),
                (true, _) => reply.with("content-range", &format!("bytes 0-9/{}", data_bytes())),
            },
            &["ranges are broken"],
        ),
        (
            "weights come compressed",
            |_, r, reply| {
                if r.path.ends_with(WEIGHTS) { Reply::whole(&reply.content).with("content-encoding", "br") } else { reply }
            },
            &["compressed"],
        ),
    ];
    for (name, fault, about) in faults {
        for from_hub in [false, true] {
            let count = Arc::new(AtomicU64::new(0));
            let counted = Arc::clone(&count);
            let server = faulty(&BIG, move |request, reply| {
                let weights = request.path.ends_with(WEIGHTS);
                let n = if weights { counted.fetch_add(1, Ordering::SeqCst) } else { counted.load(Ordering::SeqCst) };
                fault(n, request, reply)
            });
            let store = Scratch::new();
            let sources = if from_hub { hub(&server, Some(&store)) } else { url(&server, Some(&store)) };
            if from_hub && name.starts_with("another version") {
                // The bytes are the same, and their hash says so.
                assert_eq!(load(sources, None).unwrap().logits, *EXPECTED);
                continue;
            }
            let error = refused(load(sources, None), about);
            for file in store.blocks() {
                // What is there was made of bytes that came as they should.
                assert!(!name.contains("version") && !name.contains("size"), "{name}: {error}: {} is kept", file.display());
            }
            assert!(store.manifests().iter().all(|manifest| manifest["complete"] == false), "{name}");
            for file in store.files() {
                let kept = std::fs::read(&file).unwrap();
                assert!(!kept.windows(HTML.len()).any(|window| window == HTML), "{name}: a page is kept in {}", file.display());
            }
        }
    }
}

#[test]
fn a_hash_that_does_not_agree_deletes_the_entry_and_never_reaches_ready() {
    // One bit of one weight, of the last and of the first bytes.
    for at in [data_bytes() as usize - 1, data_bytes() as usize / 2, 100_000] {
        let mut damaged = BIG.clone();
        let mut weights = bytes(&BIG[WEIGHTS]).to_vec();
        weights[at] ^= 1;
        damaged.insert(WEIGHTS.into(), Content::Bytes(Arc::new(weights)));
        let listing = listing(&BIG, "c0ffee");
        let server = Server::start(move |request| serve(&damaged, "c0ffee", &listing, request));
        let store = Scratch::new();
        let mut phases = Vec::new();
        let mut sources = hub(&server, Some(&store));
        let failed = block_on(loaded(&mut sources, None, |event| {
            if let LoadEvent::Progress(progress) = event {
                phases.push(progress.phase);
            }
            true
        }));
        refused(failed, &["SHA-256", WEIGHTS, "the hub lists"]);
        assert!(!phases.contains(&Phase::Ready));
        assert!(store.files().is_empty(), "{:?}", store.files());
    }
    // Control: the right bytes, which are also all that an address can be held to.
    let store = Scratch::new();
    load(hub(&server(&BIG), Some(&store)), None).unwrap();
    assert!(!store.files().is_empty());
}

/// Loads until `bytes` weights bytes have come, then stops. What had come by then.
fn stopped_at<B: BlobStore>(mut sources: Sources<Remote<B>>, bytes: u64) -> u64 {
    let mut done = 0;
    let stopped = block_on(loaded(&mut sources, None, |event| match event {
        LoadEvent::Progress(progress) if progress.phase == Phase::Download => {
            done = progress.done;
            done < bytes
        }
        _ => true,
    }));
    assert!(matches!(&stopped, Err(Error::Aborted(_))), "{:?}", stopped.map(|loaded| loaded.phases));
    done
}

#[test]
fn a_download_that_was_stopped_goes_on_at_its_byte() {
    const BATCH: u64 = 9 << 20;
    for from_hub in [false, true] {
        let sources = |server: &Server, store: &Scratch| match from_hub {
            true => hub(server, Some(store)),
            false => url(server, Some(store)),
        };
        for stop in [1 << 20, 12 << 20, 20 << 20, 30 << 20] {
            let (store, server) = (Scratch::new(), server(&BIG));
            stopped_at(sources(&server, &store), stop);
            let stored = store.blocks().len();
            assert!(stop < BATCH || stored > 0, "{stored} blocks at {stop}");
            server.forget();
            let resumed = load(sources(&server, &store), None).unwrap();
            assert_eq!(resumed.logits, *EXPECTED, "stopped at {stop}");
            let sent = server.sent();
            assert!(sent <= data_bytes() - stop.saturating_sub(2 * BATCH) + (1 << 20), "{sent} bytes came again after {stop}");
            if stored > 0 {
                let asked = server.asked_for(WEIGHTS);
                let start = asked.iter().filter_map(|request| request.range).map(|(from, _)| from).max().unwrap();
                assert!(start > 0, "{asked:?}");
                if from_hub {
                    // The one request begins where the blocks that are stored end.
                    assert_eq!(asked.len(), 1, "{asked:?}");
                    assert_eq!(sent, data_bytes() - start + listing(&BIG, "c0ffee").to_string().len() as u64);
                }
            }
            server.stop();
            assert_eq!(load(sources(&server, &store), None).unwrap().logits, *EXPECTED);
        }
        // Stopped over and over again, it ends all the same, and every stop leaves more.
        let (store, server) = (Scratch::new(), server(&BIG));
        for _ in 0..4 {
            let before = store.blocks().len();
            stopped_at(sources(&server, &store), 12 << 20);
            assert!(store.blocks().len() > before, "{before}");
            server.forget();
        }
        assert_eq!(load(sources(&server, &store), None).unwrap().logits, *EXPECTED);
    }
}

#[test]
fn a_file_whose_versions_cannot_be_told_apart_starts_anew() {
    for tag in [false, true] {
        let other = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&other);
        let (mut changed, listing) = (BIG.clone(), listing(&BIG, "c0ffee"));
        let mut weights = bytes(&changed[WEIGHTS]).to_vec();
        // In the first tensors, which are stored by then.
        let header = u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
        let place = 8 + header + 200_000;
        weights[place..place + 4000].rotate_left(64);
        changed.insert(WEIGHTS.into(), Content::from(weights.as_slice()));
        let after = from_folder(&changed, None);
        let server = Server::start(move |request| {
            let files = if seen.load(Ordering::SeqCst) { &changed } else { &*BIG };
            let reply = serve(files, "c0ffee", &listing, request);
            if tag { reply } else { reply.without("etag") }
        });
        let store = Scratch::new();
        stopped_at(url(&server, Some(&store)), 30 << 20);
        assert!(!store.blocks().is_empty());
        other.store(true, Ordering::SeqCst);
        let logits = load(url(&server, Some(&store)), None).map(|loaded| loaded.logits);
        // Control: with one and the same tag for both it is not the new model that comes.
        assert_eq!(logits.as_ref().is_ok_and(|logits| *logits == after), !tag, "{:?}", logits.map(drop));
    }
}

#[test]
fn a_resumed_download_is_still_held_to_its_hash() {
    // The second half is damaged; the first half was fetched from a good server.
    let store = Scratch::new();
    let good = bytes(&BIG[WEIGHTS]).to_vec();
    let mut bad = good.clone();
    *bad.last_mut().unwrap() ^= 1;
    let (damage, listing) = (Arc::new(AtomicBool::new(false)), listing(&BIG, "c0ffee"));
    let seen = Arc::clone(&damage);
    let server = Server::start(move |request| {
        let mut files = BIG.clone();
        if seen.load(Ordering::SeqCst) {
            files.insert(WEIGHTS.into(), Content::from(bad.as_slice()));
        }
        serve(&files, "c0ffee", &listing, request)
    });
    stopped_at(hub(&server, Some(&store)), 20 << 20);
    assert!(!store.blocks().is_empty());
    damage.store(true, Ordering::SeqCst);
    refused(load(hub(&server, Some(&store)), None), &["SHA-256"]);
    assert!(store.files().is_empty(), "{:?}", store.files());
    // Control: with the right second half the same way ends well.
    damage.store(false, Ordering::SeqCst);
    stopped_at(hub(&server, Some(&store)), 20 << 20);
    assert_eq!(load(hub(&server, Some(&store)), None).unwrap().logits, *EXPECTED);
}

/// 22 MB, all scales behind all weights: no step ends before the last twentieth of the file passes.
static SORTED: LazyLock<Files> = LazyLock::new(|| files_of(&big_shape().sorted_by_type(8), 7));
static EXPECTED_SORTED: LazyLock<Vec<Vec<f32>>> = LazyLock::new(|| from_folder(&SORTED, None));
/// 41 MB whose gates lie before everything and the rest of each gated layer behind everything.
static APART: LazyLock<Files> = LazyLock::new(|| files_of(&big_shape().torn_apart(), 9));

const BLOCK: u64 = 256 << 10;
/// What may come twice when a load was ended: the lag of the resume point and what came since it was laid down.
const AGAIN: u64 = 12 * BLOCK;

/// Small blocks, of which few are held.
fn small_blocks() -> HttpOptions {
    HttpOptions { block_bytes: BLOCK, kept_bytes: 16 * BLOCK, ..http_options() }
}

fn in_blocks<B: BlobStore>(server: &Server, from_hub: bool, store: Option<B>) -> Sources<Remote<B>> {
    let base = match from_hub {
        true => remote("o/m@v1", Some(&server.address), small_blocks(), store),
        false => remote(&format!("{}/m/", server.address), None, small_blocks(), store),
    };
    Sources { base, adapter: AdapterFrom::Auto }
}

fn in_folder(server: &Server, from_hub: bool, store: &Scratch) -> Sources<Remote> {
    in_blocks(server, from_hub, Some(FolderStore::new(&store.0)))
}

/// Bytes of weights that went out.
fn weights_sent(server: &Server, files: &Files) -> u64 {
    let small = |name: &str, bytes: u64| bytes * server.asked_for(name).len() as u64;
    let listing = listing(files, "c0ffee").to_string().len() as u64;
    server.sent() - small("config.json", files["config.json"].len()) - small("?blobs=true", listing)
}

#[test]
fn a_load_of_a_file_sorted_by_type_that_was_ended_goes_on_where_it_was() {
    let size = SORTED[WEIGHTS].len();
    assert!(
        from_folder(&files_of(&big_shape().sorted_by_type(8), 8), None) != *EXPECTED_SORTED,
        "control: another seed is another model"
    );
    for from_hub in [false, true] {
        for stop in [1 << 20, 4 << 20, 10 << 20, 18 << 20, 20 << 20, 41 << 19] {
            let (store, server) = (Scratch::new(), server(&SORTED));
            let first = stopped_at(in_folder(&server, from_hub, &store), stop);
            assert!(stop < 4 << 20 || stop > 18 << 20 || !store.raw().is_empty(), "nothing is stored as it came at {stop}");
            server.forget();
            let done = load(in_folder(&server, from_hub, &store), None).unwrap();
            assert_eq!((done.logits, done.warnings), (EXPECTED_SORTED.clone(), vec![]), "stopped at {stop}");
            let second = weights_sent(&server, &SORTED);
            assert!((size..size + AGAIN).contains(&(first + second)), "{first} and {second} bytes came of {size}");
            assert_eq!(store.raw(), Vec::<PathBuf>::new(), "what is made is stored instead");
            let [manifest] = &store.manifests()[..] else { panic!("one entry") };
            assert_eq!((&manifest["complete"], &manifest["weights"][WEIGHTS]["verified"]), (&json!(true), &json!(true)));
            server.stop();
            assert_eq!(load(in_folder(&server, from_hub, &store), None).unwrap().logits, *EXPECTED_SORTED);
        }
        // Ended over and over again.
        let (store, server) = (Scratch::new(), server(&SORTED));
        let mut came = 0;
        for _ in 0..4 {
            came += stopped_at(in_folder(&server, from_hub, &store), 5 << 20);
        }
        server.forget();
        assert_eq!(load(in_folder(&server, from_hub, &store), None).unwrap().logits, *EXPECTED_SORTED);
        came += weights_sent(&server, &SORTED);
        assert!(came < size + 4 * AGAIN, "{came} bytes came of {size}");
    }
}

/// A store that takes no block as it came.
#[derive(Debug, Clone)]
struct NoShelf(Limited);

impl BlobStore for NoShelf {
    async fn get(&self, name: &str) -> Option<Vec<u8>> {
        self.0.get(name).await
    }

    async fn put(&self, name: &str, bytes: &[u8]) -> Result<(), StoreFailure> {
        if name.contains("/raw-") { Err(StoreFailure::Full) } else { self.0.put(name, bytes).await }
    }

    async fn list(&self, prefix: &str) -> Vec<(String, u64)> {
        self.0.list(prefix).await
    }

    async fn remove(&self, name: &str) {
        self.0.remove(name).await;
    }

    async fn lock(&self, entry: &str) -> Result<bool, StoreFailure> {
        self.0.lock(entry).await
    }
}

#[test]
fn what_has_no_room_in_memory_travels_once_where_a_store_takes_it() {
    let size = SORTED[WEIGHTS].len();
    for from_hub in [false, true] {
        let server = server(&SORTED);
        let roomy = Limited::default();
        roomy.room.set(1 << 30);
        let done = load(in_blocks(&server, from_hub, Some(roomy.clone())), None).unwrap();
        assert_eq!((done.logits, done.warnings), (EXPECTED_SORTED.clone(), vec![]));
        let sent = weights_sent(&server, &SORTED);
        assert!((size..size + BLOCK).contains(&sent), "{sent} bytes of {size}");
        assert!(roomy.blobs.borrow().keys().all(|name| !name.contains("/raw-")));
        // Controls: without a store, and with one that takes only what is made, the most of it comes twice; and an ended load
        // begins anew.
        let never: Option<Limited> = None;
        server.forget();
        assert_eq!(load(in_blocks(&server, from_hub, never), None).unwrap().logits, *EXPECTED_SORTED);
        let sent = weights_sent(&server, &SORTED);
        assert!(sent > size * 4 / 3, "{sent} bytes of {size}");
        let closed = NoShelf(Limited::default());
        closed.0.room.set(1 << 30);
        let first = stopped_at(in_blocks(&server, from_hub, Some(closed.clone())), 16 << 20);
        server.forget();
        let done = load(in_blocks(&server, from_hub, Some(closed.clone())), None).unwrap();
        assert_eq!((done.logits, done.warnings), (EXPECTED_SORTED.clone(), vec![]));
        let sent = first + weights_sent(&server, &SORTED);
        assert!(sent > size + first, "{sent} bytes of {size}");
    }
}

#[test]
fn blocks_stored_as_they_came_that_are_torn_or_gone_come_again_and_are_held_to_their_sums() {
    for from_hub in [false, true] {
        let server = server(&SORTED);
        for spoil in 0..6 {
            let store = Scratch::new();
            stopped_at(in_folder(&server, from_hub, &store), 12 << 20);
            let raw = store.raw();
            assert!(raw.len() > 20, "{raw:?}");
            for file in &raw[3..6] {
                let mut bytes = std::fs::read(file).unwrap();
                match spoil {
                    0 => bytes.truncate(bytes.len() / 2),
                    1 => bytes.clear(),
                    2 => bytes[1000..].fill(0),
                    3 => bytes[5000] ^= 1,
                    4 => {}
                    _ => {
                        std::fs::remove_file(file).unwrap();
                        continue;
                    }
                }
                std::fs::write(file, bytes).unwrap();
            }
            server.forget();
            let done = load(in_folder(&server, from_hub, &store), None).unwrap();
            assert_eq!((done.logits, done.warnings), (EXPECTED_SORTED.clone(), vec![]), "spoilt in way {spoil}");
            let asked = server.asked_for(WEIGHTS).into_iter().filter(|asked| asked.range.unwrap().1.is_some()).count();
            // Where nothing is listed the first bytes tell the size.
            let asked = asked - usize::from(!from_hub);
            match (from_hub, spoil) {
                (_, 4) => assert_eq!(asked, 0, "control: nothing was spoilt"),
                // An address lists no hash, so its stream goes on at the first block that is not there.
                (false, 5) => assert_eq!(asked, 0),
                _ => assert_eq!(asked, 3),
            }
            assert!(store.raw().is_empty());
        }
    }
    // A hub that answers with something else for such a block, or for what comes after it.
    for (at, about) in [(None, ""), (Some(2_000_000), "changed on the server"), (Some(20_000_000), "SHA-256")] {
        let mut damaged = SORTED.clone();
        if let Some(at) = at {
            let mut weights = bytes(&SORTED[WEIGHTS]).to_vec();
            weights[at..at + 4_000].iter_mut().for_each(|byte| *byte ^= 1);
            damaged.insert(WEIGHTS.into(), Content::Bytes(Arc::new(weights)));
        }
        let (good, store) = (server(&SORTED), Scratch::new());
        let listing = listing(&SORTED, "c0ffee");
        stopped_at(in_folder(&good, true, &store), 12 << 20);
        for file in store.raw() {
            std::fs::remove_file(file).unwrap();
        }
        let bad = Server::start(move |request| serve(&damaged, "c0ffee", &listing, request));
        let base = |server: &Server| {
            // The same source from another server: the entry's name is made of its address.
            let mut entries = std::fs::read_dir(&store.0).unwrap().map(|entry| entry.unwrap().path());
            let old = entries.find(|entry| !entry.ends_with(".locks")).unwrap();
            let source = format!("{}/o/m", server.address);
            std::fs::rename(&old, store.0.join(forecall::fetch::store::entry_name("model", &source, "c0ffee"))).unwrap();
            in_folder(server, true, &store)
        };
        match at {
            None => assert_eq!(load(base(&bad), None).unwrap().logits, *EXPECTED_SORTED, "control"),
            Some(_) => {
                refused(load(base(&bad), None), &[about, WEIGHTS]);
                assert!(store.files().is_empty(), "{:?}", store.files());
            }
        }
    }
}

#[test]
fn blocks_stored_as_they_came_serve_another_form_too() {
    let size = APART[WEIGHTS].len();
    let expected = from_folder(&APART, Some(Quantize::Q4));
    assert_ne!(expected, from_folder(&APART, None), "control: another form is another model");
    for from_hub in [false, true] {
        let (store, server) = (Scratch::new(), server(&APART));
        let first = stopped_at(in_folder(&server, from_hub, &store), 25 << 20);
        server.forget();
        let done = load(in_folder(&server, from_hub, &store), Some(Quantize::Q4)).unwrap();
        assert_eq!((done.logits, done.warnings), (expected.clone(), vec![]));
        let sent = first + weights_sent(&server, &APART);
        assert!((size..size + AGAIN).contains(&sent), "{sent} bytes of {size}");
        assert!(store.raw().is_empty());
    }
    // Of a file in its usual order nothing is stored as it came, so another form needs all of it again.
    let (store, server) = (Scratch::new(), server(&BIG));
    stopped_at(in_folder(&server, true, &store), 25 << 20);
    server.forget();
    assert_eq!(load(in_folder(&server, true, &store), Some(Quantize::Q4)).unwrap().logits, *EXPECTED_Q4);
    assert!(weights_sent(&server, &BIG) >= data_bytes());
}

#[test]
fn a_store_without_room_for_blocks_as_they_came_still_takes_what_is_made() {
    let server = server(&SORTED);
    let size = SORTED[WEIGHTS].len();
    let limited = |room: u64| {
        let store = Limited::default();
        store.room.set(room);
        store
    };
    let with = |store: &Limited| {
        let done = load(in_blocks(&server, true, Some(store.clone())), None).unwrap();
        assert_eq!(done.logits, *EXPECTED_SORTED);
        assert!(store.blobs.borrow().keys().all(|name| !name.contains("/raw-")), "{:?}", store.blobs.borrow().keys());
        done.warnings
    };
    // All that is made fits, and little more.
    let roomy = limited(1 << 30);
    assert!(with(&roomy).is_empty());
    let made: u64 = roomy.blobs.borrow().values().map(|blob| blob.len() as u64).sum();
    for room in [made + 10_000, made + (1 << 20)] {
        let store = limited(room);
        assert_eq!(with(&store), Vec::<&str>::new(), "room for {room} of {made} bytes");
        server.forget();
        assert!(with(&store).is_empty());
        assert_eq!(weights_sent(&server, &SORTED), 0);
        // An ended load goes on behind what did fit.
        let store = limited(room);
        let first = stopped_at(in_blocks(&server, true, Some(store.clone())), 20 << 20);
        server.forget();
        assert!(with(&store).is_empty());
        let sent = first + weights_sent(&server, &SORTED);
        assert!(sent < size + 6 * AGAIN, "{sent} bytes of {size}");
    }
    // It does not: the first block that does not is the one warning there is.
    for room in [made / 2, 3 << 20, 10_000] {
        let store = limited(room);
        assert_eq!(with(&store), ["store-quota"], "room for {room} bytes");
        assert!(store.blobs.borrow().is_empty());
    }
}

#[test]
fn two_at_once_share_what_is_stored_as_it_came() {
    let (store, server) = (Scratch::new(), server(&SORTED));
    let mut first = in_folder(&server, true, &store);
    let once = Cell::new(false);
    let done = block_on(loaded(&mut first, None, |event| {
        if let LoadEvent::Progress(progress) = event
            && progress.phase == Phase::Download
            && progress.done > 12 << 20
            && !once.replace(true)
        {
            let raw = store.raw();
            let loaded = load(in_folder(&server, true, &store), None).unwrap();
            assert_eq!((&loaded.logits, &loaded.warnings), (&*EXPECTED_SORTED, &vec!["store-busy"]));
            assert_eq!(store.raw(), raw, "the second one writes nothing");
        }
        true
    }));
    assert_eq!(done.unwrap().logits, *EXPECTED_SORTED);
    assert!(once.get() && store.raw().is_empty());
}

/// Not a test of its own: what [`a_program_that_is_killed_leaves_what_it_had`] kills.
#[test]
fn loads_in_a_program_that_is_killed() {
    let (Ok(address), Ok(store)) = (std::env::var("FORECALL_KILLED_ADDRESS"), std::env::var("FORECALL_KILLED_STORE")) else {
        return;
    };
    let base = remote("o/m@v1", Some(&address), small_blocks(), Some(FolderStore::new(store)));
    load(Sources { base, adapter: AdapterFrom::Auto }, None).unwrap();
}

#[test]
fn a_program_that_is_killed_leaves_what_it_had() {
    let (store, size) = (Scratch::new(), SORTED[WEIGHTS].len());
    // The weights stop coming half-way, so that the program is there to be killed.
    let stalls = Arc::new(AtomicBool::new(true));
    let stalling = Arc::clone(&stalls);
    let server = faulty(&SORTED, move |request, reply| {
        let whole = request.path.ends_with(WEIGHTS) && request.range.is_some_and(|(_, to)| to.is_none());
        if whole && stalling.load(Ordering::SeqCst) { reply.stall(14 << 20) } else { reply }
    });
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "loads_in_a_program_that_is_killed"])
        .env("FORECALL_KILLED_ADDRESS", &server.address)
        .env("FORECALL_KILLED_STORE", &store.0)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    for _ in 0..1500 {
        if store.raw().len() as u64 > 20 && store.files().iter().any(|file| name_of(file) == "resume") {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!store.raw().is_empty());
    stalls.store(false, Ordering::SeqCst);
    server.forget();
    assert_eq!(load(in_folder(&server, true, &store), None).unwrap().logits, *EXPECTED_SORTED);
    let sent = weights_sent(&server, &SORTED);
    assert!(sent < size - (3 << 20), "{sent} bytes of {size} came again");
    assert!(store.raw().is_empty());
    assert!(store.files().iter().all(|file| !name_of(file).contains(".part")), "{:?}", store.files());
}

#[test]
fn what_is_announced_beforehand_is_what_comes() {
    for (files, stop) in [(&*BIG, 20 << 20), (&*SORTED, 12 << 20), (&*APART, 30 << 20)] {
        for from_hub in [false, true] {
            let (store, server) = (Scratch::new(), server(files));
            let ask = |quantize| {
                let options = LoadOptions { backend: Backend::Cpu, quantize, context_length: Some(64), ..LoadOptions::default() };
                let offered = Offered { gpu: Offer::default(), quota_left: None };
                let mut sources = in_folder(&server, from_hub, &store);
                block_on(Model::preflight(&mut sources, &options, offered)).unwrap()["download"].clone()
            };
            // The last total of the download, and the bytes that it counted.
            let told = |quantize| {
                let mut told = (0, 0);
                let watch = |event: &LoadEvent| {
                    if let LoadEvent::Progress(progress) = event
                        && progress.phase == Phase::Download
                    {
                        told = (progress.done, progress.total);
                    }
                    true
                };
                block_on(loaded(&mut in_folder(&server, from_hub, &store), quantize, watch)).unwrap();
                told
            };
            let all = ask(None);
            assert_eq!(all["bytes"], files[WEIGHTS].len());
            stopped_at(in_folder(&server, from_hub, &store), stop);
            let left = ask(None);
            let bytes = left["bytes"].as_u64().unwrap();
            assert!(bytes <= files[WEIGHTS].len() - stop + AGAIN.max(9 << 20), "{left}");
            assert!(left["stored_bytes"].as_u64().unwrap() + bytes + AGAIN + (9 << 20) > files[WEIGHTS].len(), "{left}");
            assert_eq!(told(None), (bytes, bytes), "from the hub: {from_hub}");
            assert_eq!((ask(None)["bytes"].clone(), told(None)), (json!(0), (0, 0)));
            let again = ask(Some(Quantize::Q4))["bytes"].as_u64().unwrap();
            assert_eq!(told(Some(Quantize::Q4)), (again, again));
        }
    }
}

#[test]
fn a_busy_hub_is_not_waited_for_where_all_is_stored() {
    let store = Scratch::new();
    let busy = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&busy);
    let server = faulty(&BIG, move |_, reply| if seen.load(Ordering::SeqCst) { Reply::status(503) } else { reply });
    for sources in [url, hub] {
        load(sources(&server, Some(&store)), None).unwrap();
        busy.store(true, Ordering::SeqCst);
        server.forget();
        let done = load(sources(&server, Some(&store)), None).unwrap();
        assert_eq!((done.logits, done.warnings), (EXPECTED.clone(), vec!["store-offline"]));
        assert_eq!(server.requests().len(), 2, "asked once more");
        // Control: where nothing is stored it is waited for.
        server.forget();
        refused(load(sources(&server, Some(&Scratch::new())), None), &["503"]);
        assert!(server.requests().len() >= 6, "{}", server.requests().len());
        busy.store(false, Ordering::SeqCst);
    }
}

#[test]
fn json_files_may_begin_with_a_mark() {
    let files = golden("tiny-llama-tied");
    let expected = from_folder(&files, None);
    let mut marked = files.clone();
    let mut count = 0;
    for (name, content) in &mut marked {
        if name.ends_with(".json") {
            *content = Content::from([b"\xEF\xBB\xBF", bytes(content)].concat().as_slice());
            count += 1;
        }
    }
    assert!(count >= 3 && files.contains_key("tokenizer.json"), "{:?}", files.keys());
    let (store, server) = (Scratch::new(), server(&marked));
    assert_eq!(from_folder(&marked, None), expected);
    for sources in [url, hub] {
        for _ in 0..2 {
            assert_eq!(load(sources(&server, Some(&store)), None).unwrap().logits, expected);
        }
    }
    // Control: any other bytes there are refused.
    let content = Content::from([b"\xEF\xBB", bytes(&files["config.json"])].concat().as_slice());
    marked.insert("config.json".into(), content);
    let server = self::server(&marked);
    assert!(load(url(&server, None), None).unwrap_err().to_string().contains("config.json"));
}

#[test]
fn what_stands_in_the_place_of_a_blob_or_an_entry_gives_way() {
    let (store, server) = (Scratch::new(), server(&BIG));
    load(hub(&server, Some(&store)), None).unwrap();
    let files = store.files();
    for file in &files {
        std::fs::remove_file(file).unwrap();
        std::fs::create_dir_all(file.join("inside")).unwrap();
        let done = load(hub(&server, Some(&store)), None).unwrap();
        assert_eq!((done.logits, done.warnings), (EXPECTED.clone(), vec![]), "{}", file.display());
        assert!(name_of(file) == "resume" || file.is_file(), "{} was not made again", file.display());
    }
    server.forget();
    load(hub(&server, Some(&store)), None).unwrap();
    assert!(weights_sent(&server, &BIG) == 0, "all is there again");
    let entry = files[0].parent().unwrap();
    std::fs::remove_dir_all(entry).unwrap();
    std::fs::write(entry, "a file").unwrap();
    let done = load(hub(&server, Some(&store)), None).unwrap();
    assert_eq!((done.logits, done.warnings), (EXPECTED.clone(), vec![]));
    assert!(entry.is_dir() && !store.blocks().is_empty());
}

#[test]
fn torn_blobs_are_seen_and_made_again() {
    let (store, server) = (Scratch::new(), server(&BIG));
    for sources in [url, hub] {
        load(sources(&server, Some(&store)), None).unwrap();
    }
    for file in store.files() {
        let whole = std::fs::read(&file).unwrap();
        for spoil in [0, 1, 2, 3] {
            let mut torn = whole.clone();
            match spoil {
                0 => torn.truncate(whole.len() / 2),
                1 => torn.clear(),
                // Still a manifest, with other sizes.
                3 => torn = String::from_utf8_lossy(&whole).replace("\"size\": ", "\"size\": 1").into_bytes(),
                _ => {
                    let middle = whole.len() / 2;
                    torn[middle..].fill(0);
                }
            }
            if torn == whole || (spoil == 3 && name_of(&file) != "manifest.json") {
                continue;
            }
            std::fs::write(&file, &torn).unwrap();
            server.forget();
            for sources in [url, hub] {
                let again = load(sources(&server, Some(&store)), None);
                assert_eq!(again.unwrap().logits, *EXPECTED, "{} spoilt in way {spoil}", file.display());
            }
            if name_of(&file).starts_with("block-") {
                assert_eq!(std::fs::read(&file).unwrap(), whole, "it was made again");
                assert!(server.sent() < 20 << 20, "only what was missing travels: {}", server.sent());
            }
        }
    }
}

/// A store in memory that holds so many bytes and no more.
#[derive(Debug, Clone, Default)]
struct Limited {
    blobs: Rc<RefCell<BTreeMap<String, Vec<u8>>>>,
    room: Rc<Cell<u64>>,
    failure: Option<StoreFailure>,
}

impl BlobStore for Limited {
    async fn get(&self, name: &str) -> Option<Vec<u8>> {
        self.blobs.borrow().get(name).cloned()
    }

    async fn put(&self, name: &str, bytes: &[u8]) -> Result<(), StoreFailure> {
        let used: u64 = self.blobs.borrow().values().map(|blob| blob.len() as u64).sum();
        if used + bytes.len() as u64 > self.room.get() {
            return Err(self.failure.clone().unwrap_or(StoreFailure::Full));
        }
        self.blobs.borrow_mut().insert(name.to_owned(), bytes.to_vec());
        Ok(())
    }

    async fn list(&self, prefix: &str) -> Vec<(String, u64)> {
        let blobs = self.blobs.borrow();
        blobs.iter().filter(|(name, _)| name.starts_with(prefix)).map(|(name, blob)| (name.clone(), blob.len() as u64)).collect()
    }

    async fn remove(&self, name: &str) {
        self.blobs.borrow_mut().retain(|known, _| if name.ends_with('/') { !known.starts_with(name) } else { known != name });
    }

    async fn lock(&self, _: &str) -> Result<bool, StoreFailure> {
        Ok(true)
    }
}

#[test]
fn a_store_that_is_full_costs_a_warning_and_no_more() {
    let server = server(&BIG);
    let with = |store: &Limited, quantize| {
        let base = remote("o/m@v1", Some(&server.address), http_options(), Some(store.clone()));
        load(Sources { base, adapter: AdapterFrom::Auto }, quantize).unwrap()
    };
    for room in [0, 100, 3_000, 1 << 20, 20 << 20, 36 << 20] {
        let store = Limited::default();
        store.room.set(room);
        let done = with(&store, None);
        assert_eq!((done.logits, done.warnings), (EXPECTED.clone(), vec!["store-quota"]), "room for {room} bytes");
        assert!(store.blobs.borrow().is_empty(), "what was begun is removed: {room}");
    }
    let store = Limited { failure: Some(StoreFailure::Other("the disk is gone".into())), ..Limited::default() };
    assert_eq!(with(&store, None).warnings, ["store-failed"]);
    // What was stored before some other failure is there to go on from.
    let store = Limited { failure: Some(StoreFailure::Other("the disk is away".into())), ..Limited::default() };
    store.room.set(25 << 20);
    let done = with(&store, None);
    assert_eq!((done.logits, done.warnings), (EXPECTED.clone(), vec!["store-failed"]));
    assert!(!store.blobs.borrow().is_empty());
    store.room.set(1 << 30);
    server.forget();
    let done = with(&store, None);
    assert_eq!((done.logits, done.warnings), (EXPECTED.clone(), vec![]));
    assert!((1 << 20..30 << 20).contains(&server.sent()), "{} bytes came again", server.sent());
    // Where the model is stored in one form already, that one stays.
    let store = Limited::default();
    store.room.set(42 << 20);
    assert!(with(&store, None).warnings.is_empty(), "control: there is room");
    let blobs = store.blobs.borrow().len();
    let other = with(&store, Some(Quantize::Q4));
    assert_eq!((other.logits, other.warnings), (EXPECTED_Q4.clone(), vec!["store-quota"]));
    assert!(store.blobs.borrow().len() <= blobs + 1);
    server.forget();
    assert_eq!(with(&store, None).logits, *EXPECTED);
    assert!(server.sent() < 1 << 20);
}

#[test]
fn a_store_that_cannot_be_written_to_is_no_store_in_use() {
    let (scratch, server) = (Scratch::new(), server(&BIG));
    // In the folder's place is a file.
    let file = scratch.0.join("file");
    std::fs::write(&file, "").unwrap();
    let closed = || {
        let base = remote("o/m@v1", Some(&server.address), http_options(), Some(FolderStore::new(&file)));
        load(Sources { base, adapter: AdapterFrom::Auto }, None).unwrap()
    };
    let done = closed();
    assert_eq!((done.logits, done.warnings), (EXPECTED.clone(), vec!["store-failed"]));
    // What is whole needs no writing, so nothing is said of it.
    let store = Scratch::new();
    load(hub(&server, Some(&store)), None).unwrap();
    std::fs::remove_dir_all(store.0.join(".locks")).unwrap();
    std::fs::write(store.0.join(".locks"), "").unwrap();
    let done = load(hub(&server, Some(&store)), None).unwrap();
    assert_eq!((done.logits, done.warnings), (EXPECTED.clone(), vec![]));
}

#[test]
fn two_at_once_do_not_disturb_each_other() {
    let (store, server) = (Scratch::new(), server(&BIG));
    let mut first = hub(&server, Some(&store));
    // The second is loaded whole while the first is on its way.
    let second = RefCell::new(None);
    let done = block_on(loaded(&mut first, None, |event| {
        if let (LoadEvent::Progress(progress), None) = (event, &*second.borrow())
            && progress.phase == Phase::Upload
        {
            let loaded = load(hub(&server, Some(&store)), None).unwrap();
            assert_eq!((&loaded.logits, &loaded.warnings), (&*EXPECTED, &vec!["store-busy"]));
        }
        if matches!(event, LoadEvent::Progress(progress) if progress.phase == Phase::Upload) {
            second.replace(Some(()));
        }
        true
    }));
    assert_eq!(done.unwrap().logits, *EXPECTED);
    drop(first);
    server.stop();
    let after = load(hub(&server, Some(&store)), None).unwrap();
    assert_eq!((after.logits, after.warnings), (EXPECTED.clone(), vec!["store-offline"]));
}

#[test]
fn a_store_in_use_elsewhere_is_no_matter_where_all_is_stored() {
    let (store, server) = (Scratch::new(), server(&BIG));
    load(hub(&server, Some(&store)), None).unwrap();
    let once = Cell::new(false);
    let mut first = hub(&server, Some(&store));
    let done = block_on(loaded(&mut first, None, |event| {
        if matches!(event, LoadEvent::Progress(progress) if progress.phase == Phase::Upload) && !once.replace(true) {
            let second = load(hub(&server, Some(&store)), None).unwrap();
            assert_eq!((second.logits, second.warnings), (EXPECTED.clone(), vec![]));
            // Control: another form is something to store.
            let other = load(hub(&server, Some(&store)), Some(Quantize::Q4)).unwrap();
            assert_eq!((other.logits, other.warnings), (EXPECTED_Q4.clone(), vec!["store-busy"]));
        }
        true
    }));
    assert_eq!((done.unwrap().logits, once.get()), (EXPECTED.clone(), true));
}

/// A store whose lock has to be waited for, until another loading has stored everything.
#[derive(Debug)]
struct Late {
    store: Limited,
    then: Limited,
}

impl BlobStore for Late {
    async fn get(&self, name: &str) -> Option<Vec<u8>> {
        self.store.get(name).await
    }

    async fn put(&self, name: &str, bytes: &[u8]) -> Result<(), StoreFailure> {
        self.store.put(name, bytes).await
    }

    async fn list(&self, prefix: &str) -> Vec<(String, u64)> {
        self.store.list(prefix).await
    }

    async fn remove(&self, name: &str) {
        self.store.remove(name).await;
    }

    async fn lock(&self, _: &str) -> Result<bool, StoreFailure> {
        *self.store.blobs.borrow_mut() = self.then.blobs.borrow().clone();
        Ok(true)
    }
}

#[test]
fn what_was_stored_while_the_store_was_waited_for_counts() {
    let server = server(&BIG);
    let roomy = || {
        let store = Limited::default();
        store.room.set(1 << 30);
        store
    };
    let with = |store: Late| {
        server.forget();
        let base = remote("o/m@v1", Some(&server.address), http_options(), Some(store));
        let done = load(Sources { base, adapter: AdapterFrom::Auto }, None).unwrap();
        assert_eq!((done.logits, done.warnings), (EXPECTED.clone(), vec![]));
        weights_sent(&server, &BIG)
    };
    let full = roomy();
    assert!(with(Late { store: full.clone(), then: roomy() }) >= data_bytes(), "control: nothing was stored");
    let (half, there) = (roomy(), full.clone());
    stopped_at(
        Sources { base: remote("o/m@v1", Some(&server.address), http_options(), Some(half.clone())), adapter: AdapterFrom::Auto },
        20 << 20,
    );
    for before in [roomy(), half] {
        assert_eq!(with(Late { store: before, then: there.clone() }), 0);
    }
}

#[test]
fn a_model_and_an_adapter_of_one_place_are_stored_beside_each_other() {
    let files: Files = golden("tiny-llama-tied")
        .into_iter()
        .map(|(name, content)| (name.strip_prefix("draft_adapter/").unwrap_or(&name).to_owned(), content))
        .collect();
    let server = server(&files);
    let adapter = |location: &str, hub: Option<&str>, store: &Scratch| {
        let locator = Locator::parse(location, None, hub).unwrap();
        let folder = Some(FolderStore::new(&store.0));
        let transport = UreqTransport::new(Duration::from_secs(3));
        AdapterFrom::Source(RemoteSource::new(transport, location, locator, http_options(), Role::Adapter, folder))
    };
    let expected = from_folder(&golden("tiny-llama-tied"), None);
    let store = Scratch::new();
    let both = |from_hub: bool| match from_hub {
        true => Sources { adapter: adapter("o/m@v1", Some(&server.address), &store), ..hub(&server, Some(&store)) },
        false => Sources { adapter: adapter(&format!("{}/m/", server.address), None, &store), ..url(&server, Some(&store)) },
    };
    for from_hub in [false, true] {
        for _ in 0..2 {
            let done = load(both(from_hub), None).unwrap();
            assert_eq!((done.logits, done.warnings), (expected.clone(), vec![]));
        }
    }
    let of = |role: &str| store.manifests().iter().filter(|m| m["role"] == role && m["complete"] == true).count();
    assert_eq!((of("model"), of("adapter")), (2, 2));
    server.stop();
    for from_hub in [false, true] {
        let done = load(both(from_hub), None).unwrap();
        assert_eq!((done.logits, done.warnings), (expected.clone(), vec!["store-offline"; 2]));
    }
}

/// A hub whose weights are others while the switch is on, for requests that `which` takes. Its listing stays.
fn switching(other: Vec<u8>, which: fn(&Request) -> bool) -> (Server, Arc<AtomicBool>) {
    let on = Arc::new(AtomicBool::new(false));
    let (seen, listing) = (Arc::clone(&on), listing(&BIG, "c0ffee"));
    let mut others = BIG.clone();
    others.insert(WEIGHTS.into(), Content::from(other.as_slice()));
    let server = Server::start(move |request| {
        let files = if seen.load(Ordering::SeqCst) && which(request) { &others } else { &*BIG };
        serve(files, "c0ffee", &listing, request)
    });
    (server, on)
}

#[test]
fn a_part_of_a_verified_file_that_comes_again_must_be_what_it_was() {
    let mut other = bytes(&BIG[WEIGHTS]).to_vec();
    other[20_000..].iter_mut().for_each(|byte| *byte ^= 1);
    let (server, bad) = switching(other, |_| true);
    for sources in [url, hub] {
        for (damaged, gone) in [(false, false), (true, false), (false, true), (true, true)] {
            let store = Scratch::new();
            bad.store(false, Ordering::SeqCst);
            load(sources(&server, Some(&store)), None).unwrap();
            let block = store.blocks().into_iter().min_by_key(|block| block.metadata().unwrap().len()).unwrap();
            if gone {
                std::fs::remove_file(&block).unwrap();
            } else {
                let mut content = std::fs::read(&block).unwrap();
                *content.last_mut().unwrap() ^= 1;
                std::fs::write(&block, content).unwrap();
            }
            bad.store(damaged, Ordering::SeqCst);
            server.forget();
            let done = load(sources(&server, Some(&store)), None);
            assert!(weights_sent(&server, &BIG) < data_bytes() / 2, "only a part comes again");
            if damaged {
                refused(done, &["came once more", WEIGHTS]);
                assert!(store.files().is_empty(), "{:?}", store.files());
            } else {
                assert_eq!(done.unwrap().logits, *EXPECTED, "control");
            }
        }
    }
}

#[test]
fn what_was_made_of_bytes_that_no_hash_covers_is_made_again() {
    // Weights of the first batch; the stream they come in never ends.
    let mut other = bytes(&BIG[WEIGHTS]).to_vec();
    other[5_000_000..5_004_000].iter_mut().for_each(|byte| *byte ^= 1);
    let mut flawed = BIG.clone();
    flawed.insert(WEIGHTS.into(), Content::from(other.as_slice()));
    assert_ne!(from_folder(&flawed, None), *EXPECTED, "control: it is another model");
    let (server, bad) = switching(other, |_| true);
    for way in 0..3 {
        let store = Scratch::new();
        bad.store(true, Ordering::SeqCst);
        stopped_at(hub(&server, Some(&store)), 20 << 20);
        assert!(!store.blocks().is_empty());
        bad.store(false, Ordering::SeqCst);
        match way {
            // Another form comes whole and is verified.
            0 => assert_eq!(load(hub(&server, Some(&store)), Some(Quantize::Q4)).unwrap().logits, *EXPECTED_Q4),
            // It is on its way, and has a resume point.
            1 => {
                let stopped = block_on(loaded(
                    &mut hub(&server, Some(&store)),
                    Some(Quantize::Q4),
                    |event| !matches!(event, LoadEvent::Progress(progress) if progress.done > 30 << 20),
                ));
                assert!(matches!(stopped, Err(Error::Aborted(_))));
            }
            _ => {
                let resume = store.files().into_iter().find(|file| name_of(file) == "resume").unwrap();
                std::fs::remove_file(resume).unwrap();
            }
        }
        server.forget();
        let done = load(hub(&server, Some(&store)), None).unwrap();
        assert_eq!((done.logits, done.warnings), (EXPECTED.clone(), vec![]), "way {way}");
        assert!(weights_sent(&server, &BIG) >= data_bytes());
        server.forget();
        assert_eq!(load(hub(&server, Some(&store)), None).unwrap().logits, *EXPECTED);
        assert_eq!(weights_sent(&server, &BIG), 0);
    }
    // Control: with its resume point the hash finds it.
    let store = Scratch::new();
    bad.store(true, Ordering::SeqCst);
    stopped_at(hub(&server, Some(&store)), 20 << 20);
    bad.store(false, Ordering::SeqCst);
    refused(load(hub(&server, Some(&store)), None), &["SHA-256"]);
    assert!(store.files().is_empty());
}

#[test]
fn the_header_must_be_the_one_that_passes_in_the_stream() {
    // Two layers' gates change names: another header of the same length.
    let right = bytes(&BIG[WEIGHTS]).to_vec();
    let [a, b] = ["layers.0.mlp.gate_proj", "layers.1.mlp.gate_proj"].map(str::as_bytes);
    let places = |name: &[u8]| right[..60_000].windows(name.len()).position(|window| window == name).unwrap();
    let mut other = right.clone();
    other[places(a)..][..a.len()].copy_from_slice(b);
    other[places(b)..][..b.len()].copy_from_slice(a);
    let mut flawed = BIG.clone();
    flawed.insert(WEIGHTS.into(), Content::from(other.as_slice()));
    assert_ne!(from_folder(&flawed, None), *EXPECTED, "control: it is another model");
    let (server, bad) = switching(other, |request| request.range.is_some_and(|(_, to)| to.is_some()));
    for sources in [url, hub] {
        for stored in [false, true] {
            let store = Scratch::new();
            let place = stored.then_some(&store);
            bad.store(true, Ordering::SeqCst);
            refused(load(sources(&server, place), None), &["changed on the server", WEIGHTS]);
            assert!(store.files().is_empty());
            bad.store(false, Ordering::SeqCst);
            assert_eq!(load(sources(&server, place), None).unwrap().logits, *EXPECTED, "control");
        }
    }
    // One that is lost from the store comes alone, and must be the verified one; else all of it passes again.
    for damaged in [false, true] {
        let store = Scratch::new();
        bad.store(false, Ordering::SeqCst);
        load(hub(&server, Some(&store)), None).unwrap();
        let sides = store.files().into_iter().filter(|file| name_of(file).starts_with("side-"));
        sides.for_each(|side| std::fs::remove_file(side).unwrap());
        bad.store(damaged, Ordering::SeqCst);
        server.forget();
        let done = load(hub(&server, Some(&store)), None);
        if damaged {
            refused(done, &["changed on the server", WEIGHTS]);
        } else {
            assert_eq!(done.unwrap().logits, *EXPECTED);
            assert!(server.sent() < 1 << 20);
        }
    }
}

#[test]
fn a_new_revision_takes_the_place_of_the_old_one() {
    let changed = big(3);
    let expected = from_folder(&changed, None);
    let version = Arc::new(Mutex::new((BIG.clone(), "c0ffee")));
    let seen = Arc::clone(&version);
    let server = Server::start(move |request| {
        let (files, commit) = seen.lock().unwrap().clone();
        let listed = if request.path.starts_with("/api/") { listing(&files, commit) } else { Value::Null };
        serve(&files, commit, &listed, request)
    });
    let store = Scratch::new();
    for sources in [url, hub] {
        *version.lock().unwrap() = (BIG.clone(), "c0ffee");
        assert_eq!(load(sources(&server, Some(&store)), None).unwrap().logits, *EXPECTED);
        let entries = store.manifests().len();
        *version.lock().unwrap() = (changed.clone(), "decaf");
        // Stopped half-way, the old one is still there.
        stopped_at(sources(&server, Some(&store)), 12 << 20);
        assert_eq!(store.manifests().len(), entries + 1);
        assert_eq!(load(sources(&server, Some(&store)), None).unwrap().logits, expected);
        assert_eq!(store.manifests().len(), entries, "the old one is gone");
    }
}

#[test]
fn headers_go_to_their_own_server_only() {
    // Weights lie on another host, as those of a hub do, at an address that is good for a while.
    let listing = listing(&BIG, "c0ffee");
    let weights = Server::start(move |request| match request.path.strip_suffix("?signed=1") {
        Some(path) => serve(&BIG, "c0ffee", &listing, &Request { path: path.to_owned(), ..request.clone() }).cut(20_000_000),
        None => Reply::status(403),
    });
    let elsewhere = weights.address.clone();
    let hub_server = faulty(&BIG, move |request, reply| match request.headers.get("authorization").map(String::as_str) {
        Some("Bearer secret") if request.path.ends_with(WEIGHTS) => {
            Reply::status(302).with("location", &format!("{elsewhere}/m/{WEIGHTS}?signed=1#x"))
        }
        Some("Bearer secret") => reply,
        _ => Reply::status(401),
    });
    let headers = vec![("authorization".to_owned(), "Bearer secret".to_owned())];
    let options = HttpOptions { headers, ..http_options() };
    let base = remote::<FolderStore>("o/m@v1", Some(&hub_server.address), options, None);
    assert_eq!(load(Sources { base, adapter: AdapterFrom::Auto }, None).unwrap().logits, *EXPECTED);
    let asked = weights.requests();
    assert!(asked.len() > 2 && asked.iter().all(|request| !request.headers.contains_key("authorization")), "{asked:?}");
    assert!(asked.iter().all(|request| request.range.is_some()), "ranges go along");
    // Control: without the header the hub refuses.
    refused(load(hub(&hub_server, None), None), &["401", "permission"]);
}

#[test]
fn preflight_says_what_it_would_take_and_reads_no_weight() {
    let (store, server) = (Scratch::new(), server(&BIG));
    let ask = |quantize, limits: Option<Limits>, store: Option<&Scratch>| {
        let backend = if limits.is_none() { Backend::Cpu } else { Backend::Gpu };
        let options = LoadOptions { backend, quantize, context_length: Some(256), ..LoadOptions::default() };
        let gpu = limits.map_or_else(Offer::default, Offer::Real);
        let offered = Offered { gpu, quota_left: Some(1000) };
        block_on(Model::preflight(&mut hub(&server, store), &options, offered)).unwrap()
    };
    let all = ask(None, Some(Limits::default()), Some(&store));
    assert_eq!((&all["fits"], &all["reason"], &all["model_type"]), (&json!(true), &Value::Null, &json!("llama")));
    assert_eq!(all["download"]["bytes"], data_bytes());
    assert_eq!(all["download"]["files"], json!([{ "file": WEIGHTS, "bytes": data_bytes() }]));
    assert_eq!(all["store"]["quota_left"], 1000);
    assert!(store.files().is_empty(), "nothing is stored");
    let weights = all["memory"]["weights"].as_u64().unwrap();
    assert!((data_bytes()..data_bytes() * 11 / 10).contains(&weights), "{all}");
    assert_eq!(all["memory"]["kv_cache"], 3 * 2 * (256 + 160) * 4 * 64 * 2);
    let q4 = ask(Some(Quantize::Q4), Some(Limits::default()), Some(&store));
    assert!(q4["memory"]["weights"].as_u64().unwrap() < weights / 2, "{q4}");
    assert!(q4["quantization"].as_str().unwrap().starts_with("4-bit"), "{q4}");
    assert!(server.sent() < 6 << 20, "{} bytes came for configs and headers", server.sent());

    for (limits, name) in [
        (Limits { max_storage_buffer_binding_size: 50_000, ..Limits::default() }, "maxStorageBufferBindingSize"),
        (Limits { max_buffer_size: 50_000, ..Limits::default() }, "maxBufferSize"),
    ] {
        let tight = ask(None, Some(limits), None);
        assert_eq!((&tight["fits"], &tight["limit"]), (&json!(false), &json!(name)), "{tight}");
        assert!(tight["reason"].as_str().unwrap().contains("50000"), "{tight}");
    }
    let cpu = ask(None, None, None);
    assert_eq!((&cpu["fits"], &cpu["backend"]), (&json!(true), &json!("cpu")));

    // What is stored is not fetched, and is said to be there.
    stopped_at(hub(&server, Some(&store)), 20 << 20);
    let part = ask(None, None, Some(&store));
    let left = part["download"]["bytes"].as_u64().unwrap();
    assert!(left < data_bytes() && left > data_bytes() / 4, "{part}");
    assert!(part["download"]["stored_bytes"].as_u64().unwrap() > 0);
    load(hub(&server, Some(&store)), None).unwrap();
    let done = ask(None, None, Some(&store));
    assert_eq!((&done["download"]["bytes"], &done["store"]["bytes_needed"]), (&json!(0), &json!(0)), "{done}");
    assert_eq!(ask(Some(Quantize::Q4), None, Some(&store))["download"]["bytes"], data_bytes());
}

/// A server of a checkpoint that is a config and a header, before as many zeros as the weights have bytes; the file's size.
fn described(shape: &Shape) -> (Server, u64) {
    let (header, size) = shape.header(|_| true);
    let config = Content::from(shape.config.to_string().as_bytes());
    let weights = Content::Padded(Arc::new(header), size);
    let server = Server::start(move |request| match request.path.as_str() {
        "/m/config.json" => Reply::whole(&config),
        "/m/model.safetensors" => Reply::ranged(request, &weights, "\"1\""),
        _ => Reply::status(404),
    });
    (server, size)
}

#[test]
fn three_billion_parameters_fit_the_limits_that_every_device_has() {
    let shape = Shape::nemotron_3b();
    let (server, size) = described(&shape);
    let ask = |limits, context| {
        let options = LoadOptions {
            backend: Backend::Gpu,
            quantize: Some(Quantize::Q4),
            context_length: Some(context),
            ..LoadOptions::default()
        };
        let offered = Offered { gpu: Offer::Real(limits), quota_left: None };
        block_on(Model::preflight(&mut url(&server, None), &options, offered)).unwrap()
    };
    let all = ask(Limits::default(), 4096);
    assert_eq!((&all["fits"], &all["drafter"]), (&json!(true), &json!(true)), "{all}");
    // Head and table, 400 MB each in 8 bits, are bound in parts.
    let largest = all["memory"]["largest_binding"]["bytes"].as_u64().unwrap();
    assert!((64 << 20..=128 << 20).contains(&largest), "{all}");
    assert_eq!(all["download"]["bytes"], size);
    assert!((2_400_000_000..2_700_000_000).contains(&all["memory"]["weights"].as_u64().unwrap()), "{all}");
    assert!(server.sent() < 1 << 20, "{} bytes came", server.sent());
    // Control: a cache that no binding holds.
    let tight = ask(Limits::default(), 262_144);
    assert_eq!((&tight["fits"], &tight["limit"]), (&json!(false), &json!("maxStorageBufferBindingSize")), "{tight}");
    assert!(tight["reason"].as_str().unwrap().contains("use a context of at most"), "{tight}");
}

/// What preflight says of a device is what loading would do with it.
#[test]
fn preflight_says_on_what_loading_would_run() {
    // Heads that the GPU's kernels do not take; the CPU's do.
    let mut wide_heads = Shape::llama(768, 1, 256, 300);
    wide_heads.config["head_dim"] = json!(384);
    wide_heads.config["num_attention_heads"] = json!(2);
    wide_heads.config["num_key_value_heads"] = json!(1);
    for (shape, fits_gpu) in [(Shape::llama(256, 1, 256, 300), true), (wide_heads, false)] {
        let (server, _) = described(&shape);
        let ask = |backend, gpu| {
            let options = LoadOptions { backend, context_length: Some(256), ..LoadOptions::default() };
            block_on(Model::preflight(&mut url(&server, None), &options, Offered { gpu, quota_left: None })).unwrap()
        };
        let limits = Limits::default();
        let (real, software) = (|| Offer::Real(limits), || Offer::Software(limits, "llvmpipe".into()));
        let none = || Offer::Missing("no WebGPU adapter: none at all".into());
        let said = |answer: &Value| {
            let word = |field: &str| answer[field].as_str().unwrap_or_default().to_owned();
            (answer["fits"] == true, word("backend"), word("backend_reason"), word("reason"), word("limit"))
        };
        for (backend, gpu, runs_on, fits, why) in [
            (Backend::Gpu, real(), "webgpu", fits_gpu, "asked for"),
            (Backend::Gpu, software(), "webgpu", fits_gpu, "asked for"),
            (Backend::Gpu, none(), "webgpu", false, "no WebGPU adapter"),
            (Backend::Auto, real(), "webgpu", fits_gpu, "there is a GPU"),
            (Backend::Auto, software(), "cpu", true, "llvmpipe is a software one"),
            (Backend::Auto, none(), "cpu", true, "no WebGPU adapter"),
            (Backend::Cpu, real(), "cpu", true, "asked for"),
        ] {
            let what = format!("{backend:?} with {gpu:?}");
            let lacking = backend == Backend::Gpu && gpu == none();
            let answer = ask(backend, gpu);
            let (really_fits, backend, backend_reason, reason, limit) = said(&answer);
            assert_eq!((really_fits, backend.as_str()), (fits, runs_on), "{what}: {answer}");
            assert!(backend_reason.contains(why), "{what}: {answer}");
            match (fits, lacking) {
                (true, _) => assert!(reason.is_empty() && limit.is_empty(), "{what}: {answer}"),
                (false, true) => assert!(reason.contains("none at all") && limit.is_empty(), "{what}: {answer}"),
                (false, false) => assert!(reason.contains("head_dim is 384") && limit == "head_dim", "{what}: {answer}"),
            }
            assert!(answer["memory"]["weights"].as_u64().unwrap() > 100_000, "{what}: {answer}");
        }
    }
}

#[test]
fn the_command_line_loads_from_addresses_and_repositories() {
    let files = golden("tiny-llama-tied");
    let server = faulty(&files, |request, reply| match request.headers.get("x-key").map(String::as_str) {
        Some("a: b") => reply,
        _ => Reply::status(403),
    });
    let store = Scratch::new();
    let run = |model: &str, more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forecall"));
        command.args([
            "generate",
            "--backend",
            "cpu",
            "--json",
            "--max-tokens",
            "8",
            "--prompt",
            "every morning",
            "--model",
            model,
        ]);
        command.args(["--store", &store.0.display().to_string()]).args(more).env_remove("HF_ENDPOINT");
        let output = command.output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let tokens = |(success, stdout, stderr): (bool, String, String)| {
        assert!(success, "{stderr}");
        ids(&serde_json::from_str::<Value>(&stdout).unwrap()["tokens"])
    };
    let expected = tokens(run(&golden_folder("tiny-llama-tied").display().to_string(), &[]));
    assert!(store.files().is_empty(), "folders are not stored");
    let (address, key) = (format!("{}/m", server.address), ["--header", "X-Key: a: b"]);
    assert_eq!(tokens(run(&address, &key)), expected);
    let hub = ["--header", "X-Key: a: b", "--hub-url", &server.address];
    assert_eq!(tokens(run("o/m@v1", &hub)), expected);
    assert_eq!(tokens(run("o/m", &[hub.as_slice(), &["--revision", "v1"]].concat())), expected);
    assert_eq!(tokens(run("o/m", &hub)), expected);
    let refused = |(success, stdout, stderr): (bool, String, String), about: &str| {
        assert!(!success && stdout.is_empty() && stderr.contains(about), "{stderr}");
        assert_eq!(stderr.trim_end().lines().count(), 1, "one sentence: {stderr}");
    };
    refused(run(&address, &["--store", "none"][..0]), "permission");
    refused(run("o/m@v2", &hub), "no such revision");
    refused(run("o/m@v1", &[hub.as_slice(), &["--revision", "v2"]].concat()), "two revisions");
    refused(run("./o/m", &hub), "no such folder");
    refused(run("ftp://x/y", &[]), "ftp");
    let secret = server.address.replace("://", "://user:secret@");
    for (success, stdout, stderr) in [run(&format!("{secret}/m"), &key), run("o/m", &["--hub-url", &secret])] {
        assert!(!stderr.contains("secret"), "{stderr}");
        refused((success, stdout, stderr), "header");
    }
    assert_eq!(tokens(run(&address.replace("http", "HTTP"), &key)), expected);
    refused(run("o/m", &["--header", "nonsense"]), "NAME: VALUE");
    for header in ["Content-Length: 5", "range: bytes=0-1", "Host: x", "a\u{e9}: x", "a: b\r\nc: d"] {
        refused(run("o/m", &["--header", header]), "--header");
    }
    refused(run("models/none", &[hub.as_slice(), &["--revision", "none"]].concat()), "Nor is there a folder models/none here");
    server.stop();
    let (success, stdout, stderr) = run("o/m@v1", &hub);
    assert!(stderr.contains("warning: ") && stderr.contains("could not be checked"), "{stderr}");
    assert_eq!(tokens((success, stdout, stderr)), expected);
    refused(run("o/other", &hub), "cannot be reached");
}
