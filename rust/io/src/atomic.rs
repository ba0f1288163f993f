//! Writes files atomically.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use trainable_candle_core::{Error, Result};

/// The size of the write buffer in bytes. A single write of this size or more bypasses the buffer.
const BUFFER: usize = 1 << 20;

/// Call `write` on a temporary file in the folder of `path`, sync the temporary file to the disk, and rename it to
/// `path`. After a crash, `path` is the old file or the complete new file.
///
/// # Errors
/// [`Error::Io`] that names `path`, if the folder is missing or read-only, the disk is full, or `write` fails.
pub fn write_atomically(path: &Path, write: impl FnOnce(&mut dyn Write) -> std::io::Result<()>) -> Result<()> {
    let failed = |source| Error::io(path, source);
    let name = path.file_name().ok_or_else(|| failed(std::io::Error::other("the path names no file")))?;
    let mut temporary = name.to_os_string();
    temporary.push(format!(".{}.partial", std::process::id()));
    let temporary = path.with_file_name(temporary);
    let outcome = (|| {
        let mut file = BufWriter::with_capacity(BUFFER, File::create(&temporary)?);
        write(&mut file)?;
        let file = file.into_inner().map_err(std::io::IntoInnerError::into_error)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)?;
        sync_folder(path)
    })();
    if outcome.is_err() {
        // The function returns the error in `outcome`, not a failure to remove the temporary file.
        let _ = std::fs::remove_file(&temporary);
    }
    outcome.map_err(failed)
}

/// Sync the folder of `path` to the disk, because a power failure could otherwise undo the rename.
#[cfg(unix)]
fn sync_folder(path: &Path) -> std::io::Result<()> {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => File::open(folder)?.sync_all(),
        _ => File::open(".")?.sync_all(),
    }
}

#[cfg(not(unix))]
fn sync_folder(_path: &Path) -> std::io::Result<()> {
    Ok(())
}
