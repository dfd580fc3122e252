//! What native programs lend: requests by ureq, and a store in a folder.

use std::cell::RefCell;
use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use super::http_source::HttpOptions;
use super::locator::{Locator, is_repo_id};
use super::remote::{RemoteSource, Role};
use super::store::{BlobStore, StoreFailure};
use super::transport::{Answer, Body, Failure, Transport};
use crate::error::Result;
use crate::weights::source::{Either, FolderSource};

/// Bytes of a piece of a body.
const PIECE_BYTES: usize = 256 << 10;
/// Pieces read ahead of whoever waits for them.
const PIECES_AHEAD: usize = 8;
/// Redirects followed.
const MAX_REDIRECTS: usize = 8;

/// Requests by ureq. Bodies are read on a thread of their own, a little ahead.
#[derive(Debug, Clone)]
pub struct UreqTransport {
    agent: ureq::Agent,
}

impl UreqTransport {
    /// A connection counts as broken when nothing came for `patience`.
    #[must_use]
    pub fn new(patience: Duration) -> Self {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            // Followed here, because what is sent to a host depends on which one it is.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(patience))
            .timeout_recv_response(Some(patience))
            .timeout_per_read(Some(patience))
            .user_agent(concat!("forecall/", env!("CARGO_PKG_VERSION")))
            .build();
        Self { agent: config.new_agent() }
    }
}

impl Default for UreqTransport {
    fn default() -> Self {
        Self::new(Duration::from_secs(30))
    }
}

impl Transport for UreqTransport {
    type Body = ReadAhead;

    async fn get(
        &self,
        url: &str,
        headers: &[(String, String)],
        private: &[(String, String)],
    ) -> Result<Answer<ReadAhead>, Failure> {
        let broken = |error: ureq::Error| Failure::Broken(error.to_string());
        let own = origin(url);
        let mut url = url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.agent.get(&url);
            let trusted = if origin(&url) == own { private } else { &[] };
            for (name, value) in headers.iter().chain(trusted) {
                request = request.header(name, value);
            }
            if headers.iter().any(|(name, _)| name == "range") {
                request = request.header("accept-encoding", "identity");
            }
            let response = request.call().map_err(broken)?;
            let status = response.status().as_u16();
            let location = response.headers().get("location").and_then(|location| location.to_str().ok());
            if let (301 | 302 | 303 | 307 | 308, Some(location)) = (status, location) {
                url = join(&url, location);
                continue;
            }
            let headers = response
                .headers()
                .iter()
                .filter_map(|(name, value)| Some((name.as_str().to_ascii_lowercase(), value.to_str().ok()?.to_owned())))
                .collect();
            let body =
                ReadAhead::start(response.into_body().into_reader()).map_err(|error| Failure::Broken(error.to_string()))?;
            return Ok(Answer { status, headers, body });
        }
        Err(Failure::Broken(format!("more than {MAX_REDIRECTS} redirects followed one another")))
    }

    async fn pause(&self, time: Duration) -> Result<(), Failure> {
        std::thread::sleep(time);
        Ok(())
    }
}

/// Scheme and host with port, in lower case.
fn origin(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or_default();
    let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
    // What stands before an @ is no part of the host.
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    format!("{scheme}://{host}").to_ascii_lowercase()
}

/// The address that `location` means on the page `url`.
fn join(url: &str, location: &str) -> String {
    let location = location.split('#').next().unwrap_or_default();
    // An address may stand in a query, too: only what comes first is a scheme.
    let first = location.split(['/', '?', '#']).next().unwrap_or_default();
    if first.ends_with(':') && location.get(first.len()..).is_some_and(|rest| rest.starts_with("//")) {
        return location.to_owned();
    }
    let (scheme, rest) = url.split_once("://").unwrap_or_default();
    if let Some(host) = location.strip_prefix("//") {
        return format!("{scheme}://{host}");
    }
    let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if location.starts_with('/') {
        return format!("{scheme}://{host}{location}");
    }
    let path = rest.split(['?', '#']).next().unwrap_or_default();
    let folder = path.rsplit_once('/').map_or(path, |(folder, _)| folder);
    format!("{scheme}://{folder}/{location}")
}

/// A body that a thread reads ahead of whoever asks for it, a few pieces at most.
#[derive(Debug)]
pub struct ReadAhead {
    pieces: Receiver<Result<Vec<u8>, Failure>>,
    /// Whether the next poll is the one after a turn was given to others.
    turned: bool,
}

impl ReadAhead {
    fn start(mut reader: impl Read + Send + 'static) -> std::io::Result<Self> {
        let (send, pieces) = sync_channel(PIECES_AHEAD);
        std::thread::Builder::new().spawn(move || pump(&mut reader, &send))?;
        Ok(Self { pieces, turned: false })
    }
}

fn pump(reader: &mut impl Read, send: &SyncSender<Result<Vec<u8>, Failure>>) {
    let mut piece = vec![0; PIECE_BYTES];
    let mut filled = 0;
    loop {
        let read = piece.get_mut(filled..).map_or(Ok(0), |free| reader.read(free));
        let (ended, failed) = match read {
            Ok(0) => (true, None),
            Ok(count) => {
                filled += count;
                (false, None)
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => (false, None),
            Err(error) => (true, Some(Failure::Broken(error.to_string()))),
        };
        // Small pieces are sent at once when they are all there is for now; a full one always.
        if filled > 0 {
            let bytes = piece.get(..filled).unwrap_or_default().to_vec();
            filled = 0;
            if send.send(Ok(bytes)).is_err() {
                return;
            }
        }
        if let Some(broken) = failed {
            // Nobody listens any more if this fails.
            let _ = send.send(Err(broken));
        }
        if ended {
            return;
        }
    }
}

impl Body for ReadAhead {
    async fn next(&mut self) -> Result<Option<Vec<u8>>, Failure> {
        // Whoever drives this future looks at what came, and may stop, between two pieces.
        std::future::poll_fn(|context| {
            self.turned = !self.turned;
            if self.turned {
                context.waker().wake_by_ref();
                return std::task::Poll::Pending;
            }
            std::task::Poll::Ready(())
        })
        .await;
        // The reading thread is gone at the end.
        self.pieces.recv().ok().transpose()
    }
}

/// A store in a folder: an entry is a folder, a blob a file.
#[derive(Debug)]
pub struct FolderStore {
    root: PathBuf,
    /// Locked files; the locks end with the value, or with the program.
    locks: RefCell<Vec<(String, File)>>,
}

/// What follows a blob's name while it is written.
const UNFINISHED: &str = ".part";
/// Where locks are; no entry's name begins with a dot.
const LOCKS: &str = ".locks";

impl FolderStore {
    /// A store in `root`, which is made when it is needed.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), locks: RefCell::default() }
    }

    /// The folder for caches of the user whose program this is; `None` if the system names none.
    #[must_use]
    pub fn default_root() -> Option<PathBuf> {
        let from = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let caches = match std::env::consts::OS {
            "windows" => from("LOCALAPPDATA"),
            "macos" => from("HOME").map(|home| home.join("Library/Caches")),
            _ => from("XDG_CACHE_HOME").or_else(|| from("HOME").map(|home| home.join(".cache"))),
        };
        caches.map(|caches| caches.join("forecall"))
    }

    /// `None` for a name that could lead elsewhere.
    fn path(&self, name: &str) -> Option<PathBuf> {
        let plain = |part: &str| {
            !part.is_empty()
                && !part.starts_with('.')
                && part.bytes().all(|c| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'_' | b'-'))
        };
        let parts: Vec<_> = name.trim_end_matches('/').split('/').collect();
        (parts.len() <= 2 && parts.iter().all(|part| plain(part))).then(|| self.root.join(parts.join("/")))
    }

    fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
        let folder = path.parent().ok_or(ErrorKind::InvalidInput)?;
        // What stands in an entry's or a blob's place and is none gives way.
        if folder.is_file() {
            fs::remove_file(folder)?;
        }
        fs::create_dir_all(folder)?;
        // Whole or not at all: the name comes last.
        let mut unfinished = path.as_os_str().to_owned();
        unfinished.push(format!("{UNFINISHED}{}", std::process::id()));
        let unfinished = PathBuf::from(unfinished);
        let renamed = |()| {
            if path.is_dir() {
                fs::remove_dir_all(path)?;
            }
            fs::rename(&unfinished, path)
        };
        let written = File::create(&unfinished).and_then(|mut file| file.write_all(bytes)).and_then(renamed);
        if written.is_err() {
            // What cannot be removed is not listed.
            let _ = fs::remove_file(&unfinished);
        }
        written
    }
}

impl BlobStore for FolderStore {
    async fn get(&self, name: &str) -> Option<Vec<u8>> {
        let path = self.path(name)?;
        // Reading what is no file, such as a pipe, may never end.
        fs::metadata(&path).ok().filter(fs::Metadata::is_file)?;
        fs::read(path).ok()
    }

    async fn put(&self, name: &str, bytes: &[u8]) -> Result<(), StoreFailure> {
        let path = self.path(name).ok_or_else(|| StoreFailure::Other(format!("{name} is not a blob's name")))?;
        Self::write(&path, bytes).map_err(|error| failed(&path, &error))
    }

    async fn list(&self, prefix: &str) -> Vec<(String, u64)> {
        let entries = fs::read_dir(&self.root).into_iter().flatten().flatten();
        let mut blobs = Vec::new();
        for entry in entries {
            let entry_name = entry.file_name().to_string_lossy().into_owned();
            let wanted = prefix.is_empty() || prefix.strip_suffix('/') == Some(entry_name.as_str());
            if !wanted || self.path(&entry_name).is_none() {
                continue;
            }
            for file in fs::read_dir(entry.path()).into_iter().flatten().flatten() {
                let name = file.file_name().to_string_lossy().into_owned();
                if let Ok(about) = file.metadata()
                    && about.is_file()
                    && !name.contains(UNFINISHED)
                {
                    blobs.push((format!("{entry_name}/{name}"), about.len()));
                }
            }
        }
        blobs
    }

    async fn remove(&self, name: &str) {
        let Some(path) = self.path(name) else { return };
        // What cannot be removed stays; it is found again when it is next listed.
        let _ = if name.ends_with('/') || path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    }

    async fn lock(&self, entry: &str) -> Result<bool, StoreFailure> {
        let mut locks = self.locks.borrow_mut();
        if locks.iter().any(|(held, _)| held == entry) {
            return Ok(true);
        }
        if self.path(entry).is_none() {
            return Err(StoreFailure::Other(format!("{entry} is not an entry's name")));
        }
        let folder = self.root.join(LOCKS);
        let file = fs::create_dir_all(&folder).and_then(|()| File::create(folder.join(entry)));
        let file = file.map_err(|error| failed(&folder, &error))?;
        match file.try_lock() {
            Ok(()) => {
                locks.push((entry.to_owned(), file));
                // Programs that were ended left them; nobody else writes here now.
                for file in fs::read_dir(self.root.join(entry)).into_iter().flatten().flatten() {
                    if file.file_name().to_string_lossy().contains(UNFINISHED) {
                        let _ = fs::remove_file(file.path());
                    }
                }
                Ok(true)
            }
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(error)) => Err(failed(&folder, &error)),
        }
    }
}

fn failed(path: &Path, error: &std::io::Error) -> StoreFailure {
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => StoreFailure::Full,
        _ => StoreFailure::Other(format!("{}: {error}", path.display())),
    }
}

/// Where and how a native program finds files.
#[derive(Debug, Clone, Default)]
pub struct Places {
    /// A branch, tag or commit, for repositories.
    pub revision: Option<String>,
    /// The hub's address; [`super::locator::HUB_ENDPOINT`] if none is given.
    pub hub: Option<String>,
    /// Headers for the source's own origin.
    pub headers: Vec<(String, String)>,
    /// The store's folder; `None` stores nothing.
    pub store: Option<PathBuf>,
}

/// Files on disk or from the network.
pub type NativeSource = Either<RemoteSource<UreqTransport, FolderStore>, FolderSource>;

/// Opens what a user named: a folder if there is one, else an address or a repository id.
///
/// # Errors
/// [`crate::Error::Fetch`] if it is neither; [`crate::Error::InvalidOption`] by [`Locator::parse`].
pub fn open(location: &str, places: &Places, role: Role) -> Result<NativeSource> {
    let remote = location.contains("://") || is_repo_id(location);
    if Path::new(location).is_dir() || !remote {
        return FolderSource::new(location).map(Either::Right);
    }
    let locator = Locator::parse(location, places.revision.as_deref(), places.hub.as_deref())?;
    let options = HttpOptions { headers: places.headers.clone(), ..HttpOptions::default() };
    let store = places.store.clone().map(FolderStore::new);
    // Listed by its address, whichever slash it was written with.
    let listed =
        if let Locator::Url(base) = &locator { base.clone() } else { location.split('@').next().unwrap_or(location).to_owned() };
    Ok(Either::Left(RemoteSource::new(UreqTransport::default(), &listed, locator, options, role, store)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_lead_where_they_say() {
        let at = "https://a.org:8/x/y?z";
        assert_eq!(join(at, "https://b.org/c"), "https://b.org/c");
        assert_eq!(join(at, "//b.org/c"), "https://b.org/c");
        assert_eq!(join(at, "/c?d#e"), "https://a.org:8/c?d");
        assert_eq!(join(at, "c"), "https://a.org:8/x/c");
        assert_eq!(join("https://a.org", "c"), "https://a.org/c");
        // An address in a query is none to go to.
        assert_eq!(join(at, "/c?to=https://b.org/d"), "https://a.org:8/c?to=https://b.org/d");
        assert_eq!(join(at, "c?to=https://b.org/d"), "https://a.org:8/x/c?to=https://b.org/d");
        assert_eq!(join("https://a.org?q=/x", "/c"), "https://a.org/c");
        assert_eq!(join(at, "http://b.org?c"), "http://b.org?c");
    }

    #[test]
    fn origins() {
        assert_eq!(origin("HTTPS://A.org/x"), origin("https://a.org?y"));
        for other in ["http://a.org", "https://a.org:444", "https://b.org", "https://a.org@b.org/", "https://a.org.b.org"] {
            assert_ne!(origin(other), origin("https://a.org/"), "{other}");
        }
    }
}
