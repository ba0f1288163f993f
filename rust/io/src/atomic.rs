//! Writes files atomically.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use trainable_candle_core::{Error, Result};

/// Size of the write buffer; larger pieces are written directly.
const BUFFER: usize = 1 << 20;

/// Call `write` on a temporary file beside `path`, sync it, and rename it to `path`. After a crash, `path` is the old
/// file or the complete new one.
///
/// # Errors
/// [`Error::Io`] that names `path`, if the folder is missing, read-only or full, or if `write` fails.
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
        // Report the first error, not a failure to remove the temporary file.
        let _ = std::fs::remove_file(&temporary);
    }
    outcome.map_err(failed)
}

/// Sync the folder of `path`, because a power failure could otherwise undo the rename.
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
