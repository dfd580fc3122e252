//! Of this room what parses. A file of its own: paths inside a block would go through a folder that git does not keep.

#[path = "../../src/fetch/locator.rs"]
pub mod locator;
#[path = "../../src/fetch/running_hash.rs"]
pub(crate) mod running_hash;
#[path = "../../src/fetch/store.rs"]
pub mod store;
