//! Checkpoints that tests load: the golden ones with the truth beside them, and the demo model.

#![allow(dead_code, reason = "each test file takes what it needs")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use forecall::engine::{AdapterFrom, Backend, LoadOptions, Model, Precision, Sources};
use forecall::weights::source::FolderSource;
use pollster::block_on;
use serde_json::Value;

/// What runs a model, by name.
pub const BACKENDS: [(&str, Backend); 3] = [("reference", Backend::Reference), ("cpu", Backend::Cpu), ("gpu", Backend::Gpu)];

/// The golden checkpoints.
pub const GOLDEN: [&str; 19] = [
    "tiny-llama",
    "tiny-llama-tied",
    "tiny-llama-q4",
    "tiny-llama-q8-bf16",
    "tiny-llama3",
    "tiny-mistral",
    "tiny-qwen2",
    "tiny-qwen3",
    "tiny-smollm3",
    "tiny-ministral3",
    "tiny-nemotron",
    "tiny-nemotron-base",
    "tiny-nemotron-trained",
    "tiny-nemotron-q4",
    "tiny-setdlm",
    "tiny-setdlm-trained",
    "tiny-setdlm-f16",
    "tiny-nemotron-bf16",
    "tiny-setdlm-bf16",
];

/// A path in the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// A golden checkpoint's folder.
pub fn golden_folder(name: &str) -> PathBuf {
    repository("tests/golden").join(name)
}

/// The demo model's folder. A test that needs it fails without it.
pub fn demo_folder() -> PathBuf {
    let folder = repository("models/smollm2-135m-instruct");
    assert!(
        folder.join("model.safetensors").is_file(),
        "{} has no model.safetensors; run `npm run setup`, which makes the demo model",
        folder.display()
    );
    folder
}

/// Loads a checkpoint with the adapter beside it. A machine without a WebGPU adapter fails the tests.
pub fn load(folder: &Path, backend: Backend, precision: Precision, context: Option<usize>) -> Model {
    load_as(folder, &LoadOptions { backend, precision, context_length: context, ..LoadOptions::default() })
}

/// The same with options of one's own.
pub fn load_as(folder: &Path, options: &LoadOptions) -> Model {
    let base = FolderSource::new(folder).expect("the checkpoint's folder");
    block_on(Model::load(&mut Sources { base, adapter: AdapterFrom::Auto }, options, &mut |_| true))
        .unwrap_or_else(|e| panic!("{} with {options:?}: {e}", folder.display()))
}

/// A JSON file of the repository.
pub fn json(path: &Path) -> Value {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// An array of ids in JSON.
pub fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().expect("an array of ids");
    ids.iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

/// A tensor of the truth.
pub struct Tensor {
    /// Shape.
    pub shape: Vec<usize>,
    /// Row-major values.
    pub values: Vec<f32>,
}

/// The truth about a golden checkpoint.
pub struct Golden {
    /// `golden.json`.
    pub json: Value,
    tensors: BTreeMap<String, Tensor>,
}

impl Golden {
    /// Reads the truth beside a golden checkpoint.
    pub fn read(name: &str) -> Self {
        Self::read_file(name, "golden.safetensors")
    }

    /// Reads the truth about a golden checkpoint that is quantised while loading.
    pub fn read_quantized(name: &str) -> Self {
        Self::read_file(name, "quantized.safetensors")
    }

    fn read_file(name: &str, tensors: &str) -> Self {
        let folder = golden_folder(name);
        let bytes = std::fs::read(folder.join(tensors)).unwrap_or_else(|e| panic!("{name}/{tensors}: {e}"));
        let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
        let tensors = file
            .tensors()
            .into_iter()
            .map(|(name, view)| {
                assert_eq!(view.dtype(), safetensors::Dtype::F32, "{name}");
                let values = view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
                (name, Tensor { shape: view.shape().to_vec(), values })
            })
            .collect();
        Self { json: json(&folder.join("golden.json")), tensors }
    }

    /// A tensor by name.
    pub fn tensor(&self, name: &str) -> &Tensor {
        self.tensors.get(name).unwrap_or_else(|| panic!("the truth has no {name}"))
    }

    /// The tensors' names in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The token that stands at mask rows and is never chosen, where the mask is one.
    pub fn mask_token(&self) -> Option<usize> {
        self.json["mask_token"].as_u64().map(|id| id as usize)
    }

    /// The range of the logits, which errors are measured in.
    pub fn logit_range(&self) -> f32 {
        self.json["logit_range"].as_f64().expect("logit_range") as f32
    }
}

/// The largest difference of two lists, in units of `range`; infinite if a value is missing or not a number.
pub fn distance(got: &[f32], want: &[f32], range: f32) -> f32 {
    if got.len() != want.len() || got.is_empty() {
        return f32::INFINITY;
    }
    let differences = got.iter().zip(want).map(|(a, b)| if (a - b).is_nan() { f32::INFINITY } else { (a - b).abs() });
    differences.fold(0.0, f32::max) / range
}

/// How far each token of a text is from being the choice: the largest logit less the token's, in units of logits, 0 where it
/// is the choice (the smallest id among equals). `logits[i]` is the row that chooses `tokens[i]`.
pub fn regrets(logits: &[Vec<f32>], tokens: &[u32]) -> Vec<f32> {
    assert!(logits.len() >= tokens.len(), "{} rows for {} tokens", logits.len(), tokens.len());
    tokens
        .iter()
        .zip(logits)
        .map(|(&token, row)| {
            let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            row.get(token as usize).map_or(f32::INFINITY, |logit| best - logit)
        })
        .collect()
}
