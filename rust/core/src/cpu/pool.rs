//! The thread pool of the CPU engine.
//!
//! All CPU work of the library runs on one pool, whose size [`set_num_threads`] may change at any time. [`par_ranges`]
//! splits work at boundaries that depend on its arguments alone, never on the number of threads, and kernels compute
//! each element in the same way on any thread. So results are the same bit for bit with any pool. The calling thread
//! takes part in the work, and work that fits in one piece does not use the pool.

use std::any::Any;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, TryLockError};

use crate::{Error, Result};

/// The usual `grain` of [`par_ranges`]: the number of elements that a thread takes at a time.
pub(super) const GRAIN: usize = 32 * 1024;

/// Number of threads of the pool; 0 until [`num_threads`] or [`set_num_threads`] is first called.
static NUM_THREADS: AtomicUsize = AtomicUsize::new(0);

/// The pool, created at its first use. It is replaced, never resized, so running calls keep the pool they started on.
static POOL: RwLock<Option<Threads>> = RwLock::new(None);

/// A pool, and the process in which its threads run. A forked process inherits the pool without the threads, so work
/// given to that pool would never be done.
struct Threads {
    pool: Arc<rayon::ThreadPool>,
    process: u32,
}

impl Threads {
    /// Starts a pool of `n` threads.
    fn start(n: usize) -> std::result::Result<Self, rayon::ThreadPoolBuildError> {
        let builder = rayon::ThreadPoolBuilder::new().num_threads(n).thread_name(|i| format!("trainable-candle-{i}"));
        Ok(Self { pool: Arc::new(builder.build()?), process: std::process::id() })
    }

    /// Returns the pool if its threads run in this process.
    fn here(&self) -> Option<Arc<rayon::ThreadPool>> {
        (self.process == std::process::id()).then(|| Arc::clone(&self.pool))
    }

    /// Drops the pool if its threads run in this process; they end when no running call uses them. Otherwise leaks the
    /// pool: its threads are in another process, and locks that they held at the fork are never released.
    fn end(self) {
        if self.here().is_none() {
            std::mem::forget(self);
        }
    }
}

/// The maximum number of threads of a pool, so that a mistyped number does not exhaust the machine.
const MOST_THREADS: usize = 1024;

/// Returns the number of threads over which CPU work is spread, including the calling thread.
///
/// Defaults to the environment variable `RAYON_NUM_THREADS` if it is a number from 1 to 1024, otherwise to the number
/// of processors that this process may use, or to 1 if that number is unknown.
pub fn num_threads() -> usize {
    match NUM_THREADS.load(Ordering::Relaxed) {
        0 => {
            let n = default_num_threads();
            // If another thread has set a value meanwhile, that value stays.
            match NUM_THREADS.compare_exchange(0, n, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => n,
                Err(set) => set,
            }
        }
        n => n,
    }
}

/// Sets the number of threads over which CPU work is spread. Results do not depend on it.
///
/// # Errors
/// [`Error::Argument`] if `n` is 0 or above 1024, or if the operating system cannot start the threads; the pool is then
/// unchanged.
pub fn set_num_threads(n: usize) -> Result<()> {
    if n == 0 || n > MOST_THREADS {
        return Err(Error::argument("set_num_threads", format!("found {n} threads, expected 1 to {MOST_THREADS}")));
    }
    let new =
        Threads::start(n).map_err(|e| Error::argument("set_num_threads", format!("cannot start {n} threads: {e}")))?;
    let old = {
        let mut slot = POOL.write().unwrap_or_else(PoisonError::into_inner);
        NUM_THREADS.store(n, Ordering::Relaxed);
        slot.replace(new)
    };
    // The old pool is dropped outside the lock, because dropping a pool wakes all its threads.
    if let Some(old) = old {
        old.end();
    }
    Ok(())
}

/// Runs `f` on a thread of the pool, so that rayon calls in `f` use this pool, including calls in other crates. If the
/// pool's threads cannot be started or another thread is changing the pool, runs `f` on the calling thread.
pub fn run<R: Send>(f: impl FnOnce() -> R + Send) -> R {
    match pool() {
        Some(pool) => pool.install(f),
        None => f(),
    }
}

/// Calls `f` once for each piece of `0..len`, on several threads. All pieces have `grain` elements (1 if `grain` is 0)
/// except the last, which may have fewer. An empty range makes no call; a range of at most `grain` elements makes one
/// call on this thread.
///
/// # Panics
/// If `f` panics.
pub fn par_ranges(len: usize, grain: usize, f: impl Fn(Range<usize>) + Sync) {
    let grain = grain.max(1);
    if len <= grain {
        if len > 0 {
            f(0..len);
        }
        return;
    }
    let pieces = len.div_ceil(grain);
    let compute_piece = |i: usize| f(i * grain..len.min((i + 1) * grain));
    let helpers = num_threads().min(pieces) - 1;
    let pool = if helpers > 0 { pool() } else { None };
    let Some(pool) = pool else {
        (0..pieces).for_each(compute_piece);
        return;
    };
    let job = Arc::new(Job::new(&compute_piece, pieces));
    for _ in 0..helpers {
        let job = Arc::clone(&job);
        pool.spawn(move || job.work());
    }
    job.finish();
}

/// Pieces of work that threads take one by one.
///
/// The caller waits for the pieces that other threads have taken, but not for the threads themselves: if the threads
/// wake too late, the caller does all the work and returns. Spreading small work thus costs little more than waking
/// threads. Rayon's scopes would wait for the threads, which takes longer than many operations.
struct Job {
    /// Computes the piece with the given index. The pointer is valid until the last piece is done.
    compute_piece: *const (dyn Fn(usize) + Sync),
    /// Number of pieces.
    pieces: usize,
    /// Index of the next piece to take; `pieces` or more when all are taken.
    taken: AtomicUsize,
    /// Number of pieces that have been computed or have panicked.
    done: AtomicUsize,
    /// The last panic in a piece.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: the function behind the pointer is `Sync`, so it may be called from any thread.
unsafe impl Send for Job {}
// SAFETY: as above; all other fields are constant, atomic or locked.
unsafe impl Sync for Job {}

impl Job {
    /// Creates a job of `pieces` pieces. The caller must call [`finish`](Self::finish) while `compute_piece` is alive.
    fn new<'a>(compute_piece: &'a (dyn Fn(usize) + Sync + 'a), pieces: usize) -> Self {
        // SAFETY: only the lifetime changes. `work` calls the function only for pieces that are not done, and `finish`,
        // whose caller owns the function, does not return before all pieces are done.
        let compute_piece = unsafe {
            std::mem::transmute::<&'a (dyn Fn(usize) + Sync + 'a), &'static (dyn Fn(usize) + Sync)>(compute_piece)
        };
        Self { compute_piece, pieces, taken: AtomicUsize::new(0), done: AtomicUsize::new(0), panic: Mutex::new(None) }
    }

    /// Takes and computes pieces until all pieces are taken.
    fn work(&self) {
        loop {
            let i = self.taken.fetch_add(1, Ordering::Relaxed);
            if i >= self.pieces {
                break;
            }
            // SAFETY: piece `i` is not done yet, so `finish` has not returned and the function is still alive.
            let compute_piece = unsafe { &*self.compute_piece };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| compute_piece(i))) {
                *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
            }
            self.done.fetch_add(1, Ordering::Release);
        }
    }

    /// Takes part in the work and returns when all of it is done. If a piece has panicked, the panic continues here.
    fn finish(&self) {
        self.work();
        let mut spins = 0u32;
        while self.done.load(Ordering::Acquire) < self.pieces {
            // Other threads usually finish their last pieces within microseconds. If they need longer, spinning on this
            // processor would slow them down.
            if spins < 10_000 {
                spins += 1;
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        if let Some(panic) = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take() {
            resume_unwind(panic);
        }
    }
}

/// Calls `f(index, piece)` once for each piece of `chunk` elements of `data` (the last may have fewer), on several
/// threads. Data that fits in one piece is handled on this thread.
///
/// # Panics
/// If `f` panics.
pub fn par_chunks_mut<T: Send>(data: &mut [T], chunk: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    let chunk = chunk.max(1);
    let len = data.len();
    let shared = SharedMut::new(data);
    par_ranges(len, chunk, |range| {
        let index = range.start / chunk;
        // SAFETY: the ranges of one `par_ranges` call are disjoint and within the data.
        f(index, unsafe { shared.slice(range) });
    });
}

/// A mutable slice whose disjoint parts several threads write, for kernels that [`par_chunks_mut`] does not fit, such
/// as those with more than one output.
pub struct SharedMut<'a, T> {
    ptr: *mut T,
    len: usize,
    data: PhantomData<&'a mut [T]>,
}

// SAFETY: safe code cannot reach the elements. The callers of the unsafe `slice` promise that parts are disjoint, so
// each thread has no more than a `&mut [T]` of its own, which `T: Send` allows.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    /// Borrows `data` mutably for the lifetime of the result.
    pub fn new(data: &'a mut [T]) -> Self {
        Self { ptr: data.as_mut_ptr(), len: data.len(), data: PhantomData }
    }

    /// Returns a pointer to the first element, for kernels that write through pointers and guarantee themselves that
    /// the parts are disjoint.
    pub fn as_ptr(&self) -> *mut T {
        self.ptr
    }

    /// Returns the elements of `range`.
    ///
    /// # Safety
    /// Ranges whose slices are alive at the same time must not overlap.
    ///
    /// # Panics
    /// If `range` ends before its start or after the end of the slice.
    #[allow(clippy::mut_from_ref)]
    #[inline(always)]
    pub unsafe fn slice(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds by the assertion, disjoint by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(range.start), range.len()) }
    }
}

/// Computes the default of [`num_threads`].
fn default_num_threads() -> usize {
    let from_env = std::env::var("RAYON_NUM_THREADS")
        .ok()
        .and_then(|v| v.trim().parse::<usize>().ok())
        .filter(|n| (1..=MOST_THREADS).contains(n));
    from_env.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Returns the pool, which is started if this process has none. Returns `None` if the threads cannot be started or
/// another thread is changing the pool; the calling thread then does the work alone. Never waits for the lock: a lock
/// that another thread held when this process was forked is never released.
fn pool() -> Option<Arc<rayon::ThreadPool>> {
    let here = |slot: &Option<Threads>| slot.as_ref().and_then(Threads::here);
    match POOL.try_read() {
        Ok(slot) => {
            if let Some(pool) = here(&slot) {
                return Some(pool);
            }
        }
        // A thread panicked while it held the lock. The pool is replaced in one step, so it is intact.
        Err(TryLockError::Poisoned(_)) => {}
        Err(TryLockError::WouldBlock) => return None,
    }
    let mut slot = match POOL.try_write() {
        Ok(slot) => slot,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return None,
    };
    // Starts a pool if this process has none. If `replace` then returns a pool, a fork has inherited it.
    if here(&slot).is_none()
        && let Some(inherited) = std::mem::replace(&mut *slot, Threads::start(num_threads()).ok())
    {
        inherited.end();
    }
    here(&slot)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Held by tests that change the number of threads, which is global in the process.
    static CHANGING_THREADS: Mutex<()> = Mutex::new(());

    /// Returns the results of `f` with 1 and with `n` threads.
    pub(crate) fn with_1_and_n_threads<R>(n: usize, f: impl Fn() -> R) -> (R, R) {
        let _guard = CHANGING_THREADS.lock().unwrap_or_else(PoisonError::into_inner);
        let previous = num_threads();
        set_num_threads(1).unwrap();
        let one = f();
        set_num_threads(n).unwrap();
        let many = f();
        set_num_threads(previous).unwrap();
        (one, many)
    }

    #[test]
    fn ranges_cover_everything_once_whatever_the_number_of_threads() {
        for len in [0, 1, 7, 8, 9, 64, 1000] {
            for grain in [0, 1, 8, 2000] {
                let pieces = || {
                    let seen = Mutex::new(Vec::new());
                    par_ranges(len, grain, |r| seen.lock().unwrap().push((r.start, r.end)));
                    let mut seen = seen.into_inner().unwrap();
                    seen.sort_unstable();
                    seen
                };
                let (one, many) = with_1_and_n_threads(3, pieces);
                assert_eq!(one, many);
                let mut end = 0;
                for &(start, stop) in &one {
                    assert_eq!(start, end);
                    assert!(stop > start && stop - start <= grain.max(1));
                    end = stop;
                }
                assert_eq!(end, len);
            }
        }
    }

    #[test]
    fn chunks_are_given_with_their_index() {
        let mut data = vec![0usize; 1003];
        par_chunks_mut(&mut data, 10, |index, chunk| {
            for (i, x) in chunk.iter_mut().enumerate() {
                *x += index * 10 + i;
            }
        });
        assert!(data.iter().enumerate().all(|(i, &x)| i == x));
    }

    #[test]
    fn several_threads_take_part_and_nested_calls_finish() {
        let (_, threads) = with_1_and_n_threads(4, || {
            let ids = Mutex::new(std::collections::HashSet::new());
            par_ranges(64, 1, |_| {
                // Gives the other threads time to wake up and take a piece.
                std::thread::sleep(std::time::Duration::from_millis(1));
                ids.lock().unwrap().insert(std::thread::current().id());
                par_ranges(16, 4, |r| assert_eq!(r.len(), 4));
            });
            ids.into_inner().unwrap().len()
        });
        assert_eq!(threads, 4);
    }

    #[test]
    fn run_uses_this_pool() {
        let (one, many) = with_1_and_n_threads(3, || run(rayon::current_num_threads));
        assert_eq!((one, many), (1, 3));
    }

    #[test]
    fn a_panic_in_a_piece_reaches_the_caller_and_later_calls_work() {
        let caught = catch_unwind(|| par_ranges(100, 1, |r| assert_ne!(r.start, 42)));
        assert!(caught.is_err());
        par_ranges(100, 1, |_| ());
    }

    #[test]
    fn numbers_of_threads_outside_1_to_1024_are_errors() {
        for n in [0, MOST_THREADS + 1, usize::MAX] {
            let message = set_num_threads(n).unwrap_err().to_string();
            assert!(message.contains("expected 1 to 1024"), "{message}");
        }
    }
}
