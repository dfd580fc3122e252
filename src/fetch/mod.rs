//! Checkpoints from the network, and what is kept of them: one core for the browser and for native programs, which lend it
//! two things, a [`transport::Transport`] that makes one request and a [`store::BlobStore`] of named blobs.

pub mod http_source;
pub mod locator;
#[cfg(not(target_arch = "wasm32"))]
pub mod native;
pub mod remote;
pub(crate) mod running_hash;
pub mod store;
pub mod transport;

#[cfg(test)]
mod fake;
