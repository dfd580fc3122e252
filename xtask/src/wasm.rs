//! Builds the crate for the browser: cargo, then wasm-bindgen, then wasm-opt, then a look at the size.
//!
//! wasm-bindgen runs as a library of this program, not as a tool of its own, so that nothing needs installing and its
//! version is the one in Cargo.lock. wasm-opt is Debian's binaryen; it reads from the module which features are in use.

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sha2::{Digest, Sha256};

/// The target that browsers run.
const TARGET: &str = "wasm32-unknown-unknown";

/// Most bytes that the module may have, gzipped: it stands before a page's first token.
pub const LARGEST_GZIP: u64 = 1_500_000;

/// Names of what is written, beside the `.d.ts` files.
const NAME: &str = "forecall";

/// What went wrong in the build.
#[derive(Debug, thiserror::Error)]
pub enum WasmError {
    /// A program could not be started.
    #[error("{program} cannot be started ({source}): {advice}")]
    Start {
        /// Which.
        program: String,
        /// Why.
        source: std::io::Error,
        /// What to do.
        advice: &'static str,
    },
    /// A program failed; it has said why.
    #[error("{0} failed")]
    Failed(String),
    /// Cargo named no module.
    #[error("cargo built no .wasm file: is the crate still a cdylib?")]
    NoModule,
    /// wasm-bindgen refused the module.
    #[error("wasm-bindgen: {0}")]
    Bindgen(String),
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// wasm-opt left a module that cannot be repaired.
    #[error(transparent)]
    Repair(#[from] crate::externref_table::RepairError),
    /// The module is larger than a page should load.
    #[error("{path} has {gzip} bytes gzipped, the limit is {LARGEST_GZIP}")]
    TooLarge {
        /// The module.
        path: PathBuf,
        /// Its gzipped size.
        gzip: u64,
    },
}

/// Sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// As it lies on disk.
    pub raw: u64,
    /// As a server sends it.
    pub gzip: u64,
}

fn at<T>(path: &Path, result: std::io::Result<T>) -> Result<T, WasmError> {
    result.map_err(|source| WasmError::Io { path: path.to_owned(), source })
}

/// Builds the workspace at `root` into the folder `out`; returns the sizes of its files by name. A module that comes out of
/// cargo unchanged is not processed again.
///
/// # Errors
/// [`WasmError`].
pub fn build(root: &Path, out: &Path) -> Result<Vec<(String, Sizes)>, WasmError> {
    let module = cargo_build(root)?;
    let bytes = at(&module, fs::read(&module))?;
    let stamp_path = out.join(".made-from");
    // This file is part of what the output depends on: the flags stand in it.
    let inputs = Sha256::new().chain_update(&bytes).chain_update(include_bytes!("wasm.rs")).finalize();
    let inputs: String = inputs.iter().map(|byte| format!("{byte:02x}")).collect();
    let stamp = format!("{inputs} {}", wasm_opt_version()?);
    let optimised = out.join(format!("{NAME}_bg.wasm"));
    let current = fs::read_to_string(&stamp_path).is_ok_and(|made_from| made_from == stamp) && optimised.exists();
    if !current {
        eprintln!("wasm-bindgen and wasm-opt");
        at(out, fs::create_dir_all(out))?;
        // The stamp goes first and comes last, so that an interrupted build is never taken for a finished one.
        if stamp_path.exists() {
            at(&stamp_path, fs::remove_file(&stamp_path))?;
        }
        wasm_bindgen_cli_support::Bindgen::new()
            .input_path(&module)
            .out_name(NAME)
            .typescript(true)
            .web(true)
            .and_then(|bindgen| bindgen.omit_default_module_path(false).generate(out))
            .map_err(|error| WasmError::Bindgen(error.to_string()))?;
        wasm_opt(&optimised)?;
        let mut bytes = at(&optimised, fs::read(&optimised))?;
        if crate::externref_table::restore(&mut bytes)? {
            at(&optimised, fs::write(&optimised, bytes))?;
        }
        at(&stamp_path, fs::write(&stamp_path, stamp))?;
    }
    let sizes = [format!("{NAME}_bg.wasm"), format!("{NAME}.js")]
        .into_iter()
        .map(|name| Ok((name.clone(), measure(&out.join(name))?)))
        .collect::<Result<Vec<_>, WasmError>>()?;
    match sizes.first() {
        Some((_, Sizes { gzip, .. })) if *gzip > LARGEST_GZIP => Err(WasmError::TooLarge { path: optimised, gzip: *gzip }),
        _ => Ok(sizes),
    }
}

/// Runs cargo and returns the path of the module it built.
fn cargo_build(root: &Path) -> Result<PathBuf, WasmError> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // For this build alone: native code and other targets know no such feature. The crate is built for speed, but with
    // little inlining of what does not ask for it: that makes the module 6 % smaller and no kernel slower (building the crate
    // for size would make products twice as slow).
    let mut rustflags = std::env::var_os("RUSTFLAGS").unwrap_or_default();
    rustflags.push(" -C target-feature=+simd128 -C llvm-args=-inline-threshold=10");
    let output = run(
        Command::new(cargo)
            .current_dir(root)
            .args(["build", "--package", NAME, "--lib", "--profile", "wasm", "--target", TARGET])
            .arg("--message-format=json-render-diagnostics")
            .env("RUSTFLAGS", rustflags)
            .stdout(Stdio::piped()),
        "cargo build",
        "install Rust with rustup",
    )?;
    String::from_utf8_lossy(&output)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["reason"] == "compiler-artifact" && message["target"]["name"] == NAME)
        .filter_map(|message| message["filenames"].as_array().cloned())
        .flatten()
        .filter_map(|file| file.as_str().map(PathBuf::from))
        .rfind(|file| file.extension().is_some_and(|extension| extension == "wasm"))
        .ok_or(WasmError::NoModule)
}

/// The program, or what WASM_OPT names.
fn wasm_opt_program() -> OsString {
    std::env::var_os("WASM_OPT").unwrap_or_else(|| "wasm-opt".into())
}

const WASM_OPT_ADVICE: &str = "install Debian's package \"binaryen\", or name the program in WASM_OPT";

fn wasm_opt_version() -> Result<String, WasmError> {
    let output = run(Command::new(wasm_opt_program()).arg("--version").stdout(Stdio::piped()), "wasm-opt", WASM_OPT_ADVICE)?;
    Ok(String::from_utf8_lossy(&output).trim().to_owned())
}

/// Optimises a module in place.
fn wasm_opt(module: &Path) -> Result<(), WasmError> {
    run(Command::new(wasm_opt_program()).arg("-O3").arg(module).arg("-o").arg(module), "wasm-opt", WASM_OPT_ADVICE).map(drop)
}

/// Runs a program to its end and returns its standard output, if that is piped.
fn run(command: &mut Command, name: &str, advice: &'static str) -> Result<Vec<u8>, WasmError> {
    let start = |source| WasmError::Start { program: name.to_owned(), source, advice };
    let output = command.spawn().and_then(std::process::Child::wait_with_output).map_err(start)?;
    if output.status.success() { Ok(output.stdout) } else { Err(WasmError::Failed(name.to_owned())) }
}

fn measure(path: &Path) -> Result<Sizes, WasmError> {
    let bytes = at(path, fs::read(path))?;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    let gzipped = at(path, encoder.write_all(&bytes).and_then(|()| encoder.finish()))?;
    Ok(Sizes { raw: bytes.len() as u64, gzip: gzipped.len() as u64 })
}
