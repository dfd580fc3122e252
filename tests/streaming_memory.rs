//! A checkpoint of several gigabytes in one file, streamed from a server and turned into 4-bit groups: what that takes of
//! memory and time. One test, because it counts what the whole program allocates.
//!
//! `FORECALL_STREAM_SHAPE` is `3b` (the default), `8b` or `14b`, `FORECALL_STREAM_LAYERS` how many of its 26, 34 or 40 layers
//! there are; all those of 3B are 7.66 GB. With `FORECALL_STREAM_SORTED` the matrices come in 4-bit groups, with all scales
//! behind all weights.

mod server;
mod synthetic;

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forecall::fetch::http_source::HttpOptions;
use forecall::fetch::locator::Locator;
use forecall::fetch::native::{FolderStore, UreqTransport};
use forecall::fetch::remote::{RemoteSource, Role};
use forecall::fetch::store::{BlobStore, StoreFailure};
use forecall::model::load::{AdapterFrom, LoadOptions, Sources, load_checkpoint, stream_weights};
use forecall::model::program::{MatrixId, VectorId};
use forecall::weights::WeightSink;
use forecall::weights::packed::PackedRows;
use forecall::weights::plan::PlainFormat;
use pollster::block_on;
use server::{Content, Reply, Server};
use sha2::{Digest, Sha256};
use synthetic::Shape;

/// Counts what is allocated and how much of it there was at most.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn grew(bytes: usize) {
    let now = NOW.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(now, Ordering::Relaxed);
}

// SAFETY: every call is passed on as it is to the system's allocator; only numbers are kept beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grew(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grew(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        grew(size);
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Counts rows and lets them go.
#[derive(Default)]
struct Counted {
    words: u64,
    rows: u64,
}

impl WeightSink for Counted {
    fn matrix(&mut self, _: MatrixId, rows: PackedRows) -> forecall::Result<()> {
        self.words += (rows.data.len() + rows.scales.len()) as u64;
        self.rows += rows.n as u64;
        Ok(())
    }

    fn vector(&mut self, _: VectorId, values: Vec<f32>) -> forecall::Result<()> {
        self.words += values.len() as u64;
        Ok(())
    }
}

/// A store that keeps what comes before it is due, and counts the rest.
#[derive(Debug)]
struct Sink {
    folder: PathBuf,
    shelf: FolderStore,
}

static STORED: AtomicUsize = AtomicUsize::new(0);
static SHELVED: AtomicUsize = AtomicUsize::new(0);

impl Sink {
    fn new() -> Self {
        let name = format!("streaming-{}", std::process::id());
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        Self { shelf: FolderStore::new(&folder), folder }
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl BlobStore for Sink {
    async fn get(&self, name: &str) -> Option<Vec<u8>> {
        self.shelf.get(name).await
    }

    async fn put(&self, name: &str, bytes: &[u8]) -> Result<(), StoreFailure> {
        if name.contains("/raw-") {
            SHELVED.fetch_add(bytes.len(), Ordering::Relaxed);
            return self.shelf.put(name, bytes).await;
        }
        if name.contains("/block-") {
            STORED.fetch_add(bytes.len(), Ordering::Relaxed);
        }
        Ok(())
    }

    async fn list(&self, prefix: &str) -> Vec<(String, u64)> {
        self.shelf.list(prefix).await
    }

    async fn remove(&self, name: &str) {
        self.shelf.remove(name).await;
    }

    async fn lock(&self, _: &str) -> Result<bool, StoreFailure> {
        Ok(true)
    }
}

/// SHA-256 of `head` and zeros up to `size`.
fn hash(head: &[u8], size: u64) -> String {
    let mut hash = Sha256::new_with_prefix(head);
    let zeros = vec![0; 1 << 20];
    let mut left = size - head.len() as u64;
    while left > 0 {
        let now = left.min(zeros.len() as u64);
        hash.update(&zeros[..now as usize]);
        left -= now;
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn gigabytes_stream_through_a_quarter_of_one() {
    let layers = std::env::var("FORECALL_STREAM_LAYERS").ok().and_then(|layers| layers.parse().ok()).unwrap_or(2);
    let name = std::env::var("FORECALL_STREAM_SHAPE").unwrap_or_else(|_| "3b".to_owned());
    let shape = match name.as_str() {
        "3b" => Shape::nemotron_3b(),
        "8b" => Shape::nemotron_8b(),
        "14b" => Shape::nemotron_14b(),
        other => panic!("FORECALL_STREAM_SHAPE is {other}; expected 3b, 8b or 14b"),
    };
    let shape = shape.with_layers(layers);
    let sorted = std::env::var_os("FORECALL_STREAM_SORTED").is_some();
    let shape = if sorted { shape.sorted_by_type(4) } else { shape };
    let (header, size) = shape.header(|_| true);
    if layers == 26 && name == "3b" && !sorted {
        assert_eq!(shape.data_bytes(), 7_663_347_000 - 27_960, "the size of the published file, header aside");
    }
    let sha256 = hash(&header, size);
    let config = shape.config.to_string();
    let listing = serde_json::json!({ "sha": "c0ffee", "siblings": [
        { "rfilename": "config.json", "size": config.len() },
        { "rfilename": "model.safetensors", "size": size, "lfs": { "sha256": sha256, "size": size } },
    ]});
    let (config, listing) = (Content::from(config.as_bytes()), Content::from(listing.to_string().as_bytes()));
    let weights = Content::Padded(Arc::new(header), size);
    let server = Server::start(move |request| match request.path.as_str() {
        "/api/models/o/m/revision/main?blobs=true" => Reply::whole(&listing),
        "/o/m/resolve/c0ffee/config.json" => Reply::whole(&config),
        "/o/m/resolve/c0ffee/model.safetensors" => Reply::ranged(request, &weights, "\"1\""),
        _ => Reply::status(404),
    });

    let locator = Locator::parse("o/m", None, Some(&server.address)).unwrap();
    let transport = UreqTransport::new(Duration::from_secs(30));
    let base = RemoteSource::new(transport, "o/m", locator, HttpOptions::default(), Role::Model, Some(Sink::new()));
    let mut sources = Sources { base, adapter: AdapterFrom::Auto };
    let options = LoadOptions { plain: PlainFormat::Affine { bits: 4, group: 64 } };
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let start = Instant::now();
    let mut sink = Counted::default();
    let checkpoint = block_on(load_checkpoint(&mut sources, &options)).unwrap();
    block_on(stream_weights(&mut sources, &checkpoint, &mut sink, &mut |_| Ok(()))).unwrap();
    let (seconds, peak) = (start.elapsed().as_secs_f64(), PEAK.load(Ordering::Relaxed) - before);
    println!(
        "{name}, {layers} layers, {:.2} GB to 4 bits: {seconds:.1} s, {:.2} s per GB, {:.1} MB at most, {:.2} GB stored, {:.2} GB \
         stored as they came for a while, {:.2} GB sent",
        size as f64 / 1e9,
        seconds / (size as f64 / 1e9),
        peak as f64 / 1e6,
        STORED.load(Ordering::Relaxed) as f64 / 1e9,
        SHELVED.load(Ordering::Relaxed) as f64 / 1e9,
        server.sent() as f64 / 1e9,
    );
    assert_eq!(4 * sink.words, checkpoint.packed_bytes(), "all of it arrived");
    assert!(peak < 256 << 20, "{peak} bytes at most");
    assert!(peak > 8 << 20, "control: the count counts, at least a batch was held: {peak}");
    assert!(STORED.load(Ordering::Relaxed) as u64 >= checkpoint.packed_bytes());
    // Each byte once, the header and what else is small twice.
    assert!(server.sent() < size + (1 << 20), "{} bytes were sent of {size}", server.sent());
    let left = block_on(Sink::new().list(""));
    assert!(left.is_empty(), "what came goes when what is made of it is stored: {left:?}");
}
