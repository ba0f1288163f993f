//! [`Pages`]: memory that processes of a machine share.

use std::fs::{File, Metadata};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::OP;
use crate::{Error, Result};

/// Bytes of a page of the system, or a multiple of it.
const PAGE: usize = 1 << 16;

/// Memory of one process that other processes of the machine map too. It has no name, and the system frees it when no
/// process maps it any more, however the processes end. It counts as shared memory, but not against the size of
/// `/dev/shm`.
pub struct Pages {
    address: NonNull<u8>,
    len: usize,
    /// The file of the memory, until all processes have mapped it.
    file: Option<File>,
}

// SAFETY: it is plain memory, which its owner alone changes.
unsafe impl Send for Pages {}
// SAFETY: as above; shared references only read it.
unsafe impl Sync for Pages {}

impl Pages {
    /// A mapping of at least `bytes`. It takes no memory of the machine before it is [written](Self::write).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the system gives none.
    pub(crate) fn create(bytes: usize) -> Result<Self> {
        let len = bytes.max(1).next_multiple_of(PAGE);
        let file = memfd_create("trainable-candle", MemfdFlags::CLOEXEC).map_err(|error| no_memory(bytes, error))?;
        ftruncate(&file, len as u64).map_err(|error| no_memory(bytes, error))?;
        Self::map(file.into(), len)
    }

    /// The memory that another process of this machine has described.
    ///
    /// # Errors
    /// [`Error::Argument`] if this process cannot open it.
    pub(crate) fn open(description: &str) -> Result<Self> {
        let refuse = |why: String| {
            let message = format!(
                "the memory of another process of this machine cannot be opened ({why}); start all processes of a machine as one user, in \
                 one container"
            );
            Error::argument(OP, message)
        };
        let fields: Vec<u64> = description.split(' ').filter_map(|field| field.parse().ok()).collect();
        let &[process, descriptor, device, inode, len] = fields.as_slice() else {
            return Err(refuse(format!("it is described as {description:?}")));
        };
        let path = PathBuf::from(format!("/proc/{process}/fd/{descriptor}"));
        let opened = File::options().read(true).write(true).open(&path);
        let file = opened.map_err(|error| refuse(format!("{}: {error}", path.display())))?;
        let found = file.metadata().map_err(|error| refuse(format!("{}: {error}", path.display())))?;
        if identity(&found) != (device, inode, len) {
            return Err(refuse(format!("{} is another file", path.display())));
        }
        Self::map(file, len as usize)
    }

    fn map(file: File, len: usize) -> Result<Self> {
        // SAFETY: a new mapping at a place that the system chooses.
        let address =
            unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0) };
        let address = address.map_err(|error| no_memory(len, error))?;
        let Some(address) = NonNull::new(address.cast()) else {
            return Err(Error::argument(OP, "the system has mapped memory at address 0"));
        };
        Ok(Self { address, len, file: Some(file) })
    }

    /// The description that [`open`](Self::open) needs. It is valid until this process [closes](Self::close) the
    /// memory.
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

    /// Write `bytes` from offset `start` on, before other processes read them.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the system gives no memory for them.
    pub(crate) fn write(&mut self, start: usize, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let Some(file) = &self.file else { return Err(Error::argument(OP, "the memory is closed already")) };
        // Without this, a write for which there is no memory would end the process.
        fallocate(file, FallocateFlags::empty(), start as u64, bytes.len() as u64)
            .map_err(|error| no_memory(bytes.len(), error))?;
        let to = self.range(start..start + bytes.len());
        // SAFETY: the range is within the mapping, and the exclusive reference lets nothing else use it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Some of its bytes, after they were written.
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        let len = range.len();
        // SAFETY: the range is within the mapping, and nothing writes any more.
        unsafe { std::slice::from_raw_parts(self.range(range).as_ptr(), len) }
    }

    /// The address and the size of the mapping, both multiples of a page.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only CUDA pins memory and counts in it"))]
    pub(crate) const fn mapping(&self) -> (NonNull<u8>, usize) {
        (self.address, self.len)
    }

    fn range(&self, range: Range<usize>) -> NonNull<u8> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} bytes", self.len);
        // SAFETY: the range is within the mapping.
        unsafe { self.address.add(range.start) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's, and no reference to it is left.
        let _ = unsafe { munmap(self.address.as_ptr().cast(), self.len) };
    }
}

fn identity(found: &Metadata) -> (u64, u64, u64) {
    (found.dev(), found.ino(), found.len())
}

fn no_memory(bytes: usize, error: rustix::io::Errno) -> Error {
    let gib = bytes as f64 / (1u64 << 30) as f64;
    let message = format!(
        "the system cannot provide {gib:.2} GiB of shared memory for streamed blocks ({error}); raise the memory limit of the \
         container, stream fewer blocks, or quantize the base"
    );
    Error::OutOfMemory { op: OP, message }
}
