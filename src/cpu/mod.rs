//! Running calls without a GPU: the f64 reference that judges every other backend.

mod arrivals;
pub mod reference;
#[cfg(test)]
pub(crate) mod testing;
