//! [`Sharing`]: the processes of a machine that stream the same weights from one copy.
//!
//! If the copy is in the memory of the host, the process of the lowest rank on the machine writes the copy, and the
//! other processes map it. If the copy is in slices on the devices, the units (the streamed weights of one block
//! each) are divided among the processes: one process writes all slices of a unit, those on the devices of the other
//! processes too. All processes take the same steps: they build the same model, compare the descriptions of their
//! units, and exchange messages. A process reads what another process wrote only after both have exchanged a message.
//! Each process loads every weight once, to compute the digest for the comparison; after that, only the process that
//! writes the weight keeps its values.

use std::cell::RefCell;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use super::OP;
use super::pages::Pages;
use crate::{Error, Result};

/// Sends a message to all processes, waits for theirs, and returns the messages of all processes, by rank.
pub type Exchange = dyn Fn(&[u8]) -> Result<Vec<Vec<u8>>> + Send + Sync;

/// Where the one copy of the weights of a machine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// In the memory of the host.
    Host,
    /// On the devices of the processes, a slice of each unit on each device.
    Peers,
}

/// The processes that load the same model at the same time.
pub struct Sharing {
    exchange: Box<Exchange>,
    rank: usize,
    origin: Origin,
    /// The ranks of the processes on this machine, in ascending order. The first process writes a copy in the memory of
    /// the host.
    machine: Vec<usize>,
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<Sharing>>> = const { RefCell::new(None) };
}

/// A name that is equal in all processes that can share memory with this one: those with the same boot of the system,
/// the same PID namespace and the same user. `None` if the system does not report the boot, the namespace or the user.
pub fn machine() -> Option<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = std::fs::read_link("/proc/self/ns/pid").ok()?;
    let user = std::fs::metadata("/proc/self").ok()?.uid();
    Some(format!("{} {} {user}", boot.trim(), namespace.display()))
}

impl Sharing {
    /// Find out which processes are on the same machine as this one; all processes must call this function. `rank` is
    /// the rank of this process.
    ///
    /// # Errors
    /// The errors of `exchange`; [`Error::Argument`] if `exchange` returns too few messages or, with [`Origin::Peers`],
    /// if a process is alone on its machine.
    pub fn new(rank: usize, origin: Origin, exchange: Box<Exchange>) -> Result<Arc<Self>> {
        // A process that cannot name its machine counts as alone on a machine.
        let own_name = machine().unwrap_or_else(|| format!("rank {rank}"));
        let names = exchange(own_name.as_bytes())?;
        if rank >= names.len() {
            let count = names.len();
            return Err(Error::argument(
                OP,
                format!("the exchange of rank {rank} returned the messages of {count} processes only"),
            ));
        }
        let ranks_on = |name: &[u8]| (0..names.len()).filter(|&rank| names[rank] == name).collect::<Vec<_>>();
        if let Some(alone) =
            names.iter().map(|name| ranks_on(name)).find(|ranks| ranks.len() == 1 && origin == Origin::Peers)
        {
            return Err(Error::argument(
                OP,
                format!(
                    "rank {} has no other process on its machine to stream from (processes in another container or of \
                     another user do not count); start several processes there, or stream from the host",
                    alone[0]
                ),
            ));
        }
        let machine = ranks_on(own_name.as_bytes());
        Ok(Arc::new(Self { exchange, rank, origin, machine }))
    }

    /// Let the models that this thread loads from now on share their streamed weights with other processes; None
    /// switches this off.
    pub fn set(sharing: Option<Arc<Self>>) {
        CURRENT.set(sharing);
    }

    /// The value that [`set`](Self::set) was last called with on this thread.
    pub fn current() -> Option<Arc<Self>> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// Where the copy of the weights is.
    pub(super) const fn origin(&self) -> Origin {
        self.origin
    }

    /// The ranks of the processes on this machine, in ascending order.
    pub(super) fn machine(&self) -> &[usize] {
        &self.machine
    }

    /// The number of processes on this machine.
    pub(super) fn processes(&self) -> usize {
        self.machine.len()
    }

    /// The number of this process among the processes of its machine, from 0.
    pub(super) fn number(&self) -> usize {
        // `machine` has the rank of this process, so the default is not used.
        self.machine.iter().position(|&rank| rank == self.rank).unwrap_or(0)
    }

    /// Whether this process writes unit number `unit` for all processes of its machine, and so keeps the loaded values.
    pub(super) fn keeps(&self, unit: usize) -> bool {
        match self.origin {
            Origin::Host => self.number() == 0,
            Origin::Peers => self.number() == unit % self.processes(),
        }
    }

    /// Check that all processes have the same units; `mine` has a description of each unit of this process.
    ///
    /// # Errors
    /// [`Error::Argument`] with the first rank and unit that differ from rank 0, or if a process has failed.
    pub(super) fn agree(&self, mine: &[String]) -> Result<()> {
        let ((), every) = self.all_gather(Ok(()), |()| mine.join("\n"))?;
        let of_rank_0: Vec<&str> = every[0].split('\n').collect();
        for (rank, theirs) in every.iter().enumerate() {
            let theirs: Vec<&str> = theirs.split('\n').collect();
            let differs = (0..of_rank_0.len().max(theirs.len())).find(|&unit| of_rank_0.get(unit) != theirs.get(unit));
            if let Some(unit) = differs {
                let [found, expected] = [&theirs, &of_rank_0].map(|units| units.get(unit).copied().unwrap_or("none"));
                return Err(Error::argument(
                    OP,
                    format!(
                        "rank {rank} has other weights than rank 0 in streamed block {unit}: {found}, \
                         expected {expected}; give all processes the same files and settings"
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Create memory of at least `bytes` bytes that all processes of this machine share, and return the result of
    /// `attach`. `fill` is called in every process, because each process loads every weight; only in the process that
    /// writes the memory, `fill` gets the memory. Then `attach` is called in every process with the written memory.
    /// When this function returns, `attach` has returned in all processes.
    pub(super) fn pages<T>(
        &self,
        bytes: usize,
        fill: impl FnOnce(Option<&mut Pages>) -> Result<()>,
        attach: impl FnOnce(Pages) -> Result<T>,
    ) -> Result<T> {
        let written = if self.number() == 0 {
            Pages::create(bytes).and_then(|mut pages| {
                fill(Some(&mut pages))?;
                Ok((pages.description()?, Some(pages)))
            })
        } else {
            fill(None).map(|()| (String::new(), None))
        };
        let ((_, created), every) = self.all_gather(written, |(description, _)| description.clone())?;
        let opened = created.map_or_else(|| Pages::open(&every[self.machine[0]]), Ok);
        // The file descriptor of the writing process must stay open until all processes have opened the memory by it.
        let (mut pages, _) = self.all_gather(opened, |_| String::new())?;
        pages.close();
        Ok(self.all_gather(attach(pages), |_| String::new())?.0)
    }

    /// Send a text made from the value `mine` to all processes; returns `mine`, and the texts of all processes by rank.
    /// If `mine` is an error in one process, this function returns an error in all processes.
    pub(super) fn all_gather<T>(&self, mine: Result<T>, text: impl FnOnce(&T) -> String) -> Result<(T, Vec<String>)> {
        // The first character says whether a text or an error follows.
        let message = match &mine {
            Ok(found) => format!("+{}", text(found)),
            Err(error) => format!("-{error}"),
        };
        let every = (self.exchange)(message.as_bytes())?;
        // This process returns its own error only now, after the other processes have received it.
        let mine = mine?;
        let read = |(rank, message): (usize, Vec<u8>)| {
            let text = String::from_utf8_lossy(&message).into_owned();
            match text.split_at_checked(1) {
                Some(("+", text)) => Ok(text.to_owned()),
                Some((_, error)) => Err(Error::argument(OP, format!("rank {rank} has failed: {error}"))),
                None => Err(Error::argument(OP, format!("rank {rank} has sent an empty message"))),
            }
        };
        Ok((mine, every.into_iter().enumerate().map(read).collect::<Result<_>>()?))
    }
}
