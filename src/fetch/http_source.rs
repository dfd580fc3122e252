//! Files over HTTP. Weights, which are large, pass by as one stream per file, from the first byte wanted to the last: blocks
//! that pass before the loader asks for them are kept, within a bound; what had to be dropped is asked for again by range,
//! unless the caller writes it down when it is told to, and gives it back.
//! So every byte travels about once, in the order in which a hash of the whole file can be taken. A connection that breaks
//! is taken up at its byte. Everything else is small and is fetched whole.
//!
//! What is refused, by name: files that are not there, need permission, or come as a web page; sizes and hashes other than
//! the hub lists; a file that changes while it is read; broken ranges; weights that come compressed.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use super::locator::{Listed, Listing, Locator};
use super::running_hash::{self, Hash, RunningHash, hex};
use super::transport::{Answer, Body, Failure, Transport};
use crate::error::{Error, HttpFailure, Result};
use crate::model::fields::MAX_JSON_BYTES;
use crate::weights::source::{ByteSource, Step, Traffic};

/// Bytes of a weights file that are asked for first: its header is in them, most often.
const HEAD_BYTES: u64 = 64 << 10;
/// Streams open at once; browsers give a server six connections.
const MAX_STREAMS: usize = 2;
/// How often a broken connection is taken up in a hurry.
const HURRIED_RETRIES: u32 = 1;
/// The longest pause between two tries.
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// How to fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpOptions {
    /// Sent to the source's own origin, such as a token for a repository that needs one.
    pub headers: Vec<(String, String)>,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Bytes of passed blocks that are kept for later, over all files.
    pub kept_bytes: u64,
    /// How often a broken connection is taken up without a byte of progress in between.
    pub retries: u32,
    /// The pause before the first of these tries; it doubles with each.
    pub first_pause: Duration,
}

impl Default for HttpOptions {
    fn default() -> Self {
        Self {
            headers: Vec::new(),
            block_bytes: 4 << 20,
            kept_bytes: 80 << 20,
            retries: 5,
            first_pause: Duration::from_millis(250),
        }
    }
}

/// Files of a repository or below an address.
#[derive(Debug)]
pub struct HttpSource<T: Transport> {
    net: Net<T>,
    locator: Locator,
    listing: Option<Listing>,
    files: BTreeMap<String, Opened<T::Body>>,
    kept: Kept,
    turns: u64,
    /// The last step that reads each weights file.
    last_steps: BTreeMap<String, usize>,
    /// Set when the server gave other bytes than it had promised: nothing made of them may be kept.
    distrusted: bool,
}

/// What is known of a file.
#[derive(Debug)]
enum Opened<B> {
    Missing {
        web_page: bool,
    },
    /// A small file that is held.
    Held(Vec<u8>),
    /// A small file that was read, and let go.
    Read(u64),
    Weights(Box<Remote<B>>),
}

/// A weights file.
#[derive(Debug)]
struct Remote<B> {
    file: String,
    url: String,
    size: u64,
    sha256: Option<Hash>,
    /// The first answer's ETag, or else its date, which later ones must repeat.
    version: Option<String>,
    /// Whether the server gives ranges; `None` until it was seen.
    ranges: Option<bool>,
    stream: Option<B>,
    /// Bytes of the running answer that come before `at`.
    skip: u64,
    /// When the stream was last read, in turns.
    used: u64,
    /// Bytes that have passed.
    at: u64,
    /// The bytes of the block that is passing.
    filling: Vec<u8>,
    /// The start of the block at which the stream was taken up: bytes before it never passed.
    began: u64,
    /// The first bytes, until it is known what will be read.
    head: Vec<u8>,
    /// Whether what came is a web page.
    web_page: bool,
    hash: Option<RunningHash>,
    /// The hash's state at the starts of blocks, and at the file's end.
    saved: Vec<(u64, String)>,
    /// The hash's state at a byte up to which the file had come before it was taken up.
    awaited: Option<(u64, String)>,
    /// What was read before the stream, to be held against what passes.
    ahead: Vec<Ahead>,
    blocks: BTreeMap<u64, Vec<u8>>,
    /// Bytes of each block that will still be asked for; `None` while that is not known.
    due: Option<BTreeMap<u64, u64>>,
    /// Sums of the blocks that were dropped or written down.
    sums: BTreeMap<u64, u64>,
    /// Whether the caller writes blocks down: then they stay until their step ends, and none is dropped before.
    lent: bool,
    /// Blocks that are written down.
    written: Vec<u64>,
    /// Blocks for which there is no room, until the caller takes them.
    over: Vec<(u64, Vec<u8>)>,
    checked: bool,
}

/// Bytes that were read before they passed, most often a header.
#[derive(Debug)]
struct Ahead {
    range: Range<u64>,
    hash: Hash,
    /// Of what has passed of them.
    passed: RunningHash,
}

/// Bytes kept, over all files.
#[derive(Debug, Default)]
struct Kept {
    bytes: u64,
    limit: u64,
}

/// Why a request gave nothing.
enum Trouble {
    /// Trying again may help.
    Passing(HttpFailure),
    /// There is no such file, or a web page in its place.
    Missing { failure: HttpFailure, web_page: bool },
    /// Trying again does not help.
    Lasting(Error),
}

/// Requests and what is counted of them.
#[derive(Debug)]
struct Net<T> {
    transport: T,
    options: HttpOptions,
    traffic: Rc<Traffic>,
    /// Whether the server has ever answered.
    reached: bool,
    /// Whether it is not waited for as long as it could be.
    hurried: bool,
    permission: &'static str,
}

impl<T: Transport> Net<T> {
    /// One request for bytes from `from` on (all of them as they are, if `None`). The answer's status is 200, 206 or 416.
    async fn ask(&mut self, file: &str, url: &str, range: Option<(u64, Option<u64>)>) -> Result<Answer<T::Body>, Trouble> {
        let mut headers = Vec::new();
        if let Some((from, to)) = range {
            let to = to.map_or_else(String::new, |to| (to - 1).to_string());
            headers.push(("range".to_owned(), format!("bytes={from}-{to}")));
        }
        let answer = match self.transport.get(url, &headers, &self.options.headers).await {
            Ok(answer) => answer,
            Err(Failure::Stopped) => return Err(Trouble::Lasting(stopped())),
            Err(Failure::Broken(why)) => {
                let message = format!("{file} cannot be reached at {url}: {why}. Check the address and the connection.");
                return Err(Trouble::Passing(failure(file, url, message)));
            }
        };
        self.reached = true;
        let status = answer.status;
        let said = |advice: &str| HttpFailure {
            status: Some(status),
            ..failure(file, url, format!("{file}: the server answered {status} for {url}. {advice}"))
        };
        match status {
            200 | 206 | 416 => {}
            404 | 410 => {
                let failure = HttpFailure { missing: true, ..said("Check the address of the model.") };
                return Err(Trouble::Missing { failure, web_page: false });
            }
            401 | 403 => return Err(said(self.permission).into()),
            408 | 425 | 429 | 500..=599 => return Err(Trouble::Passing(said("Try again later."))),
            _ => return Err(said("Expected 200 or 206. Is the address right?").into()),
        }
        let kind = answer.header("content-type").unwrap_or_default().trim_start().to_ascii_lowercase();
        if status != 416 && (kind.starts_with("text/html") || kind.starts_with("application/xhtml")) {
            return Err(web_page(file, url));
        }
        Ok(answer)
    }

    /// Waits before try number `failures`, or gives up.
    async fn patience(&mut self, failure: HttpFailure, failures: &mut u32) -> Result<()> {
        *failures += 1;
        // A server that never answered is not asked again: most likely there is none, or no network.
        let retries = if self.hurried { self.options.retries.min(HURRIED_RETRIES) } else { self.options.retries };
        if *failures > retries || !self.reached {
            return Err(Error::Http(Box::new(failure)));
        }
        let pause = self.options.first_pause.saturating_mul(1 << (*failures - 1).min(16));
        // Nothing but the caller's wish cuts a pause short.
        self.transport.pause(pause.min(LONGEST_PAUSE)).await.map_err(|_| stopped())
    }

    /// [`Net::ask`], again while that may help.
    async fn get(&mut self, file: &str, url: &str, range: Option<(u64, Option<u64>)>) -> Result<Answer<T::Body>, Trouble> {
        let mut failures = 0;
        loop {
            match self.ask(file, url, range).await {
                Err(Trouble::Passing(failure)) => self.patience(failure, &mut failures).await.map_err(Trouble::Lasting)?,
                other => return other,
            }
        }
    }

    /// A whole small file and the version its answer had.
    async fn held(&mut self, file: &str, url: &str) -> Result<(Vec<u8>, Option<String>), Trouble> {
        let mut failures = 0;
        loop {
            let mut answer = self.get(file, url, None).await?;
            let encoded = answer.header("content-encoding").is_some_and(|how| how != "identity");
            let length = answer.number("content-length");
            let mut bytes = Vec::new();
            let broke = loop {
                match answer.body.next().await {
                    Ok(Some(more)) => {
                        self.traffic.came(file, more.len() as u64);
                        bytes.extend_from_slice(&more);
                        if bytes.len() as u64 > MAX_JSON_BYTES {
                            let what = format!(
                                "{file}: more than {MAX_JSON_BYTES} bytes came for {url}; too many for a file of its kind"
                            );
                            return Err(failure(file, url, what).into());
                        }
                    }
                    Ok(None) => {
                        break length
                            .filter(|&l| !encoded && l > bytes.len() as u64)
                            .map(|l| format!("it ended before byte {l}"));
                    }
                    Err(Failure::Broken(why)) => break Some(why),
                    Err(Failure::Stopped) => return Err(Trouble::Lasting(stopped())),
                }
            };
            let Some(why) = broke else {
                if is_web_page(&bytes) {
                    return Err(web_page(file, url));
                }
                let version = version(&answer);
                return Ok((bytes, version));
            };
            let why = format!("the connection broke while {file} was read, at byte {}: {why} ({url}). Try again.", bytes.len());
            self.patience(failure(file, url, why), &mut failures).await.map_err(Trouble::Lasting)?;
        }
    }
}

fn failure(file: &str, url: &str, message: String) -> HttpFailure {
    HttpFailure { message, file: file.to_owned(), url: url.to_owned(), status: None, missing: false, changed: false }
}

fn broke_a_promise(error: &Error) -> bool {
    matches!(error, Error::Http(failure) if failure.changed)
}

fn stopped() -> Error {
    Error::Aborted("loading was stopped by its caller".into())
}

/// Hosts of single-page sites answer a missing file with their start page.
fn web_page(file: &str, url: &str) -> Trouble {
    let message = format!(
        "{file}: the server answered with a web page (HTML) for {url}, so there is most likely no such file. Check the address \
         of the model."
    );
    let failure = HttpFailure { status: Some(200), missing: true, ..failure(file, url, message) };
    Trouble::Missing { failure, web_page: true }
}

/// Whether bytes begin as a web page does; no JSON, template or safetensors file begins so.
fn is_web_page(bytes: &[u8]) -> bool {
    let bytes = bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(bytes).trim_ascii_start();
    ["<!doctype html", "<html"].iter().any(|tag| bytes.get(..tag.len()).is_some_and(|b| b.eq_ignore_ascii_case(tag.as_bytes())))
}

/// What tells versions of a file apart; browsers hide it where the server does not allow it to be seen.
fn version<B>(answer: &Answer<B>) -> Option<String> {
    answer.header("etag").or_else(|| answer.header("last-modified")).map(str::to_owned)
}

/// A sum of a block, to notice that it came otherwise the second time, be it on purpose.
fn sum(bytes: &[u8]) -> u64 {
    running_hash::hash(bytes).first_chunk().map_or(0, |first| u64::from_le_bytes(*first))
}

impl Trouble {
    fn into_error(self) -> Error {
        match self {
            Self::Passing(failure) | Self::Missing { failure, .. } => Error::Http(Box::new(failure)),
            Self::Lasting(error) => error,
        }
    }
}

impl From<HttpFailure> for Trouble {
    fn from(failure: HttpFailure) -> Self {
        Self::Lasting(Error::Http(Box::new(failure)))
    }
}

impl<T: Transport> HttpSource<T> {
    /// Files of `locator`; no request is made yet.
    #[must_use]
    pub fn new(transport: T, locator: Locator, options: HttpOptions) -> Self {
        let kept = Kept { bytes: 0, limit: options.kept_bytes };
        let permission = match (&locator, options.headers.is_empty()) {
            (Locator::Hub { .. }, true) => {
                "There is no such repository, or it needs permission: pass a header `Authorization: Bearer TOKEN` of an account that has it."
            }
            (Locator::Url(_), true) => "It needs permission: pass `headers`.",
            (_, false) => "It needs permission, which the headers that were passed do not give.",
        };
        let net = Net { transport, options, traffic: Rc::default(), reached: false, hurried: false, permission };
        Self {
            net,
            locator,
            listing: None,
            files: BTreeMap::new(),
            kept,
            turns: 0,
            last_steps: BTreeMap::new(),
            distrusted: false,
        }
    }

    /// Where the files are.
    #[must_use]
    pub fn locator(&self) -> &Locator {
        &self.locator
    }

    /// Whether the server has answered at all.
    #[must_use]
    pub fn reached(&self) -> bool {
        self.net.reached
    }

    /// Whether the server gave other bytes than it had promised.
    #[must_use]
    pub fn distrusted(&self) -> bool {
        self.distrusted
    }

    /// Asks the hub which commit the revision is and which files it has; nothing for an address.
    ///
    /// # Errors
    /// [`Error::Fetch`].
    pub async fn list(&mut self) -> Result<Option<&Listing>> {
        let Some(url) = self.locator.listing_url() else { return Ok(None) };
        let source = self.locator.source();
        let bytes = self.net.held(&source, &url).await.map_err(|trouble| match trouble {
            Trouble::Missing { mut failure, web_page: false } => {
                failure.message.push_str(" The hub has no such repository, or no such revision of it.");
                Error::Http(Box::new(failure))
            }
            other => other.into_error(),
        })?;
        self.listing = Some(Listing::parse(&source, &bytes.0)?);
        Ok(self.listing.as_ref())
    }

    /// Takes a listing that is known already.
    pub fn set_listing(&mut self, listing: Listing) {
        self.listing = Some(listing);
    }

    /// The listing, once known.
    #[must_use]
    pub fn listing(&self) -> Option<&Listing> {
        self.listing.as_ref()
    }

    /// Bytes of a weights file that have passed.
    #[must_use]
    pub fn passed(&self, file: &str) -> u64 {
        match self.files.get(file) {
            Some(Opened::Weights(remote)) => remote.at,
            _ => 0,
        }
    }

    /// Whether a file has been asked for.
    #[must_use]
    pub fn is_open(&self, file: &str) -> bool {
        self.files.contains_key(file)
    }

    /// Files for which a web page came.
    #[must_use]
    pub fn web_pages(&self) -> Vec<&str> {
        let pages = self.files.iter().filter(|(_, opened)| matches!(opened, Opened::Missing { web_page: true }));
        pages.map(|(file, _)| file.as_str()).collect()
    }

    /// The version that the server's answers for a weights file carried.
    #[must_use]
    pub fn version(&self, file: &str) -> Option<&str> {
        match self.files.get(file) {
            Some(Opened::Weights(remote)) => remote.version.as_deref(),
            _ => None,
        }
    }

    /// Says which bytes of weights will be asked for, in order: what passes by and is not among them need not be kept.
    pub fn expect(&mut self, reads: &[(String, Range<u64>)]) {
        let block = self.net.options.block_bytes;
        let mut due: BTreeMap<&str, BTreeMap<u64, u64>> = BTreeMap::new();
        for (file, range) in reads {
            let file = due.entry(file).or_default();
            let mut at = range.start;
            while at < range.end {
                let until = range.end.min((at / block + 1) * block);
                *file.entry(at / block).or_default() += until - at;
                at = until;
            }
        }
        for (file, opened) in &mut self.files {
            if let Opened::Weights(remote) = opened {
                let due = due.remove(file.as_str()).unwrap_or_default();
                remote.blocks.retain(|i, bytes| {
                    let stays = due.contains_key(i);
                    self.kept.bytes -= if stays { 0 } else { bytes.len() as u64 };
                    stays
                });
                remote.due = Some(due);
                remote.head = Vec::new();
            }
        }
    }

    /// Has bytes of a file that were read some other time held to their hash when they pass.
    pub fn hold_to(&mut self, file: &str, range: Range<u64>, hash: Hash) {
        if let Some(remote) = self.passing(file) {
            remote.hold_to(range, hash);
        }
    }

    /// Has the state of a file's hash at byte `at`, the start of a block or the file's end, held to `state`.
    pub fn await_hash(&mut self, file: &str, at: u64, state: &str) {
        if let Some(remote) = self.passing(file) {
            remote.awaited = Some((at, state.to_owned())).filter(|_| at > remote.at);
        }
    }

    /// The state of a file's hash that is still awaited, or else the last one that was saved, with its byte.
    #[must_use]
    pub fn last_hash(&self, file: &str) -> Option<(u64, String)> {
        match self.files.get(file) {
            Some(Opened::Weights(remote)) => remote.awaited.as_ref().or(remote.saved.last()).cloned(),
            _ => None,
        }
    }

    /// The state of a file's hash at `at`, the start of a block that has passed. States before it are forgotten.
    pub fn hash_at(&mut self, file: &str, at: u64) -> Option<String> {
        let remote = self.passing(file)?;
        remote.saved.retain(|(known, _)| *known >= at);
        remote.saved.iter().find(|(known, _)| *known == at).map(|(_, state)| state.clone())
    }

    /// Has the blocks of a file stay until [`HttpSource::let_go`], for a caller that writes some of them down; or not any more.
    pub fn lend(&mut self, file: &str, lent: bool) {
        if let Some(remote) = self.passing(file) {
            remote.lent = lent;
            if !lent {
                remote.written.clear();
                remote.over.clear();
            }
        }
    }

    /// Lets the next bytes of a file pass if its block `index` is still to come; `false` if it is not.
    ///
    /// # Errors
    /// [`Error::Fetch`].
    pub async fn reach(&mut self, file: &str, index: u64) -> Result<bool> {
        self.make_room_for(file);
        let (net, kept) = (&mut self.net, &mut self.kept);
        let Some(Opened::Weights(remote)) = self.files.get_mut(file) else { return Ok(false) };
        let end = index * net.options.block_bytes + remote.block_bytes(net.options.block_bytes, index);
        if remote.blocks.contains_key(&index) || remote.at >= end || end <= remote.began {
            return Ok(false);
        }
        let passed = remote.advance(net, kept, Some(index)).await;
        if let Err(error) = &passed {
            self.distrusted |= broke_a_promise(error);
        }
        passed.map(|()| true)
    }

    /// A block that is held.
    #[must_use]
    pub fn block(&self, file: &str, index: u64) -> Option<&[u8]> {
        match self.files.get(file) {
            Some(Opened::Weights(remote)) => remote.blocks.get(&index).map(Vec::as_slice),
            _ => None,
        }
    }

    /// A block that passed, will be asked for, and cannot be held.
    pub fn next_over(&mut self, file: &str) -> Option<(u64, Vec<u8>)> {
        self.passing(file)?.over.pop()
    }

    /// Says that the caller has a block of a file and will give it back, so it need not be held. Its sum, if it is known.
    pub fn written(&mut self, file: &str, index: u64) -> Option<u64> {
        let remote = self.passing(file)?;
        if let Some(bytes) = remote.blocks.get(&index) {
            remote.sums.insert(index, sum(bytes));
        }
        remote.written.push(index);
        remote.sums.get(&index).copied()
    }

    /// Gives back a block.
    pub fn give(&mut self, file: &str, index: u64, bytes: Vec<u8>) {
        if let Some(Opened::Weights(remote)) = self.files.get_mut(file)
            && bytes.len() as u64 == remote.block_bytes(self.net.options.block_bytes, index)
        {
            remote.keep(index, bytes, &mut self.kept);
            remote.make_room(index, &mut self.kept);
        }
    }

    /// Lets the blocks go that no later step asks for.
    pub fn let_go(&mut self) {
        for opened in self.files.values_mut() {
            if let Opened::Weights(remote) = opened
                && let Some(due) = &remote.due
            {
                let kept = &mut self.kept;
                remote.blocks.retain(|index, bytes| {
                    let stays = due.contains_key(index);
                    kept.bytes -= if stays { 0 } else { bytes.len() as u64 };
                    stays
                });
            }
        }
    }

    /// Bytes of a block.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.net.options.block_bytes
    }

    /// Has a server that is busy asked once more and no oftener, for a caller that can do without it; or not any more.
    pub fn hurry(&mut self, hurried: bool) {
        self.net.hurried = hurried;
    }

    fn passing(&mut self, file: &str) -> Option<&mut Remote<T::Body>> {
        match self.files.get_mut(file) {
            Some(Opened::Weights(remote)) => Some(remote),
            _ => None,
        }
    }

    /// Starts a file's stream at `at`, the start of a block or the file's end, with the hash of what was before it and the sums
    /// of blocks there. Before anything of the file was read.
    ///
    /// # Errors
    /// [`Error::Fetch`].
    pub async fn take_up(&mut self, file: &str, at: u64, hash: Option<RunningHash>, sums: &[(u64, u64)]) -> Result<()> {
        self.weights(file).await?;
        let Some(Opened::Weights(remote)) = self.files.get_mut(file) else { return Ok(()) };
        let at = at.min(remote.size);
        if at == 0 && remote.began == 0 {
            // It is on its way already.
            return Ok(());
        }
        remote.stream = None;
        (remote.at, remote.began, remote.skip) = (at, at, 0);
        remote.filling.clear();
        remote.hash = hash;
        // What begins before the stream does not pass whole.
        remote.ahead.retain(|ahead| ahead.range.start >= at);
        // One by one: collecting would bring a sort of its own into the module.
        for (index, sum) in sums {
            remote.sums.insert(*index, *sum);
        }
        remote.drop_blocks(&mut self.kept);
        Ok(())
    }

    /// Reads a file's parts by range from now on, without a stream and without a hash.
    ///
    /// # Errors
    /// [`Error::Fetch`].
    pub async fn by_range(&mut self, file: &str) -> Result<()> {
        let remote = self.weights(file).await?;
        (remote.stream, remote.hash, remote.checked) = (None, None, true);
        remote.filling.clear();
        (remote.at, remote.began) = (remote.size, 0);
        Ok(())
    }

    /// Ends the reading of a weights file: what is left of it passes by where its hash is known and must be the right one.
    ///
    /// # Errors
    /// [`Error::Fetch`], also if the hash is another.
    pub async fn finish(&mut self, file: &str) -> Result<()> {
        self.make_room_for(file);
        let (net, kept) = (&mut self.net, &mut self.kept);
        let Some(Opened::Weights(remote)) = self.files.get_mut(file) else { return Ok(()) };
        remote.due = Some(BTreeMap::new());
        remote.drop_blocks(kept);
        if let (Some(expected), false) = (remote.sha256, remote.checked) {
            while remote.at < remote.size {
                if let Err(error) = remote.advance(net, kept, None).await {
                    self.distrusted |= broke_a_promise(&error);
                    return Err(error);
                }
            }
            let came = remote.hash.take().unwrap_or_default().finish();
            if came != expected {
                self.distrusted = true;
                let message = format!(
                    "{file}: what came has the SHA-256 {}, but the hub lists {} ({}). It was damaged or exchanged on its way; nothing \
                     of it is kept. Load the model again.",
                    hex(&came),
                    hex(&expected),
                    remote.url
                );
                return Err(Error::Http(Box::new(HttpFailure { changed: true, ..failure(file, &remote.url, message) })));
            }
        }
        remote.checked = true;
        remote.stream = None;
        Ok(())
    }

    /// Bytes that still have to come for a weights file if all of `reads` are asked for.
    #[must_use]
    pub fn remaining(&self, file: &str) -> u64 {
        match self.files.get(file) {
            Some(Opened::Weights(remote)) => {
                let last = remote
                    .due
                    .as_ref()
                    .and_then(|due| due.keys().next_back())
                    .map_or(0, |last| remote.size.min((last + 1) * self.net.options.block_bytes));
                if remote.sha256.is_some() && !remote.checked { remote.size - remote.at } else { last.saturating_sub(remote.at) }
            }
            _ => 0,
        }
    }

    async fn weights(&mut self, file: &str) -> Result<&mut Remote<T::Body>> {
        self.open(file).await?;
        let missing = self.no_such(file);
        match self.files.get_mut(file) {
            Some(Opened::Weights(remote)) => Ok(remote),
            _ => Err(missing),
        }
    }

    fn no_such(&self, file: &str) -> Error {
        let url = self.locator.file_url(file, None);
        match self.files.get(file) {
            Some(Opened::Missing { web_page: true }) => web_page(file, &url).into_error(),
            _ => {
                let message = format!("there is no {file} at {}. Check the address of the model ({url}).", self.locator.source());
                Error::Http(Box::new(HttpFailure { missing: true, ..failure(file, &url, message) }))
            }
        }
    }

    /// Finds out what `file` is.
    async fn open(&mut self, file: &str) -> Result<()> {
        if self.files.contains_key(file) {
            return Ok(());
        }
        let opened = self.open_new(file).await?;
        self.files.insert(file.to_owned(), opened);
        Ok(())
    }

    async fn open_new(&mut self, file: &str) -> Result<Opened<T::Body>> {
        if self.listing.is_none() {
            self.list().await?;
        }
        let listed = match &self.listing {
            None => None,
            Some(listing) => match listing.files.get(file) {
                None => return Ok(Opened::Missing { web_page: false }),
                Some(listed) => Some(*listed),
            },
        };
        let url = self.locator.file_url(file, self.listing.as_ref().map(|l| l.commit.as_str()));
        let opened = match file.ends_with(".safetensors") {
            true => self.open_weights(file, &url, listed.unwrap_or_default()).await,
            false => self.open_small(file, &url, listed.unwrap_or_default()).await,
        };
        match opened {
            // What a hub lists it must have.
            Err(Trouble::Missing { web_page, .. }) if listed.is_none() => Ok(Opened::Missing { web_page }),
            other => other.map_err(Trouble::into_error),
        }
    }

    async fn open_small(&mut self, file: &str, url: &str, listed: Listed) -> Result<Opened<T::Body>, Trouble> {
        let (bytes, _) = self.net.held(file, url).await?;
        let wrong = |what: String| Err(failure(file, url, format!("{file} {what} ({url}). Load the model again.")).into());
        match listed {
            Listed { size: Some(size), .. } if size != bytes.len() as u64 => {
                self.distrusted = true;
                wrong(format!("came with {} bytes, but the hub lists {size}", bytes.len()))
            }
            Listed { sha256: Some(sha256), .. } if running_hash::hash(&bytes) != sha256 => {
                self.distrusted = true;
                wrong(format!("came with another SHA-256 than the hub lists, {}", hex(&sha256)))
            }
            _ => Ok(Opened::Held(bytes)),
        }
    }

    async fn open_weights(&mut self, file: &str, url: &str, listed: Listed) -> Result<Opened<T::Body>, Trouble> {
        let mut remote = Remote {
            file: file.to_owned(),
            url: url.to_owned(),
            size: 0,
            sha256: listed.sha256,
            version: None,
            ranges: None,
            stream: None,
            skip: 0,
            used: self.turns,
            at: 0,
            filling: Vec::new(),
            began: 0,
            head: Vec::new(),
            web_page: false,
            hash: listed.sha256.map(|_| RunningHash::default()),
            saved: Vec::new(),
            awaited: None,
            ahead: Vec::new(),
            blocks: BTreeMap::new(),
            due: None,
            sums: BTreeMap::new(),
            lent: false,
            written: Vec::new(),
            over: Vec::new(),
            checked: false,
        };
        if let Some(size) = listed.size {
            remote.size = size;
            return Ok(Opened::Weights(Box::new(remote)));
        }
        self.make_room_for(file);
        let (net, kept) = (&mut self.net, &mut self.kept);
        let first = HEAD_BYTES.min(net.options.block_bytes);
        // By range, so that it does not come compressed.
        let mut answer = net.get(file, url, Some((0, Some(first)))).await?;
        if answer.status == 206 && total(&answer).is_none() {
            // Across origins a browser may hide the total, but not the length of what is asked for.
            answer = net.get(file, url, Some((0, None))).await?;
        }
        remote.size = first_size(file, url, &answer)?;
        remote.version = version(&answer);
        let is_head = answer.status == 206 && total(&answer).is_some();
        remote.ranges = (answer.status == 206).then_some(true);
        if remote.size == 0 {
            return Ok(Opened::Weights(Box::new(remote)));
        }
        let done = if is_head {
            remote.fetch(net, 0..first.min(remote.size), Some(answer)).await.map(|head| remote.head = head.unwrap_or_default())
        } else {
            remote.stream = Some(answer.body);
            remote.advance(net, kept, Some(0)).await
        };
        match done {
            // A page that does not say that it is one shows in its first bytes.
            _ if remote.web_page || is_web_page(&remote.head) => Err(web_page(file, url)),
            Err(error) => Err(Trouble::Lasting(error)),
            Ok(()) => Ok(Opened::Weights(Box::new(remote))),
        }
    }

    /// Parks the streams that were not read for longest.
    fn make_room_for(&mut self, file: &str) {
        self.turns += 1;
        let mut open: Vec<_> = self
            .files
            .values_mut()
            .filter_map(|opened| match opened {
                Opened::Weights(remote) if remote.stream.is_some() && remote.file != file => Some(remote),
                _ => None,
            })
            .collect();
        open.sort_unstable_by_key(|remote| std::cmp::Reverse(remote.used));
        for remote in open.into_iter().skip(MAX_STREAMS - 1) {
            remote.stream = None;
        }
        if let Some(Opened::Weights(remote)) = self.files.get_mut(file) {
            remote.used = self.turns;
        }
    }
}

/// The size of the whole file that an answer to a request for a range tells.
fn total<B>(answer: &Answer<B>) -> Option<u64> {
    answer.header("content-range").and_then(|range| range.rsplit_once('/')).and_then(|(_, total)| total.trim().parse().ok())
}

/// A weights file's size by the answer to a request for all of it.
fn first_size<B>(file: &str, url: &str, answer: &Answer<B>) -> Result<u64, Trouble> {
    let total = total(answer);
    let length = answer.number("content-length");
    let size = match answer.status {
        // How an empty file answers a request for its first bytes.
        416 => Some(0),
        206 if total.is_some() => total,
        206 => length,
        _ if answer.header("content-encoding").is_some_and(|how| how != "identity") => None,
        _ => length,
    };
    size.ok_or_else(|| {
        let what =
            "comes compressed or without a length, so it cannot be read in pieces: serve it uncompressed, with Content-Length";
        failure(file, url, format!("{file} {what} ({url}).")).into()
    })
}

impl<B: Body> Remote<B> {
    fn block_bytes(&self, block: u64, index: u64) -> u64 {
        block.min(self.size.saturating_sub(index * block))
    }

    fn error(&self, what: &str, changed: bool) -> Error {
        let message = format!("{} {what} ({}). Load the model again.", self.file, self.url);
        Error::Http(Box::new(HttpFailure { changed, ..failure(&self.file, &self.url, message) }))
    }

    /// Says that the server gave other bytes than it had promised.
    fn broken_promise(&self, what: &str) -> Error {
        self.error(what, true)
    }

    /// Refuses an answer that is not the file that was opened, or does not begin at `at`.
    fn check(&mut self, answer: &Answer<B>, at: u64) -> Result<()> {
        if answer.status == 416 {
            return Err(self.broken_promise(&format!("became shorter while it was read: it has no byte {at} any more")));
        }
        match (&self.version, version(answer)) {
            // A hub's files lie on several hosts, which may name the same version differently; its hash decides.
            (Some(first), Some(now)) if *first != now && self.sha256.is_none() => {
                return Err(self.broken_promise("changed on the server while it was read"));
            }
            (None, Some(now)) => self.version = Some(now),
            _ => {}
        }
        let range = answer.header("content-range");
        let (start, total) = range
            .and_then(|range| range.trim().strip_prefix("bytes "))
            .and_then(|range| range.split_once('/'))
            .map_or((None, None), |(bytes, total)| {
                (bytes.split_once('-').and_then(|(s, _)| s.parse::<u64>().ok()), total.parse::<u64>().ok())
            });
        if answer.status == 206 {
            if let Some(came) = start.filter(|came| *came != at) {
                return Err(self.broken_promise(&format!(
                    "was asked for from byte {at} and came from byte {came}: the server's ranges are broken"
                )));
            }
        }
        let encoded = answer.header("content-encoding").is_some_and(|how| how != "identity");
        let whole = if answer.status == 200 && !encoded { answer.number("content-length") } else { total };
        match whole {
            Some(size) if size != self.size => {
                let known =
                    if self.sha256.is_some() { "is listed with" } else { "changed on the server while it was read: it had" };
                Err(self.broken_promise(&format!("{known} {} bytes, but has {size}", self.size)))
            }
            _ if encoded => Err(self.error("comes compressed; serve it uncompressed", false)),
            _ => Ok(()),
        }
    }

    /// [`Remote::check`]; an answer that is no part of the file may be a page that does not say so.
    async fn check_or_page(&mut self, answer: &mut Answer<B>, at: u64) -> Result<(), Trouble> {
        let Err(error) = self.check(answer, at) else { return Ok(()) };
        match answer.body.next().await {
            Ok(Some(bytes)) if is_web_page(&bytes) => Err(web_page(&self.file, &self.url)),
            _ => Err(Trouble::Lasting(error)),
        }
    }

    /// Opens the stream at the next byte that has not passed.
    async fn connect<T: Transport<Body = B>>(&mut self, net: &mut Net<T>) -> Result<(), Trouble> {
        let mut answer = net.ask(&self.file, &self.url, Some((self.at, None))).await?;
        self.check_or_page(&mut answer, self.at).await?;
        self.ranges = Some(answer.status == 206);
        self.skip = if answer.status == 206 { 0 } else { self.at };
        self.stream = Some(answer.body);
        Ok(())
    }

    /// Lets the next bytes pass, opening or reopening the stream as need be. Block `wanted` is kept whatever else is.
    async fn advance<T: Transport<Body = B>>(&mut self, net: &mut Net<T>, kept: &mut Kept, wanted: Option<u64>) -> Result<()> {
        let mut failures = 0;
        loop {
            let why = match &mut self.stream {
                None => match self.connect(net).await {
                    Ok(()) => continue,
                    Err(Trouble::Passing(failure)) => {
                        net.patience(failure, &mut failures).await?;
                        continue;
                    }
                    Err(other) => return Err(other.into_error()),
                },
                Some(body) => match body.next().await {
                    Ok(Some(bytes)) => {
                        net.traffic.came(&self.file, bytes.len() as u64);
                        let skipped = self.skip.min(bytes.len() as u64);
                        self.skip -= skipped;
                        let fresh = bytes.get(skipped as usize..).unwrap_or_default();
                        if fresh.is_empty() {
                            continue;
                        }
                        return self.absorb(net.options.block_bytes, fresh, kept, wanted);
                    }
                    Ok(None) => format!("it ended after {} of its {} bytes", self.at, self.size),
                    Err(Failure::Broken(why)) => why,
                    Err(Failure::Stopped) => return Err(stopped()),
                },
            };
            self.stream = None;
            net.patience(self.broken(self.at, failures + 1, &why), &mut failures).await?;
        }
    }

    fn broken(&self, at: u64, times: u32, why: &str) -> HttpFailure {
        let Self { file, url, size, .. } = self;
        let message = format!(
            "the connection broke {times} times in a row while {file} was read, at byte {at} of {size}: {why} ({url}). Try again."
        );
        failure(file, url, message)
    }

    /// Takes bytes that passed.
    fn absorb(&mut self, block: u64, mut bytes: &[u8], kept: &mut Kept, wanted: Option<u64>) -> Result<()> {
        if bytes.len() as u64 > self.size - self.at {
            self.stream = None;
            return Err(self
                .broken_promise(&format!("has more than its {} bytes: the server says one size and sends another", self.size)));
        }
        // A page that does not say that it is one shows in its first bytes.
        if self.at == 0 && is_web_page(bytes) {
            (self.web_page, self.stream) = (true, None);
            return Err(web_page(&self.file, &self.url).into_error());
        }
        while !bytes.is_empty() {
            let index = self.at / block;
            let until = (index * block + self.block_bytes(block, index)).min(self.at + bytes.len() as u64);
            let (now, later) = bytes.split_at((until - self.at) as usize);
            bytes = later;
            if let Some(hash) = &mut self.hash {
                hash.update(now);
                if until % block == 0 || until == self.size {
                    self.saved.push((until, hash.save()));
                }
            }
            if !self.is_as_before(now, until) {
                self.stream = None;
                return Err(self.broken_promise("changed on the server while it was read"));
            }
            // As a block is kept, it takes no more than its bytes.
            if self.filling.is_empty() {
                self.filling.reserve_exact(self.block_bytes(block, index) as usize);
            }
            self.filling.extend_from_slice(now);
            self.at = until;
            if until == index * block + self.block_bytes(block, index) {
                let whole = std::mem::take(&mut self.filling);
                self.pass(index, whole, kept, wanted)?;
            }
        }
        Ok(())
    }

    /// Has the bytes of `range` held to `hash` when they pass.
    fn hold_to(&mut self, range: Range<u64>, hash: Hash) {
        self.ahead.retain(|ahead| ahead.range != range);
        self.ahead.push(Ahead { range, hash, passed: RunningHash::default() });
    }

    /// Whether `now`, which pass up to byte `until`, are what they were when they came before.
    fn is_as_before(&mut self, now: &[u8], until: u64) -> bool {
        if let Some((_, expected)) = self.awaited.take_if(|(at, _)| *at == until)
            && self.saved.last().is_none_or(|(at, state)| *at != until || *state != expected)
        {
            return false;
        }
        self.ahead.iter_mut().all(|Ahead { range, hash, passed }| {
            let (from, to) = (range.start.max(self.at), range.end.min(until));
            if from >= to {
                return true;
            }
            if from == range.start {
                *passed = RunningHash::default();
            }
            passed.update(now.get((from - self.at) as usize..(to - self.at) as usize).unwrap_or_default());
            to < range.end || passed.clone().finish() == *hash
        })
    }

    /// Keeps a block that passed, if it will be asked for and there is room.
    fn pass(&mut self, index: u64, bytes: Vec<u8>, kept: &mut Kept, wanted: Option<u64>) -> Result<()> {
        let asked_for = self.due.as_ref().is_none_or(|due| due.contains_key(&index));
        if wanted != Some(index) && !asked_for {
            return Ok(());
        }
        if self.sums.get(&index).is_some_and(|known| *known != sum(&bytes)) {
            return Err(self.broken_promise("changed on the server while it was read"));
        }
        let no_room = kept.bytes + bytes.len() as u64 > kept.limit;
        if no_room && wanted != Some(index) {
            // What lies ahead of the others is asked for after them, so it is what goes: one that is written down, or this one.
            if !self.drop_last(kept, wanted, true) {
                self.sums.insert(index, sum(&bytes));
                if self.lent && !self.written.contains(&index) {
                    self.over.push((index, bytes));
                }
                return Ok(());
            }
        }
        self.keep(index, bytes, kept);
        Ok(())
    }

    /// Drops the last block that can be had again, but not `wanted`; `false` if there is none. Only what is written down, if
    /// the caller writes blocks down or `written` asks for it.
    fn drop_last(&mut self, kept: &mut Kept, wanted: Option<u64>, written: bool) -> bool {
        let any = !written && !self.lent;
        let goes = |index: &&u64| Some(**index) != wanted && (any || self.written.contains(index));
        let last = self.blocks.keys().rev().find(goes).copied();
        let Some((last, gone)) = last.and_then(|last| self.blocks.remove_entry(&last)) else { return false };
        kept.bytes -= gone.len() as u64;
        self.sums.entry(last).or_insert_with(|| sum(&gone));
        true
    }

    /// Drops blocks for `wanted`, which was taken in whatever room there was. Those that lie farthest ahead go first.
    fn make_room(&mut self, wanted: u64, kept: &mut Kept) {
        while kept.bytes > kept.limit && self.drop_last(kept, Some(wanted), false) {}
    }

    fn keep(&mut self, index: u64, bytes: Vec<u8>, kept: &mut Kept) {
        kept.bytes += bytes.len() as u64;
        if let Some(before) = self.blocks.insert(index, bytes) {
            kept.bytes -= before.len() as u64;
        }
    }

    /// Forgets all blocks that are kept.
    fn drop_blocks(&mut self, kept: &mut Kept) {
        kept.bytes -= std::mem::take(&mut self.blocks).values().map(|bytes| bytes.len() as u64).sum::<u64>();
        self.over.clear();
    }

    /// Fetches `range` beside the stream; `opened` is an answer whose body that is. `None` if the server has no ranges: then the
    /// file passes once more, from its start.
    async fn fetch<T: Transport<Body = B>>(
        &mut self,
        net: &mut Net<T>,
        range: Range<u64>,
        mut opened: Option<Answer<B>>,
    ) -> Result<Option<Vec<u8>>> {
        let length = range.end - range.start;
        let mut bytes = Vec::with_capacity(length as usize);
        let mut failures = 0;
        while (bytes.len() as u64) < length {
            let at = range.start + bytes.len() as u64;
            let asked = if self.ranges == Some(false) { (0, None) } else { (at, Some(range.end)) };
            let answer = match opened.take() {
                Some(answer) => Ok(answer),
                None => net.ask(&self.file, &self.url, Some(asked)).await,
            };
            let broke = match answer {
                Ok(mut answer) if answer.status == 200 => {
                    self.check_or_page(&mut answer, 0).await.map_err(Trouble::into_error)?;
                    self.ranges = Some(false);
                    // What comes once more must be the same.
                    self.awaited = self.awaited.take().or(self.saved.last().cloned());
                    (self.at, self.began, self.skip) = (0, 0, 0);
                    self.filling.clear();
                    self.hash = self.sha256.filter(|_| !self.checked).map(|_| RunningHash::default());
                    self.stream = Some(answer.body);
                    return Ok(None);
                }
                Ok(mut answer) => {
                    self.check(&answer, at)?;
                    self.ranges = Some(true);
                    loop {
                        match answer.body.next().await {
                            Ok(Some(more)) => {
                                net.traffic.came(&self.file, more.len() as u64);
                                let room = (length - bytes.len() as u64).min(more.len() as u64);
                                bytes.extend_from_slice(more.get(..room as usize).unwrap_or_default());
                                failures = 0;
                                if bytes.len() as u64 == length {
                                    break None;
                                }
                            }
                            Ok(None) => {
                                break Some(self.broken(range.start + bytes.len() as u64, failures + 1, "it ended early"));
                            }
                            Err(Failure::Broken(why)) => {
                                break Some(self.broken(range.start + bytes.len() as u64, failures + 1, &why));
                            }
                            Err(Failure::Stopped) => return Err(stopped()),
                        }
                    }
                }
                Err(Trouble::Passing(failure)) => Some(failure),
                Err(other) => return Err(other.into_error()),
            };
            if let Some(failure) = broke {
                net.patience(failure, &mut failures).await?;
            }
        }
        Ok(Some(bytes))
    }

    /// Fetches a block that passed and was dropped.
    async fn again<T: Transport<Body = B>>(&mut self, net: &mut Net<T>, kept: &mut Kept, block: u64, index: u64) -> Result<()> {
        let start = index * block;
        let Some(bytes) = self.fetch(net, start..start + self.block_bytes(block, index), None).await? else { return Ok(()) };
        if self.sums.get(&index).is_some_and(|known| *known != sum(&bytes)) {
            return Err(self.broken_promise("changed on the server while it was read"));
        }
        self.keep(index, bytes, kept);
        self.make_room(index, kept);
        Ok(())
    }

    /// Bytes `range`, which lie in the file.
    async fn read<T: Transport<Body = B>>(&mut self, net: &mut Net<T>, kept: &mut Kept, range: Range<u64>) -> Result<Vec<u8>> {
        // Headers, while it is not known what will be read: no reason to start the stream.
        let in_head = usize::try_from(range.start).and_then(|start| Ok(start..usize::try_from(range.end)?));
        if let Some(head) = in_head.ok().and_then(|range| self.head.get(range)) {
            let head = head.to_vec();
            self.hold_to(range, running_hash::hash(&head));
            return Ok(head);
        }
        let idle = self.due.is_none() && self.stream.is_none() && self.at == 0 && self.ranges != Some(false);
        if idle && let Some(bytes) = self.fetch(net, range.clone(), None).await? {
            if range.start == 0 && is_web_page(&bytes) {
                return Err(web_page(&self.file, &self.url).into_error());
            }
            self.hold_to(range, running_hash::hash(&bytes));
            return Ok(bytes);
        }
        let block = net.options.block_bytes;
        let mut out = Vec::with_capacity((range.end - range.start) as usize);
        let mut at = range.start;
        while at < range.end {
            let index = at / block;
            let end = index * block + self.block_bytes(block, index);
            if let Some(bytes) = self.blocks.get(&index) {
                let until = end.min(range.end);
                let from = index * block;
                out.extend_from_slice(bytes.get((at - from) as usize..(until - from) as usize).unwrap_or_default());
                self.handed(index, until - at, kept);
                at = until;
            } else if self.at >= end || end <= self.began {
                self.again(net, kept, block, index).await?;
            } else {
                self.advance(net, kept, Some(index)).await?;
            }
        }
        Ok(out)
    }

    /// Lets a block go when all that will be asked of it has been handed out.
    fn handed(&mut self, index: u64, bytes: u64, kept: &mut Kept) {
        let Some(due) = &mut self.due else { return };
        let left = due.get(&index).copied().unwrap_or_default().saturating_sub(bytes);
        if left > 0 {
            due.insert(index, left);
            return;
        }
        due.remove(&index);
        if self.lent {
            return;
        }
        self.sums.remove(&index);
        if let Some(bytes) = self.blocks.remove(&index) {
            kept.bytes -= bytes.len() as u64;
        }
    }
}

impl<T: Transport> ByteSource for HttpSource<T> {
    async fn size(&mut self, file: &str) -> Result<Option<u64>> {
        self.open(file).await?;
        Ok(match self.files.get(file) {
            Some(Opened::Weights(remote)) => Some(remote.size),
            Some(Opened::Held(bytes)) => Some(bytes.len() as u64),
            Some(Opened::Read(size)) => Some(*size),
            Some(Opened::Missing { .. }) | None => None,
        })
    }

    async fn read(&mut self, file: &str, range: Range<u64>) -> Result<Vec<u8>> {
        self.open(file).await?;
        if let Some(Opened::Read(_)) = self.files.get(file) {
            self.files.remove(file);
            self.open(file).await?;
        }
        let size = self.size(file).await?.ok_or_else(|| self.no_such(file))?;
        if range.start > range.end {
            return Err(Error::Internal(format!("bytes {} to {} of {file} were asked for", range.start, range.end)));
        }
        if range.end > size {
            let url = self.locator.file_url(file, None);
            let (start, end) = (range.start, range.end);
            let message = format!(
                "{file} has {size} bytes, but bytes {start} to {end} are needed: it is truncated. Upload the whole file ({url})."
            );
            return Err(Error::Http(Box::new(failure(file, &url, message))));
        }
        self.make_room_for(file);
        let (net, kept) = (&mut self.net, &mut self.kept);
        match self.files.get_mut(file) {
            Some(Opened::Held(bytes)) if range == (0..size) => {
                let bytes = std::mem::take(bytes);
                self.files.insert(file.to_owned(), Opened::Read(size));
                Ok(bytes)
            }
            Some(Opened::Held(bytes)) => Ok(bytes.get(range.start as usize..range.end as usize).unwrap_or_default().to_vec()),
            Some(Opened::Weights(remote)) => {
                let read = remote.read(net, kept, range).await;
                if let Err(error) = &read {
                    self.distrusted |= broke_a_promise(error);
                }
                read
            }
            _ => Err(self.no_such(file)),
        }
    }

    fn why_absent(&self, file: &str) -> Option<Error> {
        Some(self.no_such(file))
    }

    fn traffic(&self) -> Option<Rc<Traffic>> {
        Some(Rc::clone(&self.net.traffic))
    }

    async fn begin(&mut self, steps: &[Step]) -> Result<()> {
        self.last_steps.clear();
        for (i, step) in steps.iter().enumerate() {
            for (file, _) in &step.reads {
                self.last_steps.insert(file.clone(), i);
            }
        }
        let reads: Vec<_> = steps.iter().flat_map(|step| step.reads.iter().cloned()).collect();
        self.expect(&reads);
        let remaining: u64 = self.last_steps.keys().map(|file| self.remaining(file)).sum();
        self.net.traffic.expect(self.net.traffic.bytes() + remaining);
        Ok(())
    }

    async fn end_step(&mut self, step: usize, _made: Option<Vec<u8>>) -> Result<()> {
        let ended = self.last_steps.iter().filter(|(_, last)| **last == step).map(|(file, _)| file.clone());
        for file in ended.collect::<Vec<_>>() {
            self.finish(&file).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "http_source_tests.rs"]
mod tests;
