//! Where a checkpoint's bytes come from: a folder, an address, files the user picked. The loader asks, a source answers.

use std::ops::Range;

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
    read_exactly(source, file, 0..size).await.map(Some)
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
