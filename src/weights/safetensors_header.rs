//! The header of a safetensors file: an 8-byte little-endian length, then JSON `{name: {dtype, shape, data_offsets}}`.
//!
//! Parsed here and not by the safetensors crate, because that one keeps offsets as `usize`: on wasm32 it refuses the
//! files above 4 GiB that this crate reads by byte ranges.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};

use super::source::{ByteSource, read_exactly};
use crate::error::{Error, Result};

/// Longest header accepted, in bytes; the format's own bound.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Read at first, in the hope that the whole header is in it.
const FIRST_READ: u64 = 64 << 10;

/// Element type of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// Upper half of an f32.
    Bf16,
    /// 32-bit words: MLX's packed values.
    U32,
    /// Any other by its name in the file; such a tensor can be in the file, but is not read.
    Other(String),
}

impl Dtype {
    fn parse(name: &str) -> Self {
        match name {
            "F32" => Self::F32,
            "F16" => Self::F16,
            "BF16" => Self::Bf16,
            "U32" => Self::U32,
            other => Self::Other(other.to_owned()),
        }
    }

    /// Bytes per element, for the types this crate reads.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        match self {
            Self::F32 | Self::U32 => Some(4),
            Self::F16 | Self::Bf16 => Some(2),
            Self::Other(_) => None,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::U32 => "U32",
            Self::Other(name) => name,
        })
    }
}

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type.
    pub dtype: Dtype,
    /// Sizes, slowest first.
    pub shape: Vec<u64>,
    /// Where its bytes are, counted from the start of the file.
    pub bytes: Range<u64>,
}

/// Tensors by name.
pub type Tensors = BTreeMap<String, TensorInfo>;

/// Reads and checks the header of `file`, `size` bytes long.
///
/// # Errors
/// [`Error::BadWeights`] naming the file, and the tensor where one is at fault; [`Error::Fetch`] from the source.
pub async fn read_header<S: ByteSource>(source: &mut S, file: &str, size: u64) -> Result<Tensors> {
    if size < 8 {
        return Err(Error::BadWeights(format!("{file}: {size} bytes; a safetensors file has at least 8")));
    }
    let mut bytes = read_exactly(source, file, 0..size.min(FIRST_READ)).await?;
    let end = header_end(file, &bytes, size)?;
    if end > bytes.len() as u64 {
        let rest = read_exactly(source, file, bytes.len() as u64..end).await?;
        bytes.extend(rest);
    }
    parse_header(file, &bytes, size)
}

/// Where the header of a file of `size` bytes ends, from its first 8 bytes.
fn header_end(file: &str, bytes: &[u8], size: u64) -> Result<u64> {
    let length = bytes.first_chunk().map(|b| u64::from_le_bytes(*b)).unwrap_or_default();
    if length > MAX_HEADER_BYTES || length > size.saturating_sub(8) || length < 2 {
        return Err(Error::BadWeights(format!(
            "{file}: says its header has {length} bytes, in a file of {size}; it is not a safetensors file, or cut short"
        )));
    }
    Ok(8 + length)
}

/// Parses the header at the start of `bytes`; the file is `size` bytes long.
///
/// # Errors
/// [`Error::BadWeights`] naming the file, and the tensor where one is at fault.
pub fn parse_header(file: &str, bytes: &[u8], size: u64) -> Result<Tensors> {
    let end = header_end(file, bytes, size)?;
    let json = usize::try_from(end).ok().and_then(|end| bytes.get(8..end));
    let json = json.ok_or_else(|| Error::BadWeights(format!("{file}: the header is cut short")))?;
    let header: Header =
        serde_json::from_slice(json).map_err(|e| Error::BadWeights(format!("{file}: the header is not readable: {e}")))?;
    let mut tensors = Tensors::new();
    for (name, raw) in header.0 {
        let info = check(file, &name, raw, end, size)?;
        if tensors.insert(name.clone(), info).is_some() {
            return Err(Error::BadWeights(format!("{file}: tensor `{name}` is listed twice")));
        }
    }
    check_cover(file, &tensors, end, size)?;
    Ok(tensors)
}

fn check(file: &str, name: &str, raw: RawTensor, header_end: u64, size: u64) -> Result<TensorInfo> {
    let wrong = |what: String| Err(Error::BadWeights(format!("{file}: tensor `{name}` {what}")));
    let dtype = Dtype::parse(&raw.dtype);
    let (start, end) = raw.data_offsets;
    let data = size - header_end;
    if start > end || end > data {
        return wrong(format!(
            "lies at bytes {start} to {end} of the data, of which the file has {data}; it is cut short, or its header is wrong"
        ));
    }
    let elements = raw.shape.iter().try_fold(1_u64, |n, d| n.checked_mul(*d));
    if let Some(bytes) = dtype.bytes() {
        match elements.and_then(|n| n.checked_mul(bytes)) {
            Some(expected) if expected == end - start => {}
            expected => {
                return wrong(format!(
                    "of shape {:?} and type {dtype} must have {} bytes; it has {}",
                    raw.shape,
                    expected.map_or_else(|| "more than 2^64".to_owned(), |e| e.to_string()),
                    end - start
                ));
            }
        }
    }
    Ok(TensorInfo { dtype, shape: raw.shape, bytes: header_end + start..header_end + end })
}

/// The format has neither overlaps nor holes, and ends with its last tensor.
fn check_cover(file: &str, tensors: &Tensors, header_end: u64, size: u64) -> Result<()> {
    let mut order: Vec<_> = tensors.iter().map(|(name, info)| (info.bytes.start, info.bytes.end, name)).collect();
    order.sort_unstable();
    let (mut at, mut before) = (header_end, "the header");
    for (start, end, name) in order {
        if start < at {
            return Err(Error::BadWeights(format!("{file}: tensor `{name}` overlaps {before}")));
        }
        if start > at {
            return Err(Error::BadWeights(format!("{file}: {} bytes before tensor `{name}` belong to nothing", start - at)));
        }
        (at, before) = (end, name);
    }
    if at != size {
        return Err(Error::BadWeights(format!("{file}: {} bytes after the last tensor belong to nothing", size - at)));
    }
    Ok(())
}

#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The header's entries in the file's order, doubles included.
struct Header(Vec<(String, RawTensor)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Header, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<serde::de::IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(Header(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
