use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};

use super::*;
use crate::model::arch::Mask;
use crate::model::program::{Arrangement, MatrixId, Op, Role, VectorId};
use crate::weights::packed::{PackedRows, ScaleFormat};
use crate::weights::plan::BATCH_BYTES;
use crate::weights::source::{FolderSource, MemorySource};

/// Keeps chunks, checking that each matrix's come in order and without gaps.
#[derive(Debug, Default)]
struct Collected {
    matrices: BTreeMap<MatrixId, Vec<PackedRows>>,
    vectors: BTreeMap<VectorId, Vec<f32>>,
}

impl WeightSink for Collected {
    fn matrix(&mut self, id: MatrixId, rows: PackedRows) -> Result<()> {
        let chunks = self.matrices.entry(id).or_default();
        assert_eq!(rows.first_row, chunks.iter().map(|c| c.n).sum::<usize>());
        assert_eq!(rows.first_row % 8, 0);
        chunks.push(rows);
        Ok(())
    }

    fn vector(&mut self, id: VectorId, values: Vec<f32>) -> Result<()> {
        assert!(self.vectors.insert(id, values).is_none());
        Ok(())
    }
}

impl Collected {
    fn get(&self, id: usize, row: usize, k: usize) -> f64 {
        let chunk = self.matrices[&MatrixId(id)].iter().find(|c| (c.first_row..c.first_row + c.n).contains(&row)).unwrap();
        chunk.get(row - chunk.first_row, k)
    }
}

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn quiet(_: WeightsRead) -> Result<()> {
    Ok(())
}

async fn load_all<S: ByteSource>(sources: &mut Sources<S>, options: &LoadOptions) -> Result<(Checkpoint, Collected)> {
    let checkpoint = load_checkpoint(sources, options).await?;
    let mut sink = Collected::default();
    stream_weights(sources, &checkpoint, &mut sink, &mut quiet).await?;
    Ok((checkpoint, sink))
}

fn folder(name: &str, adapter: AdapterFrom<FolderSource>) -> Sources<FolderSource> {
    Sources { base: FolderSource::new(golden(name)).unwrap(), adapter }
}

fn memory(name: &str) -> Sources<MemorySource> {
    let mut base = MemorySource::default();
    let files = ["config.json", "tokenizer.json", "model.safetensors"].map(str::to_owned);
    let adapters =
        ADAPTER_FOLDERS.iter().flat_map(|f| ["adapter_config.json", "adapter_model.safetensors"].map(|n| format!("{f}{n}")));
    for file in files.into_iter().chain(adapters).filter(|file| golden(name).join(file).is_file()) {
        base.files.insert(file.clone(), std::fs::read(golden(name).join(file)).unwrap());
    }
    Sources { base, adapter: AdapterFrom::Auto }
}

fn load_memory(sources: &mut Sources<MemorySource>, options: LoadOptions) -> Result<(Checkpoint, Collected)> {
    pollster::block_on(load_all(sources, &options))
}

/// Values of a tensor, dequantised by the formula of the format's documentation, without any code of the loader.
struct Plain {
    base: Vec<u8>,
    adapter: Vec<u8>,
    quantization: serde_json::Value,
}

impl Plain {
    fn of(name: &str) -> Self {
        let config: serde_json::Value =
            serde_json::from_slice(&std::fs::read(golden(name).join("config.json")).unwrap()).unwrap();
        Self {
            base: std::fs::read(golden(name).join("model.safetensors")).unwrap(),
            adapter: std::fs::read(golden(name).join("draft_adapter/adapter_model.safetensors")).unwrap(),
            quantization: config["quantization"].clone(),
        }
    }

    fn floats(tensors: &SafeTensors, name: &str) -> Vec<f64> {
        let view = tensors.tensor(name).unwrap();
        let data = view.data();
        match view.dtype() {
            Dtype::F32 => data.chunks(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect(),
            Dtype::F16 => data.chunks(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f64()).collect(),
            Dtype::BF16 => data.chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f64()).collect(),
            other => panic!("{name} is {other:?}"),
        }
    }

    /// All values of a tensor, row by row.
    fn values(&self, origin: Origin, name: &str) -> Vec<f64> {
        if origin == Origin::Adapter {
            let tensors = SafeTensors::deserialize(&self.adapter).unwrap();
            return match name {
                "mask_embedding" => Self::floats(&tensors, name),
                _ => Self::floats(&tensors, &format!("base_model.model.{name}")),
            };
        }
        let tensors = SafeTensors::deserialize(&self.base).unwrap();
        if tensors.tensor(name).unwrap().dtype() != Dtype::U32 {
            return Self::floats(&tensors, name);
        }
        let module = name.strip_suffix(".weight").unwrap();
        let section = self.quantization.get(module).unwrap_or(&self.quantization);
        let (bits, group) = (section["bits"].as_u64().unwrap() as usize, section["group_size"].as_u64().unwrap() as usize);
        let scales = Self::floats(&tensors, &format!("{module}.scales"));
        let biases = Self::floats(&tensors, &format!("{module}.biases"));
        // Lowest bits first: value i of a row is bits i*bits.. of its bytes taken as one little-endian number.
        let bytes = tensors.tensor(name).unwrap();
        let bit = |i: usize| u64::from(bytes.data()[i * bits / 8] >> (i * bits % 8)) & ((1 << bits) - 1);
        (0..scales.len() * group).map(|i| scales[i / group] * bit(i) as f64 + biases[i / group]).collect()
    }
}

/// What row and input of a matrix should be, from its sources.
fn expected(plain: &Plain, program: &Program, id: usize) -> Vec<Vec<f64>> {
    let spec = &program.matrices[id];
    let parts: Vec<Vec<Vec<f64>>> = spec
        .sources
        .iter()
        .map(|source| match source {
            Source::Zeros { rows } => vec![vec![0.0; spec.k]; *rows],
            Source::Tensor { origin, name, .. } => plain.values(*origin, name).chunks(spec.k).map(<[f64]>::to_vec).collect(),
        })
        .collect();
    match spec.arrangement {
        Arrangement::Stacked => parts.concat(),
        Arrangement::Interleaved => parts[0].iter().zip(&parts[1]).flat_map(|(a, b)| [a.clone(), b.clone()]).collect(),
    }
}

/// The largest difference of all matrices from what the files say, and how many values were compared.
fn compare(plain: &Plain, checkpoint: &Checkpoint, sink: &Collected) -> (f64, usize) {
    let (mut largest, mut count) = (0.0_f64, 0);
    for (id, spec) in checkpoint.program.matrices.iter().enumerate() {
        let rows = expected(plain, &checkpoint.program, id);
        assert_eq!(rows.len(), spec.n, "{}", spec.label);
        for (row, values) in rows.iter().enumerate() {
            for (k, want) in values.iter().enumerate() {
                largest = largest.max((sink.get(id, row, k) - want).abs());
                count += 1;
            }
        }
    }
    for (id, spec) in checkpoint.program.vectors.iter().enumerate() {
        let Source::Tensor { origin, name, .. } = &spec.sources[0] else { panic!("a vector of zeros") };
        let got: Vec<f64> = sink.vectors[&VectorId(id)].iter().map(|v| f64::from(*v)).collect();
        assert_eq!(got, plain.values(*origin, name), "{}", spec.label);
    }
    (largest, count)
}

#[test]
fn golden_checkpoints_load_bit_for_bit() {
    let affine = |bits, group, scale| Format::Affine { bits, group, scale };
    let cases = [
        ("tiny-llama", Format::F32, Format::F32),
        ("tiny-llama-tied", Format::F32, Format::F32),
        ("tiny-llama-q4", affine(8, 32, ScaleFormat::F16), affine(4, 32, ScaleFormat::F16)),
        ("tiny-llama-q8-bf16", affine(8, 64, ScaleFormat::Bf16), affine(8, 64, ScaleFormat::Bf16)),
    ];
    for (name, table, linear) in cases {
        let mut sources = folder(name, AdapterFrom::Auto);
        let (checkpoint, sink) = pollster::block_on(load_all(&mut sources, &LoadOptions::default())).unwrap();
        for (spec, format) in checkpoint.program.matrices.iter().zip(checkpoint.formats()) {
            match spec.role {
                Role::Lora => {}
                Role::Linear => assert_eq!(*format, linear, "{name}: {}", spec.label),
                Role::Embedding | Role::Head => assert_eq!(*format, table, "{name}: {}", spec.label),
            }
        }
        let (largest, count) = compare(&Plain::of(name), &checkpoint, &sink);
        // bf16 adapters become f16: exact unless a value is tiny. Everything else is exact.
        let bound = if name.ends_with("bf16") { 2_f64.powi(-25) } else { 0.0 };
        assert!(largest <= bound, "{name}: {largest}");
        assert!(count > 50_000);
        assert_eq!(checkpoint.program.lora_width, 3 * checkpoint.adapter.as_ref().unwrap().spec.rank);
        let rules = checkpoint.program.draft.unwrap();
        assert_eq!((rules.logit_shift, rules.adapter), (1, true));
    }
}

#[test]
fn the_comparison_sees_one_wrong_bit() {
    let mut sources = memory("tiny-llama-q4");
    let file = sources.base.files.get_mut("model.safetensors").unwrap();
    let header = u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
    file[8 + header] ^= 1;
    let (checkpoint, sink) = load_memory(&mut sources, LoadOptions::default()).unwrap();
    assert!(compare(&Plain::of("tiny-llama-q4"), &checkpoint, &sink).0 > 0.0);
}

#[test]
fn adapter_can_be_left_out_or_come_from_elsewhere() {
    let none = pollster::block_on(load_all(&mut folder("tiny-llama", AdapterFrom::None), &LoadOptions::default())).unwrap();
    assert_eq!((none.0.program.lora_width, none.0.program.draft, none.0.adapter), (0, None, None));
    let other = FolderSource::new(golden("tiny-llama/draft_adapter")).unwrap();
    let mut sources = folder("tiny-llama", AdapterFrom::Source(other));
    let (checkpoint, sink) = pollster::block_on(load_all(&mut sources, &LoadOptions::default())).unwrap();
    assert_eq!(compare(&Plain::of("tiny-llama"), &checkpoint, &sink).0, 0.0);
    assert!(checkpoint.program.lora_width > 0);
}

#[test]
fn plain_weights_are_kept_as_asked() {
    let load = |plain| load_memory(&mut memory("tiny-llama"), LoadOptions { plain }).unwrap();
    let want = Plain::of("tiny-llama");
    for (plain, bound) in [
        (PlainFormat::F32, 0.0),
        (PlainFormat::F16, 2_f64.powi(-11)),
        (PlainFormat::Affine { bits: 8, group: 32 }, 0.01),
        (PlainFormat::Affine { bits: 4, group: 64 }, 0.2),
    ] {
        let (checkpoint, sink) = load(plain);
        let (largest, _) = compare(&want, &checkpoint, &sink);
        assert!(largest <= bound, "{plain:?}: {largest}");
        assert!(bound == 0.0 || largest > bound / 50.0, "{plain:?}: {largest} is too good to be true");
        let lora = checkpoint.program.matrices.iter().zip(checkpoint.formats()).filter(|(m, _)| m.role == Role::Lora);
        let expected = if plain == PlainFormat::F16 { Format::F16 } else { Format::F32 };
        assert!(lora.clone().count() > 0 && lora.into_iter().all(|(_, f)| *f == expected));
    }
    let refused = load_memory(&mut memory("tiny-llama"), LoadOptions { plain: PlainFormat::Affine { bits: 3, group: 64 } });
    assert!(matches!(refused, Err(Error::InvalidOption(_))));
}

#[test]
fn progress_counts_every_byte_and_can_stop() {
    let mut sources = memory("tiny-llama");
    let checkpoint = pollster::block_on(load_checkpoint(&mut sources, &LoadOptions::default())).unwrap();
    sources.base.reads.clear();
    let mut seen = Vec::new();
    let mut watch = |p: WeightsRead| {
        seen.push(p);
        Ok(())
    };
    let mut sink = Collected::default();
    pollster::block_on(stream_weights(&mut sources, &checkpoint, &mut sink, &mut watch)).unwrap();
    let last = seen.last().unwrap();
    assert_eq!(last.bytes, last.total);
    let read: u64 = sources.base.reads.iter().map(|(_, r): &(String, Range<u64>)| r.end - r.start).sum();
    assert_eq!(read, last.total);
    // A small checkpoint is two files, read once each.
    assert_eq!(sources.base.reads.len(), 2, "{:?}", sources.base.reads);

    let mut stop = |p: WeightsRead| if p.bytes > 0 { Err(Error::Aborted("stopped".into())) } else { Ok(()) };
    let stopped = pollster::block_on(stream_weights(&mut sources, &checkpoint, &mut Collected::default(), &mut stop));
    assert_eq!(stopped, Err(Error::Aborted("stopped".into())));
}

#[test]
fn shards_are_found_by_their_index() {
    let mut sources = memory("tiny-llama");
    let file = sources.base.files.remove("model.safetensors").unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let mut weight_map = serde_json::Map::new();
    for (shard, keep) in [("model-00001-of-00002.safetensors", 0), ("model-00002-of-00002.safetensors", 1)] {
        let part: Vec<_> = tensors.tensors().into_iter().enumerate().filter(|(i, _)| i % 2 == keep).map(|(_, t)| t).collect();
        weight_map.extend(part.iter().map(|(name, _)| (name.clone(), shard.into())));
        sources.base.files.insert(shard.to_owned(), safetensors::serialize(part, None).unwrap());
    }
    let index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": weight_map});
    sources.base.files.insert("model.safetensors.index.json".into(), index.to_string().into_bytes());
    let (checkpoint, sink) = load_memory(&mut sources, LoadOptions::default()).unwrap();
    assert_eq!(compare(&Plain::of("tiny-llama"), &checkpoint, &sink).0, 0.0);
    assert_eq!(checkpoint.weights.files.len(), 3);

    sources.base.files.remove("model-00002-of-00002.safetensors");
    let message = load_memory(&mut sources, LoadOptions::default()).unwrap_err_string();
    assert!(message.contains("BadWeights") && message.contains("model-00002-of-00002.safetensors"), "{message}");
    let escape = serde_json::json!({"weight_map": {"a": "../../etc/passwd.safetensors"}});
    sources.base.files.insert("model.safetensors.index.json".into(), escape.to_string().into_bytes());
    let message = load_memory(&mut sources, LoadOptions::default()).unwrap_err_string();
    assert!(message.contains("BadConfig") && message.contains("beside the index"), "{message}");
}

trait ErrorText {
    /// Kind and sentence of the error.
    fn unwrap_err_string(self) -> String;
}

impl<T> ErrorText for Result<T> {
    fn unwrap_err_string(self) -> String {
        match self {
            Ok(_) => panic!("expected an error"),
            Err(e) => format!("{}: {e}", e.code()),
        }
    }
}

/// Rewrites the base's tensors.
fn with_tensors(
    sources: &mut Sources<MemorySource>,
    file: &str,
    edit: impl Fn(&mut BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>),
) {
    let bytes = sources.base.files.get(file).unwrap().clone();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut map: BTreeMap<_, _> =
        tensors.tensors().into_iter().map(|(n, v)| (n, (v.dtype(), v.shape().to_vec(), v.data().to_vec()))).collect();
    edit(&mut map);
    let views = map.iter().map(|(name, (dtype, shape, data))| {
        (name.clone(), safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    let new = safetensors::serialize(views, None).unwrap();
    sources.base.files.insert(file.to_owned(), new);
}

#[test]
fn malformed_checkpoints_are_refused_by_name() {
    type Edit = fn(&mut BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>);
    let q = "model.layers.0.self_attn.q_proj.weight";
    let base: [(&str, &str, Edit, [&str; 2]); 8] = [
        (
            "tiny-llama",
            "model.safetensors",
            |m| drop(m.remove("model.layers.1.mlp.up_proj.weight")),
            ["BadWeights", "no tensor `model.layers.1.mlp.up_proj.weight`"],
        ),
        ("tiny-llama", "model.safetensors", |m| drop(m.remove("lm_head.weight")), ["BadWeights", "no output head"]),
        (
            "tiny-llama",
            "model.safetensors",
            |m| drop(m.remove("model.embed_tokens.weight")),
            ["BadWeights", "no embedding table"],
        ),
        (
            "tiny-llama",
            "model.safetensors",
            |m| m.get_mut("model.layers.0.self_attn.q_proj.weight").unwrap().1.reverse(),
            ["BadWeights", "expected [96, 48]"],
        ),
        (
            "tiny-llama",
            "model.safetensors",
            |m| m.get_mut("model.layers.0.self_attn.q_proj.weight").unwrap().0 = Dtype::I32,
            ["BadWeights", "type I32"],
        ),
        (
            "tiny-llama",
            "model.safetensors",
            |m| drop(m.insert("model.layers.0.self_attn.q_proj.bias".into(), (Dtype::F32, vec![96], vec![0; 384]))),
            ["BadWeights", "q_proj.bias"],
        ),
        (
            "tiny-llama-q4",
            "model.safetensors",
            |m| drop(m.remove("model.layers.0.self_attn.q_proj.scales")),
            ["BadWeights", "`.scales` and `.biases` are missing"],
        ),
        (
            "tiny-llama",
            "draft_adapter/adapter_model.safetensors",
            |m| drop(m.remove("base_model.model.model.layers.2.mlp.up_proj.lora_B.weight")),
            ["BadWeights", "but not both"],
        ),
    ];
    for (name, file, edit, parts) in base {
        let mut sources = memory(name);
        with_tensors(&mut sources, file, |_| {});
        assert!(load_memory(&mut sources, LoadOptions::default()).is_ok(), "control");
        with_tensors(&mut sources, file, edit);
        let message = load_memory(&mut sources, LoadOptions::default()).unwrap_err_string();
        assert!(parts.iter().all(|p| message.contains(p)), "{q}: {message}");
    }
}

#[test]
fn malformed_files_are_refused_by_name() {
    let load = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut sources = memory("tiny-llama");
        edit(sources.base.files.get_mut("model.safetensors").unwrap());
        load_memory(&mut sources, LoadOptions::default())
    };
    let cases: [(&dyn Fn(&mut Vec<u8>), &str); 7] = [
        (&|f| f.truncate(4), "at least 8"),
        (&|f| f.truncate(f.len() - 1), "cut short"),
        (&|f| f.truncate(100), "cut short"),
        (&|f| f.push(0), "after the last tensor"),
        (&|f| f[..8].fill(0xFF), "not a safetensors file"),
        (&|f| f[8] = b'[', "not readable"),
        (&|f| *f = b"<!doctype html><html></html>".to_vec(), "not a safetensors file"),
    ];
    for (edit, part) in cases {
        let message = load(edit).unwrap_err_string();
        assert!(message.starts_with("BadWeights: model.safetensors") && message.contains(part), "{message}");
    }
    let mut sources = memory("tiny-llama");
    sources.base.files.remove("model.safetensors");
    assert!(load_memory(&mut sources, LoadOptions::default()).unwrap_err_string().contains("neither"));
    sources.base.files.remove("config.json");
    assert!(load_memory(&mut sources, LoadOptions::default()).unwrap_err_string().contains("config.json"));
}

#[test]
fn every_truncation_and_every_flipped_header_bit_is_an_error_or_a_model() {
    let whole = memory("tiny-llama-q4");
    let file = whole.base.files["model.safetensors"].clone();
    let header = 8 + u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
    for cut in (0..file.len()).step_by(997) {
        let mut sources = whole.clone();
        sources.base.files.insert("model.safetensors".into(), file[..cut].to_vec());
        assert!(load_memory(&mut sources, LoadOptions::default()).is_err(), "cut at {cut}");
    }
    for at in (0..header).step_by(7) {
        let mut sources = whole.clone();
        sources.base.files.get_mut("model.safetensors").unwrap()[at] ^= 1 << (at % 8);
        // Most are errors; a flip inside ignored metadata is not. None may panic.
        let _ = load_memory(&mut sources, LoadOptions::default());
    }
}

#[test]
fn reads_stay_within_the_batch_size() {
    // A plain matrix of 40 MiB: several chunks of whole tiles, each read within the bound.
    let (v, d) = (20_480_usize, 1024_usize);
    let mut sources = memory("tiny-llama");
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": d, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "head_dim": 2, "vocab_size": v, "max_position_embeddings": 8, "tie_word_embeddings": true
    });
    let mut sources = {
        sources.base.files = BTreeMap::from([("config.json".to_owned(), config.to_string().into_bytes())]);
        sources
    };
    let half = |n: usize| -> Vec<u8> { (0..n).flat_map(|i| bf16::from_f32((i % 251) as f32).to_le_bytes()).collect() };
    let layer = "model.layers.0.";
    let mut tensors = BTreeMap::new();
    for (name, rows, k) in [
        ("self_attn.q_proj", 2, d),
        ("self_attn.k_proj", 2, d),
        ("self_attn.v_proj", 2, d),
        ("self_attn.o_proj", d, 2),
        ("mlp.gate_proj", 8, d),
        ("mlp.up_proj", 8, d),
        ("mlp.down_proj", d, 8),
    ] {
        tensors.insert(format!("{layer}{name}.weight"), (vec![rows, k], half(rows * k)));
    }
    for name in ["model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"] {
        tensors.insert(format!("{name}.weight"), (vec![d], half(d)));
    }
    tensors.insert("model.embed_tokens.weight".to_owned(), (vec![v, d], half(v * d)));
    let views = tensors
        .iter()
        .map(|(n, (shape, data))| (n.clone(), safetensors::tensor::TensorView::new(Dtype::BF16, shape.clone(), data).unwrap()));
    sources.base.files.insert("model.safetensors".into(), safetensors::serialize(views, None).unwrap());
    let (checkpoint, sink) = load_memory(&mut sources, LoadOptions::default()).unwrap();
    assert_eq!(checkpoint.formats()[0], Format::F16);
    assert_eq!(sink.matrices[&MatrixId(0)].len(), 5);
    for (row, k) in [(0, 0), (4095, 1023), (4096, 0), (20_479, 1023), (9001, 77)] {
        assert_eq!(sink.get(0, row, k), ((row * d + k) % 251) as f64);
    }
    let largest = sources.base.reads.iter().map(|(_, r)| r.end - r.start).max().unwrap();
    assert!(largest <= BATCH_BYTES, "{largest}");
}

/// A mask is never chosen, so a text would not end at it.
#[test]
fn a_mask_that_ends_texts_is_refused() {
    let set = |sources: &mut Sources<MemorySource>, file: &str, field: &str, value: serde_json::Value| {
        let mut json: serde_json::Value = serde_json::from_slice(&sources.base.files[file]).unwrap();
        json[field] = value;
        sources.base.files.insert(file.into(), json.to_string().into_bytes());
    };
    let load = |sources: &mut Sources<MemorySource>| {
        load_memory(sources, LoadOptions::default()).map(|(checkpoint, _)| checkpoint.program.mask)
    };
    // The checkpoint's own, and one that an adapter names.
    let adapters = "linear_spec_lora/adapter_config.json";
    let draft = |id: u32| serde_json::json!({ "logit_shift": 0, "mask_token_id": id });
    for (name, file, field) in [("tiny-setdlm", "config.json", "mask_token_id"), ("tiny-nemotron", adapters, "draft")] {
        for (mask, ends) in [(7, 8), (7, 7), (9, 9)] {
            let mut sources = memory(name);
            set(&mut sources, "config.json", "eos_token_id", serde_json::json!([3, ends]));
            set(&mut sources, file, field, if field == "draft" { draft(mask) } else { mask.into() });
            let mask_found = load(&mut sources);
            if mask != ends {
                assert_eq!(mask_found.unwrap(), Some(Mask::Token(mask)), "control: {name}");
                continue;
            }
            let error = mask_found.unwrap_err();
            assert_eq!(error.code(), "BadConfig", "{error}");
            assert!(error.to_string().contains(&format!("mask token {mask} ")), "{error}");
        }
    }
}

#[test]
fn setdlm_is_recognised_and_its_mask_found() {
    type Edit = fn(&mut Sources<MemorySource>);
    let config = |sources: &mut Sources<MemorySource>, from: &str, to: &str| {
        let text = String::from_utf8(sources.base.files["config.json"].clone()).unwrap();
        assert!(text.contains(from));
        sources.base.files.insert("config.json".into(), text.replace(from, to).into_bytes());
    };
    let load = |name: &str, edit: Edit| {
        let mut sources = memory(name);
        edit(&mut sources);
        let loaded = load_memory(&mut sources, LoadOptions::default());
        loaded.map(|(checkpoint, _)| {
            (checkpoint.program.arch.model_type.clone(), checkpoint.program.mask, checkpoint.program.ops.last().copied())
        })
    };
    let is = |id: u32| ("setdlm".to_owned(), Some(Mask::Token(id)), Some(Op::ArgMax { banned: Some(id) }));
    // By model_type with an id of its own; by tensors alone with the tokenizer's.
    assert_eq!(load("tiny-setdlm", |_| {}).unwrap(), is(100));
    assert_eq!(load("tiny-setdlm-trained", |_| {}).unwrap(), is(257));
    // Control: the same config with other tensor names is a Qwen3 without drafts.
    let plain = load("tiny-setdlm-trained", |sources| {
        with_tensors(sources, "model.safetensors", |tensors| {
            let renamed = std::mem::take(tensors).into_iter().map(|(n, t)| (n.replace("backbone.model.", ""), t));
            tensors.extend(renamed);
        });
    });
    let (model_type, mask, _) = plain.unwrap();
    assert_eq!((model_type.as_str(), mask), ("qwen3", None));
    // Without a mask it cannot verify, so it does not load.
    let refused =
        load("tiny-setdlm-trained", |sources| drop(sources.base.files.remove("tokenizer.json"))).unwrap_err().to_string();
    assert!(refused.contains("mask_token_id") && refused.contains("<|fim_middle|>"), "{refused}");
    let mut sources = memory("tiny-setdlm");
    config(&mut sources, "\"mask_token_id\": 100", "\"mask_token_id\": 210");
    assert_eq!(load_memory(&mut sources, LoadOptions::default()).unwrap().0.program.mask, Some(Mask::Token(210)));
    config(&mut sources, "\"mask_token_id\": 210", "\"mask_token_id\": 211");
    let refused = load_memory(&mut sources, LoadOptions::default()).unwrap_err().to_string();
    assert!(refused.contains("mask_token_id"), "{refused}");
    // Its mask rows need no adapter and take none.
    let other = FolderSource::new(golden("tiny-qwen3/draft_adapter")).unwrap();
    let mut sources = folder("tiny-setdlm", AdapterFrom::Source(other));
    let refused = pollster::block_on(load_all(&mut sources, &LoadOptions::default())).unwrap_err().to_string();
    assert!(refused.contains("takes none"), "{refused}");
}

#[test]
fn setdlms_published_config_names_its_body_and_the_weights_have_the_sizes() {
    let with_config = |edit: &dyn Fn(&mut serde_json::Value)| {
        let mut sources = memory("tiny-setdlm");
        // As a denoiser's config is published: no size of the body anywhere.
        let mut config = serde_json::json!({
            "architectures": ["SetDLM"],
            "model_type": "bd3lm",
            "attn_backend": "sdpa",
            "length": 512,
            "block_size": 512,
            "vocab_size": 209,
            "mask_token_id": null,
            "eos_token_id": 2,
            "backbone_config": {
                "_target_": "backbone_automodel.AutoModelFromPreTrained",
                "automodel_cls": "CustomQwen3ForCausalLM",
                "pretrained_model_name_or_path": "Qwen/Qwen3-1.7B-Base",
                "keep_bottom_n_layers": -1,
                "hidden_size": -1,
            },
            "noise_config": { "_target_": "noise_schedule_noise_schedules.StaggeredNoise", "desired_block_size": 8, "length": 512 },
            "tokenization_config": { "mask_token_id": 100, "eos_token_id": 3, "bos_token_id": 1 },
        });
        edit(&mut config);
        sources.base.files.insert("config.json".into(), serde_json::to_vec(&config).unwrap());
        load_memory(&mut sources, LoadOptions::default()).map(|(checkpoint, _)| checkpoint.program)
    };
    let flat = load_memory(&mut memory("tiny-setdlm"), LoadOptions::default()).unwrap().0.program;
    let nested = with_config(&|_| {}).unwrap();
    // The published reach is twice the desired block size, the window as wide as that.
    assert_eq!((nested.arch.horizon, nested.arch.diffusion.unwrap().block_length), (Some(16), 8));
    assert_eq!((flat.arch.horizon, flat.arch.diffusion.unwrap().block_length), (Some(8), 4));
    let arch = crate::model::arch::Arch { horizon: Some(8), diffusion: flat.arch.diffusion, ..nested.arch.clone() };
    assert_eq!(arch, flat.arch);
    assert_eq!((nested.matrices, nested.vectors), (flat.matrices, flat.vectors));

    let refused = |edit: &dyn Fn(&mut serde_json::Value)| match with_config(edit) {
        Ok(_) => panic!("it was taken"),
        Err(e) => (e.code(), e.to_string()),
    };
    let (code, dit) = refused(&|config| config["backbone_config"]["_target_"] = "backbone_dit.DIT".into());
    assert!(code == "Unsupported" && dit.contains("DiT") && dit.contains("LayerNorm"), "{code} {dit}");
    let (code, other) = refused(&|config| config["architectures"] = serde_json::json!(["BD3LM"]));
    assert!(code == "Unsupported" && other.contains("BD3LM"), "{code} {other}");
}

#[test]
fn families_that_fill_blocks_are_known_by_their_names() {
    let rules = |name: &str, edit: &dyn Fn(&mut serde_json::Value)| {
        let mut sources = memory(name);
        let mut config: serde_json::Value = serde_json::from_slice(&sources.base.files["config.json"]).unwrap();
        edit(&mut config);
        sources.base.files.insert("config.json".into(), serde_json::to_vec(&config).unwrap());
        load_memory(&mut sources, LoadOptions::default()).map(|(checkpoint, _)| checkpoint.program)
    };
    let sdar = rules("tiny-sdar-trained", &|_| {}).unwrap();
    assert_eq!((sdar.arch.model_type.as_str(), sdar.draft, sdar.mask), ("sdar", None, Some(Mask::Token(257))));
    let own = sdar.rules().diffusion.unwrap();
    assert_eq!((own.block_length, own.logit_shift, own.sub_block, own.only), (4, 0, None, true));
    let fast = rules("tiny-fast-dllm-trained", &|_| {}).unwrap();
    let own = fast.rules().diffusion.unwrap();
    assert_eq!((own.block_length, own.logit_shift, own.sub_block, own.only), (16, 1, Some(8), true));
    assert!(fast.arch.attention_bias && fast.arch.tie_word_embeddings);
    // A head in the file is used although the config ties it, and the table where there is none.
    let tied = |config: &mut serde_json::Value| config["tie_word_embeddings"] = true.into();
    assert!(!rules("tiny-sdar-trained", &tied).unwrap().arch.tie_word_embeddings);
    let untied = |config: &mut serde_json::Value| config["tie_word_embeddings"] = false.into();
    assert!(rules("tiny-fast-dllm-trained", &untied).unwrap().arch.tie_word_embeddings);
    // Without a mask there is nothing to fill: the published id lies beyond this vocabulary.
    let maskless = rules("tiny-sdar-trained", &|config| drop(config.as_object_mut().unwrap().remove("mask_token_id")));
    let error = maskless.unwrap_err();
    assert!(error.code() == "BadConfig" && error.to_string().contains("mask_token_id"), "{error}");
    assert_eq!(
        rules("tiny-sdar-trained", &|config| config["block_size"] = 8.into()).unwrap().rules().diffusion.unwrap().block_length,
        8
    );
}

#[test]
fn nemotrons_spellings_are_all_read() {
    let load = |from: &'static str, to: &'static str| {
        let mut sources = memory("tiny-nemotron");
        with_tensors(&mut sources, "model.safetensors", |tensors| {
            let renamed =
                std::mem::take(tensors).into_iter().map(|(n, t)| (n.replace("encoder.", from).replace("diffusion_head", to), t));
            tensors.extend(renamed);
            tensors.insert(format!("{from}layers.0.self_attn.rotary_emb.inv_freq"), (Dtype::F32, vec![1], vec![0; 4]));
            tensors.insert("base_model.model.x.lora_A.weight".into(), (Dtype::F32, vec![1], vec![0; 4]));
        });
        load_memory(&mut sources, LoadOptions::default())
    };
    let own = load("encoder.", "diffusion_head").unwrap();
    assert_eq!(own.0.program.draft.map(|r| (r.logit_shift, r.adapter)), Some((0, true)));
    assert!(!own.0.program.arch.tie_word_embeddings);
    for (body, head) in [
        ("language_model.model.", "language_model.diffusion_head"),
        ("model.", "lm_head"),
        ("model.encoder.", "model.diffusion_head"),
    ] {
        let other = load(body, head).unwrap();
        assert_eq!(other.0.program.matrices, own.0.program.matrices);
        assert!(other.1.matrices.iter().zip(&own.1.matrices).all(|(a, b)| a == b), "{body}");
    }
    assert!(load("decoder.", "lm_head").unwrap_err().to_string().contains("`encoder.embed_tokens.weight`"), "control");
}

#[test]
fn a_folder_source_says_what_it_was_given() {
    let said = |path: PathBuf| FolderSource::new(path).unwrap_err().to_string();
    assert!(said(golden("tiny-llama").join("config.json")).contains("a file; expected the folder"));
    assert!(said(golden("nowhere")).contains("no such folder"));
    assert!(FolderSource::new(golden("tiny-llama")).is_ok(), "control");
}
