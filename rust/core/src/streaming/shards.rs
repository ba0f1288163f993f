//! [`Shards`]: units (the streamed weights of one block each) in slices. Each process of a machine keeps one slice of
//! every unit; a process's shard is the memory that has its slices of all units.
//!
//! Processes that train together need the same unit at the same time. If one process kept a whole unit, all others
//! would read the unit through the link of that process's device. With slices, every device sends and receives as much
//! as the others.

use std::ops::Range;

use candle_core::Device;

use super::pages::Pages;
use super::sharing::Sharing;
use crate::cuda::peers;
use crate::cuda::streaming::Source;
use crate::raw::{Raw, to_cpu};
use crate::{Result, compute};

/// Slices begin at multiples of this many bytes, from which copies are fastest.
const ALIGNMENT: usize = 256;

/// Where the `len` bytes of one dtype of a unit are: process `p` has bytes `p * slice` to `(p + 1) * slice` of them,
/// from offset `start` of its shard on. The last slices may be shorter or empty.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    start: usize,
    slice: usize,
    len: usize,
}

/// Consecutive bytes of a [`Place`] that one process has.
#[derive(Debug, PartialEq, Eq)]
struct Piece {
    /// The number of the process among the processes of its machine.
    process: usize,
    /// The offset of the first byte in the shard of this process.
    start: usize,
    /// The offsets of the bytes among all bytes of the [`Place`].
    range: Range<usize>,
}

impl Place {
    /// The place of `len` bytes in the shards of `processes` processes. All slices begin at offset `start` of the
    /// shards.
    pub(super) fn new(start: usize, len: usize, processes: usize) -> Self {
        Self { start, slice: len.div_ceil(processes).next_multiple_of(ALIGNMENT), len }
    }

    /// The offset in a shard at which the slice ends.
    pub(super) const fn end(self) -> usize {
        self.start + self.slice
    }

    /// The number of bytes in all slices together.
    pub(super) const fn len(self) -> usize {
        self.len
    }

    /// The bytes in `range`, one piece for each process that has some of them, in the order of the bytes.
    fn pieces(self, range: Range<usize>) -> impl Iterator<Item = Piece> {
        let processes = if range.is_empty() { 0..0 } else { range.start / self.slice..range.end.div_ceil(self.slice) };
        processes.map(move |process| {
            let first = process * self.slice;
            let range = range.start.max(first)..range.end.min(first + self.slice);
            Piece { process, start: self.start + range.start - first, range }
        })
    }
}

/// The shards of all processes of a machine, by the number of the process on the machine.
pub(super) enum Shards {
    /// In memory of the host that the processes share, for models on the CPU.
    Host(Vec<Pages>),
    /// On the devices of the processes.
    Device(peers::Shards),
}

impl Shards {
    /// Shards of `bytes` bytes each. All processes of the machine must call this function at the same time. `fill`
    /// writes the bytes that this process has for all shards. When this function returns, all processes have written,
    /// and any shard may be read.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if a shard does not fit in memory,
    /// [`Error::Device`](crate::Error::Device) if the devices do not reach each other, the errors of `fill`, and
    /// [`Error::Argument`](crate::Error::Argument) if another process has failed.
    pub(super) fn new(
        sharing: &Sharing,
        device: &Device,
        bytes: usize,
        fill: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<Self> {
        // Each `all_gather` waits for all processes, and returns an error in all of them if one has failed. After the
        // first, all shards exist and this process has the texts to open them; after the second, all processes have
        // opened the shards and may write; after the third, all have written.
        let ((own, _), every) = sharing.all_gather(Self::own(sharing, device, bytes), |(_, text)| text.clone())?;
        let texts: Vec<&str> = sharing.machine().iter().map(|&rank| every[rank].as_str()).collect();
        let (mut shards, _) = sharing.all_gather(own.open(&texts, sharing.number()), |_| String::new())?;
        let filled = fill(&mut shards).and_then(|()| shards.close());
        sharing.all_gather(filled, |()| String::new())?;
        Ok(shards)
    }

    /// The shard of this process, and the text by which the other processes open this shard.
    fn own(sharing: &Sharing, device: &Device, bytes: usize) -> Result<(Self, String)> {
        if device.is_cpu() {
            let pages = Pages::create(bytes)?;
            let text = pages.description()?;
            return Ok((Self::Host(vec![pages]), text));
        }
        let (shards, text) = peers::Shards::new(device, bytes, sharing.number(), sharing.processes())?;
        Ok((Self::Device(shards), text))
    }

    /// Open the shards of the other processes. `texts` has the text of each process of the machine; `number` is the
    /// number of this process among them.
    fn open(self, texts: &[&str], number: usize) -> Result<Self> {
        match self {
            Self::Host(mut own) => {
                // `own` has one element, the shard of this process, which is open already.
                let open = |(process, text): (usize, &&str)| match own.pop_if(|_| process == number) {
                    Some(pages) => Ok(pages),
                    None => Pages::open(text),
                };
                texts.iter().enumerate().map(open).collect::<Result<_>>().map(Self::Host)
            }
            Self::Device(mut shards) => {
                shards.open(texts)?;
                Ok(Self::Device(shards))
            }
        }
    }

    /// Write `bytes` to `place`, from its byte number `start` on, into the shards that have these bytes. The shards
    /// must not be closed yet.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the system gives no memory,
    /// [`Error::Device`](crate::Error::Device) if the driver reports an error.
    pub(super) fn write(&mut self, place: Place, start: usize, bytes: &[u8]) -> Result<()> {
        let pieces = place.pieces(start..start + bytes.len());
        match self {
            Self::Host(pages) => {
                for Piece { process, start: at, range } in pieces {
                    pages[process].write(at, &bytes[range.start - start..range.end - start])?;
                }
                Ok(())
            }
            Self::Device(shards) => {
                let pieces = pieces.map(|piece| (piece.process, piece.start, piece.range.len()));
                shards.write(bytes, pieces)
            }
        }
    }

    /// Wait until the writes of this process are done, and let no further process open the shards.
    fn close(&mut self) -> Result<()> {
        match self {
            Self::Host(pages) => {
                pages.iter_mut().for_each(Pages::close);
                Ok(())
            }
            Self::Device(shards) => shards.close(),
        }
    }

    /// Bytes `range` of `place`, if the shards are in the memory of the host.
    pub(super) fn gathered(&self, place: Place, range: Range<usize>) -> Option<Vec<u8>> {
        let Self::Host(pages) = self else { return None };
        let mut all = Vec::with_capacity(range.len());
        for Piece { process, start, range } in place.pieces(range) {
            all.extend_from_slice(pages[process].bytes(start..start + range.len()));
        }
        Some(all)
    }

    /// The copies that bring all bytes of `place` to `to`, if the shards are on the devices; otherwise none. `to` is
    /// the tensor for the bytes of this dtype in a slot (the place for one unit on the device). Process `p` begins with
    /// the slice of process `p + 1`, so that no two processes read from one device at a time while all processes copy.
    pub(super) fn copies<'a>(&'a self, place: Place, to: &Raw) -> Result<Vec<(Source<'a>, Raw)>> {
        let Self::Device(shards) = self else { return Ok(Vec::new()) };
        let size = to.dtype().size_in_bytes();
        let copy = |Piece { process, start, range }: Piece| {
            let part = to.narrow(0, range.start / size, range.len() / size)?;
            Ok((Source::Peer(shards, process, start..start + range.len()), part))
        };
        // The copies are in the order of the processes. Processes with empty slices come last and have no copy, so
        // there may be fewer copies than processes.
        let mut all = place.pieces(0..place.len).map(copy).collect::<Result<Vec<_>>>()?;
        let first = (shards.number() + 1).min(all.len());
        all.rotate_left(first);
        Ok(all)
    }

    /// Bytes `range` of `place`, if the shards are on the devices: copied to the device of `like`, and from there to a
    /// vector on the CPU that has the dtype and the element count of `like`. For shards in the memory of the host, use
    /// [`gathered`](Self::gathered); this function returns zeros for them.
    pub(super) fn downloaded(&self, place: Place, range: Range<usize>, like: &Raw) -> Result<Raw> {
        let all = compute::zeros(&[like.elem_count()], like.dtype(), like.device())?;
        if let Self::Device(shards) = self {
            let pieces = place.pieces(range).map(|piece| (piece.process, piece.start, piece.range.len()));
            shards.read(&all, pieces)?;
        }
        to_cpu(&all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_range_in_order_and_lie_in_slices_of_equal_size() {
        for (len, processes) in [(0, 2), (1, 3), (1024, 2), (5000, 3), (256 * 7, 4)] {
            let start = 512;
            let place = Place::new(start, len, processes);
            assert_eq!(place.slice % ALIGNMENT, 0);
            // The slices hold all bytes, and each has less than `ALIGNMENT` bytes of padding.
            assert!(place.slice * processes >= len && place.slice * processes < len + processes * ALIGNMENT);
            for range in [0..len, len / 3..len, len / 3..len / 2, len..len] {
                let mut at = range.start;
                for piece in place.pieces(range.clone()) {
                    assert_eq!(piece.range.start, at);
                    assert!(piece.process < processes && !piece.range.is_empty());
                    assert_eq!(piece.start, start + at - piece.process * place.slice);
                    assert!(piece.start + piece.range.len() <= place.end());
                    at = piece.range.end;
                }
                assert_eq!(at, range.end);
            }
        }
    }
}
