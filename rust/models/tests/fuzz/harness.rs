//! Runs a reader over damaged files. Checks that the reader does not panic, does not hang, and takes at most
//! 10 · (bytes of its input) + 1 MiB of memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::env::VarError;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::mutate::Rng;

/// Bytes of memory that a reader may take for each byte of its input, in addition to [`MEMORY_FREE`].
const MEMORY_FACTOR: usize = 10;
/// Bytes of memory that a reader may take for any input.
const MEMORY_FREE: usize = 1 << 20;
/// Seconds after which a reader of a few kilobytes counts as hanging.
const HANG: u64 = 120;

/// Counts allocated bytes, and passes each call to the system's allocator.
struct Counting;

/// Bytes that are allocated now.
static NOW: AtomicUsize = AtomicUsize::new(0);
/// The largest value of `NOW` since the start of the current case.
static PEAK: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn grown(size: usize) {
    PEAK.fetch_max(NOW.fetch_add(size, Ordering::Relaxed) + size, Ordering::Relaxed);
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: the caller fulfils the conditions of the allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: the caller fulfils the conditions of the allocator.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller fulfils the conditions of the allocator.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        grown(size);
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller fulfils the conditions of the allocator.
        unsafe { System.realloc(block, layout, size) }
    }
}

/// A folder for the files of one reader. It is also a lock: memory is counted for the whole process, so only one test
/// at a time may have a folder. Tests create their folder before they prepare their files.
pub struct Folder {
    path: PathBuf,
    _alone: MutexGuard<'static, ()>,
}

impl Folder {
    pub fn new(reader: &str) -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let path = std::env::temp_dir().join(format!("fuzz-{reader}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self { path, _alone: alone }
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

/// The number in the environment variable `name`.
fn setting(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text}, expected a whole number")),
        Err(VarError::NotPresent) => default,
        Err(error) => panic!("{name}: {error}"),
    }
}

/// Writes `FUZZ_CASES` damaged versions of the files `valid` to `file`, one after the other, and reads each. `read`
/// returns whether the reader accepted the file; the reader must accept the valid files. `others` is the total size in
/// bytes of the other files that the reader reads. `FUZZ_SEED` seeds the random numbers, and `FUZZ_FIRST` is the number
/// of the first case.
pub fn run(
    reader: &str,
    file: &Path,
    valid: &[Vec<u8>],
    others: usize,
    mutate: impl Fn(&mut Rng, &[u8]) -> Vec<u8>,
    mut read: impl FnMut() -> bool,
) {
    let (cases, seed, first) = (setting("FUZZ_CASES", 1000), setting("FUZZ_SEED", 0), setting("FUZZ_FIRST", 0));
    for (number, bytes) in valid.iter().enumerate() {
        std::fs::write(file, bytes).unwrap();
        assert!(read(), "{reader}: valid file {number} is rejected");
    }
    let progress = watch(reader);
    let mut accepted = 0;
    for case in first..first + cases {
        progress.store(case, Ordering::Relaxed);
        let mut rng = Rng::new(seed, case);
        let damaged = mutate(&mut rng, &valid[case as usize % valid.len()]);
        std::fs::write(file, &damaged).unwrap();
        let before = NOW.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        let outcome = catch_unwind(AssertUnwindSafe(&mut read));
        let taken = PEAK.load(Ordering::Relaxed).saturating_sub(before);
        let name = || format!("{reader}: case {case} of seed {seed}, in {}", file.display());
        let Ok(good) = outcome else { panic!("{}: panicked", name()) };
        let most = MEMORY_FACTOR * (damaged.len() + others) + MEMORY_FREE;
        assert!(taken <= most, "{}: took {taken} bytes of memory, expected at most {most}", name());
        accepted += u64::from(good);
    }
    progress.store(u64::MAX, Ordering::Relaxed);
    println!("{reader}: {cases} cases of seed {seed} from case {first} on, {accepted} of them accepted");
}

/// Starts a thread that aborts the process if a case hangs. The caller stores the number of each case in the returned
/// counter, and `u64::MAX` after the last case.
fn watch(reader: &str) -> Arc<AtomicU64> {
    let progress = Arc::new(AtomicU64::new(0));
    let (seen, reader) = (Arc::clone(&progress), reader.to_owned());
    std::thread::spawn(move || {
        let (mut last, mut since) = (0, 0);
        while last != u64::MAX {
            std::thread::sleep(Duration::from_secs(1));
            let now = seen.load(Ordering::Relaxed);
            since = if now == last { since + 1 } else { 0 };
            last = now;
            if since > HANG && now != u64::MAX {
                eprintln!("{reader}: case {now} hangs");
                std::process::abort();
            }
        }
    });
    progress
}
