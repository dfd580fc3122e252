//! Packed rows as a blob, for a store that keeps what was made of a checkpoint and not the checkpoint.
//!
//! A blob is `FORECALL` + version (4 bytes), the bytes that follow the head (8), their [`checksum`] (8); then, for each
//! matrix chunk or vector of a batch in the batch's order, the words of its data and of its scales, or its values, each
//! behind their count (8). What they are is no part of the blob: the plan knows it, and the blob's name depends on it.
//! All numbers are little-endian.

use sha2::{Digest, Sha256};

use super::pack;
use super::packed::{Format, PackedRows};

/// Changes whenever the layout of blobs or of [`PackedRows`] does.
const MAGIC: &[u8; 12] = b"FORECALL0001";
const HEAD_BYTES: usize = MAGIC.len() + 16;

/// The name of a blob that holds what `text` describes: 32 hex digits.
#[must_use]
pub fn key(text: &str) -> String {
    let hash = Sha256::new().chain_update(MAGIC).chain_update(text).finalize();
    hash.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// A sum of bytes that tells torn and damaged ones apart (not forged ones), at the speed of memory.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u64 {
    const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
    let mix = |sum: u64, word: u64| (sum ^ word).wrapping_mul(FACTOR).rotate_left(29);
    let mut lanes = [1_u64, 2, 3, 4];
    let (blocks, rest) = bytes.as_chunks::<32>();
    for block in blocks {
        for (lane, word) in lanes.iter_mut().zip(block.as_chunks::<8>().0) {
            *lane = mix(*lane, u64::from_le_bytes(*word));
        }
    }
    let tail = rest.iter().fold(bytes.len() as u64, |sum, byte| mix(sum, u64::from(*byte)));
    lanes.into_iter().fold(tail, mix)
}

/// `content` behind the head that shows whether a blob is whole.
#[must_use]
pub fn seal(content: &[u8]) -> Vec<u8> {
    let (length, sum) = (content.len() as u64, checksum(content));
    [MAGIC.as_slice(), &length.to_le_bytes(), &sum.to_le_bytes(), content].concat()
}

/// The content of a blob; `None` if it is not whole.
#[must_use]
pub fn unseal(blob: &[u8]) -> Option<&[u8]> {
    let rest = blob.strip_prefix(MAGIC)?;
    let (length, rest) = rest.split_first_chunk()?;
    let (sum, content) = rest.split_first_chunk()?;
    let whole = content.len() as u64 == u64::from_le_bytes(*length) && checksum(content) == u64::from_le_bytes(*sum);
    whole.then_some(content)
}

/// The sum that a blob's head carries; `None` for what is no blob. Whether it is the content's, [`unseal`] tells.
#[must_use]
pub fn head_sum(blob: &[u8]) -> Option<u64> {
    let (_, rest) = blob.strip_prefix(MAGIC)?.split_first_chunk::<8>()?;
    rest.first_chunk().map(|sum| u64::from_le_bytes(*sum))
}

/// Writes a blob.
#[derive(Debug)]
pub struct BlobWriter(Vec<u8>);

impl Default for BlobWriter {
    fn default() -> Self {
        Self(vec![0; HEAD_BYTES])
    }
}

impl BlobWriter {
    /// Appends a chunk of a matrix.
    pub fn matrix(&mut self, rows: &PackedRows) {
        self.words(&rows.data);
        self.words(&rows.scales);
    }

    /// Appends a vector.
    pub fn vector(&mut self, values: &[f32]) {
        self.0.extend((values.len() as u64).to_le_bytes());
        self.0.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }

    fn words(&mut self, words: &[u32]) {
        self.0.extend((words.len() as u64).to_le_bytes());
        if cfg!(target_endian = "little") {
            self.0.extend_from_slice(bytemuck::cast_slice(words));
        } else {
            self.0.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        }
    }

    /// The blob.
    #[must_use]
    pub fn finish(self) -> Vec<u8> {
        let mut blob = self.0;
        let content = blob.get(HEAD_BYTES..).unwrap_or_default();
        let (length, sum) = (content.len() as u64, checksum(content));
        let head: Vec<u8> = MAGIC.iter().copied().chain(length.to_le_bytes()).chain(sum.to_le_bytes()).collect();
        blob.splice(..HEAD_BYTES, head);
        blob
    }
}

/// Reads a blob.
#[derive(Debug)]
pub struct BlobReader<'a>(&'a [u8]);

impl<'a> BlobReader<'a> {
    /// `None` if `blob` is not whole.
    #[must_use]
    pub fn new(blob: &'a [u8]) -> Option<Self> {
        unseal(blob).map(Self)
    }

    /// The next chunk of a matrix, if it is one of this kind.
    #[must_use]
    pub fn matrix(&mut self, format: Format, first_row: usize, n: usize, k: usize) -> Option<PackedRows> {
        let (data_words, scale_words) = pack::words(format, n, k);
        let data = self.words(data_words)?;
        let scales = self.words(scale_words)?;
        Some(PackedRows { format, first_row, n, k, data, scales })
    }

    /// The next vector, if it has `n` values.
    #[must_use]
    pub fn vector(&mut self, n: usize) -> Option<Vec<f32>> {
        Some(self.words(n)?.into_iter().map(f32::from_bits).collect())
    }

    /// Whether all of it was read.
    #[must_use]
    pub fn at_end(&self) -> bool {
        self.0.is_empty()
    }

    fn words(&mut self, expected: usize) -> Option<Vec<u32>> {
        let (count, rest) = self.0.split_first_chunk()?;
        if u64::from_le_bytes(*count) != expected as u64 {
            return None;
        }
        let (words, rest) = rest.split_at_checked(expected.checked_mul(4)?)?;
        self.0 = rest;
        Some(words.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blob() -> (PackedRows, Vec<f32>, Vec<u8>) {
        let mut rows = pack::zeros(Format::F16, 8, 5, 12);
        rows.data.iter_mut().enumerate().for_each(|(i, word)| *word = i as u32 * 77);
        let vector = vec![1.5, -0.0, f32::MIN_POSITIVE];
        let mut writer = BlobWriter::default();
        writer.matrix(&rows);
        writer.vector(&vector);
        (rows, vector, writer.finish())
    }

    #[test]
    fn what_was_written_is_read() {
        let (rows, vector, blob) = blob();
        let mut reader = BlobReader::new(&blob).expect("whole");
        assert_eq!(reader.matrix(Format::F16, 8, 5, 12), Some(rows));
        assert!(!reader.at_end());
        assert_eq!(reader.vector(3), Some(vector));
        assert!(reader.at_end());
        // Another shape is refused.
        assert_eq!(BlobReader::new(&blob).unwrap().matrix(Format::F16, 8, 9, 12), None);
        assert_eq!(BlobReader::new(&blob).unwrap().matrix(Format::F32, 8, 5, 12), None);
        assert_eq!(BlobReader::new(&blob).unwrap().vector(3), None);
    }

    #[test]
    fn torn_and_damaged_blobs_are_seen() {
        let (.., blob) = blob();
        for length in 0..blob.len() {
            assert!(BlobReader::new(&blob[..length]).is_none(), "{length} of {} bytes", blob.len());
            let mut zeroed = blob.clone();
            zeroed[length..].fill(0);
            assert!(zeroed == blob || BlobReader::new(&zeroed).is_none(), "zeros from byte {length} on");
        }
        for at in 0..blob.len() {
            let mut damaged = blob.clone();
            damaged[at] ^= 1 << (at % 8);
            assert!(BlobReader::new(&damaged).is_none(), "byte {at}");
        }
        assert!(BlobReader::new(&[blob.as_slice(), &[0]].concat()).is_none());
        assert!(BlobReader::new(&blob).is_some());
    }
}
