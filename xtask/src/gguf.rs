//! Reads GGUF, the single-file format of llama.cpp: as much of it as the demo model needs.
//!
//! A file is a header (magic, version, counts), key-value metadata, a table of tensors, and the tensors' bytes, aligned.
//! Everything is little-endian. The reader borrows the file's bytes and trusts none of them: every length and offset is
//! checked against the file before it is used, and nothing is allocated on the word of a count alone.
//!
//! Source of the layout: the format's public specification (docs/gguf.md of the ggml project), versions 2 and 3.

use std::collections::BTreeMap;

/// Inputs that share one scale in the quantised types read here.
pub const BLOCK: usize = 32;

/// What is wrong with a GGUF file.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum GgufError {
    /// The file ends inside something.
    #[error("GGUF file is truncated: {what} needs {need} bytes at offset {offset}, the file has {len} bytes")]
    Truncated {
        /// What was being read.
        what: String,
        /// Where it starts.
        offset: u64,
        /// How long it is.
        need: u64,
        /// The file's size.
        len: u64,
    },
    /// The first four bytes are others.
    #[error("not a GGUF file: it starts with {0:02x?}, not with \"GGUF\"")]
    BadMagic([u8; 4]),
    /// A version with another layout.
    #[error("GGUF version {0} cannot be read, only 2 and 3")]
    BadVersion(u32),
    /// A metadata value of a type that the format does not define.
    #[error("metadata \"{key}\" has value type {type_id}, which GGUF does not define")]
    BadValueType {
        /// The metadata key.
        key: String,
        /// The type's number in the file.
        type_id: u32,
    },
    /// A name or text that is not UTF-8.
    #[error("{0} is not UTF-8")]
    NotUtf8(String),
    /// Alignment that is no power of two, dimensions that overflow, and the like.
    #[error("{0}")]
    Malformed(String),
    /// A tensor type that this reader does not know.
    #[error("tensor {name} has type id {type_id}; only F32 (0), Q4_1 (3) and Q8_0 (8) can be read")]
    TensorType {
        /// The tensor.
        name: String,
        /// The type's number in the file.
        type_id: u32,
    },
    /// A tensor whose bytes lie outside the file.
    #[error("tensor {name} lies at bytes {start}..{end}, the file has {len} bytes")]
    TensorOutside {
        /// The tensor.
        name: String,
        /// First byte.
        start: u64,
        /// End of its bytes.
        end: u64,
        /// The file's size.
        len: u64,
    },
    /// Two tensors of one name.
    #[error("tensor {0} stands twice in the file")]
    Duplicate(String),
}

/// A metadata value. Arrays are passed over: no array is needed here.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Any integer type.
    Integer(i128),
    /// `f32` or `f64`.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A text.
    Text(String),
    /// An array, of which only the length is kept.
    Array(u64),
}

/// How a tensor's values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorType {
    /// IEEE single.
    F32,
    /// Blocks of 32: f16 scale, f16 minimum, 16 bytes of nibbles (low: inputs 0..16, high: 16..32). `w = scale q + min`.
    Q4_1,
    /// Blocks of 32: f16 scale, 32 signed bytes. `w = scale q`.
    Q8_0,
}

impl TensorType {
    fn from_id(id: u32) -> Option<Self> {
        match id {
            0 => Some(Self::F32),
            3 => Some(Self::Q4_1),
            8 => Some(Self::Q8_0),
            _ => None,
        }
    }

    /// Values per block, and bytes per block.
    #[must_use]
    pub fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::Q4_1 => (BLOCK, 2 + 2 + BLOCK / 2),
            Self::Q8_0 => (BLOCK, 2 + BLOCK),
        }
    }
}

/// One tensor, its bytes borrowed from the file. `data` has exactly the bytes that type and shape call for.
#[derive(Debug, Clone)]
pub struct Tensor<'a> {
    /// Its name in the file.
    pub name: String,
    /// Storage of the values.
    pub kind: TensorType,
    /// Outputs (rows); 1 for a vector.
    pub rows: usize,
    /// Inputs (values per row), which lie side by side.
    pub cols: usize,
    /// The row-major blocks.
    pub data: &'a [u8],
}

/// A parsed file.
#[derive(Debug)]
pub struct Gguf<'a> {
    /// Key-value pairs.
    pub metadata: BTreeMap<String, Value>,
    /// Tensors by name.
    pub tensors: BTreeMap<String, Tensor<'a>>,
}

/// Reads forward through the bytes; every step is checked.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, need: u64, what: impl Fn() -> String) -> Result<&'a [u8], GgufError> {
        let truncated = || GgufError::Truncated { what: what(), offset: self.at as u64, need, len: self.bytes.len() as u64 };
        let end = usize::try_from(need).ok().and_then(|n| self.at.checked_add(n)).ok_or_else(truncated)?;
        let taken = self.bytes.get(self.at..end).ok_or_else(truncated)?;
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: impl Fn() -> String) -> Result<[u8; N], GgufError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    fn u32(&mut self, what: impl Fn() -> String) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: impl Fn() -> String) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn text(&mut self, what: impl Fn() -> String) -> Result<String, GgufError> {
        let len = self.u64(&what)?;
        let bytes = self.take(len, &what)?;
        String::from_utf8(bytes.to_vec()).map_err(|_| GgufError::NotUtf8(what()))
    }

    /// A value of type `type_id`; an array of texts is stepped over one by one, since their lengths differ.
    fn value(&mut self, key: &str, type_id: u32) -> Result<Value, GgufError> {
        let what = || format!("metadata \"{key}\"");
        Ok(match type_id {
            0 => Value::Integer(self.array::<1>(what)?[0].into()),
            1 => Value::Integer(i8::from_le_bytes(self.array(what)?).into()),
            2 => Value::Integer(u16::from_le_bytes(self.array(what)?).into()),
            3 => Value::Integer(i16::from_le_bytes(self.array(what)?).into()),
            4 => Value::Integer(self.u32(what)?.into()),
            5 => Value::Integer(i32::from_le_bytes(self.array(what)?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array(what)?).into()),
            7 => Value::Bool(self.array::<1>(what)? != [0]),
            8 => Value::Text(self.text(what)?),
            9 => {
                let element = self.u32(what)?;
                let count = self.u64(what)?;
                match scalar_size(element) {
                    Some(size) => {
                        let bytes = count
                            .checked_mul(size)
                            .ok_or_else(|| GgufError::Malformed(format!("{} is an array of {count} elements", what())))?;
                        self.take(bytes, what)?;
                    }
                    None if element == 8 => {
                        for _ in 0..count {
                            self.text(what)?;
                        }
                    }
                    None => return Err(GgufError::BadValueType { key: key.to_owned(), type_id: element }),
                }
                Value::Array(count)
            }
            10 => Value::Integer(self.u64(what)?.into()),
            11 => Value::Integer(i64::from_le_bytes(self.array(what)?).into()),
            12 => Value::Float(f64::from_le_bytes(self.array(what)?)),
            _ => return Err(GgufError::BadValueType { key: key.to_owned(), type_id }),
        })
    }
}

/// Bytes of one value of a fixed-size type; `None` for texts, arrays and unknown types.
fn scalar_size(type_id: u32) -> Option<u64> {
    match type_id {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

impl<'a> Gguf<'a> {
    /// Parses a whole file.
    ///
    /// # Errors
    /// A [`GgufError`] that names the part, key or tensor at fault.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, GgufError> {
        let mut cursor = Cursor { bytes, at: 0 };
        let magic = cursor.array(|| "the magic".into())?;
        if magic != *b"GGUF" {
            return Err(GgufError::BadMagic(magic));
        }
        let version = cursor.u32(|| "the version".into())?;
        if !(2..=3).contains(&version) {
            return Err(GgufError::BadVersion(version));
        }
        let tensor_count = cursor.u64(|| "the tensor count".into())?;
        let metadata_count = cursor.u64(|| "the metadata count".into())?;

        let mut metadata = BTreeMap::new();
        for index in 0..metadata_count {
            let key = cursor.text(|| format!("metadata key {index}"))?;
            let type_id = cursor.u32(|| format!("the type of metadata \"{key}\""))?;
            let value = cursor.value(&key, type_id)?;
            metadata.insert(key, value);
        }
        let alignment = match metadata.get("general.alignment") {
            None => 32,
            Some(Value::Integer(n)) if *n > 0 && *n <= 1 << 20 && (*n & (*n - 1)) == 0 => *n as u64,
            Some(other) => return Err(GgufError::Malformed(format!("general.alignment is {other:?}, not a power of two"))),
        };

        let mut headers = Vec::new();
        for index in 0..tensor_count {
            headers.push(TensorHeader::read(&mut cursor, index)?);
        }
        let data_start = (cursor.at as u64).next_multiple_of(alignment);
        let mut tensors = BTreeMap::new();
        for header in headers {
            let tensor = header.locate(bytes, data_start)?;
            if let Some(twice) = tensors.insert(tensor.name.clone(), tensor) {
                return Err(GgufError::Duplicate(twice.name));
            }
        }
        Ok(Self { metadata, tensors })
    }
}

/// An entry of the tensor table. `offset` counts from the start of the data part.
struct TensorHeader {
    name: String,
    dims: Vec<u64>,
    type_id: u32,
    offset: u64,
}

impl TensorHeader {
    fn read(cursor: &mut Cursor<'_>, index: u64) -> Result<Self, GgufError> {
        let name = cursor.text(|| format!("the name of tensor {index}"))?;
        let what = || format!("the header of tensor {name}");
        let rank = cursor.u32(what)?;
        if !(1..=4).contains(&rank) {
            return Err(GgufError::Malformed(format!("tensor {name} has {rank} dimensions, expected 1 to 4")));
        }
        let dims = (0..rank).map(|_| cursor.u64(what)).collect::<Result<_, _>>()?;
        let type_id = cursor.u32(what)?;
        let offset = cursor.u64(what)?;
        Ok(Self { name, dims, type_id, offset })
    }

    fn locate<'a>(self, bytes: &'a [u8], data_start: u64) -> Result<Tensor<'a>, GgufError> {
        let Self { name, dims, type_id, offset } = self;
        let Some(kind) = TensorType::from_id(type_id) else {
            return Err(GgufError::TensorType { name, type_id });
        };
        let too_large = || GgufError::Malformed(format!("tensor {name} has impossible dimensions {dims:?}"));
        if dims.contains(&0) {
            return Err(too_large());
        }
        // GGUF names the innermost dimension, the inputs, first.
        let [cols, outer @ ..] = dims.as_slice() else { return Err(too_large()) };
        let rows = outer.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim)).ok_or_else(too_large)?;
        let (block_values, block_bytes) = kind.block();
        if !cols.is_multiple_of(block_values as u64) {
            return Err(GgufError::Malformed(format!(
                "tensor {name} is {kind:?} with {cols} inputs per row, not a multiple of {block_values}"
            )));
        }
        let size = (cols / block_values as u64)
            .checked_mul(rows)
            .and_then(|blocks| blocks.checked_mul(block_bytes as u64))
            .ok_or_else(too_large)?;
        let start = data_start.checked_add(offset).ok_or_else(too_large)?;
        let end = start.checked_add(size).ok_or_else(too_large)?;
        let outside = || GgufError::TensorOutside { name: name.clone(), start, end, len: bytes.len() as u64 };
        let range = usize::try_from(start).map_err(|_| outside())?..usize::try_from(end).map_err(|_| outside())?;
        let data = bytes.get(range).ok_or_else(outside)?;
        let (rows, cols) = (usize::try_from(rows).map_err(|_| too_large())?, usize::try_from(*cols).map_err(|_| too_large())?);
        Ok(Tensor { name, kind, rows, cols, data })
    }
}

impl Tensor<'_> {
    /// The values of one row as the format defines them, in f32 arithmetic. Empty when `row` is out of range.
    #[must_use]
    pub fn row(&self, row: usize) -> Vec<f32> {
        let (values, bytes) = self.kind.block();
        let row_bytes = self.cols / values * bytes;
        let Some(data) = row.checked_mul(row_bytes).and_then(|start| self.data.get(start..start + row_bytes)) else {
            return Vec::new();
        };
        let mut out = Vec::with_capacity(self.cols);
        for block in data.chunks_exact(bytes) {
            match self.kind {
                TensorType::F32 => out.push(f32::from_le_bytes([block[0], block[1], block[2], block[3]])),
                TensorType::Q4_1 => {
                    let (scale, min) = (half(&block[0..2]), half(&block[2..4]));
                    let nibbles = &block[4..];
                    out.extend(nibbles.iter().map(|byte| scale * f32::from(byte & 15) + min));
                    out.extend(nibbles.iter().map(|byte| scale * f32::from(byte >> 4) + min));
                }
                TensorType::Q8_0 => {
                    let scale = half(&block[0..2]);
                    out.extend(block[2..].iter().map(|byte| scale * f32::from(byte.cast_signed())));
                }
            }
        }
        out
    }
}

/// A little-endian f16. `bytes` holds two.
fn half(bytes: &[u8]) -> f32 {
    half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Writes small GGUF files, and broken ones, for tests.
    pub(crate) struct Writer {
        pub(crate) metadata: Vec<u8>,
        pub(crate) metadata_count: u64,
        pub(crate) tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
    }

    impl Writer {
        pub(crate) fn new() -> Self {
            Self { metadata: Vec::new(), metadata_count: 0, tensors: Vec::new() }
        }

        /// `raw` is the value's bytes as they stand in the file.
        pub(crate) fn meta(&mut self, key: &str, type_id: u32, raw: &[u8]) -> &mut Self {
            text(&mut self.metadata, key);
            self.metadata.extend(type_id.to_le_bytes());
            self.metadata.extend(raw);
            self.metadata_count += 1;
            self
        }

        /// `dims` as GGUF has them: inputs first.
        pub(crate) fn tensor(&mut self, name: &str, dims: &[u64], type_id: u32, data: Vec<u8>) -> &mut Self {
            self.tensors.push((name.into(), dims.into(), type_id, data));
            self
        }

        pub(crate) fn finish(&self) -> Vec<u8> {
            let mut out = b"GGUF".to_vec();
            out.extend(3u32.to_le_bytes());
            out.extend((self.tensors.len() as u64).to_le_bytes());
            out.extend(self.metadata_count.to_le_bytes());
            out.extend(&self.metadata);
            let mut data = Vec::new();
            for (name, dims, type_id, bytes) in &self.tensors {
                text(&mut out, name);
                out.extend((dims.len() as u32).to_le_bytes());
                dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
                out.extend(type_id.to_le_bytes());
                out.extend((data.len() as u64).to_le_bytes());
                data.extend(bytes);
                data.resize(data.len().next_multiple_of(32), 0);
            }
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(data);
            out
        }
    }

    fn text(out: &mut Vec<u8>, text: &str) {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text.as_bytes());
    }

    fn sample() -> Writer {
        let mut writer = Writer::new();
        let strings = {
            let mut raw = 8u32.to_le_bytes().to_vec();
            raw.extend(2u64.to_le_bytes());
            text(&mut raw, "one");
            text(&mut raw, "two");
            raw
        };
        let mut shorts = 2u32.to_le_bytes().to_vec();
        shorts.extend(3u64.to_le_bytes());
        shorts.extend([1, 0, 2, 0, 3, 0]);
        let mut name = Vec::new();
        text(&mut name, "sample");
        writer.meta("general.name", 8, &name).meta("a.strings", 9, &strings).meta("a.shorts", 9, &shorts);
        writer.meta("a.layers", 4, &7u32.to_le_bytes()).meta("a.base", 6, &1e5f32.to_le_bytes()).meta("a.flag", 7, &[1]);
        writer.tensor("norm", &[3], 0, [1.5f32, -2.0, 0.25].iter().flat_map(|v| v.to_le_bytes()).collect());
        let mut q4 = half::f16::from_f32(0.5).to_le_bytes().to_vec();
        q4.extend(half::f16::from_f32(-1.0).to_le_bytes());
        q4.extend((0..16).map(|i: u8| i | ((15 - i) << 4)));
        writer.tensor("q4", &[32, 1], 3, q4);
        let mut q8 = half::f16::from_f32(2.0).to_le_bytes().to_vec();
        q8.extend((0..32).map(|i: i8| (i - 16).cast_unsigned()));
        writer.tensor("q8", &[32, 1], 8, q8);
        writer
    }

    #[test]
    fn reads_metadata_and_every_tensor_type() {
        let bytes = sample().finish();
        let gguf = Gguf::parse(&bytes).unwrap();
        assert_eq!(gguf.metadata["general.name"], Value::Text("sample".into()));
        assert_eq!(gguf.metadata["a.strings"], Value::Array(2));
        assert_eq!(gguf.metadata["a.shorts"], Value::Array(3));
        assert_eq!(gguf.metadata["a.layers"], Value::Integer(7));
        assert_eq!(gguf.metadata["a.base"], Value::Float(1e5));
        assert_eq!(gguf.metadata["a.flag"], Value::Bool(true));
        assert_eq!(gguf.tensors["norm"].row(0), [1.5, -2.0, 0.25]);
        let low = (0..16).map(|i| 0.5 * i as f32 - 1.0);
        let high = (0..16).map(|i| 0.5 * (15 - i) as f32 - 1.0);
        assert_eq!(gguf.tensors["q4"].row(0), low.chain(high).collect::<Vec<_>>());
        assert_eq!(gguf.tensors["q8"].row(0), (0..32).map(|i| 2.0 * (i - 16) as f32).collect::<Vec<_>>());
        assert!(gguf.tensors["q8"].row(1).is_empty());
    }

    #[test]
    fn a_file_cut_anywhere_is_an_error_and_never_a_panic() {
        let bytes = sample().finish();
        // The last tensor ends before the padding does; every shorter file lacks something.
        let padding = 30;
        assert!(Gguf::parse(&bytes[..bytes.len() - padding]).is_ok());
        for len in 0..bytes.len() - padding {
            assert!(Gguf::parse(&bytes[..len]).is_err(), "{len} of {} bytes parsed", bytes.len());
        }
        let error = Gguf::parse(&bytes[..bytes.len() - padding - 1]).unwrap_err();
        assert!(matches!(&error, GgufError::TensorOutside { name, .. } if name == "q8"), "{error}");
    }

    #[test]
    fn every_flipped_byte_of_the_head_is_survived() {
        let bytes = sample().finish();
        for at in 0..bytes.len() {
            for bit in [0x01, 0x80, 0xff] {
                let mut broken = bytes.clone();
                broken[at] ^= bit;
                // Some flips leave a valid file (a letter of a name, a weight); none may panic or allocate wildly.
                if let Ok(gguf) = Gguf::parse(&broken) {
                    gguf.tensors.values().for_each(|tensor| assert_eq!(tensor.row(0).len(), tensor.cols));
                }
            }
        }
    }

    #[test]
    fn errors_name_the_thing() {
        let mut unknown = Writer::new();
        unknown.tensor("odd", &[32], 12, vec![0; 64]);
        assert_eq!(Gguf::parse(&unknown.finish()).unwrap_err(), GgufError::TensorType { name: "odd".into(), type_id: 12 });
        let mut ragged = Writer::new();
        ragged.tensor("ragged", &[33, 2], 3, vec![0; 64]);
        assert!(Gguf::parse(&ragged.finish()).unwrap_err().to_string().contains("tensor ragged is Q4_1 with 33 inputs"));
        let mut huge = Writer::new();
        huge.tensor("huge", &[u64::MAX / 32 * 32, 64], 8, vec![]);
        assert!(Gguf::parse(&huge.finish()).unwrap_err().to_string().contains("tensor huge has impossible dimensions"));
        let mut twice = Writer::new();
        twice.tensor("t", &[1], 0, vec![0; 4]).tensor("t", &[1], 0, vec![0; 4]);
        assert_eq!(Gguf::parse(&twice.finish()).unwrap_err(), GgufError::Duplicate("t".into()));
        let mut value = Writer::new();
        value.meta("bad.key", 99, &[]);
        assert_eq!(Gguf::parse(&value.finish()).unwrap_err(), GgufError::BadValueType { key: "bad.key".into(), type_id: 99 });
        assert_eq!(Gguf::parse(b"<!doctype html>").unwrap_err(), GgufError::BadMagic(*b"<!do"));
        assert!(matches!(Gguf::parse(b"GGUF").unwrap_err(), GgufError::Truncated { .. }));
    }
}
