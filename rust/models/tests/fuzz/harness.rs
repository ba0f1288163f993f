//! Runs a reader of files, such as those of weights, over damaged files. Checks that the reader does not panic, does
//! not hang, and takes at most 10 · (bytes of its input) + 1 MiB of memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::env::VarError;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::mutate::Rng;

/// Bytes of memory that a reader may take for each byte of its input, in addition to [`MEMORY_BASE`].
const MEMORY_FACTOR: usize = 10;
/// Bytes of memory that a reader may take even for an empty input.
const MEMORY_BASE: usize = 1 << 20;
/// Seconds after which a reader of a few kilobytes counts as hanging.
const HANG_SECONDS: u64 = 120;

/// In the place of a case's number, tells the thread of [`Watch`] to end.
const DONE: u64 = u64::MAX;

/// Counts allocated bytes, and passes each call to the system's allocator.
struct Counting;

/// Bytes that are allocated now.
static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
/// The largest value of `ALLOCATED` since the start of the current case.
static PEAK: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Counts `size` more allocated bytes.
fn count(size: usize) {
    PEAK.fetch_max(ALLOCATED.fetch_add(size, Ordering::Relaxed) + size, Ordering::Relaxed);
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller fulfils the conditions of the allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller fulfils the conditions of the allocator.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller fulfils the conditions of the allocator.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Counts both blocks, because the allocator may need both while it copies.
        count(size);
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller fulfils the conditions of the allocator.
        unsafe { System.realloc(block, layout, size) }
    }
}

/// A folder for the files of one reader. It is also a lock: memory is counted for the whole process, so only one test
/// at a time may have a folder. Tests create their folder before they prepare their files, because that takes memory.
pub struct Folder {
    path: PathBuf,
    _lock: MutexGuard<'static, ()>,
}

impl Folder {
    pub fn new(reader: &str) -> Self {
        static LOCK: Mutex<()> = Mutex::new(());
        let lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let path = std::env::temp_dir().join(format!("fuzz-{reader}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self { path, _lock: lock }
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Files of a failed case are kept for inspection.
        if !std::thread::panicking() {
            drop(std::fs::remove_dir_all(&self.path));
        }
    }
}

/// The whole number in the environment variable `name`, or `default` if the variable is not set.
fn setting(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text}, expected a whole number")),
        Err(VarError::NotPresent) => default,
        Err(error) => panic!("{name}: {error}"),
    }
}

/// Writes `FUZZ_CASES` damaged versions of the contents `valid` to `file`, one after the other, and reads each.
/// `damage` makes a damaged version. `read` returns whether the reader accepted `file`; it must accept each of `valid`.
/// `others` is the total size in bytes of the other files that the reader reads. `FUZZ_SEED` seeds the random numbers,
/// and `FUZZ_FIRST` is the number of the first case. Panics if the reader fails a check.
pub fn run(
    reader: &str,
    file: &Path,
    valid: &[Vec<u8>],
    others: usize,
    damage: impl Fn(&mut Rng, &[u8]) -> Vec<u8>,
    mut read: impl FnMut() -> bool,
) {
    let (cases, seed, first) = (setting("FUZZ_CASES", 1000), setting("FUZZ_SEED", 0), setting("FUZZ_FIRST", 0));
    for (number, bytes) in valid.iter().enumerate() {
        std::fs::write(file, bytes).unwrap();
        assert!(read(), "{reader}: valid file {number} is rejected");
    }
    let watch = Watch::start(reader);
    let mut accepted = 0;
    for case in first..first + cases {
        watch.0.store(case, Ordering::Relaxed);
        let mut rng = Rng::new(seed, case);
        let damaged = damage(&mut rng, &valid[case as usize % valid.len()]);
        std::fs::write(file, &damaged).unwrap();
        let allocated_before = ALLOCATED.load(Ordering::Relaxed);
        PEAK.store(allocated_before, Ordering::Relaxed);
        let outcome = catch_unwind(AssertUnwindSafe(&mut read));
        let taken = PEAK.load(Ordering::Relaxed).saturating_sub(allocated_before);
        let case_name = || format!("{reader}: case {case} of seed {seed}, in {}", file.display());
        let Ok(is_accepted) = outcome else { panic!("{}: panicked", case_name()) };
        let limit = MEMORY_FACTOR * (damaged.len() + others) + MEMORY_BASE;
        assert!(taken <= limit, "{}: took {taken} bytes of memory, expected at most {limit}", case_name());
        accepted += u64::from(is_accepted);
    }
    println!("{reader}: {cases} cases of seed {seed} from case {first} on, {accepted} of them accepted");
}

/// The number of the current case, which a thread watches: it aborts the process if a case hangs.
struct Watch(Arc<AtomicU64>);

impl Watch {
    fn start(reader: &str) -> Self {
        let current = Arc::new(AtomicU64::new(0));
        let (watched, reader) = (Arc::clone(&current), reader.to_owned());
        std::thread::spawn(move || {
            let (mut last, mut unchanged_seconds) = (0, 0);
            while last != DONE {
                std::thread::sleep(Duration::from_secs(1));
                let case = watched.load(Ordering::Relaxed);
                unchanged_seconds = if case == last { unchanged_seconds + 1 } else { 0 };
                last = case;
                if unchanged_seconds > HANG_SECONDS && case != DONE {
                    eprintln!("{reader}: case {case} hangs");
                    std::process::abort();
                }
            }
        });
        Self(current)
    }
}

impl Drop for Watch {
    /// Ends the thread, also after a case that failed a check.
    fn drop(&mut self) {
        self.0.store(DONE, Ordering::Relaxed);
    }
}
