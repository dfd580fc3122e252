//! The crate's pure rooms, under its own name, and what is fuzzed of them.

extern crate self as forecall;

#[path = "../../src/decode/mod.rs"]
pub mod decode;
#[path = "../../src/error.rs"]
pub mod error;
/// Of this room what parses.
pub mod fetch {
    #[path = "../../../src/fetch/locator.rs"]
    pub mod locator;
    #[path = "../../../src/fetch/running_hash.rs"]
    pub(crate) mod running_hash;
    #[path = "../../../src/fetch/store.rs"]
    pub mod store;
}
#[path = "../../src/model/mod.rs"]
pub mod model;
#[path = "../../src/text/mod.rs"]
pub mod text;
#[path = "../../src/weights/mod.rs"]
pub mod weights;

#[path = "../targets.rs"]
pub mod targets;

pub use error::{Error, Result};
