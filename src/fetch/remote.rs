//! A checkpoint from the network with a store beside it: what is stored is not fetched, and what is made is stored.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

use web_time::{SystemTime, UNIX_EPOCH};

use super::http_source::{HttpOptions, HttpSource};
use super::locator::{Listing, Locator};
use super::running_hash::RunningHash;
use super::store::{
    self, BlobStore, MANIFEST, Manifest, RESUME, ResumePoint, StoreFailure, StoredListing, StoredWeights, VERSION, entry_name,
    read_manifest, side_name,
};
use super::transport::Transport;
use crate::error::{Error, Result};
use crate::weights::source::{ByteSource, Step, Survey, Traffic, Warning};
use crate::weights::stored_block::{seal, unseal};

/// Of a file that is verified, so small a part is fetched by range if it is missing; more, and the whole file passes again.
const SMALL_PART: u64 = 8;

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
    /// Why it cannot be written to by anyone.
    closed: Option<StoreFailure>,
    /// Whether the revision could not be checked, so that nothing but the store counts.
    offline: bool,
    /// Whether what is stored of small files is still what the source has: it is, at a commit.
    pinned: bool,
    resume: BTreeMap<String, ResumePoint>,
    /// Small files and headers that will be stored when weights begin to come: then they have been understood.
    sides: BTreeMap<String, Vec<u8>>,
    /// Blobs that are there.
    present: BTreeSet<String>,
    /// Blobs that this loading wrote.
    written: BTreeSet<String>,
    steps: Vec<Kept>,
    /// Weights files and how they are read.
    files: BTreeMap<String, Way>,
    /// Weights files that are not those that the entry knew.
    changed: BTreeSet<String>,
    /// Whether something that was made could not be stored.
    lost: bool,
}

/// A step and its blob.
#[derive(Debug)]
struct Kept {
    blob: String,
    stored: bool,
    /// The lowest byte of each file that this step or one after it needs.
    lowest: BTreeMap<String, u64>,
    /// Files that no later step reads.
    ends: Vec<String>,
}

/// How a weights file is read.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Way {
    /// All of it is there, or single parts are fetched by range.
    Parts,
    /// As a stream from its first byte.
    Stream,
    /// As a stream from a later byte on.
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
        let of_commit = asked.as_deref().filter(|_| is_commit).map(|asked| entry_name(&source, asked));
        let of_commit = match of_commit {
            Some(name) => self.manifest(&name).await.filter(|manifest| manifest.complete).map(|manifest| (name, manifest)),
            None => None,
        };
        let (name, manifest, offline) = match of_commit {
            Some((name, manifest)) => (name, Some(manifest), false),
            None => match self.revision().await {
                Ok(Some(revision)) => {
                    let name = entry_name(&source, &revision);
                    match self.manifest(&name).await {
                        Some(manifest) => (name, Some(manifest), false),
                        None => {
                            self.entry = Some(self.new_entry(name, revision, asked));
                            return self.take_entry().await;
                        }
                    }
                }
                // What is wrong with the source is told when it is read.
                Ok(None) => return self.newest_or(&source, asked.as_deref(), None).await,
                Err(error) => return self.newest_or(&source, asked.as_deref(), Some(error)).await,
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
        let listed = store.list(&prefix).await;
        entry.present = listed.into_iter().filter_map(|(name, _)| name.strip_prefix(&prefix).map(str::to_owned)).collect();
        if let Some(listing) = &entry.manifest.listing {
            entry.pinned = true;
            if self.http.listing().is_none() {
                self.http.set_listing(Listing::from(listing));
            }
        }
        let resume = store.get(&format!("{prefix}{RESUME}")).await;
        entry.resume = resume.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        match store.lock(&entry.name).await {
            Ok(true) => entry.writable = true,
            Ok(false) => {
                let message =
                    format!("{} is being loaded elsewhere at the same time; this time nothing of it is stored", self.location);
                self.warn("store-busy", message);
            }
            // Told when there is something to store: a store that is read only may have it all.
            Err(failure) => entry.closed = Some(failure),
        }
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

    /// Takes the newest complete entry of the source, if the revision could not be learnt because of `error`.
    async fn newest_or(&mut self, source: &str, asked: Option<&str>, error: Option<Error>) -> Result<()> {
        let lasting = match &error {
            Some(Error::Http(failure)) => {
                matches!(failure.status, Some(401 | 403 | 404 | 410)) && !(failure.missing && failure.status == Some(200))
            }
            Some(_) => true,
            None => self.http.web_pages().is_empty(),
        };
        let mut newest: Option<(String, Manifest)> = None;
        if let (false, Some(store)) = (lasting, &self.store) {
            let prefix = format!("{}-", store::short_hash(source));
            let manifests = store.list("").await.into_iter().map(|(name, _)| name);
            let manifests = manifests.filter(|name| name.starts_with(&prefix) && name.ends_with(&format!("/{MANIFEST}")));
            for name in manifests.collect::<Vec<_>>() {
                let name = name.trim_end_matches(MANIFEST).trim_end_matches('/').to_owned();
                let Some(manifest) = self.manifest(&name).await.filter(|m| m.complete) else { continue };
                let same = asked.is_none() || manifest.asked.as_deref() == asked || Some(manifest.revision.as_str()) == asked;
                if same && newest.as_ref().is_none_or(|(_, known)| known.created < manifest.created) {
                    newest = Some((name, manifest));
                }
            }
        }
        let Some((name, manifest)) = newest else { return error.map_or(Ok(()), Err) };
        let why = error.map_or_else(|| "a web page came in its place".to_owned(), |error| error.to_string());
        self.warn(
            "store-offline",
            format!("{} could not be checked for changes, so what is stored of it is taken: {why}", self.location),
        );
        self.entry = Some(Entry::new(name, manifest, true));
        self.take_entry().await
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
        let Some(entry) = self.entry.as_mut().filter(|entry| entry.writable) else { return };
        let Some(store) = &self.store else { return };
        match store.put(&format!("{}/{blob}", entry.name), bytes).await {
            Ok(()) => {
                entry.present.insert(blob.to_owned());
                entry.written.insert(blob.to_owned());
            }
            Err(failure) => {
                entry.writable = false;
                entry.lost = true;
                // What made the model loadable without a network stays; what this loading added goes.
                if entry.manifest.complete && entry.known {
                    for blob in entry.written.iter().filter(|blob| blob.starts_with("block-")) {
                        store.remove(&format!("{}/{blob}", entry.name)).await;
                    }
                } else {
                    store.remove(&format!("{}/", entry.name)).await;
                }
                self.warn_of(failure);
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
    async fn plan(&mut self, steps: &[Step]) -> Result<(Vec<Kept>, BTreeMap<String, Way>)> {
        let mut kept = Vec::with_capacity(steps.len());
        for step in steps {
            let blob = self.blob(step);
            let stored = self.entry.as_ref().is_some_and(|entry| entry.present.contains(&blob));
            kept.push(Kept { blob, stored, lowest: BTreeMap::new(), ends: Vec::new() });
        }
        let mut lowest: BTreeMap<String, u64> = BTreeMap::new();
        let mut missing: BTreeMap<String, u64> = BTreeMap::new();
        for (kept, step) in kept.iter_mut().zip(steps).rev() {
            for (file, range) in &step.reads {
                if !lowest.contains_key(file) {
                    let size = self.size(file).await?.unwrap_or_default();
                    lowest.insert(file.clone(), size);
                    kept.ends.push(file.clone());
                }
                if !kept.stored {
                    *missing.entry(file.clone()).or_default() += range.end - range.start;
                    lowest.entry(file.clone()).and_modify(|low| *low = range.start.min(*low));
                }
            }
            kept.lowest.clone_from(&lowest);
        }
        let mut ways = BTreeMap::new();
        for (file, low) in &lowest {
            let missing = missing.get(file).copied().unwrap_or_default();
            let known = self.entry.as_ref().and_then(|entry| entry.manifest.weights.get(file)).cloned().unwrap_or_default();
            let listed =
                self.http.listing().and_then(|listing| listing.files.get(file)).is_some_and(|file| file.sha256.is_some());
            let resume = self.entry.as_ref().and_then(|entry| entry.resume.get(file)).filter(|point| point.offset <= *low);
            let way = match (listed, resume) {
                _ if missing == 0 && (known.verified || !listed) => Way::Parts,
                _ if known.verified && missing <= known.size / SMALL_PART => Way::Parts,
                (true, Some(point)) if !known.verified => Way::TakenUp(point.offset, Some(point.hash.clone())),
                // Less than what has passed already is not worth a request.
                (false, _) if *low > self.http.passed(file) => Way::TakenUp(*low, None),
                _ => Way::Stream,
            };
            ways.insert(file.clone(), way);
        }
        Ok((kept, ways))
    }

    /// Ends files whose last step has ended.
    async fn finish(&mut self, files: &[String]) -> Result<()> {
        for file in files {
            let finished = self.http.finish(file).await;
            self.checked(finished).await?;
            if let Some(known) = self.entry.as_mut().and_then(|entry| entry.manifest.weights.get_mut(file)) {
                known.verified = true;
            }
            if let Some(entry) = &mut self.entry {
                entry.resume.remove(file);
            }
        }
        Ok(())
    }
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
            present: BTreeSet::new(),
            written: BTreeSet::new(),
            steps: Vec::new(),
            files: BTreeMap::new(),
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
                        *known = StoredWeights { size, version, verified: false };
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
            return Ok(bytes);
        }
        // A blob was not whole: only what is in it is fetched again.
        let in_parts = self.entry.as_ref().is_some_and(|entry| begun && entry.files.get(file) == Some(&Way::Parts));
        if in_parts {
            self.http.by_range(file).await?;
        }
        let bytes = self.http.read(file, range.clone()).await;
        let bytes = self.checked(bytes).await?;
        if whole || part.is_some() {
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
        let (kept, ways) = self.plan(steps).await?;
        let mut survey = Survey { files: Vec::new(), stored_steps: kept.iter().map(|kept| kept.stored).collect() };
        for (file, way) in ways {
            let size = self.size(&file).await?.unwrap_or_default();
            let reads = steps.iter().zip(&kept).filter(|(_, kept)| !kept.stored).flat_map(|(step, _)| &step.reads);
            let of_file: Vec<_> = reads.filter(|(name, _)| *name == file).map(|(_, range)| range.clone()).collect();
            let listed = self.http.listing().and_then(|listing| listing.files.get(&file)).is_some_and(|f| f.sha256.is_some());
            let end = if listed { size } else { of_file.iter().map(|range| range.end).max().unwrap_or_default() };
            let bytes = match way {
                Way::Parts => of_file.iter().map(|range| range.end - range.start).sum(),
                Way::Stream => end,
                Way::TakenUp(from, _) => end.saturating_sub(from),
            };
            survey.files.push((file, bytes));
        }
        Ok(survey)
    }

    async fn begin(&mut self, steps: &[Step]) -> Result<()> {
        self.find_entry().await?;
        let Some(_) = &self.entry else { return self.http.begin(steps).await };
        let (kept, ways) = self.plan(steps).await?;
        for (file, way) in &ways {
            match way {
                Way::Parts if self.offline() => {}
                // Nothing of it may be needed at all: then it is not even opened.
                Way::Parts => {
                    let needed =
                        steps.iter().zip(&kept).any(|(step, kept)| !kept.stored && step.reads.iter().any(|(f, _)| f == file));
                    if needed || self.http.is_open(file) {
                        self.http.by_range(file).await?;
                    }
                }
                Way::Stream => self.http.take_up(file, 0, Some(RunningHash::default())).await?,
                Way::TakenUp(at, hash) => match hash.as_deref().map(RunningHash::restore) {
                    Some(None) => self.http.take_up(file, 0, Some(RunningHash::default())).await?,
                    Some(hash) => self.http.take_up(file, *at, hash).await?,
                    None => self.http.take_up(file, *at, None).await?,
                },
            }
            if *way != Way::Parts {
                let marks: BTreeSet<u64> = kept.iter().filter_map(|kept| kept.lowest.get(file).copied()).collect();
                self.http.save_at(file, marks).await?;
            }
        }
        let missing: Vec<_> =
            steps.iter().zip(&kept).filter(|(_, kept)| !kept.stored).flat_map(|(step, _)| step.reads.iter().cloned()).collect();
        self.http.expect(&missing);
        let remaining: u64 = ways.iter().filter(|(_, way)| **way != Way::Parts).map(|(file, _)| self.http.remaining(file)).sum();
        let parts: u64 =
            missing.iter().filter(|(file, _)| ways.get(file) == Some(&Way::Parts)).map(|(_, r)| r.end - r.start).sum();
        if let Some(traffic) = self.http.traffic() {
            traffic.expect(traffic.bytes() + remaining + parts);
        }
        if kept.iter().any(|kept| !kept.stored)
            && let Some(failure) = self.entry.as_mut().and_then(|entry| entry.closed.take())
        {
            self.warn_of(failure);
        }
        let mut sides = BTreeMap::new();
        if let Some(entry) = &mut self.entry {
            (entry.steps, entry.files) = (kept, ways);
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
        let (Some(entry), Some(store)) = (&self.entry, &self.store) else { return Ok(None) };
        match entry.steps.get(step).filter(|kept| kept.stored) {
            Some(kept) => Ok(store.get(&format!("{}/{}", entry.name, kept.blob)).await),
            None => Ok(None),
        }
    }

    fn stores(&self) -> bool {
        self.entry.as_ref().is_some_and(|entry| entry.writable)
    }

    async fn end_step(&mut self, step: usize, made: Option<Vec<u8>>) -> Result<()> {
        let Some(entry) = &self.entry else { return self.http.end_step(step, made).await };
        let Some(kept) = entry.steps.get(step) else { return Ok(()) };
        let (blob, ends, stored) = (kept.blob.clone(), kept.ends.clone(), kept.stored);
        let next = entry.steps.get(step + 1).map(|kept| kept.lowest.clone()).unwrap_or_default();
        let ways = entry.files.clone();
        let was_made = made.is_some();
        match made {
            Some(made) => self.put(&blob, &made).await,
            None if !stored => {
                if let Some(entry) = &mut self.entry {
                    entry.lost = true;
                }
            }
            None => {}
        }
        // After the block, so that what a resume point builds on is there.
        let mut moved = false;
        for (file, low) in next {
            if ways.get(&file).is_some_and(|way| *way != Way::Parts)
                && let Some(hash) = self.http.saved_at(&file, low)
                && let Some(entry) = &mut self.entry
            {
                let point = ResumePoint { offset: low, hash };
                moved |= entry.resume.get(&file) != Some(&point);
                entry.resume.insert(file, point);
            }
        }
        let ended: Vec<_> = ends.into_iter().filter(|file| ways.get(file).is_some_and(|way| *way != Way::Parts)).collect();
        if moved && was_made {
            let text = self.entry.as_ref().map(|entry| serde_json::to_vec(&entry.resume).unwrap_or_default());
            self.put(RESUME, &text.unwrap_or_default()).await;
        }
        if !ended.is_empty() {
            self.finish(&ended).await?;
            self.put_manifest().await;
        }
        Ok(())
    }

    async fn end(&mut self) -> Result<()> {
        let Some(entry) = &mut self.entry else { return Ok(()) };
        if !entry.writable || entry.lost {
            return Ok(());
        }
        // Where nothing is listed there is nothing to hold a file against.
        entry.manifest.weights.values_mut().for_each(|known| known.verified = true);
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
            let superseded = manifest.is_none_or(|manifest| manifest.asked.as_deref() == asked);
            if superseded && store.lock(entry).await == Ok(true) {
                store.remove(&format!("{entry}/")).await;
            }
        }
    }
}
