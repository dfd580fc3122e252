//! Work in parallel pieces: all cores natively, one thread in a page.

/// Runs `work(i, piece)` on every piece of `size` values (the last may be shorter); `i` is the index of the piece.
pub(super) fn pieces<T: Send>(values: &mut [T], size: usize, work: impl Fn(usize, &mut [T]) + Sync + Send) {
    #[cfg(not(target_arch = "wasm32"))]
    if values.len() > size && threads() > 1 {
        use rayon::prelude::*;
        values.par_chunks_mut(size.max(1)).enumerate().for_each(|(i, piece)| work(i, piece));
        return;
    }
    for (i, piece) in values.chunks_mut(size.max(1)).enumerate() {
        work(i, piece);
    }
}

/// How many threads work.
pub(super) fn threads() -> usize {
    #[cfg(not(target_arch = "wasm32"))]
    return if have_pool() { rayon::current_num_threads() } else { 1 };
    #[cfg(target_arch = "wasm32")]
    1
}

/// Whether there are threads to share work with. Where the system gives none (a limit on processes or memory), asking
/// rayon for their number would panic.
#[cfg(not(target_arch = "wasm32"))]
fn have_pool() -> bool {
    static POOL: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    // An error without a source is one of a pool that is there already.
    *POOL.get_or_init(|| {
        rayon::ThreadPoolBuilder::new().build_global().map_or_else(|error| std::error::Error::source(&error).is_none(), |()| true)
    })
}

/// The size of piece that shares `items` out evenly, a few pieces a thread where there are enough.
pub(super) fn share(items: usize) -> usize {
    match threads() {
        1 => items.max(1),
        n => items.div_ceil(4 * n).max(1),
    }
}
