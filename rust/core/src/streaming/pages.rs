//! [`Pages`]: memory that processes of a machine share, for weights of streamed blocks and for counters.

use std::fs::{File, Metadata};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::OP;
use crate::{Error, Result};

/// The sizes of mappings are multiples of this many bytes, which is a multiple of the system's page size.
const LEN_UNIT: usize = 1 << 16;

/// Memory of one process that other processes of the machine map too. The memory has no name in the file system. The
/// system frees the memory when no process maps it any more, even if the processes are killed. The memory counts as
/// shared memory, but not against the size of `/dev/shm`.
pub struct Pages {
    address: NonNull<u8>,
    len: usize,
    /// The open file of the memory, by which other processes map it; `None` after [`close`](Self::close).
    file: Option<File>,
}

// SAFETY: the mapping belongs to this object alone and is tied to no thread.
unsafe impl Send for Pages {}
// SAFETY: shared references only read the memory, or access words of it atomically at the address from `mapping`.
unsafe impl Sync for Pages {}

impl Pages {
    /// A mapping of at least `bytes` bytes. A page of the system takes memory of the machine only when it is
    /// [written](Self::write).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the system cannot map so many bytes.
    pub(crate) fn create(bytes: usize) -> Result<Self> {
        let len = bytes.max(1).next_multiple_of(LEN_UNIT);
        let file = memfd_create("trainable-candle", MemfdFlags::CLOEXEC).map_err(|error| no_memory(bytes, error))?;
        ftruncate(&file, len as u64).map_err(|error| no_memory(bytes, error))?;
        Self::map(file.into(), len)
    }

    /// The memory of another process of this machine; `description` is what that process got from
    /// [`description`](Self::description).
    ///
    /// # Errors
    /// [`Error::Argument`] if this process cannot open the memory, [`Error::OutOfMemory`] if it cannot map it.
    pub(crate) fn open(description: &str) -> Result<Self> {
        let cannot_open = |why: String| {
            let message = format!(
                "the memory of another process of this machine cannot be opened ({why}); start all \
                 processes of a machine as one user, in one container"
            );
            Error::argument(OP, message)
        };
        let fields: Vec<u64> = description.split(' ').filter_map(|field| field.parse().ok()).collect();
        let &[process, descriptor, device, inode, len] = fields.as_slice() else {
            return Err(cannot_open(format!("expected five numbers, found {description:?}")));
        };
        let path = PathBuf::from(format!("/proc/{process}/fd/{descriptor}"));
        let opened = File::options().read(true).write(true).open(&path);
        let file = opened.map_err(|error| cannot_open(format!("{}: {error}", path.display())))?;
        let found = file.metadata().map_err(|error| cannot_open(format!("{}: {error}", path.display())))?;
        if identity(&found) != (device, inode, len) {
            return Err(cannot_open(format!("{} is another file", path.display())));
        }
        Self::map(file, len as usize)
    }

    fn map(file: File, len: usize) -> Result<Self> {
        let offset = 0;
        // SAFETY: a new mapping at an address that the system chooses replaces no other mapping.
        let address = unsafe {
            mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, offset)
        };
        let address = address.map_err(|error| no_memory(len, error))?;
        let Some(address) = NonNull::new(address.cast()) else {
            return Err(Error::argument(OP, "the system has mapped memory at address 0"));
        };
        Ok(Self { address, len, file: Some(file) })
    }

    /// The description by which another process [opens](Self::open) this memory: process, file descriptor, device,
    /// inode, size in bytes. It is valid until this process [closes](Self::close) the memory.
    ///
    /// # Errors
    /// [`Error::Argument`] if the memory is closed.
    pub(crate) fn description(&self) -> Result<String> {
        use std::os::fd::AsRawFd;
        let Some(file) = &self.file else { return Err(Error::argument(OP, "the memory is closed already")) };
        let found = file.metadata().map_err(|error| Error::io("/proc/self/fd", error))?;
        let (device, inode, len) = identity(&found);
        Ok(format!("{} {} {device} {inode} {len}", std::process::id(), file.as_raw_fd()))
    }

    /// Close the file, so that no further process can open the memory.
    pub(crate) fn close(&mut self) {
        self.file = None;
    }

    /// Write `bytes` from offset `start` on. No process may read these bytes of the memory before this call returns.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the system gives no memory for `bytes`, [`Error::Argument`] if the memory is closed.
    pub(crate) fn write(&mut self, start: usize, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let Some(file) = &self.file else { return Err(Error::argument(OP, "the memory is closed already")) };
        // Reserves the memory: without this call, a write for which the system has no memory would end the process.
        fallocate(file, FallocateFlags::empty(), start as u64, bytes.len() as u64)
            .map_err(|error| no_memory(bytes.len(), error))?;
        let to = self.address_of(start..start + bytes.len());
        // SAFETY: the range is within the mapping, and the exclusive reference lets nothing else use it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// The bytes in `range`. No process may write these bytes after this call.
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        let len = range.len();
        // SAFETY: the range is within the mapping, and no process writes these bytes any more.
        unsafe { std::slice::from_raw_parts(self.address_of(range).as_ptr(), len) }
    }

    /// The address and the size in bytes of the mapping, both multiples of the system's page size.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "only CUDA code pins the memory or keeps counters in it")
    )]
    pub(crate) const fn mapping(&self) -> (NonNull<u8>, usize) {
        (self.address, self.len)
    }

    /// The address of the first byte of `range`, which must be within the mapping.
    fn address_of(&self, range: Range<usize>) -> NonNull<u8> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} bytes", self.len);
        // SAFETY: the range is within the mapping.
        unsafe { self.address.add(range.start) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this object, and no reference into it is left.
        let _ = unsafe { munmap(self.address.as_ptr().cast(), self.len) };
    }
}

/// Device, inode and size in bytes of a file, by which processes check that they have opened the same file.
fn identity(found: &Metadata) -> (u64, u64, u64) {
    (found.dev(), found.ino(), found.len())
}

fn no_memory(bytes: usize, error: rustix::io::Errno) -> Error {
    let gib = bytes as f64 / (1u64 << 30) as f64;
    let message = format!(
        "the system cannot provide {gib:.2} GiB of shared memory for streamed blocks ({error}); raise the memory \
         limit of the container, stream fewer blocks, or quantize the base"
    );
    Error::OutOfMemory { op: OP, message }
}
