//! A checkpoint from the network with a store beside it: what is stored is not fetched, and what is made is stored.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

use web_time::{SystemTime, UNIX_EPOCH};

use super::http_source::{HttpOptions, HttpSource};
use super::locator::{Listing, Locator};
use super::running_hash::{self, Hash, RunningHash};
use super::store::{
    self, BlobStore, MANIFEST, Manifest, RAW, RESUME, ResumePoint, StoreFailure, StoredListing, StoredWeights, VERSION,
    entry_name, read_manifest, read_resume, side_name,
};
use super::transport::Transport;
use crate::error::{Error, HttpFailure, Result};
use crate::weights::source::{ByteSource, Step, Survey, Traffic, Warning};
use crate::weights::stored_block::{checksum, head_sum, seal, unseal};

/// Of a file that is verified, so small a part is fetched by range if it is missing; more, and the whole file passes again.
const SMALL_PART: u64 = 8;
/// Blocks by which a resume point may lag behind the stream before what holds it back is stored as it came: an eighth of
/// the file, within these bounds.
const LAG_BLOCKS: (u64, u64) = (4, 8);

/// What the files are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A checkpoint.
    Model,
    /// A draft adapter.
    Adapter,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Adapter => "adapter",
        }
    }

    /// The weights that tell revisions at an address apart.
    fn weights(self) -> &'static str {
        match self {
            Self::Model => "model.safetensors",
            Self::Adapter => "adapter_model.safetensors",
        }
    }
}

/// Files of a repository or an address, and a store.
#[derive(Debug)]
pub struct RemoteSource<T: Transport, B> {
    http: HttpSource<T>,
    store: Option<B>,
    location: String,
    role: Role,
    entry: Option<Entry>,
    /// Whether the entry has been looked for.
    searched: bool,
    warnings: Vec<Warning>,
}

/// The entry of the revision that is loaded.
#[derive(Debug)]
struct Entry {
    name: String,
    manifest: Manifest,
    /// Whether there was such an entry before.
    known: bool,
    /// Whether it is written to.
    writable: bool,
    /// Why it is not written to, to be told when there is something to store.
    closed: Option<Closed>,
    /// Whether the revision could not be checked, so that nothing but the store counts.
    offline: bool,
    /// Whether what is stored of small files is still what the source has: it is, at a commit.
    pinned: bool,
    resume: BTreeMap<String, ResumePoint>,
    /// Small files and headers that will be stored when weights begin to come: then they have been understood.
    sides: BTreeMap<String, Vec<u8>>,
    /// What was read of weights files before their weights.
    heads: BTreeMap<String, Vec<Head>>,
    /// Blobs that are there.
    present: BTreeSet<String>,
    /// Blobs that this loading wrote.
    written: BTreeSet<String>,
    steps: Vec<Kept>,
    /// Weights files, how they are read and what is stored of them as it came.
    files: BTreeMap<String, Shelf>,
    /// Whether blocks are stored as they come: no longer if there was no room for one.
    shelving: bool,
    /// Weights files that are not those that the entry knew.
    changed: BTreeSet<String>,
    /// Whether something that was made could not be stored.
    lost: bool,
}

/// Why an entry is not written to.
#[derive(Debug)]
enum Closed {
    /// Another loading writes to it.
    Busy,
    /// Nobody can.
    Failed(StoreFailure),
}

/// A part of a weights file that was read before its weights: of its header.
#[derive(Debug, Clone)]
struct Head {
    range: Range<u64>,
    hash: Hash,
    /// Its blob, and the sum in that one's head.
    blob: String,
    sum: u64,
}

/// A step and its blob.
#[derive(Debug)]
struct Kept {
    blob: String,
    /// Whether the blob is there, made of bytes that were or will be held against the hash of their file.
    stored: bool,
    /// The sum in the blob's head, as it is or must be.
    sum: Option<u64>,
    /// Files that the step reads.
    reads: BTreeSet<String>,
    /// Files that no later step reads.
    ends: Vec<String>,
}

/// Blocks of a weights file that steps need. A file in which they lie far apart passes long before the first step ends (one
/// sorted by type, with all scales behind all weights, does so whole), so these blocks are stored as they came, until the steps
/// that need them are.
#[derive(Debug)]
struct Shelf {
    way: Way,
    /// The beginning of its blobs' names; a block's number follows.
    prefix: String,
    /// Bytes of the file.
    size: u64,
    /// Bytes that steps which are not stored read.
    missing: u64,
    /// Blocks that such steps need, in order.
    blocks: Vec<Needed>,
}

/// A block that steps need.
#[derive(Debug)]
struct Needed {
    index: u64,
    /// The last of these steps.
    last: usize,
    /// Whether it is stored.
    raw: bool,
    /// Whether it holds the resume point back: it is not stored, and not before the stream's beginning.
    open: bool,
    /// Its sum, if it is stored or was until there was no room.
    sum: Option<u64>,
}

impl Shelf {
    /// Blocks before byte `at` that are needed and not stored.
    fn lacks(&self, at: u64, block: u64) -> impl Iterator<Item = &Needed> {
        self.blocks.iter().filter(move |needed| needed.index < at / block && !needed.raw)
    }

    /// Bytes of the blocks that `which` takes.
    fn bytes(&self, block: u64, which: &dyn Fn(&Needed) -> bool) -> u64 {
        let taken = self.blocks.iter().filter(|needed| which(needed));
        taken.map(|needed| block.min(self.size.saturating_sub(needed.index * block))).sum()
    }

    fn get(&mut self, index: u64) -> Option<&mut Needed> {
        let at = self.blocks.binary_search_by_key(&index, |needed| needed.index).ok()?;
        self.blocks.get_mut(at)
    }

    fn name(&self, index: u64) -> String {
        format!("{}{index}", self.prefix)
    }

    fn sums(&self) -> Vec<(u64, u64)> {
        self.blocks.iter().filter_map(|needed| Some((needed.index, needed.sum?))).collect()
    }
}

/// How a weights file is read.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Way {
    /// All of it is there, or single parts are fetched by range.
    Parts,
    /// As a stream from its first byte.
    Stream,
    /// As a stream from a later block on.
    TakenUp(u64, Option<String>),
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}

impl<T: Transport, B: BlobStore> RemoteSource<T, B> {
    /// The files of `location`, which a caller wrote and `locator` was made of. Without a `store` nothing is kept.
    #[must_use]
    pub fn new(transport: T, location: &str, locator: Locator, options: HttpOptions, role: Role, store: Option<B>) -> Self {
        let http = HttpSource::new(transport, locator, options);
        Self { http, store, location: location.to_owned(), role, entry: None, searched: false, warnings: Vec::new() }
    }

    fn warn(&mut self, code: &'static str, message: String) {
        self.warnings.push(Warning { code, message });
    }

    /// Finds the entry, once.
    async fn find_entry(&mut self) -> Result<()> {
        if self.searched || self.store.is_none() {
            return Ok(());
        }
        self.searched = true;
        let locator = self.http.locator().clone();
        let (source, asked) = match &locator {
            Locator::Hub { revision, .. } => (locator.source(), Some(revision.clone())),
            Locator::Url(base) => (base.clone(), None),
        };
        // A commit never means anything else, so the hub need not be asked.
        let is_commit = asked.as_deref().is_some_and(|asked| asked.len() == 40 && asked.bytes().all(|c| c.is_ascii_hexdigit()));
        let of_commit = asked.as_deref().filter(|_| is_commit).map(|asked| entry_name(self.role.name(), &source, asked));
        let of_commit = match of_commit {
            Some(name) => self.manifest(&name).await.filter(|manifest| manifest.complete).map(|manifest| (name, manifest)),
            None => None,
        };
        let (name, manifest, offline) = match of_commit {
            Some((name, manifest)) => (name, Some(manifest), false),
            None => match self.revision_or_stored(&source, asked.as_deref()).await {
                None => return self.take_entry().await,
                Some(Ok(Some(revision))) => {
                    let name = entry_name(self.role.name(), &source, &revision);
                    match self.manifest(&name).await {
                        Some(manifest) => (name, Some(manifest), false),
                        None => {
                            self.entry = Some(self.new_entry(name, revision, asked));
                            return self.take_entry().await;
                        }
                    }
                }
                // What is wrong with the source is told when it is read.
                Some(Ok(None)) => return Ok(()),
                Some(Err(error)) => return Err(error),
            },
        };
        let Some(manifest) = manifest else { return Ok(()) };
        self.entry = Some(Entry::new(name, manifest, offline));
        self.take_entry().await
    }

    fn new_entry(&self, name: String, revision: String, asked: Option<String>) -> Entry {
        let manifest = Manifest {
            version: VERSION,
            source: self.location.clone(),
            revision,
            asked,
            role: self.role.name().to_owned(),
            complete: false,
            created: now(),
            used: now(),
            listing: self.http.listing().map(StoredListing::from),
            missing: BTreeSet::new(),
            small: BTreeMap::new(),
            weights: BTreeMap::new(),
            sum: 0,
        };
        let mut entry = Entry::new(name, manifest, false);
        entry.known = false;
        entry
    }

    /// Settles on the entry: its blobs, whether it may be written to.
    async fn take_entry(&mut self) -> Result<()> {
        let (Some(entry), Some(store)) = (&mut self.entry, &self.store) else { return Ok(()) };
        let prefix = format!("{}/", entry.name);
        // First of all, as it may be waited for: what is read afterwards nobody else changes.
        match store.lock(&entry.name).await {
            Ok(true) => entry.writable = true,
            Ok(false) => entry.closed = Some(Closed::Busy),
            // A store that is read only may have it all.
            Err(failure) => entry.closed = Some(Closed::Failed(failure)),
        }
        let manifest = store.get(&format!("{prefix}{MANIFEST}")).await;
        match manifest.as_deref().and_then(read_manifest) {
            Some(manifest) => (entry.manifest, entry.known) = (manifest, true),
            None => (entry.manifest.complete, entry.known) = (false, false),
        }
        let listed = store.list(&prefix).await;
        entry.present = listed.into_iter().filter_map(|(name, _)| name.strip_prefix(&prefix).map(str::to_owned)).collect();
        if let Some(listing) = &entry.manifest.listing {
            entry.pinned = true;
            if self.http.listing().is_none() {
                self.http.set_listing(Listing::from(listing));
            }
        }
        let resume = store.get(&format!("{prefix}{RESUME}")).await;
        entry.resume = resume.and_then(|bytes| read_resume(&bytes)).unwrap_or_default();
        Ok(())
    }

    async fn manifest(&self, name: &str) -> Option<Manifest> {
        let bytes = self.store.as_ref()?.get(&format!("{name}/{MANIFEST}")).await?;
        read_manifest(&bytes)
    }

    /// What tells the source's present revision from others; `None` if it has no weights.
    async fn revision(&mut self) -> Result<Option<String>> {
        if let Some(listing) = self.http.list().await? {
            return Ok(Some(listing.commit.clone()));
        }
        let weights = self.role.weights();
        if let Some(size) = self.http.size(weights).await? {
            return Ok(Some(format!("{weights} {size} {}", self.http.version(weights).unwrap_or("-"))));
        }
        let index = format!("{weights}.index.json");
        let Some(size) = self.http.size(&index).await? else { return Ok(None) };
        let bytes = self.http.read(&index, 0..size).await?;
        Ok(Some(format!("{index} {}", store::short_hash(&String::from_utf8_lossy(&bytes)))))
    }

    /// [`RemoteSource::revision`]; `None` if it cannot be learnt, and the newest complete entry of the source is taken.
    /// A source that is busy is waited for only where nothing is stored.
    async fn revision_or_stored(&mut self, source: &str, asked: Option<&str>) -> Option<Result<Option<String>>> {
        let mut hurried = true;
        loop {
            self.http.hurry(hurried);
            let revision = self.revision().await;
            self.http.hurry(false);
            if let Ok(Some(_)) = revision {
                return Some(revision);
            }
            let busy = matches!(&revision, Err(Error::Http(failure)) if !failure.missing && self.http.reached());
            match self.newest_or(source, asked, revision.err()).await {
                Ok(true) => return None,
                Ok(false) => return Some(Ok(None)),
                Err(_) if hurried && busy => hurried = false,
                Err(error) => return Some(Err(error)),
            }
        }
    }

    /// Takes the newest complete entry of the source, if the revision could not be learnt because of `error`; `false` if there is
    /// none and no error.
    async fn newest_or(&mut self, source: &str, asked: Option<&str>, error: Option<Error>) -> Result<bool> {
        let lasting = match &error {
            Some(Error::Http(failure)) => {
                matches!(failure.status, Some(401 | 403 | 404 | 410)) && !(failure.missing && failure.status == Some(200))
            }
            Some(_) => true,
            None => self.http.web_pages().is_empty(),
        };
        let mut newest: Option<(String, Manifest)> = None;
        if let (false, Some(store)) = (lasting, &self.store) {
            let prefix = entry_name(self.role.name(), source, "");
            let prefix = prefix.split_inclusive('-').next().unwrap_or_default();
            let manifests = store.list("").await.into_iter().map(|(name, _)| name);
            let manifests = manifests.filter(|name| name.starts_with(prefix) && name.ends_with(&format!("/{MANIFEST}")));
            for name in manifests.collect::<Vec<_>>() {
                let name = name.trim_end_matches(MANIFEST).trim_end_matches('/').to_owned();
                let Some(manifest) = self.manifest(&name).await.filter(|m| m.complete) else { continue };
                let same = asked.is_none() || manifest.asked.as_deref() == asked || Some(manifest.revision.as_str()) == asked;
                if same && newest.as_ref().is_none_or(|(_, known)| known.created < manifest.created) {
                    newest = Some((name, manifest));
                }
            }
        }
        let Some((name, manifest)) = newest else { return error.map_or(Ok(false), Err) };
        let why = error.map_or_else(|| "a web page came in its place".to_owned(), |error| error.to_string());
        self.warn(
            "store-offline",
            format!("{} could not be checked for changes, so what is stored of it is taken: {why}", self.location),
        );
        self.entry = Some(Entry::new(name, manifest, true));
        Ok(true)
    }

    /// A stored small file or part of a weights file.
    async fn side(&self, file: &str, part: Option<&Range<u64>>) -> Option<Vec<u8>> {
        let (entry, store) = (self.entry.as_ref()?, self.store.as_ref()?);
        let name = side_name(file, part);
        if let Some(bytes) = entry.sides.get(&name) {
            return Some(bytes.clone());
        }
        let blob = store.get(&format!("{}/{name}", entry.name)).await.filter(|_| entry.present.contains(&name))?;
        unseal(&blob).map(<[u8]>::to_vec)
    }

    fn remember_side(&mut self, file: &str, part: Option<&Range<u64>>, bytes: &[u8]) {
        if let Some(entry) = self.entry.as_mut().filter(|entry| entry.writable) {
            entry.sides.insert(side_name(file, part), bytes.to_vec());
        }
    }

    /// Remembers what of a weights file was read before its weights: the same must pass.
    fn remember_head(&mut self, file: &str, part: Option<&Range<u64>>, bytes: &[u8]) {
        let (Some(entry), Some(range)) = (&mut self.entry, part) else { return };
        let heads = entry.heads.entry(file.to_owned()).or_default();
        heads.retain(|head| head.range != *range);
        let (hash, sum) = (running_hash::hash(bytes), checksum(bytes));
        heads.push(Head { range: range.clone(), hash, blob: side_name(file, part), sum });
    }

    /// Whether what is stored of small files needs no look at the network.
    fn stored_counts(&self) -> bool {
        self.entry.as_ref().is_some_and(|entry| entry.offline || entry.pinned)
    }

    fn offline(&self) -> bool {
        self.entry.as_ref().is_some_and(|entry| entry.offline)
    }

    /// Passes a result on; where the server broke a promise, the entry goes.
    async fn checked<R>(&mut self, result: Result<R>) -> Result<R> {
        if result.is_err() && self.http.distrusted() {
            self.remove_entry().await;
        }
        result
    }

    async fn remove_entry(&mut self) {
        if let (Some(entry), Some(store)) = (self.entry.as_mut().filter(|entry| entry.writable), &self.store) {
            store.remove(&format!("{}/", entry.name)).await;
            entry.writable = false;
            entry.present.clear();
        }
    }

    async fn put(&mut self, blob: &str, bytes: &[u8]) {
        loop {
            let Some(entry) = self.entry.as_mut().filter(|entry| entry.writable) else { return };
            let Some(store) = &self.store else { return };
            let Err(failure) = store.put(&format!("{}/{blob}", entry.name), bytes).await else {
                entry.present.insert(blob.to_owned());
                entry.written.insert(blob.to_owned());
                return;
            };
            // What is made goes before what it is made of.
            if self.clear_shelves(|_| true).await {
                continue;
            }
            let (Some(entry), Some(store)) = (&mut self.entry, &self.store) else { return };
            entry.writable = false;
            entry.lost = true;
            match failure {
                // Another loading may go on with what is stored.
                StoreFailure::Other(_) => {}
                // What made the model loadable without a network stays; what this loading added goes.
                StoreFailure::Full if entry.manifest.complete && entry.known => {
                    for blob in entry.written.iter().filter(|blob| blob.starts_with("block-")) {
                        store.remove(&format!("{}/{blob}", entry.name)).await;
                    }
                }
                StoreFailure::Full => store.remove(&format!("{}/", entry.name)).await,
            }
            return self.warn_of(failure);
        }
    }

    fn warn_of_closed(&mut self, closed: Closed) {
        match closed {
            Closed::Failed(failure) => self.warn_of(failure),
            Closed::Busy => {
                let message =
                    format!("{} is being loaded elsewhere at the same time; this time nothing of it is stored", self.location);
                self.warn("store-busy", message);
            }
        }
    }

    fn warn_of(&mut self, failure: StoreFailure) {
        let (code, why) = match failure {
            StoreFailure::Full => ("store-quota", "there is no room for it".to_owned()),
            StoreFailure::Other(why) => ("store-failed", why),
        };
        let message = format!("{} is loaded without storing it: {why}", self.location);
        self.warn(code, message);
    }

    /// Whether a blob is stored with this content.
    async fn has(&self, blob: &str, bytes: &[u8]) -> bool {
        match (&self.entry, &self.store) {
            (Some(entry), Some(store)) if entry.present.contains(blob) => {
                store.get(&format!("{}/{blob}", entry.name)).await.is_some_and(|known| known == bytes)
            }
            _ => false,
        }
    }

    async fn put_resume(&mut self) {
        let Some(entry) = &self.entry else { return };
        let text = store::write_resume(&entry.resume);
        self.put(RESUME, &text).await;
    }

    async fn put_manifest(&mut self) {
        let Some(entry) = &self.entry else { return };
        let text = entry.manifest.to_bytes();
        self.put(MANIFEST, &text).await;
    }

    /// The blob of a step: by what it holds, and by the versions of the files it is made of.
    fn blob(&self, step: &Step) -> String {
        let files: BTreeSet<&str> = step.reads.iter().map(|(file, _)| file.as_str()).collect();
        let version = |file: &str| {
            let known = self.entry.as_ref().and_then(|entry| entry.manifest.weights.get(file));
            known.map_or_else(String::new, |known| format!(" {} {}", known.size, known.version.as_deref().unwrap_or("-")))
        };
        let versions: String = files.into_iter().map(version).collect();
        format!("block-{}", crate::weights::stored_block::key(&format!("{}{versions}", step.key)))
    }

    /// What is stored of `steps`, and how each file is to be read.
    async fn plan(&mut self, steps: &[Step]) -> Result<(Vec<Kept>, BTreeMap<String, Shelf>)> {
        loop {
            let (kept, files) = self.plan_by_points(steps).await?;
            // What is built on a resume point that cannot be gone on from counts for nothing.
            let vain = |file: &String| files.get(file).is_some_and(|shelf| shelf.way == Way::Stream);
            let Some(entry) = &mut self.entry else { return Ok((kept, files)) };
            let points = entry.resume.len();
            entry.resume.retain(|file, _| !vain(file));
            if entry.resume.len() == points {
                return Ok((kept, files));
            }
        }
    }

    /// The sum of a blob of `file` that was verified with it; any, if no hash is listed that could verify one.
    fn verified_sum(&self, file: &str, blob: &str) -> Option<u64> {
        self.entry.as_ref()?.manifest.weights.get(file)?.blobs.get(blob).copied()
    }

    /// Whether a blob counts as made of `file`: it was verified with it, or will be if its resume point is gone on from.
    fn counts(&self, file: &str, blob: &str) -> bool {
        let point = || self.entry.as_ref().and_then(|entry| entry.resume.get(file));
        let built = || !self.is_listed(file) || point().is_some_and(|point| point.blobs.contains_key(blob));
        self.verified_sum(file, blob).is_some() || (self.is_told_apart(file) && built())
    }

    /// Whether another version of a file would be noticed, or all of this one is here: if not, halves of two versions could
    /// pass for one file.
    fn is_told_apart(&self, file: &str) -> bool {
        let known = self.entry.as_ref().and_then(|entry| entry.manifest.weights.get(file));
        self.is_listed(file) || known.is_some_and(|known| known.version.is_some() || known.verified)
    }

    /// [`RemoteSource::plan`], if all resume points are gone on from.
    async fn plan_by_points(&mut self, steps: &[Step]) -> Result<(Vec<Kept>, BTreeMap<String, Shelf>)> {
        let block = self.http.block_bytes();
        let mut kept = Vec::with_capacity(steps.len());
        for step in steps {
            let blob = self.blob(step);
            let reads: BTreeSet<String> = step.reads.iter().map(|(file, _)| file.clone()).collect();
            let present = self.entry.as_ref().is_some_and(|entry| entry.present.contains(&blob));
            let stored = present && reads.iter().all(|file| self.counts(file, &blob));
            kept.push(Kept { blob, stored, sum: None, reads, ends: Vec::new() });
        }
        let mut files: BTreeMap<String, Shelf> = BTreeMap::new();
        let mut needs: BTreeMap<&str, BTreeMap<u64, u64>> = BTreeMap::new();
        for (last, (kept, step)) in kept.iter_mut().zip(steps).enumerate().rev() {
            for (file, range) in &step.reads {
                if !files.contains_key(file) {
                    let size = self.size(file).await?.unwrap_or_default();
                    let version = self.entry.as_ref().and_then(|entry| entry.manifest.weights.get(file)?.version.as_deref());
                    let what = format!("{file} {size} {} {block}", version.unwrap_or("-"));
                    let prefix = format!("{RAW}{}-", store::short_hash(&what));
                    files.insert(file.clone(), Shelf { way: Way::Stream, prefix, size, missing: 0, blocks: Vec::new() });
                    kept.ends.push(file.clone());
                }
                if let Some(shelf) = files.get_mut(file).filter(|_| !kept.stored && !range.is_empty()) {
                    shelf.missing += range.end - range.start;
                    let need = needs.entry(file).or_default();
                    for index in range.start / block..=(range.end - 1) / block {
                        // The last step comes first.
                        need.entry(index).or_insert(last as u64);
                    }
                }
            }
        }
        for (file, shelf) in &mut files {
            let (entry, told_apart) = (self.entry.as_ref(), self.is_told_apart(file));
            for (index, last) in needs.remove(file.as_str()).unwrap_or_default() {
                let raw = told_apart && entry.is_some_and(|entry| entry.present.contains(&shelf.name(index)));
                shelf.blocks.push(Needed { index, last: last as usize, raw, open: false, sum: None });
            }
            let missing = shelf.missing;
            let known = entry.and_then(|entry| entry.manifest.weights.get(file)).cloned().unwrap_or_default();
            let listed = self.is_listed(file);
            let heads = entry.and_then(|entry| entry.heads.get(file)).map_or(&[] as _, Vec::as_slice);
            // Whether single parts may be fetched: there is something to hold what is made of them against.
            let proven = known.verified
                && heads.iter().all(|head| known.blobs.get(&head.blob) == Some(&head.sum))
                && kept.iter().all(|kept| !kept.reads.contains(file) || known.blobs.contains_key(&kept.blob));
            let low = shelf.lacks(u64::MAX, block).next().map_or(shelf.size, |first| first.index * block);
            let point = entry.and_then(|entry| entry.resume.get(file)).filter(|point| {
                point.block == block
                    && point.offset % block == 0
                    && point.offset <= shelf.size
                    && RunningHash::restore(&point.hash).is_some()
                    && heads.iter().all(|head| point.blobs.get(&head.blob) == Some(&head.sum))
            });
            let sum = |index: u64| {
                let sums = point.map_or(&[] as _, |point| point.sums.as_slice());
                sums.iter().find(|(known, _)| *known == index).map(|(_, sum)| *sum)
            };
            // What is needed before it must be stored, or else be fetched again and held against its sum.
            let sound = point.filter(|point| shelf.lacks(point.offset, block).all(|needed| sum(needed.index).is_some()));
            shelf.way = match (listed, sound) {
                (false, _) if missing == 0 => Way::Parts,
                _ if (proven || (known.verified && !listed)) && missing <= known.size / SMALL_PART => Way::Parts,
                (true, Some(point)) => {
                    shelf.blocks.iter_mut().for_each(|needed| needed.sum = sum(needed.index));
                    Way::TakenUp(point.offset, Some(point.hash.clone()))
                }
                // Less than what has passed already is not worth a request.
                (false, _) if low > self.http.passed(file) => Way::TakenUp(low, None),
                _ => Way::Stream,
            };
            // What passed before the stream's beginning is in its hash; anything else comes again.
            let began = if let Way::TakenUp(at, _) = shelf.way { at.div_ceil(block) } else { 0 };
            for needed in &mut shelf.blocks {
                needed.open = needed.index >= began;
                needed.raw &= !needed.open;
            }
        }
        for kept in &mut kept {
            let point = |file: &String| {
                let goes_on = files.get(file).is_some_and(|shelf| matches!(shelf.way, Way::TakenUp(..)));
                self.entry.as_ref()?.resume.get(file).filter(|_| goes_on)?.blobs.get(&kept.blob).copied()
            };
            kept.sum = kept.reads.iter().find_map(|file| self.verified_sum(file, &kept.blob).or_else(|| point(file)));
        }
        Ok((kept, files))
    }

    /// Whether a file's hash is known.
    fn is_listed(&self, file: &str) -> bool {
        self.http.listing().and_then(|listing| listing.files.get(file)).is_some_and(|file| file.sha256.is_some())
    }

    /// Bytes of a file that will have to come.
    fn to_come(&self, file: &str, shelf: &Shelf) -> u64 {
        let block = self.http.block_bytes();
        let last = shelf.blocks.last().map_or(0, |last| shelf.size.min((last.index + 1) * block));
        let end = if self.is_listed(file) { shelf.size } else { last };
        match &shelf.way {
            Way::Parts => shelf.bytes(block, &|_| true),
            Way::Stream => end,
            Way::TakenUp(from, _) => {
                end.saturating_sub(*from) + shelf.bytes(block, &|needed| needed.index < from / block && !needed.raw)
            }
        }
    }

    /// Reads bytes of a file that passes by.
    async fn read_passing(&mut self, file: &str, range: Range<u64>) -> Result<Vec<u8>> {
        let block = self.http.block_bytes();
        let mut bytes = Vec::with_capacity((range.end - range.start) as usize);
        let mut at = range.start;
        while at < range.end {
            let index = at / block;
            let until = range.end.min((index + 1) * block);
            self.take_down(file, index).await;
            while self.http.reach(file, index).await? {
                self.shelve(file).await;
            }
            bytes.append(&mut self.http.read(file, at..until).await?);
            at = until;
        }
        Ok(bytes)
    }

    /// Gives back a block that is stored. One that is not whole is fetched again.
    async fn take_down(&mut self, file: &str, index: u64) {
        let (Some(entry), Some(store)) = (&mut self.entry, &self.store) else { return };
        let Some(shelf) = entry.files.get_mut(file) else { return };
        let name = shelf.name(index);
        if let Some(needed) = shelf.get(index).filter(|needed| needed.raw)
            && self.http.block(file, index).is_none()
        {
            let blob = store.get(&format!("{}/{name}", entry.name)).await;
            match blob.as_deref().and_then(unseal) {
                Some(bytes) => self.http.give(file, index, bytes.to_vec()),
                None => needed.raw = false,
            }
        }
    }

    /// Stores blocks for which there is no room, and those that hold a file's resume point back; then the point.
    async fn shelve(&mut self, file: &str) {
        while let Some((index, bytes)) = self.http.next_over(file) {
            self.put_raw(file, index, &seal(&bytes)).await;
        }
        while let Some(index) = self.held_back_by(file) {
            let Some(blob) = self.http.block(file, index).map(seal) else { break };
            if !self.put_raw(file, index, &blob).await {
                break;
            }
        }
        if self.move_resume_points(false)
            && let (Some(entry), Some(store)) = (self.entry.as_ref().filter(|entry| entry.writable), &self.store)
        {
            // For want of room nothing is lost but the way that has been made since the last one.
            let _ = store.put(&format!("{}/{RESUME}", entry.name), &store::write_resume(&entry.resume)).await;
        }
    }

    /// The block that holds a file's resume point back by more than it should.
    fn held_back_by(&self, file: &str) -> Option<u64> {
        let shelf = self.entry.as_ref().filter(|entry| entry.writable && entry.shelving)?.files.get(file)?;
        let first = shelf.blocks.iter().find(|needed| needed.open)?.index;
        let block = self.http.block_bytes();
        let (least, most) = LAG_BLOCKS;
        let lag = (shelf.size / 8 / block).clamp(least, most);
        ((first + 1 + lag) * block <= self.http.passed(file)).then_some(first)
    }

    /// Stores a block as it came; the first for which there is no room is the last one tried.
    async fn put_raw(&mut self, file: &str, index: u64, blob: &[u8]) -> bool {
        let (Some(entry), Some(store)) = (&mut self.entry, &self.store) else { return false };
        let Some(shelf) = entry.files.get_mut(file).filter(|_| entry.shelving && entry.writable) else { return false };
        let name = shelf.name(index);
        if store.put(&format!("{}/{name}", entry.name), blob).await.is_err() {
            self.stop_shelving();
            return false;
        }
        entry.present.insert(name);
        if let Some(needed) = shelf.get(index) {
            (needed.raw, needed.open, needed.sum) = (true, false, self.http.written(file, index));
        }
        true
    }

    fn stop_shelving(&mut self) {
        if let Some(entry) = &mut self.entry {
            entry.shelving = false;
            entry.files.keys().for_each(|file| self.http.lend(file, false));
        }
    }

    /// Removes the blocks that are stored as they came and that `which` takes. Whether there were any.
    async fn clear_shelves(&mut self, which: impl Fn(&str) -> bool) -> bool {
        let (Some(entry), Some(store)) = (self.entry.as_mut().filter(|entry| entry.writable), &self.store) else { return false };
        let gone: Vec<_> = entry.present.iter().filter(|blob| blob.starts_with(RAW) && which(blob)).cloned().collect();
        for blob in &gone {
            store.remove(&format!("{}/{blob}", entry.name)).await;
            entry.present.remove(blob);
        }
        let mut were = false;
        for needed in entry.files.values_mut().flat_map(|shelf| &mut shelf.blocks) {
            were |= std::mem::take(&mut needed.raw);
        }
        if were {
            self.stop_shelving();
        }
        !gone.is_empty()
    }

    /// Moves the resume points to where all that is needed before them is stored, or, if something was `made`, notes it there.
    /// Whether there is anything new.
    fn move_resume_points(&mut self, made: bool) -> bool {
        let block = self.http.block_bytes();
        let Some(entry) = &mut self.entry else { return false };
        let mut moved = false;
        for (file, shelf) in entry.files.iter().filter(|(_, shelf)| shelf.way != Way::Parts) {
            let passed = self.http.passed(file) / block;
            let first = shelf.blocks.iter().find(|needed| needed.open);
            let offset = first.map_or(passed, |first| passed.min(first.index)) * block;
            let hash = match entry.resume.get(file) {
                Some(point) if point.offset > offset || (point.offset == offset && !made) => None,
                Some(point) if point.offset == offset => Some(point.hash.clone()),
                _ => self.http.hash_at(file, offset),
            };
            if let Some(hash) = hash
                && let Some((until, until_hash)) = self.http.last_hash(file)
            {
                let mut blobs = entry.resume.remove(file).map(|point| point.blobs).unwrap_or_default();
                blobs.extend(made_of(&entry.steps, &entry.heads, file, until));
                let point = ResumePoint { offset, block, hash, until, until_hash, sums: shelf.sums(), blobs };
                entry.resume.insert(file.clone(), point);
                moved = true;
            }
        }
        moved
    }

    /// Removes what is stored of a step's files as it came and no later step needs.
    async fn unshelve(&mut self, step: usize) {
        let (Some(entry), Some(store)) = (self.entry.as_mut().filter(|entry| entry.writable), &self.store) else { return };
        for shelf in entry.files.values_mut() {
            for needed in shelf.blocks.iter().filter(|needed| needed.raw && needed.last == step) {
                let blob = shelf.name(needed.index);
                store.remove(&format!("{}/{blob}", entry.name)).await;
                entry.present.remove(&blob);
            }
            shelf.blocks.retain(|needed| needed.last != step);
        }
    }

    /// Says that what was made of a part of `files` that came once more is not what was made of it before.
    fn made_otherwise(&self, files: &BTreeSet<String>) -> Error {
        let file = files.iter().next().map_or("", String::as_str);
        let url = self.http.locator().file_url(file, self.http.listing().map(|listing| listing.commit.as_str()));
        let message = format!(
            "{file}: a part of it came once more, as what was stored of it is damaged, and is not what it was ({url}). It was \
             damaged or exchanged on its way; nothing of it is kept. Load the model again."
        );
        let file = file.to_owned();
        Error::Http(Box::new(HttpFailure { message, file, url, status: None, missing: false, changed: true }))
    }

    /// Ends files whose last step has ended.
    async fn finish(&mut self, files: &[String]) -> Result<()> {
        for file in files {
            let finished = self.http.finish(file).await;
            self.checked(finished).await?;
            if let Some(entry) = &mut self.entry {
                let point = entry.resume.remove(file);
                if let Some(known) = entry.manifest.weights.get_mut(file) {
                    known.verified = true;
                    known.blobs.extend(point.map(|point| point.blobs).unwrap_or_default());
                    known.blobs.extend(made_of(&entry.steps, &entry.heads, file, u64::MAX));
                }
            }
        }
        Ok(())
    }
}

/// Blobs that are stored and made of the first `until` bytes of `file`, with their sums. Of what a step reads all has passed.
fn made_of(steps: &[Kept], heads: &BTreeMap<String, Vec<Head>>, file: &str, until: u64) -> BTreeMap<String, u64> {
    let steps = steps.iter().filter(|kept| kept.stored && kept.reads.contains(file));
    let steps = steps.filter_map(|kept| Some((kept.blob.clone(), kept.sum?)));
    let heads = heads.get(file).into_iter().flatten().filter(|head| head.range.end <= until);
    steps.chain(heads.map(|head| (head.blob.clone(), head.sum))).collect()
}

impl Entry {
    fn new(name: String, manifest: Manifest, offline: bool) -> Self {
        Self {
            name,
            manifest,
            known: true,
            writable: false,
            closed: None,
            offline,
            pinned: false,
            resume: BTreeMap::new(),
            sides: BTreeMap::new(),
            heads: BTreeMap::new(),
            present: BTreeSet::new(),
            written: BTreeSet::new(),
            steps: Vec::new(),
            files: BTreeMap::new(),
            shelving: true,
            changed: BTreeSet::new(),
            lost: false,
        }
    }
}

fn is_weights(file: &str) -> bool {
    file.ends_with(".safetensors")
}

impl<T: Transport, B: BlobStore> ByteSource for RemoteSource<T, B> {
    async fn size(&mut self, file: &str) -> Result<Option<u64>> {
        self.find_entry().await?;
        if self.stored_counts()
            && let Some(entry) = &self.entry
        {
            let weights = entry.manifest.weights.get(file).map(|known| known.size);
            if let Some(size) = entry.manifest.small.get(file).copied().or(weights) {
                return Ok(Some(size));
            }
            if entry.manifest.missing.contains(file) {
                return Ok(None);
            }
        }
        let size = self.http.size(file).await;
        let size = self.checked(size).await?;
        let version = self.http.version(file).map(str::to_owned);
        if let Some(entry) = &mut self.entry {
            let manifest = &mut entry.manifest;
            match size {
                None => {
                    manifest.small.remove(file);
                    manifest.weights.remove(file);
                    manifest.missing.insert(file.to_owned());
                }
                Some(size) if is_weights(file) => {
                    let known = manifest.weights.entry(file.to_owned()).or_default();
                    if known.size != size || known.version != version {
                        *known = StoredWeights { size, version, ..StoredWeights::default() };
                        entry.resume.remove(file);
                        entry.changed.insert(file.to_owned());
                    }
                    manifest.missing.remove(file);
                }
                Some(size) => {
                    manifest.small.insert(file.to_owned(), size);
                    manifest.missing.remove(file);
                }
            }
        }
        Ok(size)
    }

    async fn read(&mut self, file: &str, range: Range<u64>) -> Result<Vec<u8>> {
        let size = self.size(file).await?;
        let begun = self.entry.as_ref().is_some_and(|entry| !entry.steps.is_empty());
        let part = is_weights(file).then_some(&range).filter(|_| self.entry.is_some() && !begun);
        let whole = !is_weights(file) && size == Some(range.end) && range.start == 0;
        // A header of a version of the file that is still the server's.
        let header_counts = self.entry.as_ref().is_some_and(|entry| entry.known && !entry.changed.contains(file));
        if ((whole && self.stored_counts()) || (part.is_some() && (header_counts || self.stored_counts())))
            && let Some(bytes) = self.side(file, part).await.filter(|bytes| bytes.len() as u64 == range.end - range.start)
        {
            self.remember_head(file, part, &bytes);
            return Ok(bytes);
        }
        // A blob was not whole: only what is in it is fetched again.
        let way = self.entry.as_ref().filter(|_| begun).and_then(|entry| entry.files.get(file)).map(|shelf| &shelf.way);
        let passes = matches!(way, Some(Way::Stream | Way::TakenUp(..)));
        if way == Some(&Way::Parts) {
            self.http.by_range(file).await?;
        }
        let bytes = match passes && size.is_some_and(|size| range.end <= size) {
            true => self.read_passing(file, range.clone()).await,
            false => self.http.read(file, range.clone()).await,
        };
        let bytes = self.checked(bytes).await?;
        if whole || part.is_some() {
            self.remember_head(file, part, &bytes);
            self.remember_side(file, part, &bytes);
        }
        Ok(bytes)
    }

    fn why_absent(&self, file: &str) -> Option<Error> {
        self.http.why_absent(file)
    }

    fn traffic(&self) -> Option<Rc<Traffic>> {
        self.http.traffic()
    }

    async fn survey(&mut self, steps: &[Step]) -> Result<Survey> {
        self.find_entry().await?;
        let (kept, files) = self.plan(steps).await?;
        let mut survey = Survey { stored_steps: kept.iter().map(|kept| kept.stored).collect(), ..Survey::default() };
        for (file, shelf) in &files {
            survey.files.push((file.clone(), self.to_come(file, shelf)));
            survey.stored_raw += shelf.bytes(self.http.block_bytes(), &|needed| needed.raw);
        }
        Ok(survey)
    }

    async fn begin(&mut self, steps: &[Step]) -> Result<()> {
        self.find_entry().await?;
        let Some(_) = &self.entry else { return self.http.begin(steps).await };
        let (kept, files) = self.plan(steps).await?;
        let writable = self.entry.as_ref().is_some_and(|entry| entry.writable);
        for (file, shelf) in &files {
            match &shelf.way {
                Way::Parts if self.offline() => {}
                // Nothing of it may be needed at all: then it is not even opened.
                Way::Parts => {
                    if !shelf.blocks.is_empty() || self.http.is_open(file) {
                        self.http.by_range(file).await?;
                    }
                }
                Way::Stream => {
                    self.http.take_up(file, 0, Some(RunningHash::default()), &[]).await?;
                    let heads = self.entry.as_ref().and_then(|entry| entry.heads.get(file));
                    heads.into_iter().flatten().for_each(|head| self.http.hold_to(file, head.range.clone(), head.hash));
                }
                Way::TakenUp(at, hash) => {
                    let hash = hash.as_deref().and_then(RunningHash::restore);
                    self.http.take_up(file, *at, hash, &shelf.sums()).await?;
                    if let Some(point) =
                        self.entry.as_ref().and_then(|entry| entry.resume.get(file)).filter(|_| self.is_listed(file))
                    {
                        self.http.await_hash(file, point.until, &point.until_hash);
                    }
                }
            }
            if shelf.way != Way::Parts {
                self.http.lend(file, writable);
                for needed in shelf.blocks.iter().filter(|needed| needed.raw) {
                    self.http.written(file, needed.index);
                }
            }
        }
        let missing: Vec<_> =
            steps.iter().zip(&kept).filter(|(_, kept)| !kept.stored).flat_map(|(step, _)| step.reads.iter().cloned()).collect();
        self.http.expect(&missing);
        let to_come: u64 = files.iter().map(|(file, shelf)| self.to_come(file, shelf)).sum();
        if let Some(traffic) = self.http.traffic() {
            traffic.expect(traffic.bytes() + to_come);
        }
        if kept.iter().any(|kept| !kept.stored)
            && let Some(closed) = self.entry.as_mut().and_then(|entry| entry.closed.take())
        {
            self.warn_of_closed(closed);
        }
        let mut sides = BTreeMap::new();
        let raw = |shelf: &Shelf| -> Vec<String> {
            shelf.blocks.iter().filter(|needed| needed.raw).map(|needed| shelf.name(needed.index)).collect()
        };
        let needed: Vec<String> = files.values().flat_map(raw).collect();
        self.clear_shelves(|blob| !needed.iter().any(|needed| needed == blob)).await;
        if let Some(entry) = &mut self.entry {
            (entry.steps, entry.files) = (kept, files);
            sides = std::mem::take(&mut entry.sides);
            entry.manifest.used = now();
        }
        for (name, bytes) in sides {
            let blob = seal(&bytes);
            if !self.has(&name, &blob).await {
                self.put(&name, &blob).await;
            }
        }
        self.put_manifest().await;
        Ok(())
    }

    async fn stored(&mut self, step: usize) -> Result<Option<Vec<u8>>> {
        let (Some(entry), Some(store)) = (&mut self.entry, &self.store) else { return Ok(None) };
        let Some(kept) = entry.steps.get_mut(step).filter(|kept| kept.stored) else { return Ok(None) };
        let blob = store.get(&format!("{}/{}", entry.name, kept.blob)).await;
        let sum = blob.as_deref().filter(|blob| unseal(blob).is_some()).and_then(head_sum);
        if sum.is_none() || kept.sum.is_some_and(|known| sum != Some(known)) {
            kept.stored = false;
            return Ok(None);
        }
        kept.sum = sum;
        Ok(blob)
    }

    fn stores(&self) -> bool {
        // What is not stored may have to be held against a sum all the same.
        let compares = |entry: &Entry| entry.steps.iter().any(|kept| !kept.stored && kept.sum.is_some());
        self.entry.as_ref().is_some_and(|entry| entry.writable || compares(entry))
    }

    async fn end_step(&mut self, step: usize, made: Option<Vec<u8>>) -> Result<()> {
        let Some(entry) = &self.entry else { return self.http.end_step(step, made).await };
        let Some(kept) = entry.steps.get(step) else { return Ok(()) };
        let (blob, ends, stored) = (kept.blob.clone(), kept.ends.clone(), kept.stored);
        let passes = |file: &String| entry.files.get(file).is_some_and(|shelf| shelf.way != Way::Parts);
        let ended: Vec<_> = ends.into_iter().filter(passes).collect();
        let was_made = made.is_some();
        match made {
            Some(made) => {
                let sum = head_sum(&made);
                if kept.sum.is_some() && kept.sum != sum {
                    let error = self.made_otherwise(&kept.reads);
                    self.remove_entry().await;
                    return Err(error);
                }
                self.put(&blob, &made).await;
                if let Some(entry) = self.entry.as_mut().filter(|entry| entry.writable)
                    && let Some(kept) = entry.steps.get_mut(step)
                {
                    (kept.stored, kept.sum) = (true, sum);
                }
            }
            None if !stored => {
                if let Some(entry) = &mut self.entry {
                    entry.lost = true;
                }
            }
            None => {}
        }
        self.http.let_go();
        // After the block, so that what a resume point builds on is there.
        if was_made || stored {
            self.unshelve(step).await;
        }
        if self.move_resume_points(was_made) && was_made {
            self.put_resume().await;
        }
        if !ended.is_empty() {
            self.finish(&ended).await?;
            self.put_resume().await;
            self.put_manifest().await;
        }
        Ok(())
    }

    async fn end(&mut self) -> Result<()> {
        self.clear_shelves(|_| true).await;
        let listing = self.http.listing();
        let Some(entry) = self.entry.as_mut().filter(|entry| entry.writable && !entry.lost) else { return Ok(()) };
        // Where nothing is listed there is nothing to hold a file against.
        let listed =
            |file: &String| listing.and_then(|listing| listing.files.get(file)).is_some_and(|file| file.sha256.is_some());
        for (file, known) in entry.manifest.weights.iter_mut().filter(|(file, _)| !listed(file)) {
            known.verified = true;
            known.blobs.extend(made_of(&entry.steps, &entry.heads, file, u64::MAX));
        }
        entry.manifest.complete = true;
        let (name, asked) = (entry.name.clone(), entry.manifest.asked.clone());
        self.put_manifest().await;
        self.remove_superseded(&name, asked.as_deref()).await;
        Ok(())
    }

    fn warnings(&mut self) -> Vec<Warning> {
        std::mem::take(&mut self.warnings)
    }
}

impl<T: Transport, B: BlobStore> RemoteSource<T, B> {
    /// Removes the entries of what this source was before: the same address or branch, another revision.
    async fn remove_superseded(&mut self, current: &str, asked: Option<&str>) {
        let Some(store) = &self.store else { return };
        let Some((source, _)) = current.split_once('-') else { return };
        let entries: BTreeSet<String> = store
            .list("")
            .await
            .into_iter()
            .filter_map(|(name, _)| name.split_once('/').map(|(entry, _)| entry.to_owned()))
            .collect();
        for entry in entries.iter().filter(|entry| entry.starts_with(source) && *entry != current) {
            let manifest = self.manifest(entry).await;
            // One whose manifest cannot be read is of no use to anyone.
            let superseded = manifest.is_none_or(|m| m.asked.as_deref() == asked && m.role == self.role.name());
            if superseded && store.lock(entry).await == Ok(true) {
                store.remove(&format!("{entry}/")).await;
            }
        }
    }
}
