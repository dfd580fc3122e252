//! Where a checkpoint's bytes come from: a folder, an address, files the user picked. The loader asks, a source answers.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;

use crate::error::{Error, Result};

/// A set of files by name, relative to the checkpoint's folder; names use `/`.
#[allow(async_fn_in_trait, reason = "futures need not be Send: loading is single-threaded by design")]
pub trait ByteSource {
    /// Bytes in `file`; `None` if there is no such file.
    ///
    /// # Errors
    /// [`Error::Fetch`] if that cannot be found out.
    async fn size(&mut self, file: &str) -> Result<Option<u64>>;

    /// Bytes `range` of `file`, all of them.
    ///
    /// # Errors
    /// [`Error::Fetch`] naming the file.
    async fn read(&mut self, file: &str, range: Range<u64>) -> Result<Vec<u8>>;

    /// Why a file is not there, where more can be said than that.
    fn why_absent(&self, file: &str) -> Option<Error> {
        let _ = file;
        None
    }

    /// What the source counts while it waits for a network; `None` for sources that have none.
    fn traffic(&self) -> Option<Rc<Traffic>> {
        None
    }

    /// What would have to be fetched for `steps`, and what is stored of them already. Changes nothing.
    ///
    /// # Errors
    /// [`Error::Fetch`].
    async fn survey(&mut self, steps: &[Step]) -> Result<Survey> {
        let _ = steps;
        Ok(Survey::default())
    }

    /// Says what weights will be read in which order, and what will be made of them. Once, before the first step.
    ///
    /// # Errors
    /// [`Error::Fetch`].
    async fn begin(&mut self, steps: &[Step]) -> Result<()> {
        let _ = steps;
        Ok(())
    }

    /// What was made in `step` some other time, if the source has kept it.
    ///
    /// # Errors
    /// [`Error::Aborted`].
    async fn stored(&mut self, step: usize) -> Result<Option<Vec<u8>>> {
        let _ = step;
        Ok(None)
    }

    /// Whether the source keeps what is made of its bytes.
    fn stores(&self) -> bool {
        false
    }

    /// Ends a step. `made` is what was made in it, for a source that [`ByteSource::stores`] and did not have it.
    ///
    /// # Errors
    /// [`Error::Fetch`], also if a file that this step ends is not what it should be.
    async fn end_step(&mut self, step: usize, made: Option<Vec<u8>>) -> Result<()> {
        let _ = (step, made);
        Ok(())
    }

    /// Ends the loading, when all steps have ended.
    ///
    /// # Errors
    /// [`Error::Fetch`].
    async fn end(&mut self) -> Result<()> {
        Ok(())
    }

    /// Things to tell the caller that do not stop the loading, each once.
    fn warnings(&mut self) -> Vec<Warning> {
        Vec::new()
    }
}

/// A step of loading weights: bytes that are read together, and what is made of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Names what is made, by all that it depends on but the revision of the files.
    pub key: String,
    /// Files and bytes, in the order in which they are read.
    pub reads: Vec<(String, Range<u64>)>,
}

/// What a loading would fetch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Survey {
    /// Weights files and the bytes that would have to come of each.
    pub files: Vec<(String, u64)>,
    /// Steps whose outcome is stored.
    pub stored_steps: Vec<bool>,
    /// Bytes that are stored as they came.
    pub stored_raw: u64,
}

/// Something that went wrong without stopping the loading.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// What, for programs: `store-quota`, `store-busy`, `store-failed`, `store-offline`, `quantized-already`.
    pub code: &'static str,
    /// What, for people.
    pub message: String,
}

/// One of two kinds of source.
#[derive(Debug)]
pub enum Either<A, B> {
    /// The one.
    Left(A),
    /// The other.
    Right(B),
}

/// Runs `$body` with `$source` bound to whichever there is.
macro_rules! either {
    ($self:expr, $source:ident => $body:expr) => {
        match $self {
            Either::Left($source) => $body,
            Either::Right($source) => $body,
        }
    };
}

impl<A: ByteSource, B: ByteSource> ByteSource for Either<A, B> {
    async fn size(&mut self, file: &str) -> Result<Option<u64>> {
        either!(self, source => source.size(file).await)
    }

    async fn read(&mut self, file: &str, range: Range<u64>) -> Result<Vec<u8>> {
        either!(self, source => source.read(file, range).await)
    }

    fn why_absent(&self, file: &str) -> Option<Error> {
        either!(self, source => source.why_absent(file))
    }

    fn traffic(&self) -> Option<Rc<Traffic>> {
        either!(self, source => source.traffic())
    }

    async fn survey(&mut self, steps: &[Step]) -> Result<Survey> {
        either!(self, source => source.survey(steps).await)
    }

    async fn begin(&mut self, steps: &[Step]) -> Result<()> {
        either!(self, source => source.begin(steps).await)
    }

    async fn stored(&mut self, step: usize) -> Result<Option<Vec<u8>>> {
        either!(self, source => source.stored(step).await)
    }

    fn stores(&self) -> bool {
        either!(self, source => source.stores())
    }

    async fn end_step(&mut self, step: usize, made: Option<Vec<u8>>) -> Result<()> {
        either!(self, source => source.end_step(step, made).await)
    }

    async fn end(&mut self) -> Result<()> {
        either!(self, source => source.end().await)
    }

    fn warnings(&mut self) -> Vec<Warning> {
        either!(self, source => source.warnings())
    }
}

/// What has come over a network, counted by a source and looked at by whoever waits for it.
#[derive(Debug, Default)]
pub struct Traffic {
    bytes: Cell<u64>,
    expected: Cell<u64>,
    file: RefCell<String>,
}

impl Traffic {
    /// Counts bytes of `file`.
    pub fn came(&self, file: &str, bytes: u64) {
        self.bytes.set(self.bytes.get() + bytes);
        let mut last = self.file.borrow_mut();
        if *last != file {
            file.clone_into(&mut last);
        }
    }

    /// Says how many bytes there will be in all, as far as is known.
    pub fn expect(&self, bytes: u64) {
        self.expected.set(bytes);
    }

    /// Bytes so far.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    /// Bytes there will be in all; 0 while not known.
    #[must_use]
    pub fn expected(&self) -> u64 {
        self.expected.get()
    }

    /// The file of the last bytes.
    #[must_use]
    pub fn file(&self) -> String {
        self.file.borrow().clone()
    }
}

/// Reads `range` and checks that all of it came.
///
/// # Errors
/// [`Error::Fetch`].
pub async fn read_exactly<S: ByteSource>(source: &mut S, file: &str, range: Range<u64>) -> Result<Vec<u8>> {
    let wanted = range.end.saturating_sub(range.start);
    let bytes = source.read(file, range.clone()).await?;
    if bytes.len() as u64 != wanted {
        return Err(Error::Fetch(format!(
            "{file}: asked for bytes {} to {}, {wanted} of them, and got {}",
            range.start,
            range.end,
            bytes.len()
        )));
    }
    Ok(bytes)
}

/// Reads a whole small file; `None` if there is no such file.
///
/// # Errors
/// [`Error::Fetch`], also for a file above `limit` bytes.
pub async fn read_small<S: ByteSource>(source: &mut S, file: &str, limit: u64) -> Result<Option<Vec<u8>>> {
    let Some(size) = source.size(file).await? else { return Ok(None) };
    if size > limit {
        return Err(Error::Fetch(format!("{file}: {size} bytes; expected at most {limit} for a file of this kind")));
    }
    let mut bytes = read_exactly(source, file, 0..size).await?;
    // Some editors put a byte-order mark before UTF-8 text, which JSON does not know. A template is taken as it is.
    if file.ends_with(".json") && bytes.starts_with(b"\xEF\xBB\xBF") {
        bytes.drain(..3);
    }
    Ok(Some(bytes))
}

/// A folder on disk.
#[cfg(not(target_arch = "wasm32"))]
#[derive(Debug)]
pub struct FolderSource {
    root: std::path::PathBuf,
    open: std::collections::HashMap<String, std::fs::File>,
}

#[cfg(not(target_arch = "wasm32"))]
impl FolderSource {
    /// A source over `root`.
    ///
    /// # Errors
    /// [`Error::Fetch`] if that is no folder.
    pub fn new(root: impl Into<std::path::PathBuf>) -> Result<Self> {
        let root = root.into();
        if root.is_file() {
            return Err(Error::Fetch(format!("{}: a file; expected the folder that it is in", root.display())));
        }
        if !root.is_dir() {
            return Err(Error::Fetch(format!("{}: no such folder", root.display())));
        }
        Ok(Self { root, open: std::collections::HashMap::new() })
    }

    fn path(&self, file: &str) -> Result<std::path::PathBuf> {
        let plain = |p| matches!(p, std::path::Component::Normal(_));
        match std::path::Path::new(file).components().all(plain) {
            true => Ok(self.root.join(file)),
            false => Err(Error::Fetch(format!("{file}: not a name inside the checkpoint's folder"))),
        }
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl ByteSource for FolderSource {
    fn why_absent(&self, file: &str) -> Option<Error> {
        Some(Error::Fetch(format!("there is no {file} in the folder {}", self.root.display())))
    }

    async fn size(&mut self, file: &str) -> Result<Option<u64>> {
        let path = self.path(file)?;
        match std::fs::metadata(&path) {
            Ok(meta) if meta.is_file() => Ok(Some(meta.len())),
            Ok(_) => Err(Error::Fetch(format!("{}: not a file", path.display()))),
            Err(e) if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => Ok(None),
            Err(e) => Err(Error::Fetch(format!("{}: {e}", path.display()))),
        }
    }

    async fn read(&mut self, file: &str, range: Range<u64>) -> Result<Vec<u8>> {
        use std::io::{Read, Seek, SeekFrom};
        let path = self.path(file)?;
        let failed = |e: std::io::Error| Error::Fetch(format!("{}: {e}", path.display()));
        let open = match self.open.entry(file.to_owned()) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => entry.insert(std::fs::File::open(&path).map_err(failed)?),
        };
        open.seek(SeekFrom::Start(range.start)).map_err(failed)?;
        let mut bytes = Vec::new();
        open.take(range.end.saturating_sub(range.start)).read_to_end(&mut bytes).map_err(failed)?;
        Ok(bytes)
    }
}

/// Files held in memory, for tests.
#[cfg(test)]
#[derive(Debug, Clone, Default)]
pub struct MemorySource {
    /// By name.
    pub files: std::collections::BTreeMap<String, Vec<u8>>,
    /// Every read made.
    pub reads: Vec<(String, Range<u64>)>,
}

#[cfg(test)]
impl ByteSource for MemorySource {
    async fn size(&mut self, file: &str) -> Result<Option<u64>> {
        Ok(self.files.get(file).map(|f| f.len() as u64))
    }

    async fn read(&mut self, file: &str, range: Range<u64>) -> Result<Vec<u8>> {
        self.reads.push((file.to_owned(), range.clone()));
        let bytes = self.files.get(file).ok_or_else(|| Error::Fetch(format!("{file}: no such file")))?;
        let end = (range.end as usize).min(bytes.len());
        Ok(bytes.get(range.start as usize..end).unwrap_or_default().to_vec())
    }
}
