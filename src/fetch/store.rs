//! What is kept of checkpoints: blobs in entries, one entry for each revision of a source. An entry holds
//!
//! | blob | what |
//! | --- | --- |
//! | `manifest.json` | [`Manifest`]: whose entry it is, and how far it is complete |
//! | `resume` | [`ResumePoint`] per weights file: where its download goes on; sealed |
//! | `side-HASH` | a small file, or the part of a weights file that its header is in, as it came |
//! | `raw-HASH-NUMBER` | a block of a weights file as it came, sealed, until what is made of it is stored |
//! | `block-HASH` | what a step of loading made: packed rows ([`crate::weights::stored_block`]) |
//!
//! Blobs are written once and whole; those that are not whole all the same are seen by their own head and made again.
//! `resume` is written after the blobs that it builds on, so a program may end anywhere.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::locator::{Listed, Listing};
use super::running_hash::{hash, hex, unhex};
use crate::weights::stored_block::{checksum, seal, unseal};

/// The version of entries' layout; others are not read.
pub const VERSION: u32 = 1;
/// The blob that says whose an entry is.
pub const MANIFEST: &str = "manifest.json";
/// The blob that says where downloads go on.
pub const RESUME: &str = "resume";
/// How the names of blobs begin that hold blocks as they came.
pub const RAW: &str = "raw-";

/// Why something could not be stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreFailure {
    /// There is no room.
    Full,
    /// Anything else, in the platform's words.
    Other(String),
}

/// Blobs by name, `entry/blob`, both of letters, digits, `.`, `_` and `-`.
#[allow(async_fn_in_trait, reason = "futures need not be Send: loading is single-threaded by design")]
pub trait BlobStore {
    /// A blob, if it is there and can be read.
    async fn get(&self, name: &str) -> Option<Vec<u8>>;

    /// Writes a blob whole, in place of one of the same name.
    ///
    /// # Errors
    /// [`StoreFailure`].
    async fn put(&self, name: &str, bytes: &[u8]) -> Result<(), StoreFailure>;

    /// Names and sizes of the blobs whose names begin with `prefix`: `` for all, or `entry/`.
    async fn list(&self, prefix: &str) -> Vec<(String, u64)>;

    /// Removes one blob (`entry/blob`) or an entry (`entry/`). What cannot be removed stays.
    async fn remove(&self, name: &str);

    /// Makes the caller the only one that writes to an entry, until its loading is over; `false` if another one is.
    ///
    /// # Errors
    /// [`StoreFailure`] if nobody can write there.
    async fn lock(&self, entry: &str) -> Result<bool, StoreFailure>;
}

/// No store.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoStore;

impl BlobStore for NoStore {
    async fn get(&self, _: &str) -> Option<Vec<u8>> {
        None
    }

    async fn put(&self, _: &str, _: &[u8]) -> Result<(), StoreFailure> {
        Err(StoreFailure::Full)
    }

    async fn list(&self, _: &str) -> Vec<(String, u64)> {
        Vec::new()
    }

    async fn remove(&self, _: &str) {}

    async fn lock(&self, _: &str) -> Result<bool, StoreFailure> {
        Ok(false)
    }
}

/// Whose entry it is, and how far it is complete.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`VERSION`].
    pub version: u32,
    /// The source as its caller wrote it.
    pub source: String,
    /// The commit, or what tells the files at an address apart.
    pub revision: String,
    /// The branch, tag or commit that was asked for, of a repository.
    pub asked: Option<String>,
    /// `model` or `adapter`.
    pub role: String,
    /// Whether the model can be loaded from the entry alone, in one form at least.
    pub complete: bool,
    /// When it was made, in milliseconds since 1970.
    pub created: u64,
    /// When it was last loaded, likewise.
    pub used: u64,
    /// The hub's listing.
    pub listing: Option<StoredListing>,
    /// Small files that are not there.
    pub missing: BTreeSet<String>,
    /// Small files that are stored, and their bytes.
    pub small: BTreeMap<String, u64>,
    /// Weights files.
    pub weights: BTreeMap<String, StoredWeights>,
    /// [`checksum`] of all this, with 0 in this place: a number in it may be damaged and still be one.
    #[serde(default)]
    pub sum: u64,
}

impl Manifest {
    /// As it is stored, with its sum.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let summed = Self { sum: self.own_sum(), ..self.clone() };
        serde_json::to_vec_pretty(&summed).unwrap_or_default()
    }

    fn own_sum(&self) -> u64 {
        // Readers in JavaScript see numbers up to 2^53 as they are.
        checksum(&serde_json::to_vec(&Self { sum: 0, ..self.clone() }).unwrap_or_default()) >> 11
    }
}

/// [`Listing`] as it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredListing {
    commit: String,
    files: BTreeMap<String, (Option<u64>, Option<String>)>,
}

/// What is known of a weights file.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StoredWeights {
    /// Bytes.
    pub size: u64,
    /// What the server's answers carried to tell its versions apart.
    pub version: Option<String>,
    /// Whether all of it passed and had the hash that was listed, or no hash is listed and all that was asked for came.
    pub verified: bool,
    /// Blobs made of it when that was so, with the sums that their heads carry: what is made again of single parts must have
    /// the same. Of a file whose hash is listed no other blob counts, but those of a [`ResumePoint`].
    #[serde(default)]
    pub blobs: BTreeMap<String, u64>,
}

/// Where the download of a weights file goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResumePoint {
    /// A start of a block. What is needed of the file before it is in blobs, or was.
    pub offset: u64,
    /// Bytes of a block.
    pub block: u64,
    /// The state of the hash of what was before it.
    pub hash: String,
    /// How far the file had come when this was laid down, at least: what comes once more up to there must be the same.
    pub until: u64,
    /// The state of the hash of what was before `until`.
    pub until_hash: String,
    /// Numbers and sums of blocks before it, to hold a block against that has to come again.
    pub sums: Vec<(u64, u64)>,
    /// Blobs made of what was before `until`, with the sums that their heads carry.
    pub blobs: BTreeMap<String, u64>,
}

impl From<&Listing> for StoredListing {
    fn from(listing: &Listing) -> Self {
        let file = |(name, listed): (&String, &Listed)| (name.clone(), (listed.size, listed.sha256.map(|hash| hex(&hash))));
        Self { commit: listing.commit.clone(), files: listing.files.iter().map(file).collect() }
    }
}

impl From<&StoredListing> for Listing {
    fn from(stored: &StoredListing) -> Self {
        let hash = |text: &Option<String>| text.as_deref().and_then(unhex).and_then(|bytes| bytes.try_into().ok());
        let file = |(name, (size, sha256)): (&String, &(Option<u64>, Option<String>))| {
            (name.clone(), Listed { size: *size, sha256: hash(sha256) })
        };
        Self { commit: stored.commit.clone(), files: stored.files.iter().map(file).collect() }
    }
}

/// 16 hex digits that stand for `text` in names.
#[must_use]
pub fn short_hash(text: &str) -> String {
    hex(hash(text.as_bytes()).get(..8).unwrap_or_default())
}

/// The name of the entry for a revision of a source. A model and an adapter of one place have two; those of one role begin
/// alike, up to a `-`.
#[must_use]
pub fn entry_name(role: &str, source: &str, revision: &str) -> String {
    format!("{}-{}", short_hash(&format!("{role} {source}")), short_hash(revision))
}

/// The name of the blob of a small file, or of a part of a weights file.
#[must_use]
pub fn side_name(file: &str, part: Option<&std::ops::Range<u64>>) -> String {
    let part = part.map_or_else(String::new, |part| format!(" {} {}", part.start, part.end));
    format!("side-{}", short_hash(&format!("{file}{part}")))
}

/// The manifest in `bytes`, if it is a whole one of this version.
#[must_use]
pub fn read_manifest(bytes: &[u8]) -> Option<Manifest> {
    let manifest = serde_json::from_slice::<Manifest>(bytes).ok()?;
    (manifest.version == VERSION && manifest.sum == manifest.own_sum()).then_some(manifest)
}

/// Resume points by file, as [`read_resume`] reads them: a line for each, `offset block hash until hash`, then ` number:sum` as
/// often as there are sums, ` blob=sum` as often as there are blobs, a tab, and the file.
#[must_use]
pub fn write_resume(points: &BTreeMap<String, ResumePoint>) -> Vec<u8> {
    let mut text = String::new();
    // A name that would break a line is that of no file anyone has; its download begins anew.
    for (file, point) in points.iter().filter(|(file, _)| !file.contains('\n')) {
        text += &format!("{} {} {} {} {}", point.offset, point.block, point.hash, point.until, point.until_hash);
        for (index, sum) in &point.sums {
            text += &format!(" {index}:{sum}");
        }
        for (blob, sum) in &point.blobs {
            text += &format!(" {blob}={sum}");
        }
        text += &format!("\t{file}\n");
    }
    seal(text.as_bytes())
}

/// The resume points in `bytes` by file, if they are whole.
#[must_use]
pub fn read_resume(bytes: &[u8]) -> Option<BTreeMap<String, ResumePoint>> {
    let mut points = BTreeMap::new();
    for line in std::str::from_utf8(unseal(bytes)?).ok()?.split_terminator('\n') {
        let (point, file) = line.split_once('\t')?;
        let mut words = point.split(' ');
        let offset = words.next()?.parse().ok()?;
        let block = words.next()?.parse().ok()?;
        let hash = words.next()?.to_owned();
        let until = words.next()?.parse().ok()?;
        let until_hash = words.next()?.to_owned();
        let (mut sums, mut blobs) = (Vec::new(), BTreeMap::new());
        for word in words {
            if let Some((blob, sum)) = word.split_once('=') {
                blobs.insert(blob.to_owned(), sum.parse().ok()?);
                continue;
            }
            let (index, sum) = word.split_once(':')?;
            sums.push((index.parse().ok()?, sum.parse().ok()?));
        }
        points.insert(file.to_owned(), ResumePoint { offset, block, hash, until, until_hash, sums, blobs });
    }
    Some(points)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resume_points_are_read_as_they_were_written() {
        let point = |offset, sums: &[(u64, u64)]| ResumePoint {
            offset,
            block: 4,
            hash: "00ff".into(),
            until: 12,
            until_hash: "ff".into(),
            sums: sums.to_vec(),
            blobs: sums.iter().map(|(index, sum)| (format!("block-{index}"), *sum)).collect(),
        };
        let points: BTreeMap<_, _> =
            [("a.safetensors".to_owned(), point(8, &[])), ("b \t c".to_owned(), point(u64::MAX, &[(0, u64::MAX), (7, 0)]))]
                .into();
        let bytes = write_resume(&points);
        assert_eq!(read_resume(&bytes), Some(points.clone()));
        assert_eq!(read_resume(&write_resume(&BTreeMap::new())), Some(BTreeMap::new()));
        let broken = [("a\nb".to_owned(), point(8, &[]))].into();
        assert_eq!(read_resume(&write_resume(&broken)), Some(BTreeMap::new()));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert_eq!((read_resume(&damaged), read_resume(&bytes[..at])), (None, None), "byte {at}");
        }
        for bad in [
            "8 4 00\ta",
            "8 4 00 9 0",
            "x 4 00 9 0\ta",
            "8 4 00 9 0 1\ta",
            "8 4 00 9 0 1:\ta",
            "8 4 00 9 0 -1:2\ta",
            "8 4 00 9 0 b=\ta",
            "8 4 00 x 0\ta",
            "99999999999999999999 4 00 9 0\ta",
        ] {
            assert_eq!(read_resume(&seal(bad.as_bytes())), None, "{bad}");
        }
    }
}
