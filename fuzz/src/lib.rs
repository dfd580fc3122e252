//! The crate's pure rooms, under its own name, and what is fuzzed of them.

extern crate self as forecall;

#[path = "../../src/decode/mod.rs"]
pub mod decode;
#[path = "../../src/error.rs"]
pub mod error;
pub mod fetch;
#[path = "../../src/model/mod.rs"]
pub mod model;
#[path = "../../src/text/mod.rs"]
pub mod text;
#[path = "../../src/weights/mod.rs"]
pub mod weights;

#[path = "../targets.rs"]
pub mod targets;

pub use error::{Error, Result};
