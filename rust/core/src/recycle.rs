//! [`RecyclingAllocator`]: large blocks are kept for the next tensor instead of going back to the system.
//!
//! A training step frees and takes the same buffers again and again. The C library returns large freed blocks to the
//! system, which then provides memory page by page, zeroed. On small models this takes a quarter of the time of a step.
//! A program opts in with
//!
//! ```
//! use trainable_candle_core::RecyclingAllocator;
//!
//! #[global_allocator]
//! static ALLOCATOR: RecyclingAllocator = RecyclingAllocator::new();
//! # fn main() {}
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Blocks smaller than this come from the C library, which keeps freed blocks of such sizes itself.
const SMALLEST: usize = 1 << SMALLEST_LOG2;
const SMALLEST_LOG2: u32 = 16;
/// Blocks larger than this are not kept.
const LARGEST: usize = 1 << 37;
/// A block larger than this is kept only if a block of its size class has been taken after one was freed. Every
/// training step takes its buffers again; weights are taken only once.
const LARGEST_AT_ONCE: usize = 1 << 27;
/// The number of size classes per octave (a factor of two in size). The size of a block is rounded up to the size of
/// its class.
const STEPS: usize = 4;
/// `STEPS` classes for each octave from `SMALLEST` to `LARGEST`, and the class of exactly `SMALLEST` bytes.
const CLASSES: usize = (LARGEST.ilog2() - SMALLEST_LOG2) as usize * STEPS + 1;
/// The most blocks kept of each size class.
const KEPT: usize = 128;
/// While the store holds at most this many bytes, it keeps freed blocks of any size up to [`LARGEST_AT_ONCE`]. A fuller
/// store keeps a block only if a block of its size class has been taken after one was freed.
const MOST_BYTES: usize = 256 << 20;

/// The system's allocator with a store of freed blocks of 64 KiB and more.
///
/// The sizes of blocks are rounded up to size classes. The store keeps up to 256 MiB of freed blocks of any size up to
/// 128 MiB. Larger blocks, and blocks for which these 256 MiB have no room, are kept only if a block of their size
/// class has been taken after one was freed. The bytes in use and in the store together are at most 256 MiB more than
/// the largest number of bytes that were in use at one time.
///
/// The allocator never waits. While one thread changes the store's list for a size class, other threads take blocks of
/// that class from the system and return them to the system. If the process is forked during such a change, the child
/// process never uses the store for blocks of that class.
pub struct RecyclingAllocator {
    shelves: [Shelf; CLASSES],
    /// Bytes of the blocks in the store.
    bytes: AtomicUsize,
    /// Bytes of the blocks that the program uses at present, counted only for blocks that belong to a size class.
    used: AtomicUsize,
    /// The maximum of `used` so far.
    most_used: AtomicUsize,
}

impl RecyclingAllocator {
    /// An allocator with an empty store.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            shelves: [const { Shelf::new() }; CLASSES],
            bytes: AtomicUsize::new(0),
            used: AtomicUsize::new(0),
            most_used: AtomicUsize::new(0),
        }
    }

    /// Return kept blocks to the system, the largest first, until at most `bytes` are left.
    fn shrink(&self, bytes: usize) {
        for (class, shelf) in self.shelves.iter().enumerate().rev() {
            while self.bytes.load(Ordering::Relaxed) > bytes {
                let Some(block) = shelf.take() else { break };
                self.bytes.fetch_sub(size_of_class(class), Ordering::Relaxed);
                // SAFETY: blocks of this shelf were allocated with this layout.
                unsafe { System.dealloc(block, layout_of_class(class)) };
            }
        }
    }

    /// A block of a class: from the store if the store has one of this class, otherwise from the system.
    fn take(&self, class: usize) -> *mut u8 {
        let (shelf, size) = (&self.shelves[class], size_of_class(class));
        if shelf.freed.load(Ordering::Relaxed) {
            shelf.taken_again.store(true, Ordering::Relaxed);
        }
        let used = self.used.fetch_add(size, Ordering::Relaxed) + size;
        let most = self.most_used.fetch_max(used, Ordering::Relaxed).max(used);
        if let Some(block) = shelf.take() {
            self.bytes.fetch_sub(size, Ordering::Relaxed);
            return block;
        }
        // The new block adds to the bytes in use. So that used + stored <= most_used + MOST_BYTES, stored blocks are
        // returned to the system first.
        self.shrink(most - used + MOST_BYTES);
        self.fetch(class)
    }

    /// A block of a class from the system. If the system is out of memory, all blocks in the store are returned to it
    /// and the system is asked once more. Null if it is still out of memory.
    fn fetch(&self, class: usize) -> *mut u8 {
        // SAFETY: the size of a class is not zero.
        let mut block = unsafe { System.alloc(layout_of_class(class)) };
        if block.is_null() {
            self.shrink(0);
            // SAFETY: as above.
            block = unsafe { System.alloc(layout_of_class(class)) };
        }
        if block.is_null() {
            self.used.fetch_sub(size_of_class(class), Ordering::Relaxed);
        }
        block
    }

    /// Keep a block that is no longer in use, or return it to the system.
    fn put(&self, class: usize, block: *mut u8) {
        let (shelf, size) = (&self.shelves[class], size_of_class(class));
        self.used.fetch_sub(size, Ordering::Relaxed);
        shelf.freed.store(true, Ordering::Relaxed);
        let stored = self.bytes.fetch_add(size, Ordering::Relaxed) + size;
        let wanted = (size <= LARGEST_AT_ONCE && stored <= MOST_BYTES) || shelf.taken_again.load(Ordering::Relaxed);
        if wanted && shelf.put(block) {
            return;
        }
        self.bytes.fetch_sub(size, Ordering::Relaxed);
        // SAFETY: blocks of this class were allocated with this layout.
        unsafe { System.dealloc(block, layout_of_class(class)) };
    }
}

impl Default for RecyclingAllocator {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: a block is on at most one shelf, and a caller gets the block only after it was removed from the shelf. The
// layout that the system gets is a function of the caller's layout: the system allocates and frees a block with the
// same layout.
unsafe impl GlobalAlloc for RecyclingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match class_of(layout) {
            Some(class) => self.take(class),
            // SAFETY: the caller fulfils the conditions of `GlobalAlloc`.
            None => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some(class) = class_of(layout) else {
            // SAFETY: the caller fulfils the conditions of `GlobalAlloc`.
            return unsafe { System.alloc_zeroed(layout) };
        };
        let block = self.take(class);
        if !block.is_null() {
            // Only the `layout.size()` bytes of the caller are zeroed. The block's remaining bytes (up to the size of
            // its class) are not written, and so may take no physical memory.
            // SAFETY: the block is at least as large as the layout.
            unsafe { block.write_bytes(0, layout.size()) };
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        let Some(class) = class_of(layout) else {
            // SAFETY: the caller fulfils the conditions of `GlobalAlloc`; a block of this layout came from the system.
            return unsafe { System.dealloc(block, layout) };
        };
        self.put(class, block);
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promises that the size does not overflow when rounded up to the alignment.
        let new_layout = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        match (class_of(layout), class_of(new_layout)) {
            // SAFETY: the caller fulfils the conditions of `GlobalAlloc`; the block came from the system.
            (None, None) => unsafe { System.realloc(block, layout, size) },
            (Some(class), Some(same)) if class == same => block,
            _ => {
                // SAFETY: the new block has `size` bytes, the old one `layout.size()`, and they do not overlap.
                unsafe {
                    let moved = self.alloc(new_layout);
                    if !moved.is_null() {
                        block.copy_to_nonoverlapping(moved, size.min(layout.size()));
                        self.dealloc(block, layout);
                    }
                    moved
                }
            }
        }
    }
}

/// The kept blocks of one size class, a stack.
struct Shelf {
    /// Set while a thread uses `blocks`: a lock for which no thread waits.
    busy: AtomicBool,
    /// Whether a block of this class has ever been freed.
    freed: AtomicBool,
    /// Whether a block of this class has been taken after one was freed.
    taken_again: AtomicBool,
    blocks: UnsafeCell<Blocks>,
}

/// The stack: the first `count` entries of `kept`.
struct Blocks {
    count: usize,
    kept: [*mut u8; KEPT],
}

// SAFETY: a thread touches `blocks` only between setting `busy` from false to true and clearing it.
unsafe impl Sync for Shelf {}

impl Shelf {
    const fn new() -> Self {
        Self {
            busy: AtomicBool::new(false),
            freed: AtomicBool::new(false),
            taken_again: AtomicBool::new(false),
            blocks: UnsafeCell::new(Blocks { count: 0, kept: [null_mut(); KEPT] }),
        }
    }

    /// Run `action` on the shelf's blocks. If another thread uses the shelf, `action` does not run and the result is
    /// `None`.
    fn with<R>(&self, action: impl FnOnce(&mut Blocks) -> R) -> Option<R> {
        if self.busy.swap(true, Ordering::Acquire) {
            return None;
        }
        // SAFETY: this thread has set `busy`, and clears it after `action`, which does not panic.
        let result = action(unsafe { &mut *self.blocks.get() });
        self.busy.store(false, Ordering::Release);
        Some(result)
    }

    fn take(&self) -> Option<*mut u8> {
        self.with(|blocks| {
            blocks.count = blocks.count.checked_sub(1)?;
            blocks.kept.get(blocks.count).copied()
        })?
    }

    fn put(&self, block: *mut u8) -> bool {
        self.with(|blocks| match blocks.kept.get_mut(blocks.count) {
            Some(free) => {
                *free = block;
                blocks.count += 1;
                true
            }
            None => false,
        })
        .unwrap_or(false)
    }
}

/// The alignment in bytes of the blocks of every size class: a cache line.
const ALIGN: usize = 64;

/// The size class of a layout; `None` if blocks of this layout always come from the system.
const fn class_of(layout: Layout) -> Option<usize> {
    let size = layout.size();
    if size < SMALLEST || size > LARGEST || layout.align() > ALIGN {
        return None;
    }
    // The octave k and the step s in it, such that 2^k (1 + s / 4) < size <= 2^k (1 + (s + 1) / 4).
    let octave = (size - 1).ilog2();
    // A size of exactly SMALLEST: the smallest class ends with it.
    if octave < SMALLEST_LOG2 {
        return Some(0);
    }
    let step = (size - 1 - (1 << octave)) >> (octave - STEPS.ilog2());
    Some((octave - SMALLEST_LOG2) as usize * STEPS + step + 1)
}

const fn size_of_class(class: usize) -> usize {
    // Octave 0 begins at `SMALLEST` here, and step 0 of an octave is the size with which the octave begins.
    let (octave, step) = (class / STEPS, class % STEPS);
    (SMALLEST << octave) / STEPS * (STEPS + step)
}

const fn layout_of_class(class: usize) -> Layout {
    // SAFETY: the alignment is a power of two and the size far below the limit.
    unsafe { Layout::from_size_align_unchecked(size_of_class(class), ALIGN) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(size: usize) -> Layout {
        Layout::from_size_align(size, 16).unwrap()
    }

    #[test]
    fn classes_hold_their_sizes_with_little_waste() {
        assert_eq!(size_of_class(CLASSES - 1), LARGEST);
        for size in (SMALLEST..4 * SMALLEST).step_by(777).chain([SMALLEST, SMALLEST + 1, LARGEST - 1, LARGEST]) {
            let class = class_of(layout(size)).unwrap();
            let held = size_of_class(class);
            assert!(held >= size && held <= size + size / 4 + 1, "{size} in {held}");
            assert_eq!(class_of(layout(held)), Some(class));
        }
        assert_eq!(class_of(layout(SMALLEST - 1)), None);
        assert_eq!(class_of(layout(LARGEST + 1)), None);
        assert_eq!(class_of(Layout::from_size_align(SMALLEST, 4096).unwrap()), None);
    }

    #[test]
    fn a_freed_block_is_taken_again_and_zeroed_if_requested() {
        let allocator = RecyclingAllocator::new();
        let layout = layout(100_000);
        // SAFETY: every block is used within its layout and freed once.
        unsafe {
            let block = allocator.alloc(layout);
            block.write_bytes(7, layout.size());
            allocator.dealloc(block, layout);
            let again = allocator.alloc_zeroed(layout);
            assert_eq!(again, block);
            assert!(std::slice::from_raw_parts(again, layout.size()).iter().all(|&b| b == 0));
            assert_eq!(again.addr() % ALIGN, 0);
            allocator.dealloc(again, layout);
        }
        assert_eq!(allocator.bytes.load(Ordering::Relaxed), size_of_class(class_of(layout).unwrap()));
        allocator.shrink(0);
        assert_eq!(allocator.bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn store_is_bounded() {
        let allocator = RecyclingAllocator::new();
        let layout = layout(100 << 20);
        // SAFETY: every block is freed once.
        unsafe {
            let blocks = [0; 4].map(|_| allocator.alloc(layout));
            for block in blocks {
                allocator.dealloc(block, layout);
            }
        }
        assert!(allocator.bytes.load(Ordering::Relaxed) <= MOST_BYTES);
        allocator.shrink(0);
        assert_eq!(allocator.bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn large_blocks_of_a_size_taken_again_are_kept_up_to_the_bound() {
        let allocator = RecyclingAllocator::new();
        let held = || allocator.bytes.load(Ordering::Relaxed) + allocator.used.load(Ordering::Relaxed);
        let step = |size: usize| {
            // SAFETY: every block is freed once.
            unsafe {
                let blocks = [0; 3].map(|_| allocator.alloc(layout(size)));
                blocks.iter().for_each(|&block| allocator.dealloc(block, layout(size)));
                blocks
            }
        };
        step(1 << 30);
        assert_eq!(held(), 0, "blocks of a size that was never taken again are kept");
        let second = step(1 << 30);
        assert_eq!(held(), 3 << 30);
        let mut third = step(1 << 30);
        // A shelf is a stack: blocks are taken in the reverse of the order in which they were freed.
        third.reverse();
        assert_eq!(third, second);
        // When blocks of other size classes are taken, stored 1 GiB blocks go back to the system to keep the bound.
        for size in [(1 << 30) + (1 << 28), 3 << 28, 1 << 29].into_iter().cycle().take(9) {
            step(size);
            let most = allocator.most_used.load(Ordering::Relaxed);
            assert!(held() <= most + MOST_BYTES, "{} held, {most} was in use", held());
        }
        allocator.shrink(0);
        assert_eq!(held(), 0);
    }

    #[test]
    fn growing_and_shrinking_keeps_the_content() {
        let allocator = RecyclingAllocator::new();
        let sizes = [1000, 70_000, 71_000, 300_000, 65_536, 500, 200_000];
        // SAFETY: every block is used within its present layout and freed once.
        unsafe {
            let mut block = allocator.alloc(layout(sizes[0]));
            (0..500).for_each(|i| block.add(i).write(i as u8));
            for pair in sizes.windows(2) {
                block = allocator.realloc(block, layout(pair[0]), pair[1]);
                assert!((0..500).all(|i| block.add(i).read() == i as u8));
            }
            allocator.dealloc(block, layout(sizes[6]));
        }
        allocator.shrink(0);
    }

    #[test]
    fn threads_never_share_a_block() {
        let allocator = RecyclingAllocator::new();
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let allocator = &allocator;
                scope.spawn(move || {
                    for round in 0..2000usize {
                        let layout = layout(SMALLEST + round % 3 * 20_000);
                        // SAFETY: the block is used within its layout and freed once.
                        unsafe {
                            let block = allocator.alloc(layout);
                            block.write_bytes(thread, 4096);
                            std::thread::yield_now();
                            assert!(std::slice::from_raw_parts(block, 4096).iter().all(|&b| b == thread));
                            allocator.dealloc(block, layout);
                        }
                    }
                });
            }
        });
        allocator.shrink(0);
        assert_eq!(allocator.bytes.load(Ordering::Relaxed), 0);
    }
}
