//! Work in parallel pieces: all cores natively, one thread in a page.
//!
//! A call is some three hundred short stretches of parallel work, ten microseconds each. A thread that sleeps takes longer to
//! wake than such a stretch lasts, so the threads of a [`Crew`] look for work without sleeping for as long as calls follow one
//! another, and go back to rayon's pool when none came for a while. Nobody waits for a thread that has not begun: whoever is
//! there takes the next piece.

#[cfg(not(target_arch = "wasm32"))]
pub(super) use crew::Crew;

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

/// One thread.
#[cfg(target_arch = "wasm32")]
#[derive(Debug, Default)]
pub(super) struct Crew;

#[cfg(target_arch = "wasm32")]
impl Crew {
    pub fn call(&self) {}

    /// As natively, one piece after the other.
    pub fn pieces<T: Send>(&mut self, values: &mut [T], size: usize, work: impl Fn(usize, &mut [T]) + Sync) {
        for (i, piece) in values.chunks_mut(size.max(1)).enumerate() {
            work(i, piece);
        }
    }
}

#[cfg(not(target_arch = "wasm32"))]
mod crew {
    use std::cell::UnsafeCell;
    use std::fmt;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    use super::threads;

    /// How long a thread looks for work before it goes: longer than what lies between two calls of a text.
    const PATIENCE: Duration = Duration::from_micros(300);

    /// The threads that help one model's calls.
    #[derive(Debug, Default)]
    pub struct Crew(Arc<Shared>);

    #[derive(Default)]
    struct Shared {
        /// `job << 32 | open | helpers inside`: a helper enters only while a job is open, and nobody writes the job before all
        /// have left.
        gate: AtomicU64,
        job: UnsafeCell<Option<Job>>,
        /// The next piece.
        next: AtomicUsize,
        /// Helpers that were sent for and have not gone.
        sent_for: AtomicUsize,
        panicked: AtomicBool,
    }

    const OPEN: u64 = 1 << 31;
    const INSIDE: u64 = OPEN - 1;

    #[derive(Clone, Copy)]
    struct Job {
        /// Lives until the gate is closed and everybody has left.
        work: *const (dyn Fn(usize) + Sync),
        count: usize,
    }

    // SAFETY: `job` is written by the one thread that owns the crew while the gate is closed and nobody inside, and read by
    // helpers inside only; `Job::work` is `Sync`.
    unsafe impl Send for Shared {}
    // SAFETY: as above.
    unsafe impl Sync for Shared {}

    impl fmt::Debug for Shared {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_struct("Shared").field("gate", &self.gate).finish_non_exhaustive()
        }
    }

    impl Crew {
        /// Sends for the threads: at the begin of a call.
        pub fn call(&self) {
            while self.0.sent_for.load(Ordering::Relaxed) + 1 < threads() {
                self.0.sent_for.fetch_add(1, Ordering::Relaxed);
                let shared = Arc::clone(&self.0);
                rayon::spawn(move || shared.help());
            }
        }

        /// Runs `work(i, piece)` on every piece of `size` values (the last may be shorter); `i` is the index of the piece.
        pub fn pieces<T: Send>(&mut self, values: &mut [T], size: usize, work: impl Fn(usize, &mut [T]) + Sync) {
            let (len, size) = (values.len(), size.max(1));
            if len <= size || self.0.sent_for.load(Ordering::Relaxed) == 0 {
                for (i, piece) in values.chunks_mut(size).enumerate() {
                    work(i, piece);
                }
                return;
            }
            let base = Base(values.as_mut_ptr());
            self.run(len.div_ceil(size), &|i| {
                let first = i * size;
                // SAFETY: pieces lie apart within `values`, which is borrowed until `run` returns, and each `i` is run once.
                work(i, unsafe { std::slice::from_raw_parts_mut(base.get().add(first), size.min(len - first)) });
            });
        }

        /// Runs `work(i)` once for every `i` below `count`; returns when all are done.
        fn run(&mut self, count: usize, work: &(dyn Fn(usize) + Sync)) {
            /// Closes the gate and waits for helpers, also when the own part of the work panics.
            struct Close<'a>(&'a Shared);
            impl Drop for Close<'_> {
                fn drop(&mut self) {
                    self.0.gate.fetch_and(!OPEN, Ordering::Relaxed);
                    let mut turns = 0u32;
                    while self.0.gate.load(Ordering::Acquire) & INSIDE != 0 {
                        pause(&mut turns);
                    }
                }
            }
            let shared = &*self.0;
            shared.panicked.store(false, Ordering::Relaxed);
            // SAFETY: only the lifetime is changed. The gate is closed and nobody inside (`Close` saw to it, and `self` is
            // borrowed alone), and it will be so again before this function returns, so before `work` ends.
            unsafe {
                type Work<'a> = dyn Fn(usize) + Sync + 'a;
                let work = std::mem::transmute::<*const Work<'_>, *const Work<'static>>(std::ptr::from_ref(work));
                *shared.job.get() = Some(Job { work, count });
            }
            shared.next.store(0, Ordering::Relaxed);
            let job = (shared.gate.load(Ordering::Relaxed) >> 32) as u32;
            shared.gate.store(u64::from(job.wrapping_add(1)) << 32 | OPEN, Ordering::Release);
            {
                let _close = Close(shared);
                shared.take(count, work);
            }
            assert!(!shared.panicked.swap(false, Ordering::Relaxed), "a piece of parallel work panicked");
        }
    }

    impl Shared {
        /// Runs pieces until none is left.
        fn take(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
            loop {
                let i = self.next.fetch_add(1, Ordering::Relaxed);
                if i >= count {
                    return;
                }
                work(i);
            }
        }

        /// A helper's life: one job after the other, until none comes.
        fn help(&self) {
            let (mut last, mut turns, mut since) = (u64::MAX, 0u32, Instant::now());
            while since.elapsed() < PATIENCE {
                for _ in 0..64 {
                    let gate = self.gate.load(Ordering::Relaxed);
                    let entered = gate & OPEN != 0
                        && gate >> 32 != last
                        && self.gate.compare_exchange(gate, gate + 1, Ordering::Acquire, Ordering::Relaxed).is_ok();
                    if !entered {
                        pause(&mut turns);
                        continue;
                    }
                    last = gate >> 32;
                    // SAFETY: inside an open gate there is a job, whose work lives until this helper has left.
                    if let Some(Job { work, count }) = unsafe { *self.job.get() } {
                        // SAFETY: as above.
                        let run = AssertUnwindSafe(|| self.take(count, unsafe { &*work }));
                        if catch_unwind(run).is_err() {
                            self.panicked.store(true, Ordering::Relaxed);
                        }
                    }
                    self.gate.fetch_sub(1, Ordering::Release);
                    (turns, since) = (0, Instant::now());
                }
            }
            self.sent_for.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Waits a moment: at first for some cycles, then, on a busy machine, for others that have work.
    fn pause(turns: &mut u32) {
        *turns += 1;
        if turns.is_multiple_of(1024) { std::thread::yield_now() } else { std::hint::spin_loop() }
    }

    struct Base<T>(*mut T);

    impl<T> Base<T> {
        fn get(&self) -> *mut T {
            self.0
        }
    }

    // SAFETY: pieces of the values are handed to one thread each, and `T` is `Send`.
    unsafe impl<T: Send> Sync for Base<T> {}

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn every_piece_is_worked_on_once_by_several_threads() {
            let mut crew = Crew::default();
            let seen = std::sync::Mutex::new(std::collections::HashSet::new());
            for round in 0..3000 {
                crew.call();
                let (len, size) = (1 + round % 57, 1 + round % 5);
                let mut values = vec![0usize; len];
                crew.pieces(&mut values, size, |i, piece| {
                    if round % 100 == 0 {
                        std::thread::sleep(Duration::from_micros(20));
                        seen.lock().unwrap().insert(std::thread::current().id());
                    }
                    for (j, v) in piece.iter_mut().enumerate() {
                        *v += i * size + j + 1;
                    }
                });
                assert!(values.iter().zip(1..).all(|(v, want)| *v == want), "round {round}: {values:?}");
            }
            // Control: it is not one thread that does it all.
            assert!(threads() == 1 || seen.lock().unwrap().len() > 1);
        }

        #[test]
        fn a_panic_comes_back_and_the_crew_goes_on() {
            let mut crew = Crew::default();
            for _ in 0..20 {
                crew.call();
                let mut values = vec![0; 40];
                let run = catch_unwind(AssertUnwindSafe(|| {
                    crew.pieces(&mut values, 1, |i, _| {
                        std::thread::sleep(Duration::from_micros(10));
                        assert_ne!(i, 33, "as it should");
                    });
                }));
                assert!(run.is_err());
                crew.pieces(&mut values, 1, |_, piece| piece.fill(2));
                assert_eq!(values, [2; 40]);
            }
        }

        #[test]
        fn helpers_go_when_nothing_comes() {
            let crew = Crew::default();
            crew.call();
            assert_eq!(crew.0.sent_for.load(Ordering::Relaxed) + 1, threads());
            let begun = Instant::now();
            while crew.0.sent_for.load(Ordering::Relaxed) > 0 {
                assert!(begun.elapsed() < Duration::from_secs(20), "helpers stay");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}
