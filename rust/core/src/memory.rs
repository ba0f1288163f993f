//! The bytes that the tape keeps, and the bytes that are available on the host.

use std::sync::{Mutex, MutexGuard};

use rustc_hash::FxHashMap;

use crate::raw::{Raw, storage_identity};

#[derive(Default)]
struct Ledger {
    /// Storage address -> (number of saved tensors on it, bytes of the storage).
    entries: FxHashMap<usize, (usize, usize)>,
    /// The bytes of all storages in `entries`.
    bytes: usize,
}

/// The saved tensors of all threads. `None` until the first tensor is saved.
static LEDGER: Mutex<Option<Ledger>> = Mutex::new(None);

fn ledger() -> MutexGuard<'static, Option<Ledger>> {
    // A panic while the ledger is locked leaves the ledger consistent: only the insertion of an entry can panic, before
    // any change.
    LEDGER.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The bytes of storage that the tape keeps for backward passes: activations that operations have saved, and inputs
/// that checkpoints keep. Each storage is counted once. Parameters (variables and frozen weights) are not counted: they
/// stay in memory in any case.
pub fn saved_bytes() -> usize {
    ledger().as_ref().map_or(0, |l| l.bytes)
}

/// Counts the storage of one saved tensor until this object is dropped. The field is the address of the storage.
#[derive(Debug)]
pub(crate) struct SavedBytes(usize);

impl SavedBytes {
    pub(crate) fn new(raw: &Raw) -> Self {
        let (address, bytes) = storage_identity(raw);
        let mut guard = ledger();
        let ledger = guard.get_or_insert_default();
        let entry = ledger.entries.entry(address).or_insert((0, bytes));
        entry.0 += 1;
        if entry.0 == 1 {
            ledger.bytes += bytes;
        }
        Self(address)
    }
}

impl Drop for SavedBytes {
    fn drop(&mut self) {
        let mut guard = ledger();
        let ledger = guard.get_or_insert_default();
        if let std::collections::hash_map::Entry::Occupied(mut entry) = ledger.entries.entry(self.0) {
            entry.get_mut().0 -= 1;
            if entry.get().0 == 0 {
                ledger.bytes -= entry.get().1;
                entry.remove();
            }
        }
    }
}

/// The bytes of host memory that can still be allocated. `None` if the system does not report them; Linux does.
pub fn available_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|l| l.starts_with("MemAvailable:"))?;
    let kib: usize = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}
