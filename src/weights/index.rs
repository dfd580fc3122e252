//! Which files hold a checkpoint's tensors: one `model.safetensors`, or the shards that an index lists.

use std::collections::{BTreeMap, BTreeSet};

use super::safetensors_header::{TensorInfo, read_header};
use super::source::{ByteSource, read_small};
use crate::error::{Error, Result};
use crate::model::fields::{Fields, MAX_JSON_BYTES, parse_object};

const MAX_SHARDS: usize = 4096;
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// The tensors of a checkpoint, over all its files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TensorIndex {
    /// Files, as the source names them.
    pub files: Vec<String>,
    /// Per tensor: which of `files`, and where in it.
    pub tensors: BTreeMap<String, (usize, TensorInfo)>,
}

impl TensorIndex {
    /// The one file `file`; `None` if there is no such file.
    ///
    /// # Errors
    /// [`Error::BadWeights`] for a malformed file, [`Error::Fetch`] from the source.
    pub async fn single<S: ByteSource>(source: &mut S, file: &str) -> Result<Option<Self>> {
        let Some(size) = source.size(file).await? else { return Ok(None) };
        let tensors = read_header(source, file, size).await?;
        let tensors = tensors.into_iter().map(|(name, info)| (name, (0, info))).collect();
        Ok(Some(Self { files: vec![file.to_owned()], tensors }))
    }

    /// A checkpoint's weights: `model.safetensors`, else the shards of `model.safetensors.index.json`.
    ///
    /// # Errors
    /// [`Error::Fetch`] if neither is there, [`Error::BadWeights`] for malformed or missing shards, [`Error::BadConfig`] for
    /// a malformed index.
    pub async fn checkpoint<S: ByteSource>(source: &mut S) -> Result<Self> {
        if let Some(single) = Self::single(source, SINGLE).await? {
            return Ok(single);
        }
        let Some(bytes) = read_small(source, INDEX, MAX_JSON_BYTES).await? else {
            let missing = || Error::Fetch(format!("the checkpoint has neither {SINGLE} nor {INDEX}"));
            return Err(source.why_absent(SINGLE).unwrap_or_else(missing));
        };
        let shards = weight_map(&bytes)?;
        let mut index = Self::default();
        for (file, names) in shards {
            let size = source.size(&file).await?;
            let size = size.ok_or_else(|| Error::BadWeights(format!("{INDEX} lists {file}, but there is no such file")))?;
            let mut tensors = read_header(source, &file, size).await?;
            for name in names {
                let info = tensors.remove(&name);
                let info =
                    info.ok_or_else(|| Error::BadWeights(format!("{INDEX} says that tensor `{name}` is in {file}; it is not")))?;
                index.tensors.insert(name, (index.files.len(), info));
            }
            index.files.push(file);
        }
        Ok(index)
    }
}

/// Tensor names by shard.
fn weight_map(bytes: &[u8]) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let map = parse_object(INDEX, bytes)?;
    let fields = Fields::new(INDEX, &map);
    let entries = fields.object("weight_map")?.ok_or_else(|| fields.wrong("weight_map", "an object of tensor and file names"))?;
    let mut shards: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (name, _) in entries.iter() {
        let file = entries.text(name)?.filter(|f| is_plain(f));
        let file = file.ok_or_else(|| entries.wrong(name, "the name of a .safetensors file beside the index"))?;
        shards.entry(file.to_owned()).or_default().insert(name.to_owned());
    }
    if shards.is_empty() || shards.len() > MAX_SHARDS {
        return Err(Error::BadConfig(format!("{INDEX}: lists {} files; expected 1 to {MAX_SHARDS}", shards.len())));
    }
    Ok(shards)
}

/// A file name that cannot lead out of the checkpoint's folder.
fn is_plain(file: &str) -> bool {
    file.ends_with(".safetensors") && !file.contains(['/', '\\', ':', '?', '#', '%']) && !file.starts_with('.')
}
